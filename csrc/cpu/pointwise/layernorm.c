/* cpu/pointwise/layernorm.c - each row without its mean, divided by its standard deviation.
 *
 *   y[t,:] = (x[t,:] − mean)·rstd·w + b,  rstd = 1/sqrt(mean((x[t,:] − mean)²) + eps)
 *
 * A row's mean comes first, then the squares of what is left: a mean that is large beside the
 * deviation costs no digits. Sums run in f32 lanes over blocks, and the blocks are added in double,
 * as in norm.h. Reads T·D three times, twice of it from cache, and writes T·D; memory bound. There
 * is no gradient: only a vision tower has this norm, and it is frozen. */
#include "norm.h"

enum { GRAIN = 1 << 13 }; /* elements of one job */

#define NS 0.2 /* of an element (cpu.h) */

typedef struct LayerNorm {
    float *y; // (T, D)
    const float *x, *w, *b;
    int T, D, grain;
    float eps;
} LayerNorm;

/* Σ (x − mean), or Σ (x − mean)² if `squared`. */
static inline double sum_centred(const float *x, float mean, int n, const int squared)
{
    double total = 0.0;
    for (int from = 0; from < n; from += NORM_BLOCK) {
        int to = n - from < NORM_BLOCK ? n : from + NORM_BLOCK, i = from;
        vf even = v_set(0.0f), odd = v_set(0.0f);
        for (; i + 2 * VL <= to; i += 2 * VL) {
            vf p = v_load(x + i) - mean, q = v_load(x + i + VL) - mean;
            even = squared ? v_fma(p, p, even) : even + p;
            odd = squared ? v_fma(q, q, odd) : odd + q;
        }
        float rest = 0.0f;
        for (; i < to; i++) rest += squared ? (x[i] - mean) * (x[i] - mean) : x[i] - mean;
        total += (double)v_sum(even + odd) + (double)rest;
    }
    return total;
}

static void layernorm_row(float *restrict y, const float *restrict x, const LayerNorm *r)
{
    const float *restrict w = r->w, *restrict b = r->b;
    float mean = (float)(sum_centred(x, 0.0f, r->D, 0) / r->D);
    float rstd = (float)(1.0 / sqrt(sum_centred(x, mean, r->D, 1) / r->D + r->eps));
    for (int i = 0; i < r->D; i++) y[i] = (x[i] - mean) * rstd * w[i] + b[i];
}

static void layernorm_job(void *context, int64_t job)
{
    const LayerNorm *r = context;
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int64_t t = from; t < to; t++) layernorm_row(r->y + t * r->D, r->x + t * r->D, r);
}

void CPU(layernorm)(Device *dev, real *y, const real *x, const float *w, const float *b, int T,
                    int D, float eps)
{
    LayerNorm r = {f32(y), f32c(x), w, b, T, D, cpu_rows_of_job(GRAIN, D), eps};
    cpu_run_of(dev, NS * T * D, ((int64_t)T + r.grain - 1) / r.grain, layernorm_job, &r);
}
