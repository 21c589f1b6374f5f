/* tools/card/smoke/logits.c - checks of the head and of what is computed from rows of logits, whose
 * gradient lies in their own memory. */
#include "smoke.h"

#include <stdlib.h>
#include <string.h>

enum { BEST = 8, LOGIT_ROWS = 8, HEAD_ROWS = 300, HEAD_FEW = 6 };

typedef struct Logits {
    const float *logits, *x, *w;
    const float *lse, *dlogp; /* lse (T,2) */
    const int32_t *ids, *start;
    int V, D;
} Logits;

static void head_row(double *row, int t, const void *of)
{
    const Logits *o = of;
    for (int v = 0; v < o->V; v++)
        row[v] = dot(o->x + (size_t)t * (size_t)o->D, o->w + (size_t)v * (size_t)o->D, o->D);
}

static double lse_of(const Logits *o, int t)
{
    const float *row = o->logits + (size_t)t * (size_t)o->V;
    double most = -INFINITY, total = 0;
    for (int v = 0; v < o->V; v++) most = fmax(most, row[v]);
    for (int v = 0; v < o->V; v++) total += exp(row[v] - most);
    return most + log(total);
}

/* Row t's targets, of which all rows have as many. */
static void logp_row(double *row, int t, const void *of)
{
    const Logits *o = of;
    double lse = lse_of(o, t);
    for (int i = o->start[t]; i < o->start[t + 1]; i++)
        row[i - o->start[t]] = o->logits[(size_t)t * (size_t)o->V + (size_t)o->ids[i]] - lse;
}

static void best_ids_row(double *row, int t, const void *of)
{
    const Logits *o = of;
    const float *logits = o->logits + (size_t)t * (size_t)o->V;
    for (int k = 0; k < BEST; k++) {
        int best = -1, before = k ? (int)row[k - 1] : 0;
        for (int v = 0; v < o->V; v++) {
            int is_behind =
                k == 0 || logits[v] < logits[before] || (logits[v] == logits[before] && v > before);
            if (is_behind && (best < 0 || logits[v] > logits[best])) best = v;
        }
        row[k] = best;
    }
}

static void best_logp_row(double *row, int t, const void *of)
{
    const Logits *o = of;
    double lse = lse_of(o, t);
    best_ids_row(row, t, of);
    for (int k = 0; k < BEST; k++)
        row[k] = o->logits[(size_t)t * (size_t)o->V + (size_t)row[k]] - lse;
}

static void greedy_row(double *row, int t, const void *of)
{
    double best[BEST];
    best_ids_row(best, t, of);
    row[0] = best[0];
}

/* logits of few rows have the bits of the same rows among many, whose logits these are */
static void check_head_bits(Result r, const Input *x, const Input *w, const float *all, int rows)
{
    static const int few[] = {1, 17, 129};
    int V = r.cols, D = ((const Logits *)r.of)->D;
    for (size_t i = 0; i < sizeof few / sizeof *few; i++) {
        int first = (rows - few[i]) / 2;
        char name[64];
        snprintf(name, sizeof name, "logits of %d rows", few[i]);
        const char *from = (const char *)x->at + (size_t)(first * D) * dev->real_bytes;
        Same same = {all + (size_t)first * (size_t)V, V};
        r.name = name, r.at = room((size_t)few[i] * (size_t)V, F32), r.rows = few[i];
        r.bar = 0, r.bits = 1, r.exact = same_row, r.of = &same;
        RUN(dev->head(dev, (float *)r.at, (const real *)from, w->at, few[i], V, D));
        judge(r);
    }
}

