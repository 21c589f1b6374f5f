/* cpu/pointwise/gate.c - sigmoid gates (attention's gate, the shared expert's share), attention
 * sinks, and rows in halves.
 *
 *   gate         y = x·σ(g);  dx = dy·σ,  dg = dy·x·σ·(1 − σ)
 *   sink         y ← y·σ(lse − sink);  lse ← log(e^lse + e^sink)
 *   halve, join  a row of 2·E numbers, and its two halves
 *
 * Forward reads 2·T·D and writes T·D, backward reads 3·T·D and writes 2·T·D; memory bound. Elements
 * are independent, so jobs of `gate` are flat ranges; each vector is loaded before it is stored, so
 * dx may overwrite dy. */
#include <string.h>

#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { GRAIN = 1 << 13, GRAIN_MOVED = 1 << 14 }; /* elements of one job */

/* Of an element (cpu.h). */
#define NS 0.2
#define NS_BACKWARD 0.3
#define NS_MOVED 0.1

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

/* ---- a sigmoid of one number per row ---- */

void CPU(sigmoid)(Device *dev, float *y, const real *x, int64_t n)
{
    (void)dev;
    for (int64_t i = 0; i < n; i++) y[i] = f_sigmoid(f32c(x)[i]);
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
        vf kept = v_set(f_sigmoid(lse - sink));
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

/* ---- halves ---- */

typedef struct Halves {
    float *a, *b, *x; /* one side is only read */
    int T, E, grain;
} Halves;

static void halve_job(void *context, int64_t job)
{
    const Halves *m = context;
    int64_t from = job * m->grain, to = m->T - from < m->grain ? m->T : from + m->grain;
    size_t bytes = (size_t)m->E * sizeof *m->x;
    for (int64_t t = from; t < to; t++) {
        memcpy(m->a + t * m->E, m->x + t * 2 * m->E, bytes);
        memcpy(m->b + t * m->E, m->x + (t * 2 + 1) * m->E, bytes);
    }
}

static void join_job(void *context, int64_t job)
{
    const Halves *m = context;
    int64_t from = job * m->grain, to = m->T - from < m->grain ? m->T : from + m->grain;
    size_t bytes = (size_t)m->E * sizeof *m->x;
    for (int64_t t = from; t < to; t++) {
        memcpy(m->x + t * 2 * m->E, m->a + t * m->E, bytes);
        memcpy(m->x + (t * 2 + 1) * m->E, m->b + t * m->E, bytes);
    }
}

void CPU(halve)(Device *dev, real *a, real *b, const real *x, int T, int E)
{
    Halves m = {f32(a), f32(b), f32((real *)x), T, E, cpu_rows_of_job(GRAIN_MOVED, 2 * E)};
    cpu_run_of(dev, 2 * NS_MOVED * T * E, ((int64_t)T + m.grain - 1) / m.grain, halve_job, &m);
}

void CPU(join)(Device *dev, real *x, const real *a, const real *b, int T, int E)
{
    Halves m = {f32((real *)a), f32((real *)b), f32(x), T, E, cpu_rows_of_job(GRAIN_MOVED, 2 * E)};
    cpu_run_of(dev, 2 * NS_MOVED * T * E, ((int64_t)T + m.grain - 1) / m.grain, join_job, &m);
}
