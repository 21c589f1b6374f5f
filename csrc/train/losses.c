/* train/losses.c - how target log-probabilities become a loss: one row and one function each.
 *
 * All losses are sums over targets, as Tinker's are. lp = logp (the learner's), q = the sampler's
 * log-probability, A = advantage, w = weight, r = exp(lp − q), sg: stop-gradient. A function
 * returns the loss of its piece and writes d loss / d lp. Targets are independent, so a batch may
 * be split anywhere. A `whole` loss couples the targets of a datum, and gets one datum at a time. A
 * = 0 masks a target, whatever its log-probability: 0 times infinity is 0. The exception is dro,
 * whose quadratic term has no mask. Clip thresholds are per target; the configuration's key is
 * their default. A `taught` loss compares whole rows of logits, the learner's and a teacher's
 * (objective_divergence.c). Its function here is the same loss over a row's targets only, for data
 * with the teacher's log-probabilities of them. */
#include "losses.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../model/head.h"
#include "datums.h"

enum { MULTI = 1, WHOLE = 1, LINEAR = 1, REQUIRED = 1, RECORDED = 1 };
enum { JSD_WEIGHTS, JSD_TEACHER }; /* generalized_jsd's inputs */

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

/* Σ g·lp, g given: cross_entropy with w = −g, to the same bits */
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

/* A NaN stays a NaN, so that it is reported. */
static double clip(double r, double low, double high)
{
    double raised = r < low ? low : r;
    return raised > high ? high : raised;
}

/* A target's min(r·A, clip(r, low, high)·A), and its gradient by lp, with d r / d lp = r. The
 * gradient is r·A if the first is smaller or r is in [low, high], else 0. */
static double clipped_term(double r, double a, double low, double high, float *gradient)
{
    double free_term = r * a, other = clip(r, low, high) * a;
    *gradient = free_term <= other ? (float)free_term : 0.0f;
    return free_term <= other ? free_term : other;
}

/* Thresholds are ratios, and before the learner has moved the ratio is 1: a range without 1, such
 * as 0.2 to 0.2, would clip from the first step on. A target with A = 0 needs none. */
static Status clip_check(const Loss *loss, const Datums *d)
{
    int low = 0;
    int64_t at = 0;
    while (strcmp(loss->input[low].name, "clip_low_threshold") != 0) low++;
    for (int i = 0; i < d->count; i++)
        for (int t = 0; t < d->lengths[i]; t++, at++) {
            double least = (double)loss_input(loss, d, low, at),
                   most = (double)loss_input(loss, d, low + 1, at);
            if (d->input[loss->gate][at] == 0.0f) continue;
            if (least >= 0.0 && least <= 1.0 && most >= 1.0) continue;
            return fail(STATUS_INVALID,
                        "datum %d: %s has clip_low_threshold %g and clip_high_threshold %g at "
                        "position %d; they are ratios, as 0.8 and 1.2: low from 0 to 1, high at "
                        "least 1",
                        i, loss->name, least, most, t);
        }
    return STATUS_OK;
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

/* −Σ M·r·A;  d/dlp = −M·r·A
 *
 * M is 0 if the target's probability p is more than delta away from the sampler's and A pushes it
 * further: p − exp(q) > delta and A > 0, or exp(q) − p > delta and A < 0. Else M is 1. That is DPPO
 * with the binary total variation (Qi et al., 2026, arXiv 2602.04879, equations 12 and 13). */
static double dppo(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double delta = c->key[0], loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double lp = (double)c->logp[i], a = (double)advantage[i], term = 0.0;
        double moved = exp(lp) - exp((double)q[i]);
        if (a != 0.0 && !(a > 0.0 ? moved > delta : -moved > delta))
            term = exp(lp - (double)q[i]) * a;
        loss -= term;
        c->dlogp[i] = (float)-term;
    }
    return loss;
}

static Status dppo_check(const Loss *loss, const Datums *d)
{
    if (d->key[0] >= 0.0 && d->key[0] <= 1.0) return STATUS_OK;
    return fail(STATUS_INVALID, "%s: delta is a difference of probabilities, from 0 to 1, not %g",
                loss->name, d->key[0]);
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

/* −Σ sg(w)·A·lp − ½·kl_coeff·(lp − q)², with w = 1 where A > 0 and min(r, 1) where A < 0;
 * d/dlp = −w·A + kl_coeff·(lp − q)
 *
 * Thinking Machines has not published its formula; this one is tinsmith's. It is the tapered
 * REINFORCE of Le Roux et al., 2025 (arXiv 2503.14286), with the ratio of each token rather than of
 * the sequence. A bad token's weight falls with its probability, so no token is pushed down without
 * limit; a good token keeps its weight, which is safe because log-likelihood has a maximum (same
 * paper). No weight exceeds 1, however far the learner is from the sampler. If the two agree, the
 * gradient is importance_sampling's. The second term is Schulman's estimator k2 of their
 * divergence: its pull is proportional to the log-ratio, so it can't explode either. */
static double stable_reinforce(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double kl = c->key[0], loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double a = (double)advantage[i], lp = (double)c->logp[i], gap = lp - (double)q[i];
        double pull = a < 0.0 && !(gap >= 0.0) ? exp(gap) * a : a,
               back = kl == 0.0 ? 0.0 : kl * gap;
        if (a == 0.0) pull = back = 0.0;
        if (pull != 0.0) loss -= pull * lp;
        if (back != 0.0) loss += 0.5 * back * gap;
        c->dlogp[i] = (float)(back - pull);
    }
    return loss;
}

