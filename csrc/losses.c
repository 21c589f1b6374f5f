/* losses.c - how target log-probabilities become a loss: one row and one function each.
 *
 * All losses are sums over targets, as Tinker's are. lp = logp (the learner's), q = the sampler's
 * log-probability, A = advantage, w = weight, r = exp(lp − q), sg: held constant by the gradient.
 * A function returns the loss of its piece and writes d loss / d lp. It sees targets one by one, so
 * a batch may be cut anywhere; a `whole` loss couples the targets of a datum, and is given one
 * datum at a time. Where A = 0 a target is masked, whatever its log-probability: 0 times infinity
 * is 0 (but in dro, whose quadratic term has no mask). Clip thresholds are numbers for each target,
 * for which the configuration's key stands in. A `taught` loss is one of whole rows of logits, of
 * the learner's and a teacher's, and has no function here: distill.c computes it. */
#include <math.h>
#include <string.h>

#include "core.h"

enum { MULTI = 1, WHOLE = 1, TAUGHT = 1, LINEAR = 1, REQUIRED = 1 };

/* −Σ w·lp */
static double cross_entropy(const LossCall *c)
{
    const float *w = c->input[0];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        c->dlogp[i] = -w[i];
        if (w[i] != 0.0f) loss -= (double)w[i] * (double)c->logp[i];
    }
    return loss;
}

/* Σ g·lp, g given: cross_entropy's with w = −g, to the same bits */
static double given(const LossCall *c)
{
    const float *g = c->input[0];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        c->dlogp[i] = g[i];
        if (g[i] != 0.0f) loss += (double)g[i] * (double)c->logp[i];
    }
    return loss;
}

/* −Σ r·A;  d/dlp = −r·A */
static double importance_sampling(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double term = exp((double)c->logp[i] - (double)q[i]) * (double)advantage[i];
        if (advantage[i] == 0.0f) term = 0.0;
        loss -= term;
        c->dlogp[i] = (float)-term;
    }
    return loss;
}

/* What is not a number stays so, and is then told of. */
static double clip(double r, double low, double high)
{
    double raised = r < low ? low : r;
    return raised > high ? high : raised;
}

/* A target's min(r·A, clip(r, low, high)·A), and its gradient by lp where d r / d lp = r: r·A where
 * the first is the smaller or r is inside, else 0. */
static double clipped_term(double r, double a, double low, double high, float *gradient)
{
    double free_term = r * a, other = clip(r, low, high) * a;
    *gradient = free_term <= other ? (float)free_term : 0.0f;
    return free_term <= other ? free_term : other;
}

/* −Σ min(r·A, clip(r, low, high)·A) */
static double ppo(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1], *low = c->input[2], *high = c->input[3];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        float gradient = 0.0f;
        double r = exp((double)c->logp[i] - (double)q[i]);
        if (advantage[i] != 0.0f)
            loss -=
                clipped_term(r, (double)advantage[i], (double)low[i], (double)high[i], &gradient);
        c->dlogp[i] = -gradient;
    }
    return loss;
}

/* −Σ sg(clip(r, low, high))·lp·A;  d/dlp = −clip(r, low, high)·A */
static double cispo(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1], *low = c->input[2], *high = c->input[3];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double lp = (double)c->logp[i], weight = 0.0;
        if (advantage[i] != 0.0f)
            weight = clip(exp(lp - (double)q[i]), (double)low[i], (double)high[i]) *
                     (double)advantage[i];
        if (weight != 0.0) loss -= weight * lp;
        c->dlogp[i] = (float)-weight;
    }
    return loss;
}

/* −Σ lp·A − ½·beta·(lp − q)²;  d/dlp = −A + beta·(lp − q) */
static double dro(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double beta = c->key[0], loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double lp = (double)c->logp[i], a = (double)advantage[i], gap = lp - (double)q[i];
        loss -= lp * a - 0.5 * beta * gap * gap;
        c->dlogp[i] = (float)(beta * gap - a);
    }
    return loss;
}

/* ppo with one ratio for a datum's targets, r = exp(mean over mask ≠ 0 of sg(lp − q) + lp −
 * sg(lp)): its value is the same for all of them, its gradient by each one's lp is r. A mean of no
 * targets is not a number, and neither is then the loss. */
