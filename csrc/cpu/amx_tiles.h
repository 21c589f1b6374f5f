/* cpu/amx_tiles.h - the matrix unit's loop over a sum, and what is written of it, which amx.c and
 * split.c share. */
#ifndef TINSMITH_CPU_AMX_TILES_H
#define TINSMITH_CPU_AMX_TILES_H

#include "amx.h"

#if defined(__AMX_BF16__)

#include "ask.h"
#include "block.h"

enum { STRIP = 2 * TILE }; /* rows, or columns, of a loop's tiles */

/* What is asked for during a loop: so many lines in each step, or what is read itself, ahead. */
typedef struct Ask {
    const char *at;
    int lines, streams;
    int64_t step; /* from one step's lines to the next's */
} Ask;

static inline __attribute__((always_inline)) void ask_step(Ask *ask, const float *b)
{
    for (int line = 0; ask->streams && line < TILE * PANEL; line += PANEL) {
        far_ask(b + line);
        near_ask(b + line);
    }
    for (int i = 0; i < ask->lines; i++) __builtin_prefetch(ask->at + 64 * i, 0, 2);
    ask->at += ask->step;
}

/* The sums of two tiles of a's, or of one, and two of b's over so many steps: [a's][b's][16][16].
 */
static inline __attribute__((always_inline)) void tiles_sum(float *sums, int begun, const float *a,
                                                            const float *b, int steps, Ask ask,
                                                            const int both)
{
    enum { ROW = TILE * 4, B_ROW = PANEL * 4 };
    if (begun) {
        TILE_LOAD(0, sums, ROW);
        TILE_LOAD(1, sums + TILE_LANES, ROW);
        if (both) TILE_LOAD(2, sums + 2 * TILE_LANES, ROW);
        if (both) TILE_LOAD(3, sums + 3 * TILE_LANES, ROW);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (both) TILE_ZERO(2);
        if (both) TILE_ZERO(3);
    }
    for (int i = 0; i < steps; i++, a += 2 * TILE_LANES, b += TILE * PANEL) {
        ask_step(&ask, b);
        TILE_LOAD(4, a, ROW);
        TILE_LOAD(6, b, B_ROW);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + TILE, B_ROW);
        TILE_DOT(1, 4, 7);
        if (!both) continue;
        TILE_LOAD(5, a + TILE_LANES, ROW);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, sums, ROW);
    TILE_STORE(1, sums + TILE_LANES, ROW);
    if (both) TILE_STORE(2, sums + 2 * TILE_LANES, ROW);
    if (both) TILE_STORE(3, sums + 3 * TILE_LANES, ROW);
}

/* Asks for the lines of c that will be written. */
static inline void write_ask(Out out, int rows, int n)
{
    for (int r = 0; r < rows; r++) {
        __builtin_prefetch(out.c + r * out.ldc, 1, 2);
        __builtin_prefetch(out.c + r * out.ldc + n - 1, 1, 2);
    }
}

/* c = scale·sums [+ bias] [+ add] of `rows` rows and n ≤ PANEL columns. */
static void rows_write(Out out, const float *sums, int rows, int n)
{
    for (int r = 0; r < rows; r++)
        for (int x = 0; x < n; x += VL) {
            const float *at = sums + (r / TILE * 2 + x / VL) * TILE_LANES + r % TILE * TILE;
            vf y = v_load(at) * out.scale;
            if (out.bias) y += v_load_masked(out.bias + x, n - x);
            if (out.add) y += v_load_masked(out.add + r * out.add_row + x, n - x);
            _mm512_mask_storeu_ps(out.c + r * out.ldc + x, v_mask(n - x), (__m512)y);
        }
}

#endif
#endif