static Status stable_reinforce_check(const Loss *loss, const Datums *d)
{
    if (d->key[0] >= 0.0) return STATUS_OK;
    return fail(STATUS_INVALID, "%s: kl_coeff must be at least 0, not %g", loss->name, d->key[0]);
}

/* ppo with one ratio for a datum's targets, r = exp(mean over mask ≠ 0 of sg(lp − q) + lp −
 * sg(lp)). Its value is the same for all targets; its gradient by each lp is r. With no targets the
 * mean, and so the loss, is NaN. */
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

/* mass·log; 0 if mass is 0, even if the logarithm is infinite. */
static double of_mass(double log_mass, double log_ratio)
{
    double mass = exp(log_mass);
    return mass == 0.0 ? 0.0 : mass * log_ratio;
}

/* A term of device.h's Jsd, and d term / d log_p. */
static double jsd_term(double log_p, double log_q, const double *key, double *slope)
{
    double beta = key[JSD_BETA], term;
    if (beta == 0.0) {
        term = of_mass(log_q, log_q - log_p);
        *slope = -exp(log_q);
    } else if (beta == 1.0) {
        term = of_mass(log_p, log_p - log_q);
        *slope = exp(log_p) + term;
    } else {
        double a = log_p + log1p(-beta), b = log_q + log(beta);
        double log_m = a > b ? a + log1p(exp(b - a)) : b + log1p(exp(a - b));
        *slope = (1.0 - beta) * of_mass(log_p, log_p - log_m);
        term = beta * of_mass(log_q, log_q - log_m) + *slope;
    }
    if (!(term > key[JSD_TOKEN_CLIP])) return term;
    *slope = 0.0;
    return key[JSD_TOKEN_CLIP];
}

/* log Σ exp(x / temperature) over the ids of a row that have a teacher log-probability. */
static double log_total(const float *x, const float *teacher, int count, double temperature)
{
    double most = -INFINITY, sum = 0.0;
    for (int k = 0; k < count; k++)
        if (teacher[k] > LOGPROB_NONE && !((double)x[k] <= most)) most = (double)x[k];
    for (int k = 0; k < count; k++)
        if (teacher[k] > LOGPROB_NONE) sum += exp(((double)x[k] - most) / temperature);
    return most / temperature + log(sum);
}

static double jsd_row(const LossCall *c, int from, int count)
{
    const float *logp = c->logp + from, *teacher = c->input[JSD_TEACHER] + from,
                *w = c->input[JSD_WEIGHTS] + from;
    float *dlogp = c->dlogp + from;
    double tau = c->key[JSD_TEMPERATURE], loss = 0.0, slopes = 0.0, slope;
    int live = 0;
    for (int k = 0; k < count; k++) {
        live |= w[k] != 0.0f;
        dlogp[k] = 0.0f;
    }
    if (!live) return 0.0;
    double p_total = log_total(logp, teacher, count, tau),
           q_total = log_total(teacher, teacher, count, tau);
    for (int k = 0; k < count; k++) {
        if (teacher[k] <= LOGPROB_NONE || w[k] == 0.0f) continue;
        double log_p = (double)logp[k] / tau - p_total, log_q = (double)teacher[k] / tau - q_total;
        loss += (double)w[k] * jsd_term(log_p, log_q, c->key, &slope);
        slopes += (double)w[k] * slope;
    }
    for (int k = 0; k < count; k++) {
        if (teacher[k] <= LOGPROB_NONE) continue;
        double log_p = (double)logp[k] / tau - p_total, log_q = (double)teacher[k] / tau - q_total;
        jsd_term(log_p, log_q, c->key, &slope);
        dlogp[k] = (float)(((double)w[k] * slope - exp(log_p) * slopes) / tau);
    }
    return loss;
}

/* Σ w·term, with p and q over a row's targets only: the softmax of lp / temperature, and the
 * teacher's. Targets without a teacher log-probability (LOGPROB_NONE) are left out. */
static double generalized_jsd(const LossCall *c)
{
    double loss = 0.0;
    for (int i = 0; i < c->rows; i++)
        loss += jsd_row(c, c->start[i] - c->start[0], c->start[i + 1] - c->start[i]);
    return loss;
}

