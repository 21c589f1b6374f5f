/* cpu/pairs.c - products of bf16 pairs, and numbers as pairs (pairs.h). Roofline: 2 flops a number
 * of a sum at the speed of bf16 pairs; 28 products for two loads of b and 14 of a, from L1. Few
 * rows are bound by memory: they take four vectors of b at once and ask for what is to come. */
#include "pairs.h"

#if defined(__AVX512BF16__)

enum {
    PAIRS_FEW = 4,         /* rows of a tile of four vectors; a tile of two has TILE_ROWS_MAX */
    PAIRS_AHEAD = 1 << 10, /* prefetch distance for few rows, in lanes */
};

static inline __attribute__((always_inline)) void pairs_step(vf (*acc)[4], const Pairs *p, int i,
                                                             __mmask16 last, uint32_t kept,
                                                             const int rows, const int vectors)
{
    const float *a = p->a + i * p->a_step, *b = p->b + i * p->b_step;
    vu part[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        if (vectors > 2) __builtin_prefetch(b + PAIRS_AHEAD + v * VL);
        part[v] = (vu)_mm512_maskz_loadu_epi32(v + 1 < vectors ? 0xffff : last, b + v * VL);
        if (kept != 0xffffffffu) part[v] &= kept;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vu x = v_set_pair(a + r * p->a_row);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = v_dot_pairs(x, part[v], acc[r][v]);
    }
}

/* The last of a tile's vectors has the lanes of `last`. */
static inline __attribute__((always_inline)) void pairs_tile(float *c, int64_t c_row, Pairs p,
                                                             __mmask16 last, float scale, int add,
                                                             const int rows, const int vectors)
{
    vf acc[TILE_ROWS_MAX][4];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = v_set(0.0f);
    int whole = p.steps - p.odd;
    for (int i = 0; i < whole; i++) pairs_step(acc, &p, i, last, 0xffffffffu, rows, vectors);
    if (p.odd) pairs_step(acc, &p, whole, last, 0xffffu, rows, vectors);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *to = c + r * c_row + v * VL;
            __mmask16 lanes = v + 1 < vectors ? 0xffff : last;
            vf y = acc[r][v] * scale;
            if (add) y += (vf)_mm512_maskz_loadu_ps(lanes, to);
            _mm512_mask_storeu_ps(to, lanes, (__m512)y);
        }
}

#define PAIRS_CASE(rows)                                        \
    case rows:                                                  \
        if (vectors == 2)                                       \
            pairs_tile(c, c_row, p, last, scale, add, rows, 2); \
        else                                                    \
            pairs_tile(c, c_row, p, last, scale, add, rows, 1); \
        return
#define PAIRS_WIDE(rows) \
    case rows: pairs_tile(c, c_row, p, 0xffff, scale, add, rows, 4); return

static inline void pairs_tiles(float *c, int64_t c_row, Pairs p, int rows, int vectors,
                               __mmask16 last, float scale, int add)
{
    if (vectors == 4) switch (rows) {
            PAIRS_WIDE(1);
            PAIRS_WIDE(2);
            PAIRS_WIDE(3);
            PAIRS_WIDE(4);
        }
    switch (rows) {
        ROWS_TO_14(PAIRS_CASE);
    }
}

void CPU(pairs_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add)
{
    int tiles = (rows + TILE_ROWS_MAX - 1) / TILE_ROWS_MAX, tall = (rows + tiles - 1) / tiles;
    for (int j = 0; j < n;) {
        int vectors = rows <= PAIRS_FEW && n - j >= 4 * VL ? 4 : n - j > VL ? 2 : 1;
        __mmask16 last = v_mask(n - j - (vectors - 1) * VL);
        Pairs part = p;
        part.b += j;
        for (int r = 0; r < rows; r += tall, part.a += tall * p.a_row)
            pairs_tiles(c + r * c_row + j, c_row, part, rows - r < tall ? rows - r : tall, vectors,
                        last, scale, add);
        j += vectors * VL;
    }
}

void CPU(pairs_along)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int n)
{
    for (int r = 0; r < rows; r++, to += to_row, from += from_row)
        for (int j = 0; j < n; j += 2 * VL) {
            vf low = v_load_masked(from + j, n - j),
               high = v_load_masked(from + j + VL, n - j - VL);
            _mm512_mask_storeu_epi32(to + j / 2, v_mask((n - j + 1) / 2),
                                     (__m512i)v_round_pairs(low, high));
        }
}

void CPU(pairs_down)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                     int n)
{
    for (int r = 0; r < rows; r += 2, to += to_row, from += 2 * from_row)
        for (int j = 0; j < n; j += VL) {
            vf first = v_load_masked(from + j, n - j), second = v_set(0.0f);
            if (r + 1 < rows) second = v_load_masked(from + from_row + j, n - j);
            _mm512_mask_storeu_epi32(to + j, v_mask(n - j), (__m512i)v_join_pairs(first, second));
        }
}

#endif
