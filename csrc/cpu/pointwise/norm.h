/* cpu/pointwise/norm.h - a row divided by its root mean square, and its gradient; shared by rmsnorm
 * and rotate.
 *
 * Sums run in f32 lanes over blocks, and the blocks are added in double, so that the error does not
 * grow with the row. */
#ifndef TINSMITH_CPU_POINTWISE_NORM_H
#define TINSMITH_CPU_POINTWISE_NORM_H

#include <math.h>

#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { NORM_BLOCK = 1024 }; /* elements summed in f32 lanes */

/* Σ a·b·w, or Σ a·b if w is NULL. */
static inline double sum_products(const float *a, const float *b, const float *w, int n)
{
    double total = 0.0;
    for (int from = 0; from < n; from += NORM_BLOCK) {
        int to = n - from < NORM_BLOCK ? n : from + NORM_BLOCK, i = from;
        vf even = v_set(0.0f), odd = v_set(0.0f);
        for (; i + 2 * VL <= to; i += 2 * VL) {
            vf p = v_load(a + i), q = v_load(a + i + VL);
            if (w) {
                p *= v_load(w + i);
                q *= v_load(w + i + VL);
            }
            even = v_fma(p, v_load(b + i), even);
            odd = v_fma(q, v_load(b + i + VL), odd);
        }
        float rest = 0.0f;
        for (; i < to; i++) rest += w ? a[i] * w[i] * b[i] : a[i] * b[i];
        total += (double)v_sum(even + odd) + (double)rest;
    }
    return total;
}

/* y = x·rstd·w; returns rstd. */
static inline float norm_row(float *restrict y, const float *restrict x, const float *restrict w,
                             int n, float eps)
{
    float rstd = (float)(1.0 / sqrt(sum_products(x, x, NULL, n) / n + eps));
    for (int i = 0; i < n; i++) y[i] = x[i] * rstd * w[i];
    return rstd;
}

/* mean(g·x̂) with g = dy·w: the gradient of x subtracts it times x̂ from g. */
static inline float norm_mean(const float *dy, const float *x, const float *w, float rstd, int n)
{
    return (float)(sum_products(dy, x, w, n) * rstd / n);
}

#endif
