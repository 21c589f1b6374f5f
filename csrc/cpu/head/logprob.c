/* cpu/head/logprob.c - what is made of a row of logits: log-probabilities, their gradient, the K
 * best.
 *
 *   logprob           lse[t] = logΣ_v exp(logits[t,v]),  logp[i] = logits[t,ids[i]] − lse[t]
 *   logprob_backward  dlogits[t,v] = Σ_i dlogp[i]·([ids[i] = first+v] − exp(logits[t,v] − lse[t]))
 *   topk_logprob      the K largest of each row, best first
 *
 * Each reads T·V, the gradient also writes T·V; memory bound. The logsumexp goes over a row once:
 * each block is summed in f32 lanes against the largest logit so far, and the sums are
 * added in double, so its error does not grow with V. The K best are a heap that lives in the
 * output itself, whose worst member is the bar that whole groups of logits are held against: of
 * 152 000 logits some 300 get past it. A row is one job; it is not split over threads. */
#include "logprob.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "../runtime/simd.h"

enum {
    BLOCK = 64 * VL, /* logits whose exponentials are summed in f32, 32 in a lane of two */
    GROUP = 8 * VL,  /* logits held against the bar at once */
    GRAIN = 1 << 13, /* logits of one job: some microseconds */
};

#define NS 0.2 /* of a logit, in any of these ops (cpu.h) */

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

typedef struct TopK {
    int32_t *ids;              // (T, K)
    float *logp;               // (T, K)
    const float *logits, *lse; // (T, V), (T, 2)
    int T, V, K, grain;
} TopK;

/* ---- logsumexp ---- */

/* The largest of x, NaN passed over; −inf if there is none. */
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
 * −inf, or once it is +inf, it is 0, so that no inf − inf makes a NaN that was not in the row. */
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
        if (sum == 0.0) { /* a row without targets, or with weights of 0, as all prompts have */
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

/* ---- the K best ---- */

/* Whether (x, i) comes after (y, j) in the answer: smaller, or equal with the higher id; NaN
 * comes last. */
static inline int comes_after(float x, int32_t i, float y, int32_t j)
{
    if (x < y) return 1;
    if (x > y) return 0;
    int x_nan = x != x, y_nan = y != y;
    return x_nan == y_nan ? i > j : x_nan;
}

/* Restores the heap, worst member on top, of which only the member at `at` may be out of place. */
static void heap_sift(float *x, int32_t *id, int n, int at)
{
    float x_at = x[at];
    int32_t id_at = id[at];
    for (;;) {
        int child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && comes_after(x[child + 1], id[child + 1], x[child], id[child])) child++;
        if (!comes_after(x[child], id[child], x_at, id_at)) break;
        x[at] = x[child];
        id[at] = id[child];
        at = child;
    }
    x[at] = x_at;
    id[at] = id_at;
}

/* Whether any of x is above the bar, or not to be compared with it: a NaN on either side. `n` is
 * a multiple of VL. */
static inline int any_above(const float *x, int n, float bar)
{
    vi under = v_load(x) <= bar;
    for (int i = VL; i < n; i += VL) under &= v_load(x + i) <= bar;
    int64_t word[VL / 2], all = -1;
    memcpy(word, &under, sizeof word);
    for (int i = 0; i < VL / 2; i++) all &= word[i];
    return all != -1;
}

/* Lets the logits [from, to) into the heap that are better than its worst member. */
static void heap_offer(float *best, int32_t *id, int K, const float *x, int from, int to)
{
    for (int i = from; i < to; i++) {
        if (x[i] <= best[0] || !comes_after(best[0], id[0], x[i], i)) continue;
        best[0] = x[i];
        id[0] = i;
        heap_sift(best, id, K, 0);
    }
}

void CPU(row_topk)(int32_t *id, float *best, const float *x, int V, int K)
{
    for (int i = 0; i < K; i++) {
        best[i] = x[i];
        id[i] = i;
    }
    for (int i = K / 2 - 1; i >= 0; i--) heap_sift(best, id, K, i);
    int i = K;
    for (; i + GROUP <= V; i += GROUP) {
        if (!any_above(x + i, GROUP, best[0])) continue;
        for (int j = i; j < i + GROUP; j += VL)
            if (any_above(x + j, VL, best[0])) heap_offer(best, id, K, x, j, j + VL);
    }
    heap_offer(best, id, K, x, i, V);
    for (int n = K - 1; n > 0; n--) { /* the worst goes to the end, over and over */
        float worst = best[0];
        int32_t worst_id = id[0];
        best[0] = best[n];
        id[0] = id[n];
        best[n] = worst;
        id[n] = worst_id;
        heap_sift(best, id, n, 0);
    }
}

static void topk_job(void *context, int64_t job)
{
    const TopK *r = context;
    int K = r->K, from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++) {
        float *logp = r->logp + (int64_t)t * K;
        CPU(row_topk)(r->ids + (int64_t)t * K, logp, r->logits + (int64_t)t * r->V, r->V, K);
        const float *lse = r->lse + (int64_t)2 * t;
        for (int k = 0; k < K; k++) logp[k] = logp[k] - lse[0] - lse[1];
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

void CPU(topk_logprob)(Device *dev, int32_t *ids, float *logp, const float *logits,
                       const float *lse, int T, int V, int K)
{
    assert(K >= 0 && K <= V);
    TopK r = {ids, logp, logits, lse, T, V, K, cpu_rows_of_job(GRAIN, V)};
    if (K > 0) cpu_run_of(dev, NS * T * V, ((int64_t)T + r.grain - 1) / r.grain, topk_job, &r);
}
