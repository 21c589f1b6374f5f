/* cpu/product/pairs.h - products of bf16 pairs on the calling thread, whose sums are f32: those of
 * attention, where both sides change with every call.
 *
 * A lane of 32 bits holds two numbers that follow each other in the sum. Arrays of lanes are float
 * arrays (simd.h). A sum takes its steps in their order, whatever rows and columns stand beside it,
 * so a row's bits are its own. */
#ifndef TINSMITH_CPU_PRODUCT_PAIRS_H
#define TINSMITH_CPU_PRODUCT_PAIRS_H

#include "amx.h"
#include "tile.h"

/* The lane of row r at step i is a[r·a_row + i·a_step], that of column j is b[i·b_step + j]. Where
 * `odd`, the second number of the last step's lane of b is not looked at. */
typedef struct Pairs {
    const float *a;
    int64_t a_row, a_step;
    const float *b;
    int64_t b_step;
    int steps, odd;
} Pairs;

/* c (rows, n) = scale·a·b, or c += that. */
void CPU(pairs_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add);

/* The same on Intel's matrix unit, of whole tiles: n and steps are multiples of TILE, nothing is
 * odd, and a's rows, and c's, can be read and written up to such a multiple. c += a·b continues c's
 * sums (amx.h), and is not scaled. The caller has called tiles_begin(TILE). */
void CPU(tiles_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add);

/* Numbers as pairs, rounded to the nearest bf16. Two that stand beside each other in a row: to
 * (rows, ⌈n/2⌉); an odd last one is joined by a zero. */
void CPU(pairs_along)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int n);

/* Two that stand below each other: to (⌈rows/2⌉, n); an odd last row is joined by zeros. */
void CPU(pairs_down)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                     int n);

#endif
