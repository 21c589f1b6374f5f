/* train/memory_plan.h - the memory of weights, an adapter, training and a cache, before anything is
 * allocated. */
#ifndef TINSMITH_TRAIN_MEMORY_PLAN_H
#define TINSMITH_TRAIN_MEMORY_PLAN_H

#include "trainer.h"

/* All memory in bytes, before anything is allocated. */
typedef struct Plan {
    size_t weights, adapter, step, own, free, all;
    size_t held; /* of the weights, all but a mapped embedding that is looked up */
    size_t cache, cache_tokens, kv_token;  /* a sampler's cache: its tokens, one token's bytes */
    size_t kv_window;                      /* what one sequence keeps of its window, at most */
    size_t states, kv_sequence;            /* in it, of how many sequences the states, and one's */
    size_t scratch, step_most, datum_most; /* of `own` the ops' scratch of a step; what a step, and
                                              one of a long datum, may take, which includes it */
    int step_tokens, keep;
    int longest; /* tokens of the longest datum that a step can train */
} Plan;

/* `tokens` of a training step; 0: the trainer's own. */
Status plan_make(Plan *plan, Model *model, const AdapterSpec *layout, const TrainerLimits *limits,
                 int tokens);
/* Bytes of a step of one datum of so many tokens, scratch included, with the least kept. */
Status plan_least(size_t *bytes, Trainer *trainer, int tokens);

#endif
