/* cpu/delta/delta.h - shared by the delta rule's forward and backward: a page's keys, decays, and
 * sums over its rows. */
#ifndef TINSMITH_CPU_DELTA_DELTA_H
#define TINSMITH_CPU_DELTA_DELTA_H

#include "../../device/delta_state.h"
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

/* A page's sums of decays G: each the nearest f32 and, KV_PAGE later, its rounding error. A large
 * decay early in a page must not cost the digits of small ones after it. */
enum { SUMS = 2 * KV_PAGE };

/* Sums for rows [first, first + rows); `decay` begins with row `first`, at stride `step`. */
static inline void sums_add(float *sums, const float *decay, int64_t step, int first, int rows)
{
    for (int i = first; i < first + rows; i++, decay += step) {
        float before = i ? sums[i - 1] : 0.0f, sum = before + *decay, added = sum - before;
        float lost = (before - (sum - added)) + (*decay - added);
        sums[i] = sum;
        sums[KV_PAGE + i] = (i ? sums[KV_PAGE + i - 1] : 0.0f) + lost;
    }
}

/* e^{G_i − G_j} for VL values of j. */
static inline vf sums_decay(const float *sums, int i, int j)
{
    vf whole = sums[i] - v_load(sums + j), rest = sums[KV_PAGE + i] - v_load(sums + KV_PAGE + j);
    return v_exp(whole + rest);
}

/* e^{G_i}. */
static inline float sums_factor(const float *sums, int i)
{
    return f_exp(sums[i] + sums[KV_PAGE + i]);
}

/* Columns that a product writes for `rows` rows, in a matrix as wide as a page: whole tiles. */
static inline int page_columns(int rows)
{
    int unit = 2 * VL;
    return (rows + unit - 1) / unit * unit;
}

/* Rows (rows,N) become columns of a transposed page (N,KV_PAGE), from `column` on. */
static inline void keys_turn(float *turned, int column, const float *k, int64_t k_row, int rows,
                             int N)
{
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < N; n++) turned[n * KV_PAGE + column + i] = k[i * k_row + n];
}

static inline void rows_gather(float *to, const float *from, int64_t from_row, int rows, int width)
{
    for (int i = 0; i < rows; i++)
        memcpy(to + (size_t)i * (size_t)width, from + i * from_row, (size_t)width * sizeof *to);
}

#endif
