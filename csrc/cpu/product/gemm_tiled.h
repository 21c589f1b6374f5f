/* cpu/product/gemm_tiled.h - many rows of a product times one panel: pack a, then run a register
 * tile over it. */
#ifndef TINSMITH_CPU_PRODUCT_GEMM_TILED_H
#define TINSMITH_CPU_PRODUCT_GEMM_TILED_H

#include "../weights/frozen.h"
#include "product.h"
#include "tile.h"

enum {
    TALL = VL == 16 ? 14 : 6,     /* rows of a tile: 28 of 32 registers hold sums, or 12 of 16 */
    PACKED_DEPTH = 3 * DEPTH / 2, /* lanes of a packed row: three blocks of pairs, one of floats */
    PACKED = 518 * PACKED_DEPTH,  /* lanes of all packed rows: 1.2 MB */
    PACKED_SLACK = VL,            /* lanes past the end that packing may write */
};

/* The content of a lane of packed rows. */
typedef enum Lanes {
    ONE,    /* a float */
    PAIR,   /* two adjacent inputs, as bf16 */
    APART,  /* inputs k and k + 4 of each eight, as bf16, zero-padded at the end */
    HALVES, /* the same of k and k + 16 of each 32 */
} Lanes;

/* Lanes of `depth` inputs of a row. */
static inline int packed_lanes(int depth, Lanes form)
{
    return form == HALVES  ? (depth + 31) / 32 * 16
           : form == APART ? (depth + 7) / 8 * 4
           : form == PAIR  ? (depth + 1) / 2
                           : depth;
}

/* The destination of a product's sums from k0 on: the first are added to the caller's `plus`, the
 * others to the sums before them. */
static inline Out product_out(const Product *p, int k0)
{
    Out out = {p->c, k0 > 0 ? p->c : p->plus, p->ldc, p->ldc, p->scale, NULL};
    if (k0 == 0) out.bias = p->bias;
    return out;
}

/* How many rows of `depth` elements fit into a packed block, a multiple of TALL. */
int CPU(block_rows)(int depth, int pairs);

/* Packs one tile of `rows` ≤ height rows: lane l of row r goes to [l][r] of [lanes][height]. Up to
 * PACKED_SLACK lanes past the tile are written too. */
void CPU(tile_pack)(float *to, int height, const float *a, int64_t a_row, int rows, int depth,
                    Lanes lanes);

/* Packs rows [0, m) and k [0, depth) of a into k-major tiles of TALL rows: [tile][k][TALL]. So the
 * inner loop reads one stream, whatever a's row stride. With `pairs` a 32-bit lane holds two k,
 * rounded to bf16; an odd last one is paired with zero. */
void CPU(block_pack)(float *to, const float *a, int64_t a_row, int64_t a_col, int m, int depth,
                     int pairs);

/* Row i of a, lane l, is at[(i / TALL)·tile + l·step + i % TALL]. */
typedef struct Tiles {
    const float *at;
    int64_t step, tile;
    int pairs;
} Tiles;

/* The result of block_pack. */
static inline Tiles tiles_packed(const float *packed, int depth, int pairs)
{
    return (Tiles){packed, TALL, (int64_t)(pairs ? (depth + 1) / 2 : depth) * TALL, pairs};
}

/* A matrix (k, m) already has this order. */
static inline Tiles tiles_turned(const float *a, int64_t width)
{
    return (Tiles){a, width, TALL, 0};
}

/* out (m,width) of a·b, width ≤ PANEL; b is k-major with PANEL lanes a row and `lanes` rows: any
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
