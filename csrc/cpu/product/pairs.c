/* cpu/product/pairs.c - products of bf16 pairs, and numbers as pairs (pairs.h). Roofline: 2 flops a
 * number of a sum at the speed of bf16 pairs; 28 products for two loads of b and 14 of a, from L1.
 * Few rows are memory bound: they take four vectors of b at once and prefetch. */
#include <assert.h>

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

/* The tile's last vector has the lanes of `last`. */
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
    int tiles = (rows + TILE_ROWS_MAX - 1) / TILE_ROWS_MAX, height = (rows + tiles - 1) / tiles;
    for (int j = 0; j < n;) {
        int vectors = rows <= PAIRS_FEW && n - j >= 4 * VL ? 4 : n - j > VL ? 2 : 1;
        __mmask16 last = v_mask(n - j - (vectors - 1) * VL);
        Pairs part = p;
        part.b += j;
        for (int r = 0; r < rows; r += height, part.a += height * p.a_row)
            pairs_tiles(c + r * c_row + j, c_row, part, rows - r < height ? rows - r : height,
                        vectors, last, scale, add);
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

#if defined(__AMX_BF16__)

enum { A_LANES = KV_PAGE / 2 * 2 * TILE }; /* of two tiles' transposed rows */

/* Two tiles of a by two of b, or fewer. */
static inline __attribute__((always_inline)) void
tiles_square(float *c, int64_t c_row, Pairs p, int add, const int high, const int wide)
{
    int64_t c_bytes = c_row * 4, a_bytes = p.a_row * 4, b_bytes = p.b_step * 4;
    float *below = c + TILE * c_row;
    if (add) {
        TILE_LOAD(0, c, c_bytes);
        if (wide) TILE_LOAD(1, c + TILE, c_bytes);
        if (high) TILE_LOAD(2, below, c_bytes);
        if (high && wide) TILE_LOAD(3, below + TILE, c_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int i = 0; i < p.steps; i += TILE, p.a += TILE, p.b += TILE * p.b_step) {
        TILE_LOAD(4, p.a, a_bytes);
        TILE_LOAD(6, p.b, b_bytes);
        TILE_DOT(0, 4, 6);
        if (wide) TILE_LOAD(7, p.b + TILE, b_bytes);
        if (wide) TILE_DOT(1, 4, 7);
        if (!high) continue;
        TILE_LOAD(5, p.a + TILE * p.a_row, a_bytes);
        TILE_DOT(2, 5, 6);
        if (wide) TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, c, c_bytes);
    if (wide) TILE_STORE(1, c + TILE, c_bytes);
    if (high) TILE_STORE(2, below, c_bytes);
    if (high && wide) TILE_STORE(3, below + TILE, c_bytes);
}

/* Rows [0, 2·TILE) of a with adjacent rows, transposed so that a row's lanes are adjacent. */
static void tiles_turn(float *to, Pairs p)
{
    for (int i = 0; i < p.steps; i += VL)
        for (int r = 0; r < 2 * TILE; r += VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (int j = 0; j < VL; j++) v[j] = v_load(p.a + (i + j) * p.a_step + r);
            square_turn(v);
#pragma GCC unroll 16
            for (int j = 0; j < VL; j++) v_store(to + (r + j) * p.steps + i, v[j]);
        }
}

void CPU(tiles_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add)
{
    assert(n % TILE == 0 && p.steps % TILE == 0 && !p.odd);
    for (int r = 0; r < rows; r += 2 * TILE, c += 2 * TILE * c_row) {
        _Alignas(64) float turned[A_LANES];
        Pairs part = p;
        part.a += r * p.a_row;
        if (p.a_step > 1) {
            assert(p.a_row == 1 && p.steps <= KV_PAGE / 2);
            tiles_turn(turned, part);
            part.a = turned;
            part.a_row = p.steps;
        }
        int high = rows - r > TILE;
        for (int j = 0; j < n; j += 2 * TILE, part.b += 2 * TILE) {
            int wide = n - j > TILE;
            if (high && wide)
                tiles_square(c + j, c_row, part, add, 1, 1);
            else if (wide)
                tiles_square(c + j, c_row, part, add, 0, 1);
            else if (high)
                tiles_square(c + j, c_row, part, add, 1, 0);
            else
                tiles_square(c + j, c_row, part, add, 0, 0);
        }
        for (int i = 0; scale != 1.0f && i < 2 * TILE && r + i < rows; i++)
            for (int j = 0; j < n; j += VL)
                v_store(c + i * c_row + j, v_load(c + i * c_row + j) * scale);
    }
}

#endif

#endif
