/* cpu/runtime/transpose.h - a matrix transposed. */
#ifndef TINSMITH_CPU_RUNTIME_TRANSPOSE_H
#define TINSMITH_CPU_RUNTIME_TRANSPOSE_H

#include "cpu.h"

/* out (cols, rows padded to `out_row` by the caller) = in (rows, cols) transposed. */
void CPU(transpose)(float *out, int64_t out_row, const float *in, int64_t in_row, int rows,
                    int cols);

/* The same of f32 or bf16. */
void CPU(transpose_any)(float *out, int64_t out_row, const void *in, int64_t in_row, int rows,
                        int cols, int bf16);

#endif
