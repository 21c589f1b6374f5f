/* cpu/product/pairs.h - attention's products of bf16 pairs with f32 sums, on the calling thread.
 * Both operands change with every call.
 *
 * A lane of 32 bits holds two adjacent numbers of the sum. Arrays of lanes are float arrays
 * (simd.h). A sum adds its steps in order, independent of other rows and columns. */
#ifndef TINSMITH_CPU_PRODUCT_PAIRS_H
#define TINSMITH_CPU_PRODUCT_PAIRS_H

#include "amx.h"
#include "tile.h"

/* The lane of row r at step i is a[r·a_row + i·a_step], that of column j is b[i·b_step + j]. With
 * `odd`, the second number in the last step's lanes of b is ignored. */
typedef struct Pairs {
    const float *a;
    int64_t a_row, a_step;
    const float *b;
    int64_t b_step;
    int steps, odd;
} Pairs;

/* c (rows, n) = scale·a·b, or c += that. */
void CPU(pairs_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add);

/* The same on Intel's matrix unit, with whole tiles: n and steps are multiples of TILE, `odd` is 0,
 * and a's and c's rows are accessible up to such a multiple. c += a·b continues c's sums (amx.h),
 * unscaled. The caller has called tiles_begin(TILE). */
void CPU(tiles_product)(float *c, int64_t c_row, Pairs p, int rows, int n, float scale, int add);

/* Numbers as pairs, rounded to the nearest bf16. Pairs of neighbours in a row: to (rows, ⌈n/2⌉); an
 * odd last one is paired with zero. */
void CPU(pairs_along)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int n);

/* Pairs of neighbours in a column: to (⌈rows/2⌉, n); an odd last row is paired with zeros. */
void CPU(pairs_down)(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                     int n);

#endif
