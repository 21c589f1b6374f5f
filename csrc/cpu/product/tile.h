/* cpu/product/tile.h - shared code of the register tiles of gemm.c, gemm_tiled.c and gemv.c: 2·VL
 * columns of c, a step of k, and the store. So each sum is the same on every path. */
#ifndef TINSMITH_CPU_PRODUCT_TILE_H
#define TINSMITH_CPU_PRODUCT_TILE_H

#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum {
    WIDE = 2 * VL,      /* columns */
    TILE_ROWS_MAX = 14, /* of all tiles */
};

/* The destination of a tile's sums, and their addends: c = scale·sums [+ bias] [+ add]. */
typedef struct Out {
    float *c;
    const float *add; /* NULL: none; may be c */
    int64_t ldc, add_row;
    float scale;
    const float *bias; /* NULL: none */
} Out;

/* c = scale·sums, or c += scale·sums. */
static inline Out out_to(float *c, int64_t ldc, float scale, int accumulate)
{
    return (Out){c, accumulate ? c : NULL, ldc, ldc, scale, NULL};
}

/* The same for the part at an offset of `rows` and `columns`. */
static inline Out out_at(Out out, int rows, int columns)
{
    out.c += rows * out.ldc + columns;
    if (out.add) out.add += rows * out.add_row + columns;
    if (out.bias) out.bias += columns;
    return out;
}

/* One k, or a pair of them, of `rows` rows of a times 2·VL columns of b. */
static inline __attribute__((always_inline)) void
tile_step(vf (*acc)[2], const float *a, int64_t a_row, vf b0, vf b1, const int rows)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vf x = v_set(a[r * a_row]);
        acc[r][0] = v_fma(x, b0, acc[r][0]);
        acc[r][1] = v_fma(x, b1, acc[r][1]);
    }
}

#if defined(__AVX512BF16__)
static inline __attribute__((always_inline)) void tile_step_pairs(vf (*acc)[2], const float *a,
                                                                  vu b0, vu b1, const int rows)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vu x = v_set_pair(a + r);
        acc[r][0] = v_dot_pairs(x, b0, acc[r][0]);
        acc[r][1] = v_dot_pairs(x, b1, acc[r][1]);
    }
}
#endif

/* scale·sums of a tile; `row` is the row stride. */
static inline __attribute__((always_inline)) void sums_store(float *to, int64_t row, vf (*acc)[2],
                                                             float scale, const int rows)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++, to += row) {
        v_store(to, acc[r][0] * scale);
        v_store(to + VL, acc[r][1] * scale);
    }
}

/* The sums' first destination: c, or if they have addends, `sums` with row stride `width`. */
static inline Out sums_out(Out out, float *sums, int width)
{
    return out.bias || out.add ? out_to(sums, width, out.scale, 0) : out;
}

/* Adds it to them, and writes c. */
void CPU(sums_add)(Out out, const float *sums, int rows, int width);

static inline __attribute__((always_inline)) void tile_write(Out out, vf (*acc)[2], const int rows)
{
    float sums[TILE_ROWS_MAX * WIDE];
    Out to = sums_out(out, sums, WIDE);
    sums_store(to.c, to.ldc, acc, out.scale, rows);
    if (to.c != out.c) CPU(sums_add)(out, sums, rows, WIDE);
}

/* The same for one vector, whose first `live` lanes, maybe none, are columns. */
static inline void sums_write(Out out, vf sum, int live)
{
    vf y = sum * out.scale;
#if defined(__AVX512BF16__)
    if (out.bias) y += v_load_masked(out.bias, live);
    if (out.add) y += v_load_masked(out.add, live);
    _mm512_mask_storeu_ps(out.c, v_mask(live), (__m512)y);
#else
    if (live <= 0) return;
    if (out.bias) y += v_load_upto(out.bias, live);
    if (out.add) y += v_load_upto(out.add, live);
    v_store_upto(out.c, y, live);
#endif
}

/* The last columns, fewer than a tile is wide, go through a temporary tile. */
typedef struct Edge {
    float c[TILE_ROWS_MAX * WIDE], bias[WIDE];
} Edge;

static inline Out edge_open(Edge *edge, Out out, int rows, int width)
{
    if (out.bias) {
        memset(edge->bias, 0, sizeof edge->bias);
        memcpy(edge->bias, out.bias, (size_t)width * sizeof *edge->bias);
    }
    if (out.add) memset(edge->c, 0, (size_t)rows * WIDE * sizeof *edge->c);
    for (int r = 0; out.add && r < rows; r++)
        memcpy(edge->c + r * WIDE, out.add + r * out.add_row, (size_t)width * sizeof *edge->c);
    Out to = out_to(edge->c, WIDE, out.scale, out.add != NULL);
    to.bias = out.bias ? edge->bias : NULL;
    return to;
}

static inline void edge_close(const Edge *edge, Out out, int rows, int width)
{
    for (int r = 0; r < rows; r++)
        memcpy(out.c + r * out.ldc, edge->c + r * WIDE, (size_t)width * sizeof *edge->c);
}

/* Cases of a switch that makes the row count a constant. */
#define ROWS_TO_4(CASE) \
    CASE(1);            \
    CASE(2);            \
    CASE(3);            \
    CASE(4)
#define ROWS_TO_5(CASE) \
    ROWS_TO_4(CASE);    \
    CASE(5)
#define ROWS_TO_6(CASE) \
    ROWS_TO_5(CASE);    \
    CASE(6)
#define ROWS_TO_8(CASE) \
    ROWS_TO_6(CASE);    \
    CASE(7);            \
    CASE(8)
#define ROWS_TO_12(CASE) \
    ROWS_TO_8(CASE);     \
    CASE(9);             \
    CASE(10);            \
    CASE(11);            \
    CASE(12)
#define ROWS_TO_13(CASE) \
    ROWS_TO_12(CASE);    \
    CASE(13)
#define ROWS_TO_14(CASE) \
    ROWS_TO_13(CASE);    \
    CASE(14)

#endif
