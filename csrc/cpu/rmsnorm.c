/* cpu/rmsnorm.c - each row divided by its root mean square.
 *
 *   y[t,:] = x[t,:]·rstd[t]·w,  rstd[t] = 1/sqrt(mean(x[t,:]²) + eps)
 *   dx[t,:] += rstd·(g − x̂·mean(g·x̂)),  g = dy·w,  x̂ = x·rstd
 *
 * Forward reads T·D twice, the second time from cache, and writes T·D; backward reads 3·T·D and
 * writes T·D; memory bound. Sums run in f32 lanes over blocks, and the blocks are added in
 * double, so that the error does not grow with D. The weight has no gradient: it belongs to the
 * frozen base. */
#include <math.h>

#include "cpu.h"
#include "simd.h"

enum {
    BLOCK = 1024,    /* elements summed in f32 lanes */
    GRAIN = 1 << 13, /* elements of one job */
};

/* Of an element (cpu.h). */
#define NS 0.16
#define NS_BACKWARD 0.3

typedef struct Norm {
    float *y, *rstd; // (T, D), (T)
    const float *x, *w;
    int T, D, grain;
    float eps;
} Norm;

typedef struct NormBackward {
    float *dx;
    const float *dy, *x, *w, *rstd;
    int T, D, grain;
} NormBackward;

/* Σ a·b·w, or Σ a·b where w is NULL. */
static double sum_products(const float *a, const float *b, const float *w, int n)
{
    double total = 0.0;
    for (int from = 0; from < n; from += BLOCK) {
        int to = n - from < BLOCK ? n : from + BLOCK, i = from;
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

static void norm_job(void *context, int64_t job)
{
    const Norm *r = context;
    int D = r->D, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    const float *restrict w = r->w;
    for (int t = from; t < to; t++) {
        const float *restrict x = r->x + (int64_t)t * D;
        float *restrict y = r->y + (int64_t)t * D;
        float rstd = (float)(1.0 / sqrt(sum_products(x, x, NULL, D) / D + r->eps));
        r->rstd[t] = rstd;
        for (int i = 0; i < D; i++) y[i] = x[i] * rstd * w[i];
    }
}

static void norm_backward_job(void *context, int64_t job)
{
    const NormBackward *r = context;
    int D = r->D, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    const float *restrict w = r->w;
    for (int t = from; t < to; t++) {
        const float *restrict x = r->x + (int64_t)t * D, *restrict dy = r->dy + (int64_t)t * D;
        float *restrict dx = r->dx + (int64_t)t * D;
        float rstd = r->rstd[t];
        float mean = (float)(sum_products(dy, x, w, D) * rstd / D);
        for (int i = 0; i < D; i++) dx[i] += rstd * (dy[i] * w[i] - x[i] * rstd * mean);
    }
}

void CPU(rmsnorm)(Device *dev, real *y, float *rstd, const real *x, const float *w, int T, int D,
                  float eps)
{
    Norm r = {f32(y), rstd, f32c(x), w, T, D, cpu_rows_of_job(GRAIN, D), eps};
    cpu_run_of(dev, NS * T * D, ((int64_t)T + r.grain - 1) / r.grain, norm_job, &r);
}

void CPU(rmsnorm_backward)(Device *dev, real *dx, const real *dy, const real *x, const float *w,
                           const float *rstd, int T, int D)
{
    NormBackward r = {f32(dx), f32c(dy), f32c(x), w, rstd, T, D, cpu_rows_of_job(GRAIN, D)};
    cpu_run_of(dev, NS_BACKWARD * T * D, ((int64_t)T + r.grain - 1) / r.grain, norm_backward_job,
               &r);
}
