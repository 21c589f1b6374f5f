/* cpu/pointwise/route.c - chooses the experts and shares of a token's row, and sorts rows by
 * expert.
 *
 *   route       the K largest logits; shares e^l / Σ e^l, over those K (norm) or over all X
 *   group       pairs (row, expert) by expert: a counting sort, stable
 *   unite       y[t,:] = Σ_k x[place[t·K+k],:]
 *   share_bias  y[t,:] += Σ_k share[t,k]·bias[chosen[t,k],:];  dshare[t,k] += dy[t,:]·bias[…]
 *
 * A softmax over all experts, divided by the sum of the chosen ones, is a softmax over the chosen
 * ones: the other logits don't matter. But a NaN among them makes the row's shares NaN, because it
 * has no order. Rows are short (X is 8 to 512) beside the products that follow, so route is scalar.
 * group makes two passes over P pairs on one thread. unite reads P·D and writes T·D, and so does
 * share_bias; memory bound. */
#include <math.h>
#include <string.h>

#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { GRAIN = 1 << 12, GRAIN_ROUTE = 1 << 9 }; /* elements of one job */

/* Of a logit, and of an element of unite's x (cpu.h). */
#define NS_ROUTE 3.0
#define NS_UNITE 0.15

typedef struct Route {
    int32_t *chosen;     // (T, K); backward only reads it
    float *share;        // (T, K); likewise
    const float *dshare; // (T, K)
    const float *logits; // (T, X)
    float *dlogits;      // (T, X)
    int T, X, K, norm, grain;
} Route;

