/* cpu/head/topk.h - the largest numbers of a row. */
#ifndef TINSMITH_CPU_HEAD_TOPK_H
#define TINSMITH_CPU_HEAD_TOPK_H

#include "../runtime/cpu.h"

/* The K largest of one row and their ids, best first, ties by lower id. */
void CPU(row_topk)(int32_t *ids, float *best, const float *x, int V, int K);

#endif
