/* cpu/head/topk.c - the K largest logits of each row, best first, as log-probabilities.
 *
 * Reads T·V; memory bound. The K best are a heap in the output array. Its worst member is the bar
 * for whole groups of logits: of 152 000 logits some 300 exceed it. A row is one job; it is not
 * split over threads. */
#include "topk.h"

#include <assert.h>
#include <string.h>

#include "../runtime/simd.h"

enum {
    GROUP = 8 * VL,  /* logits compared with the bar at once */
    GRAIN = 1 << 13, /* logits of one job: some microseconds */
};

#define NS 0.2 /* of a logit (cpu.h) */

typedef struct TopK {
    int32_t *ids;              // (T, K)
    float *logp;               // (T, K)
    const float *logits, *lse; // (T, V), (T, 2)
    int T, V, K, grain;
} TopK;

/* Whether (x, i) comes after (y, j) in the result: smaller, or equal with a higher id; NaN is
 * last. */
static inline int comes_after(float x, int32_t i, float y, int32_t j)
{
    if (x < y) return 1;
    if (x > y) return 0;
    int x_nan = x != x, y_nan = y != y;
    return x_nan == y_nan ? i > j : x_nan;
}

/* Restores the heap (worst member on top) if only the member at `at` is out of place. */
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

/* Whether any of x is above the bar or unordered with it (a NaN on either side). `n` is a multiple
 * of VL. */
static inline int any_above(const float *x, int n, float bar)
{
    vi under = v_load(x) <= bar;
    for (int i = VL; i < n; i += VL) under &= v_load(x + i) <= bar;
    int64_t word[VL / 2], all = -1;
    memcpy(word, &under, sizeof word);
    for (int i = 0; i < VL / 2; i++) all &= word[i];
    return all != -1;
}

/* Inserts the logits of [from, to) that are better than the heap's worst member. */
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
    for (int n = K - 1; n > 0; n--) { /* move the worst to the end, repeatedly */
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

void CPU(topk_logprob)(Device *dev, int32_t *ids, float *logp, const float *logits,
                       const float *lse, int T, int V, int K)
{
    assert(K >= 0 && K <= V);
    TopK r = {ids, logp, logits, lse, T, V, K, cpu_rows_of_job(GRAIN, V)};
    if (K > 0) cpu_run_of(dev, NS * T * V, ((int64_t)T + r.grain - 1) / r.grain, topk_job, &r);
}