/* The K largest of X, best first, ties by lower index. */
static void row_choose(int32_t *chosen, const float *x, int X, int K)
{
    int n = 0;
    for (int e = 0; e < X; e++) {
        if (n == K && !(x[e] > x[chosen[K - 1]])) continue;
        int at = n < K ? n++ : K - 1;
        for (; at > 0 && x[e] > x[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
}

static void route_job(void *context, int64_t job)
{
    const Route *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        const float *x = g->logits + t * g->X;
        int32_t *chosen = g->chosen + t * g->K;
        float *share = g->share + t * g->K, sum = 0.0f;
        row_choose(chosen, x, g->X, g->K);
        float top = x[chosen[0]];
        for (int e = 0; e < g->X; e++) top = x[e] == x[e] ? top : x[e];
        for (int k = 0; k < g->K; k++) sum += share[k] = expf(x[chosen[k]] - top);
        if (!g->norm) {
            double all = 0.0; /* up to EXPERTS_MOST terms: f32 would lose digits */
            for (int e = 0; e < g->X; e++) all += (double)expf(x[e] - top);
            sum = (float)all;
        }
        for (int k = 0; k < g->K; k++) share[k] /= sum;
    }
}

/* With s the shares and d their gradients, Σ over the chosen: a chosen logit's gradient is s·(d − Σ
 * s·d). Another expert's, whose share would be p, is −p·Σ s·d, or 0 if the others don't matter. */
static void route_backward_job(void *context, int64_t job)
{
    const Route *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        const float *x = g->logits + t * g->X, *share = g->share + t * g->K;
        const float *d = g->dshare + t * g->K;
        const int32_t *chosen = g->chosen + t * g->K;
        float *dx = g->dlogits + t * g->X, mean = 0.0f, top = x[chosen[0]];
        for (int k = 0; k < g->K; k++) mean += share[k] * d[k];
        if (g->norm) {
            memset(dx, 0, (size_t)g->X * sizeof *dx);
        } else {
            for (int e = 0; e < g->X; e++) dx[e] = -mean * share[0] * expf(x[e] - top);
        }
        for (int k = 0; k < g->K; k++) dx[chosen[k]] = share[k] * (d[k] - mean);
    }
}

static void route_run(Device *dev, Route *g, void (*work)(void *, int64_t))
{
    g->grain = cpu_rows_of_job(GRAIN_ROUTE, g->X);
    cpu_run_of(dev, NS_ROUTE * g->T * g->X, ((int64_t)g->T + g->grain - 1) / g->grain, work, g);
}

void CPU(route)(Device *dev, int32_t *chosen, float *share, const real *logits, int T, int X, int K,
                int norm)
{
    Route g = {chosen, share, NULL, f32c(logits), NULL, T, X, K, norm, 0};
    route_run(dev, &g, route_job);
}

void CPU(route_backward)(Device *dev, real *dlogits, const float *dshare, const int32_t *chosen,
                         const float *share, const real *logits, int T, int X, int K, int norm)
{
    Route g = {
        (int32_t *)chosen, (float *)share, dshare, f32c(logits), f32(dlogits), T, X, K, norm, 0};
    route_run(dev, &g, route_backward_job);
}

/* ---- pairs by expert ---- */

void CPU(group)(Device *dev, int32_t *pair, int32_t *row, int32_t *place, int32_t *bounds,
                const int32_t *chosen, int T, int K, int X)
{
    int32_t next[EXPERTS_MOST] = {0}, P = T * K;
    (void)dev;
    for (int i = 0; i < P; i++) next[chosen[i]]++;
    for (int e = 0, first = 0; e < X; e++) {
        int count = next[e];
        bounds[2 * e] = next[e] = first;
        bounds[2 * e + 1] = first += count;
    }
    for (int i = 0; i < P; i++) {
        int at = next[chosen[i]]++;
        pair[at] = i;
        row[at] = i / K;
        place[i] = at;
    }
}

/* The first of [from, to) whose row is at least `least`. */
static int first_of(const int32_t *row, int from, int to, int least)
{
    while (from < to) {
        int middle = from + (to - from) / 2;
        if (row[middle] < least)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

void CPU(group_part)(Device *dev, int32_t *part, const int32_t *bounds, const int32_t *row, int X,
                     int first, int count)
{
    (void)dev;
    for (int e = 0; e < X; e++) {
        part[2 * e] = first_of(row, bounds[2 * e], bounds[2 * e + 1], first);
        part[2 * e + 1] = first_of(row, part[2 * e], bounds[2 * e + 1], first + count);
    }
}

/* ---- back to rows ---- */

typedef struct Unite {
    float *y;
    const float *x, *plus;
    const int32_t *place;
    int T, K, D, grain;
} Unite;

static void unite_job(void *context, int64_t job)
{
    const Unite *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        const int32_t *place = g->place + t * g->K;
        for (int i = 0; i < g->D; i += VL) {
            int rest = g->D - i < VL ? g->D - i : VL;
            vf sum = v_load_upto(g->x + (int64_t)place[0] * g->D + i, rest);
            for (int k = 1; k < g->K; k++)
                sum += v_load_upto(g->x + (int64_t)place[k] * g->D + i, rest);
            if (g->plus) sum += v_load_upto(g->plus + t * g->D + i, rest);
            v_store_upto(g->y + t * g->D + i, sum, rest);
        }
    }
}

void CPU(unite)(Device *dev, real *y, const real *x, const int32_t *place, const real *plus, int T,
                int K, int D)
{
    Unite g = {.y = f32(y),
               .x = f32c(x),
               .plus = plus ? f32c(plus) : NULL,
               .place = place,
               .T = T,
               .K = K,
               .D = D,
               .grain = cpu_rows_of_job(GRAIN, K * D)};
    cpu_run_of(dev, NS_UNITE * T * K * D, ((int64_t)T + g.grain - 1) / g.grain, unite_job, &g);
}

/* ---- a bias per expert ---- */

typedef struct Bias {
    float *y, *dshare;       /* (T,D), (T,K) */
    const float *dy, *share; /* (T,D), (T,K) */
    const int32_t *chosen;
    const float *bias;
    int T, K, D, grain;
} Bias;

static void bias_job(void *context, int64_t job)
{
    const Bias *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t t = from; t < to; t++)
        for (int i = 0; i < g->D; i += VL) {
            int rest = g->D - i < VL ? g->D - i : VL;
            float *y = g->y + t * g->D + i;
            vf sum = v_load_upto(y, rest);
            for (int k = 0; k < g->K; k++) {
                const float *bias = g->bias + (int64_t)g->chosen[t * g->K + k] * g->D + i;
                sum = v_fma(v_set(g->share[t * g->K + k]), v_load_upto(bias, rest), sum);
            }
            v_store_upto(y, sum, rest);
        }
}

static void bias_backward_job(void *context, int64_t job)
{
    const Bias *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t p = (int64_t)from * g->K; p < (int64_t)to * g->K; p++) {
        const float *dy = g->dy + p / g->K * g->D, *bias = g->bias + (int64_t)g->chosen[p] * g->D;
        double total = g->dshare[p];
        for (int i = 0; i < g->D; i++) total += (double)dy[i] * (double)bias[i];
        g->dshare[p] = (float)total;
    }
}

static void bias_run(Device *dev, Bias *g, void (*work)(void *, int64_t))
{
    g->grain = cpu_rows_of_job(GRAIN, g->K * g->D);
    cpu_run_of(dev, NS_UNITE * g->T * g->K * g->D, ((int64_t)g->T + g->grain - 1) / g->grain, work,
               g);
}

void CPU(share_bias)(Device *dev, real *y, const float *share, const int32_t *chosen,
                     const float *bias, int T, int K, int D)
{
    Bias g = {f32(y), NULL, NULL, share, chosen, bias, T, K, D, 0};
    bias_run(dev, &g, bias_job);
}

void CPU(share_bias_backward)(Device *dev, float *dshare, const real *dy, const int32_t *chosen,
                              const float *bias, int T, int K, int D)
{
    Bias g = {NULL, dshare, f32c(dy), NULL, chosen, bias, T, K, D, 0};
    bias_run(dev, &g, bias_backward_job);
}
