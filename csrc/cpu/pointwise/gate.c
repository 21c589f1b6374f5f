/* cpu/pointwise/gate.c - what a sigmoid lets through: attention's output behind its gate, the two
 * gates of the delta rule, and the shared expert's share; and what a sink lets through.
 *
 *   gate         y = x·σ(g);  dx = dy·σ,  dg = dy·x·σ·(1 − σ)
 *   delta_gates  beta = σ(b);  decay = −exp(rate)·softplus(a + bias)
 *                db = dbeta·σ·(1 − σ);  da = −ddecay·exp(rate)·σ(a + bias)
 *
 *   sink         y ← y·σ(lse − sink);  lse ← log(e^lse + e^sink)
 *
 * Forward reads 2·T·D and writes T·D, backward reads 3·T·D and writes 2·T·D; memory bound. Elements
 * are alone, so jobs of `gate` are flat stretches; each vector is loaded before any of it is
 * stored, so that dx may overwrite dy. A row of delta_gates has one number for each value head:
 * few. */
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { GRAIN = 1 << 13 }; /* elements of one job */

/* Of an element (cpu.h). */
#define NS 0.2
#define NS_BACKWARD 0.3
#define NS_DELTA 5.0

/* ---- a gate ---- */

typedef struct Gate {
    float *y, *dgate; /* y: also dx */
    const float *dy, *x, *gate;
    int64_t n;
} Gate;

static void gate_job(void *context, int64_t job)
{
    const Gate *g = context;
    int64_t i = job * GRAIN, to = g->n - i < GRAIN ? g->n : i + GRAIN;
    for (; i < to; i += VL) {
        int rest = to - i < VL ? (int)(to - i) : VL;
        vf x = v_load_upto(g->x + i, rest), gate = v_load_upto(g->gate + i, rest);
        v_store_upto(g->y + i, x * v_sigmoid(gate), rest);
    }
}

static void gate_backward_job(void *context, int64_t job)
{
    const Gate *g = context;
    int64_t i = job * GRAIN, to = g->n - i < GRAIN ? g->n : i + GRAIN;
    for (; i < to; i += VL) {
        int rest = to - i < VL ? (int)(to - i) : VL;
        vf dy = v_load_upto(g->dy + i, rest), x = v_load_upto(g->x + i, rest);
        vf s = v_sigmoid(v_load_upto(g->gate + i, rest));
        v_store_upto(g->y + i, dy * s, rest);
        v_store_upto(g->dgate + i, dy * x * (s * (1.0f - s)), rest);
    }
}

void CPU(gate)(Device *dev, real *y, const real *x, const real *gate, int T, int D)
{
    Gate g = {f32(y), NULL, NULL, f32c(x), f32c(gate), (int64_t)T * D};
    cpu_run_of(dev, NS * (double)g.n, (g.n + GRAIN - 1) / GRAIN, gate_job, &g);
}

void CPU(gate_backward)(Device *dev, real *dx, real *dgate, const real *dy, const real *x,
                        const real *gate, int T, int D)
{
    Gate g = {f32(dx), f32(dgate), f32c(dy), f32c(x), f32c(gate), (int64_t)T * D};
    cpu_run_of(dev, NS_BACKWARD * (double)g.n, (g.n + GRAIN - 1) / GRAIN, gate_backward_job, &g);
}

/* ---- the gates of the delta rule ---- */

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

static inline float sigmoid_of(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static void delta_gates_job(void *context, int64_t job)
{
    const DeltaGates *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int t = from; t < to; t++)
        for (int h = 0; h < g->H; h++) {
            int64_t i = (int64_t)t * g->H + h, at = (int64_t)t * g->step + h;
            g->beta[i] = sigmoid_of(g->b[at]);
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
            float s = sigmoid_of(g->b[at]);
            g->beta[at] = g->dbeta[i] * (s * (1.0f - s));
            g->decay[at] = g->ddecay[i] * -expf(g->rate[h]) * sigmoid_of(g->a[at] + g->bias[h]);
        }
}

void CPU(delta_gates)(Device *dev, float *beta, float *decay, const real *b, const real *a,
                      const float *rate, const float *bias, int T, int H, int step)
{
    DeltaGates g = {beta, decay, NULL, NULL, f32c(b), f32c(a),
                    rate, bias,  T,    H,    step,    cpu_rows_of_job(GRAIN / 8, H)};
    cpu_run_of(dev, NS_DELTA * T * H, ((int64_t)T + g.grain - 1) / g.grain, delta_gates_job, &g);
}

void CPU(delta_gates_backward)(Device *dev, real *db, real *da, const float *dbeta,
                               const float *ddecay, const real *b, const real *a, const float *rate,
                               const float *bias, int T, int H, int step)
{
    DeltaGates g = {f32(db), f32(da), dbeta, ddecay, f32c(b), f32c(a),
                    rate,    bias,    T,     H,      step,    cpu_rows_of_job(GRAIN / 8, H)};
    cpu_run_of(dev, NS_DELTA * T * H, ((int64_t)T + g.grain - 1) / g.grain,
               delta_gates_backward_job, &g);
}

/* ---- a sigmoid alone, of one number a row: few ---- */

void CPU(sigmoid)(Device *dev, float *y, const real *x, int64_t n)
{
    (void)dev;
    for (int64_t i = 0; i < n; i++) y[i] = sigmoid_of(f32c(x)[i]);
}

void CPU(sigmoid_backward)(Device *dev, real *dx, const float *dy, const float *y, int64_t n)
{
    (void)dev;
    for (int64_t i = 0; i < n; i++) f32(dx)[i] = dy[i] * (y[i] * (1.0f - y[i]));
}

/* ---- a sink of each head ---- */

typedef struct Sink {
    float *y, *lse;
    const float *sinks;
    int64_t rows; /* of all heads */
    int H, E, grain;
} Sink;

static void sink_job(void *context, int64_t job)
{
    const Sink *g = context;
    int64_t from = job * g->grain, to = g->rows - from < g->grain ? g->rows : from + g->grain;
    for (int64_t r = from; r < to; r++) {
        float lse = g->lse[r], sink = g->sinks[r % g->H], top = lse > sink ? lse : sink;
        vf kept = v_set(sigmoid_of(lse - sink));
        g->lse[r] = top + log1pf(expf((lse < sink ? lse : sink) - top));
        for (int64_t i = r * g->E, end = i + g->E; i < end; i += VL) {
            int rest = end - i < VL ? (int)(end - i) : VL;
            v_store_upto(g->y + i, kept * v_load_upto(g->y + i, rest), rest);
        }
    }
}

void CPU(sink)(Device *dev, real *y, float *lse, const float *sinks, int T, int H, int E)
{
    Sink g = {f32(y), lse, sinks, (int64_t)T * H, H, E, cpu_rows_of_job(GRAIN, E)};
    cpu_run_of(dev, NS * (double)g.rows * E, (g.rows + g.grain - 1) / g.grain, sink_job, &g);
}
