/* cpu/pointwise/rmsnorm.c - each row divided by its root mean square.
 *
 *   y[t,:] = x[t,:]·rstd[t]·w,  rstd[t] = 1/sqrt(mean(x[t,:]²) + eps)
 *   dx[t,:] = rstd·(g − x̂·mean(g·x̂)) + plus[t,:],  g = dy·w,  x̂ = x·rstd
 *
 * Forward reads T·D twice, the second time from cache, and writes T·D; backward reads 3·T·D and
 * writes T·D; memory bound. The weight has no gradient: it belongs to the frozen base. */
#include "norm.h"

enum { GRAIN = 1 << 13 }; /* elements of one job */

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
    const float *dy, *x, *w, *rstd, *plus;
    int T, D, grain;
} NormBackward;

static void norm_job(void *context, int64_t job)
{
    const Norm *r = context;
    int D = r->D, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++)
        r->rstd[t] = norm_row(r->y + (int64_t)t * D, r->x + (int64_t)t * D, r->w, D, r->eps);
}

static void norm_backward_job(void *context, int64_t job)
{
    const NormBackward *r = context;
    int D = r->D, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    const float *restrict w = r->w;
    for (int t = from; t < to; t++) {
        const float *restrict x = r->x + (int64_t)t * D, *restrict dy = r->dy + (int64_t)t * D;
        float *restrict dx = r->dx + (int64_t)t * D;
        size_t row = (size_t)D * sizeof *dx;
        if (!r->plus)
            memset(dx, 0, row);
        else if (r->plus != r->dx)
            memcpy(dx, r->plus + (int64_t)t * D, row);
        float rstd = r->rstd[t];
        float mean = norm_mean(dy, x, w, rstd, D);
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
                           const float *rstd, const real *plus, int T, int D)
{
    NormBackward r = {f32(dx), f32c(dy), f32c(x),
                      w,       rstd,     plus ? f32c(plus) : NULL,
                      T,       D,        cpu_rows_of_job(GRAIN, D)};
    cpu_run_of(dev, NS_BACKWARD * T * D, ((int64_t)T + r.grain - 1) / r.grain, norm_backward_job,
               &r);
}
