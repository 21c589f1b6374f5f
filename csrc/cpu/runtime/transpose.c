/* cpu/runtime/transpose.c - a matrix transposed, in squares that fit into registers. */
#include "transpose.h"

#include "simd.h"

/* Element `at` of a matrix that is f32 or bf16: its address. */
static const void *element(const void *matrix, int64_t at, int bf16)
{
    return (const unsigned char *)matrix + at * (bf16 ? 2 : 4);
}

void CPU(transpose_any)(float *out, int64_t out_row, const void *in, int64_t in_row, int rows,
                        int cols, int bf16)
{
    int full_rows = rows - rows % VL, full_cols = cols - cols % VL;
    for (int i = 0; i < full_rows; i += VL)
        for (int j = 0; j < full_cols; j += VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) {
                const void *from = element(in, (i + r) * in_row + j, bf16);
                v[r] = bf16 ? v_load_bf16(from) : v_load(from);
            }
            square_turn(v);
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) v_store(out + (j + r) * out_row + i, v[r]);
        }
    for (int i = 0; i < rows; i++)
        for (int j = i < full_rows ? full_cols : 0; j < cols; j++)
            out[j * out_row + i] = bf16 ? f_bf16(((const uint16_t *)in)[i * in_row + j])
                                        : ((const float *)in)[i * in_row + j];
}

void CPU(transpose)(float *out, int64_t out_row, const float *in, int64_t in_row, int rows,
                    int cols)
{
    CPU(transpose_any)(out, out_row, in, in_row, rows, cols, 0);
}
