/* cpu/block.h - many rows of a product against one panel: a packed, then a register tile over it.
 */
#ifndef TINSMITH_CPU_BLOCK_H
#define TINSMITH_CPU_BLOCK_H

#include "matmul.h"
#include "simd.h"

enum {
    TALL = VL == 16 ? 14 : 6, /* rows of a tile: 28 of 32 registers hold sums, or 12 of 16 */
    PACKED = 336 * DEPTH,     /* lanes of a packed block: half of L2 */
    PACKED_SLACK = VL,        /* lanes behind it that packing may write */
};

/* How many rows of `depth` elements a packed block takes, a multiple of TALL. */
int CPU(block_rows)(int depth, int pairs);

/* Rows [0, m) and k [0, depth) of a into tiles of TALL rows, each k-major: [tile][k][TALL], so that
 * the inner loop reads one stream, whatever the distance of a's rows. With `pairs` a 32-bit lane
 * holds two k, rounded to bf16; an odd last one is joined by a zero. */
void CPU(block_pack)(float *to, const float *a, int64_t a_row, int64_t a_col, int m, int depth,
                     int pairs);

/* c (m,width) = scale·a·b [+ bias] [+ c], width ≤ PANEL: a is packed, b is k-major with PANEL lanes
 * a row, `lanes` rows of it. */
void CPU(block_multiply)(float *c, int64_t ldc, const float *a, const float *b, int m, int width,
                         int lanes, float scale, const float *bias, int add, int pairs);

#endif
