/* losses.c - how target log-probabilities become a loss: one row and one function each.
 *
 * All losses are sums over targets, as Tinker's are. lp = logp (the learner's), q = the sampler's
 * log-probability, A = advantage, w = weight, r = exp(lp − q). A function returns the loss of its
 * piece and writes d loss / d lp; it sees targets one by one, so a batch may be cut anywhere. */
#include <math.h>
#include <string.h>

#include "core.h"

enum { MULTI = 1, REQUIRED = 1 };

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

/* −Σ r·A;  d/dlp = −r·A */
static double importance_sampling(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double term = exp((double)c->logp[i] - (double)q[i]) * (double)advantage[i];
        if (advantage[i] == 0.0f) term = 0.0; /* a masked token, whatever its log-probability */
        loss -= term;
        c->dlogp[i] = (float)-term;
    }
    return loss;
}

/* −Σ min(r·A, clip(r, low, high)·A);  d/dlp = −r·A where the first is the smaller or r is inside,
 * else 0 */
static double ppo(const LossCall *c)
{
    const float *q = c->input[0], *advantage = c->input[1];
    double low = c->key[0], high = c->key[1], loss = 0.0;
    for (int64_t i = 0; i < c->count; i++) {
        double a = (double)advantage[i], r = exp((double)c->logp[i] - (double)q[i]);
        if (advantage[i] == 0.0f) {
            c->dlogp[i] = 0.0f;
            continue;
        }
        double clipped = r < low ? low : r > high ? high : r;
        double free_term = r * a, clipped_term = clipped * a;
        loss -= free_term < clipped_term ? free_term : clipped_term;
        c->dlogp[i] = free_term <= clipped_term ? (float)-free_term : 0.0f;
    }
    return loss;
}

static const Loss losses[] = {
    {
        .name = "cross_entropy",
        .multi = MULTI,
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
                  {.name = "advantages", .required = REQUIRED}},
        .key = {{.name = "clip_low_threshold", .initial = 0.8},
                {.name = "clip_high_threshold", .initial = 1.2}},
        .gate = 1,
        .evaluate = ppo,
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
