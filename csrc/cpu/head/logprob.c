/* cpu/head/logprob.c - a row of logits → log-probabilities, and their gradient.
 *
 *   logprob           lse[t] = logΣ_v exp(logits[t,v]),  logp[i] = logits[t,ids[i]] − lse[t]
 *   logprob_backward  dlogits[t,v] = Σ_i dlogp[i]·([ids[i] = first+v] − exp(logits[t,v] − lse[t]))
 *
 * Each reads T·V, the gradient also writes T·V; memory bound. The logsumexp is one pass over a row:
 * each block is summed in f32 lanes relative to the largest logit so far, and the sums are added in
 * double, so the error does not grow with V. A row is one job; it is not split over threads. */
#include "logprob.h"

#include <math.h>
#include <string.h>

#include "../runtime/simd.h"

enum {
    BLOCK = 64 * VL, /* logits whose exponentials are summed in f32: 32 per lane of two registers */
    GRAIN = 1 << 13, /* logits of one job: some microseconds */
};

#define NS 0.2 /* per logit, in any of these ops (cpu.h) */

typedef struct Logprob {
    float *lse, *logp;          // (T, 2), (start[T])
    const float *logits;        // (T, V)
    const int32_t *ids, *start; // (start[T]), (T + 1)
    int T, V, grain;
} Logprob;

typedef struct LogprobBackward {
    float *dlogits;                    // (T, V)
    const float *logits, *lse, *dlogp; // (T, V), (T, 2), (start[T])
    const int32_t *ids, *start;
    int T, V, first, grain;
} LogprobBackward;

/* ---- logsumexp ---- */

/* The largest of x, ignoring NaN; −inf if there is none. */
static float block_top(const float *x, int n)
{
    vf a = v_set(-INFINITY), b = a, c = a, d = a;
    int i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL) {
        a = v_max(v_load(x + i), a);
        b = v_max(v_load(x + i + VL), b);
        c = v_max(v_load(x + i + 2 * VL), c);
        d = v_max(v_load(x + i + 3 * VL), d);
    }
    for (; i + VL <= n; i += VL) a = v_max(v_load(x + i), a);
    if (i < n) b = v_max(v_load_part(x + i, n - i, -INFINITY), b);
    return v_top(v_max(v_max(a, b), v_max(c, d)));
}

/* Σ exp(scale·(x − shift)) */
static float block_sum(const float *x, int n, float scale, float shift)
{
    vf a = v_set(0.0f), b = a;
    int i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        a += v_exp(scale * (v_load(x + i) - shift));
        b += v_exp(scale * (v_load(x + i + VL) - shift));
    }
    for (; i + VL <= n; i += VL) a += v_exp(scale * (v_load(x + i) - shift));
    if (i < n) b += v_exp(scale * (v_load_part(x + i, n - i, -INFINITY) - shift));
    return v_sum(a + b);
}

/* The sum is kept relative to exp(shift), where shift is the largest logit so far; while that is
 * −inf, or once it is +inf, it is 0, so that inf − inf makes no NaN that was not in the row. */
double CPU(row_lse)(const float *x, int V, float scale, float *base)
{
    float top = -INFINITY, shift = 0.0f;
    double total = 0.0;
    for (int from = 0; from < V; from += BLOCK) {
        int n = V - from < BLOCK ? V - from : BLOCK;
        float block = block_top(x + from, n);
        if (block > top) {
            float next = isinf(block) ? 0.0f : block;
            if (total != 0.0) total *= exp((double)scale * ((double)shift - (double)next));
            top = block;
            shift = next;
        }
        total += (double)block_sum(x + from, n, scale, shift);
    }
    *base = shift;
    return log(total);
}

static void logprob_job(void *context, int64_t job)
{
    const Logprob *r = context;
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++) {
        const float *logits = r->logits + (int64_t)t * r->V;
        float base, *lse = r->lse + (int64_t)2 * t;
        double rest = CPU(row_lse)(logits, r->V, 1.0f, &base);
        lse_split(lse, base, rest);
        for (int i = r->start[t]; i < r->start[t + 1]; i++)
            r->logp[i] = logits[r->ids[i]] - lse[0] - lse[1];
    }
}

static void logprob_backward_job(void *context, int64_t job)
{
    const LogprobBackward *r = context;
    int V = r->V, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++) {
        const float *x = r->logits + (int64_t)t * V;
        float *y = r->dlogits + (int64_t)t * V;
        const float *lse = r->lse + (int64_t)2 * t;
        double sum = 0.0;
        for (int i = r->start[t]; i < r->start[t + 1]; i++) sum += (double)r->dlogp[i];
        if (sum == 0.0) { /* no targets, or weights that sum to 0, as in a prompt */
            memset(y, 0, (size_t)V * sizeof *y);
        } else {
            float weight = -(float)sum;
            int v = 0;
            for (; v + VL <= V; v += VL)
                v_store(y + v, weight * v_exp(v_load(x + v) - lse[0] - lse[1]));
            if (v < V) {
                vf rest = v_load_part(x + v, V - v, 0.0f);
                v_store_part(y + v, weight * v_exp(rest - lse[0] - lse[1]), V - v);
            }
        }
        for (int i = r->start[t]; i < r->start[t + 1]; i++) {
            int v = r->ids[i] - r->first;
            if (v >= 0 && v < V) y[v] += r->dlogp[i];
        }
    }
}

void CPU(logprob)(Device *dev, float *lse, float *logp, const float *logits, const int32_t *ids,
                  const int32_t *start, int T, int V)
{
    Logprob r = {lse, logp, logits, ids, start, T, V, cpu_rows_of_job(GRAIN, V)};
    cpu_run_of(dev, NS * T * V, ((int64_t)T + r.grain - 1) / r.grain, logprob_job, &r);
}

void CPU(logprob_backward)(Device *dev, real *dlogits, const float *logits, const float *lse,
                           const float *dlogp, const int32_t *ids, const int32_t *start, int T,
                           int V, int first)
{
    int grain = cpu_rows_of_job(GRAIN, V);
    LogprobBackward r = {f32(dlogits), logits, lse, dlogp, ids, start, T, V, first, grain};
    cpu_run_of(dev, NS * T * V, ((int64_t)T + r.grain - 1) / r.grain, logprob_backward_job, &r);
}
