/* cpu/product/gemm_tiled.h - many rows of a product against one panel: a packed, then a register
 * tile over it.
 */
#ifndef TINSMITH_CPU_PRODUCT_GEMM_TILED_H
#define TINSMITH_CPU_PRODUCT_GEMM_TILED_H

#include "../weights/frozen.h"
#include "product.h"
#include "tile.h"

enum {
    TALL = VL == 16 ? 14 : 6,     /* rows of a tile: 28 of 32 registers hold sums, or 12 of 16 */
    PACKED_DEPTH = 3 * DEPTH / 2, /* lanes of a packed row: three blocks of pairs, one of floats */
    PACKED = 518 * PACKED_DEPTH,  /* lanes of all packed rows: 1.2 MB */
    PACKED_SLACK = VL,            /* lanes behind it that packing may write */
};

/* What a lane of packed rows holds. */
typedef enum Lanes {
    ONE,    /* a float */
    PAIR,   /* two inputs that follow each other, as bf16 */
    APART,  /* inputs k and k + 4 of each eight, as bf16; those behind the last are zeros */
    HALVES, /* the same of k and k + 16 of each 32 */
} Lanes;

/* Lanes that `depth` inputs of a row take. */
static inline int packed_lanes(int depth, Lanes form)
{
    return form == HALVES  ? (depth + 31) / 32 * 16
           : form == APART ? (depth + 7) / 8 * 4
           : form == PAIR  ? (depth + 1) / 2
                           : depth;
}

/* Where a product's sums go that begin at its k0: the first are added to what the caller gave, the
 * others to those before them. */
static inline Out product_out(const Product *p, int k0)
{
    Out out = {p->c, k0 > 0 ? p->c : p->plus, p->ldc, p->ldc, p->scale, NULL};
    if (k0 == 0) out.bias = p->bias;
    return out;
}

/* How many rows of `depth` elements a packed block takes, a multiple of TALL. */
int CPU(block_rows)(int depth, int pairs);

/* One tile of `rows` ≤ height rows: lane l of row r goes to [l][r] of [lanes][height]. Up to
 * PACKED_SLACK lanes behind the tile are written too. */
void CPU(tile_pack)(float *to, int height, const float *a, int64_t a_row, int rows, int depth,
                    Lanes lanes);

/* Rows [0, m) and k [0, depth) of a into tiles of TALL rows, each k-major: [tile][k][TALL], so that
 * the inner loop reads one stream, whatever the distance of a's rows. With `pairs` a 32-bit lane
 * holds two k, rounded to bf16; an odd last one is joined by a zero. */
void CPU(block_pack)(float *to, const float *a, int64_t a_row, int64_t a_col, int m, int depth,
                     int pairs);

/* Where row i of a, lane l, is: at[(i / TALL)·tile + l·step + i % TALL]. */
typedef struct Tiles {
    const float *at;
    int64_t step, tile;
    int pairs;
} Tiles;

/* The matrix that block_pack has made. */
static inline Tiles tiles_packed(const float *packed, int depth, int pairs)
{
    return (Tiles){packed, TALL, (int64_t)(pairs ? (depth + 1) / 2 : depth) * TALL, pairs};
}

/* A matrix (k, m) is in order as it lies. */
static inline Tiles tiles_turned(const float *a, int64_t width)
{
    return (Tiles){a, width, TALL, 0};
}

/* out (m,width) of a·b, width ≤ PANEL; b is k-major with PANEL lanes a row, `lanes` rows of it: any
 * number of blocks of the sum. */
void CPU(block_multiply)(Out out, Tiles a, const float *b, int m, int width, int lanes);

/* `width` ≤ PANEL columns of `depth` rows, PANEL lanes a row. */
static inline void panel_copy(float *to, const float *from, int64_t from_row, int depth, int width)
{
    for (int i = 0; i < depth; i++, to += PANEL, from += from_row) {
        int j = 0;
        for (; j + VL <= width; j += VL) v_store(to + j, v_load(from + j));
        for (; j < width; j++) to[j] = from[j];
    }
}

#endif