static double gspo(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1], *mask = c->input[2], *low = c->input[3],
                *high = c->input[4];
    double sum = 0.0, count = 0.0, loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        if (mask[i] == 0.0f) continue;
        sum += (double)c->logp[i] - (double)q[i];
        count += 1.0;
    }
    double r = exp(sum / count);
    for (int64_t i = 0; i < c->count; i++) {
        float gradient = 0.0f;
        if (advantage[i] != 0.0f)
            loss -=
                clipped_term(r, (double)advantage[i], (double)low[i], (double)high[i], &gradient);
        c->dlogp[i] = -gradient;
    }
    return loss;
}

const Loss loss_given = {
    .name = "dlogprobs times logprobs",
    .multi = MULTI,
    .linear = LINEAR,
    .input = {{.name = "dlogprobs", .missing = 0.0f}},
    .evaluate = given,
};

static const Loss losses[] = {
    {
        .name = "cross_entropy",
        .multi = MULTI,
        .linear = LINEAR,
        .input = {{.name = "weights", .missing = 1.0f}},
        .evaluate = cross_entropy,
    },
    {
        .name = "importance_sampling",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED}},
        .gate = 1,
        .evaluate = importance_sampling,
    },
    {
        .name = "ppo",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED},
                  {.name = "clip_low_threshold", .from = "clip_low_threshold"},
                  {.name = "clip_high_threshold", .from = "clip_high_threshold"}},
        .key = {{.name = "clip_low_threshold", .initial = 0.8},
                {.name = "clip_high_threshold", .initial = 1.2}},
        .gate = 1,
        .evaluate = ppo,
    },
    {
        .name = "cispo",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED},
                  {.name = "clip_low_threshold", .from = "clip_low_threshold"},
                  {.name = "clip_high_threshold", .from = "clip_high_threshold"}},
        .key = {{.name = "clip_low_threshold", .initial = 0.0},
                {.name = "clip_high_threshold", .initial = 4.0}},
        .gate = 1,
        .evaluate = cispo,
    },
    {
        .name = "dro",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED}},
        .key = {{.name = "beta", .initial = NAN}},
        .gate = UNGATED,
        .evaluate = dro,
    },
    {
        .name = "gspo",
        .whole = WHOLE,
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED},
                  {.name = "sequence_ratio_mask", .from = "advantages"},
                  {.name = "clip_low_threshold", .from = "clip_low_threshold"},
                  {.name = "clip_high_threshold", .from = "clip_high_threshold"}},
        .key = {{.name = "clip_low_threshold", .initial = 0.8},
                {.name = "clip_high_threshold", .initial = 1.2}},
        .gate = 1,
        .evaluate = gspo,
    },
    {
        .name = "generalized_jsd",
        .taught = TAUGHT,
        .input = {{.name = "weights", .required = REQUIRED}},
        .key = {{.name = "beta", .initial = 0.5},
                {.name = "temperature", .initial = 1.0},
                {.name = "top_k", .initial = 0.0},
                {.name = "token_clip", .initial = INFINITY}},
        .gate = 0,
    },
};

enum { LOSS_COUNT = sizeof losses / sizeof *losses };

const Loss *loss_at(int index)
{
    return index >= 0 && index < LOSS_COUNT ? &losses[index] : NULL;
}

const Loss *loss_find(const char *name)
{
    for (int i = 0; i < LOSS_COUNT; i++)
        if (strcmp(losses[i].name, name) == 0) return &losses[i];
    return NULL;
}

float loss_input(const Loss *loss, const Datums *datums, int j, int64_t target)
{
    const char *from = loss->input[j].from;
    if (datums->input[j]) return datums->input[j][target];
    for (int k = 0; from && k < LOSS_KEYS && loss->key[k].name; k++)
        if (strcmp(loss->key[k].name, from) == 0) return (float)datums->key[k];
    for (int i = 0; from && i < j; i++)
        if (strcmp(loss->input[i].name, from) == 0) return loss_input(loss, datums, i, target);
    return loss->input[j].missing;
}