/* A row with a weight must have targets with distinct ids. `seen` is all zero before and after. */
static Status jsd_row_check(const int32_t *ids, const float *teacher, const float *w, int count,
                            int datum, int row, unsigned char *seen)
{
    int live = 0, entries = 0;
    int32_t twice = -1;
    for (int k = 0; k < count; k++) {
        live |= w[k] != 0.0f;
        if (teacher[k] <= LOGPROB_NONE) continue;
        entries = 1;
        if (seen[ids[k]]) twice = ids[k];
        seen[ids[k]] = 1;
    }
    for (int k = 0; k < count; k++) seen[ids[k]] = 0;
    if (!live) return STATUS_OK;
    if (!entries)
        return fail(STATUS_INVALID,
                    "datum %d: teacher_logprobs at position %d has no entry (all are %g, which "
                    "stands for none), but the weight there is not 0",
                    datum, row, (double)LOGPROB_NONE);
    if (twice < 0) return STATUS_OK;
    return fail(STATUS_INVALID,
                "datum %d: target_tokens at position %d has id %d twice; the ids that "
                "teacher_logprobs belong to must differ",
                datum, row, twice);
}

static Status jsd_rows_check(const Datums *d)
{
    int32_t most = 0;
    for (int64_t i = 0; i < d->target_total; i++)
        if (d->targets[i] > most) most = d->targets[i];
    unsigned char *seen = calloc((size_t)most + 1, 1);
    if (!seen) return fail(STATUS_MEMORY, "no memory to look at %d ids", most);
    const float *teacher = d->input[JSD_TEACHER], *w = d->input[JSD_WEIGHTS];
    Status status = STATUS_OK;
    int64_t at = 0;
    for (int i = 0; i < d->count; i++)
        for (int t = 0; !status && t < d->lengths[i]; t++, at += d->counts[i])
            status = jsd_row_check(d->targets + at, teacher + at, w + at, d->counts[i], i, t, seen);
    free(seen);
    return status;
}

/* Temperatures whose value and reciprocal fit in float32. */
#define COLDEST 1e-30
#define HOTTEST 1e30

static Status jsd_check(const Loss *loss, const Datums *d)
{
    const double *key = d->key;
    const char *name = loss->name;
    if (!(key[JSD_BETA] >= 0.0 && key[JSD_BETA] <= 1.0))
        return fail(STATUS_INVALID, "%s: beta must be in [0, 1], not %g", name, key[JSD_BETA]);
    if (!(key[JSD_TEMPERATURE] > 0.0))
        return fail(STATUS_INVALID, "%s: temperature must be more than 0, not %g", name,
                    key[JSD_TEMPERATURE]);
    if (!(key[JSD_TEMPERATURE] >= COLDEST && key[JSD_TEMPERATURE] <= HOTTEST))
        return fail(STATUS_INVALID, "%s: temperature must be from %g to %g, not %g", name, COLDEST,
                    HOTTEST, key[JSD_TEMPERATURE]);
    if (!(key[JSD_TOKEN_CLIP] > 0.0))
        return fail(STATUS_INVALID, "%s: token_clip must be more than 0, not %g", name,
                    key[JSD_TOKEN_CLIP]);
    if (!d->input[JSD_TEACHER]) return STATUS_OK;
    if (key[JSD_TOP_K] != 0.0)
        return fail(STATUS_INVALID,
                    "%s: top_k goes with teacher_tokens; teacher_logprobs are of "
                    "the ids in target_tokens",
                    name);
    return jsd_rows_check(d);
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
        .check = clip_check,
        .evaluate = ppo,
    },
    {
        /* ppo with the thresholds of DAPO's Clip-Higher (Yu et al., 2025, arXiv 2503.14476). */
        .name = "dapo",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED},
                  {.name = "clip_low_threshold", .from = "clip_low_threshold"},
                  {.name = "clip_high_threshold", .from = "clip_high_threshold"}},
        .key = {{.name = "clip_low_threshold", .initial = 0.8},
                {.name = "clip_high_threshold", .initial = 1.28}},
        .gate = 1,
        .check = clip_check,
        .evaluate = ppo,
    },
    {
        .name = "dppo",
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED}},
        .key = {{.name = "delta", .initial = 0.15}},
        .gate = 1,
        .check = dppo_check,
        .evaluate = dppo,
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
        .check = clip_check,
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
        .name = "stable_reinforce",
        .recorded = RECORDED,
        .input = {{.name = "logprobs", .required = REQUIRED},
                  {.name = "advantages", .required = REQUIRED}},
        .key = {{.name = "kl_coeff", .initial = 0.1}},
        .gate = 1,
        .check = stable_reinforce_check,
        .evaluate = stable_reinforce,
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
        .check = clip_check,
        .evaluate = gspo,
    },
    {
        .name = "generalized_jsd",
        .multi = MULTI,
        .taught = JSD_TEACHER,
        .input = {{.name = "weights", .required = REQUIRED},
                  {.name = "teacher_logprobs", .missing = LOGPROB_NONE}},
        .key = {{.name = "beta", .initial = 0.5},
                {.name = "temperature", .initial = 1.0},
                {.name = "top_k", .initial = 0.0},
                {.name = "token_clip", .initial = INFINITY}},
        .gate = 0,
        .check = jsd_check,
        .evaluate = generalized_jsd,
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
