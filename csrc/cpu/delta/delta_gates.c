/* cpu/delta/delta_gates.c - the two gates of the delta rule.
 *
 *   beta = σ(b);  decay = −exp(rate)·softplus(a + bias)
 *   db = dbeta·σ·(1 − σ);  da = −ddecay·exp(rate)·σ(a + bias)
 *
 * A row has only one number per value head. */
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { GRAIN = 1 << 13 }; /* elements of one job */

#define NS 5.0 /* of an element (cpu.h) */

typedef struct DeltaGates {
    float *beta, *decay; /* backward's: db and da */
    const float *dbeta, *ddecay, *b, *a, *rate, *bias;
    int T, H, step, grain;
} DeltaGates;

/* log(1 + eˣ). */
static inline float softplus(float x)
{
    return x > 0.0f ? x + log1pf(expf(-x)) : log1pf(expf(x));
}

static void delta_gates_job(void *context, int64_t job)
{
    const DeltaGates *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int t = from; t < to; t++)
        for (int h = 0; h < g->H; h++) {
            int64_t i = (int64_t)t * g->H + h, at = (int64_t)t * g->step + h;
            g->beta[i] = f_sigmoid(g->b[at]);
            g->decay[i] = -expf(g->rate[h]) * softplus(g->a[at] + g->bias[h]);
        }
}

static void delta_gates_backward_job(void *context, int64_t job)
{
    const DeltaGates *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int t = from; t < to; t++)
        for (int h = 0; h < g->H; h++) {
            int64_t i = (int64_t)t * g->H + h, at = (int64_t)t * g->step + h;
            float s = f_sigmoid(g->b[at]);
            g->beta[at] = g->dbeta[i] * (s * (1.0f - s));
            g->decay[at] = g->ddecay[i] * -expf(g->rate[h]) * f_sigmoid(g->a[at] + g->bias[h]);
        }
}

void CPU(delta_gates)(Device *dev, float *beta, float *decay, const real *b, const real *a,
                      const float *rate, const float *bias, int T, int H, int step)
{
    DeltaGates g = {beta, decay, NULL, NULL, f32c(b), f32c(a),
                    rate, bias,  T,    H,    step,    cpu_rows_of_job(GRAIN / 8, H)};
    cpu_run_of(dev, NS * T * H, ((int64_t)T + g.grain - 1) / g.grain, delta_gates_job, &g);
}

void CPU(delta_gates_backward)(Device *dev, real *db, real *da, const float *dbeta,
                               const float *ddecay, const real *b, const real *a, const float *rate,
                               const float *bias, int T, int H, int step)
{
    DeltaGates g = {f32(db), f32(da), dbeta, ddecay, f32c(b), f32c(a),
                    rate,    bias,    T,     H,      step,    cpu_rows_of_job(GRAIN / 8, H)};
    cpu_run_of(dev, NS * T * H, ((int64_t)T + g.grain - 1) / g.grain, delta_gates_backward_job, &g);
}