void check_head(void)
{
    int M = shape.tiny ? 150 : HEAD_ROWS, T = HEAD_FEW, V = shape.V, D = shape.D, K = BEST;
    size_t n = (size_t)M * (size_t)V;
    Input x = input((size_t)(M * D), 21, 1, REAL), w = weight(V, D, 22, 2 / sqrtf((float)D));
    int32_t ids[HEAD_FEW], start[HEAD_FEW + 1];
    Draw draws[HEAD_FEW];
    for (int t = 0; t <= T; t++) start[t] = t;
    for (int t = 0; t < T; t++) ids[t] = (t * 7907 + 1) % V, draws[t] = (Draw){.top_p = 1};
    float *logits = room(n, F32), *lse = room(HEAD_FEW * 2, F32), *logp = room(HEAD_FEW, F32);
    float *best = room((size_t)(T * K), F32), *drawn = room(HEAD_FEW, F32);
    int32_t *top = room((size_t)(T * K), I32), *chosen = room(HEAD_FEW, I32);
    const int32_t *at = put(ids, sizeof ids), *begins = put(start, sizeof start);
    const Draw *how = put(draws, sizeof draws);
    RUN(dev->head(dev, logits, x.at, w.at, M, V, D));
    RUN(dev->logprob(dev, lse, logp, logits, at, begins, T, V));
    RUN(dev->topk_logprob(dev, top, best, logits, lse, T, V, K));
    RUN(dev->sample(dev, chosen, drawn, logits, lse, how, T, V));
    Logits of = {fetched(logits, n, F32), x.x, w.x, .ids = ids, .start = start, .V = V, .D = D};
    Result r = {"head",        "logits",          logits,   F32, M, V, BAR_F32,
                .together = 1, .exact = head_row, .of = &of};
    sizes("\"T\": %d, \"V\": %d, \"D\": %d", M, V, D);
    judge(r);
    check_head_bits(r, &x, &w, of.logits, M);
    sizes("\"T\": %d, \"V\": %d, \"K\": %d", T, V, K);
    r = (Result){"logprob", "logp", logp, F32, T, 1, BAR_F32, .exact = logp_row, .of = &of};
    judge(r);
    r = (Result){"topk_logprob", "ids", top, I32, T, K, .exact = best_ids_row, .of = &of};
    judge(r);
    r.name = "logp", r.at = best, r.kind = F32, r.bar = BAR_F32, r.exact = best_logp_row;
    judge(r);
    r = (Result){"sample", "ids", chosen, I32, T, 1, .exact = greedy_row, .of = &of};
    judge(r);
    forget();
}

/* ---- a gradient in its logits' memory ---- */

static void dlogits_row(double *row, int t, const void *of)
{
    const Logits *o = of;
    const float *logits = o->logits + (size_t)t * (size_t)o->V;
    double sum = 0, lse = (double)o->lse[2 * t] + o->lse[2 * t + 1];
    for (int i = o->start[t]; i < o->start[t + 1]; i++) sum += o->dlogp[i];
    for (int v = 0; v < o->V; v++) row[v] = -sum * exp(logits[v] - lse);
    for (int i = o->start[t]; i < o->start[t + 1]; i++) row[o->ids[i]] += o->dlogp[i];
}

/* Rows have two targets, of which row 1's are one id, and row 2's weigh 0: a prompt's. */
static void check_in_place(int V)
{
    int T = LOGIT_ROWS;
    enum { TARGETS = 2 };
    Input logits = input((size_t)T * (size_t)V, 54, 3, F32);
    Input dlogp = input((size_t)(T * TARGETS), 55, 1, F32);
    int32_t ids[LOGIT_ROWS * TARGETS], start[LOGIT_ROWS + 1];
    float weights[LOGIT_ROWS * TARGETS];
    for (int t = 0; t <= T; t++) start[t] = t * TARGETS;
    for (int i = 0; i < T * TARGETS; i++) {
        ids[i] = (int32_t)((long long)(i / 2 == 1 ? 1 : i) * 7919 * 13 % V);
        weights[i] = i / 2 == 2 ? 0 : dlogp.x[i];
    }
    const int32_t *at = put(ids, sizeof ids), *begins = put(start, sizeof start);
    const float *dl = put(weights, sizeof weights);
    float *lse = room((size_t)T * 2, F32), *logp = room((size_t)(T * TARGETS), F32);
    RUN(dev->logprob(dev, lse, logp, logits.at, at, begins, T, V));
    RUN(dev->logprob_backward(dev, logits.at, logits.at, lse, dl, at, begins, T, V, 0));
    Logits of = {logits.x,         .lse = fetched(lse, (size_t)T * 2, F32),
                 .dlogp = weights, .ids = ids,
                 .start = start,   .V = V};
    sizes("\"T\": %d, \"V\": %d, \"targets\": %d", T, V, TARGETS);
    judge(
        (Result){"logprob", "logp", logp, F32, T, TARGETS, BAR_F32, .exact = logp_row, .of = &of});
    judge((Result){"logprob_backward, in place", "dlogits", logits.at, REAL, T, V, bar_real(), 1,
                   .exact = dlogits_row, .of = &of});
    forget();
}

/* Of more than two parts of logits.cuh, in quads and one by one. */
void check_logprob(void)
{
    int V = shape.tiny ? 16400 : 151936;
    check_in_place(V);
    check_in_place(V + 1);
}
