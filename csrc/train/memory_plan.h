/* train/memory_plan.h - the memory of weights, an adapter, training and a cache, before anything is
 * allocated. */
#ifndef TINSMITH_TRAIN_MEMORY_PLAN_H
#define TINSMITH_TRAIN_MEMORY_PLAN_H

#include "trainer.h"

/* A stage's part of a plan. */
typedef struct StagePlan {
    size_t weights, adapter, step, own, cache, free, all;
} StagePlan;

/* All memory in bytes, before anything is allocated. */
typedef struct Plan {
    size_t weights, adapter, step, own, free, all;
    size_t sums; /* gradients of a call in flight and of its parts; `adapter` has those before it */
    size_t held; /* weights without a mapped, untied embedding */
    size_t cache, cache_tokens, kv_token;  /* a sampler's cache, its tokens, bytes of one token */
    size_t kv_window;                      /* the most bytes of one sequence's window */
    size_t states, kv_sequence;            /* sequences with states in it, bytes of one's states */
    size_t scratch, step_most, datum_most; /* the ops' scratch of a step, part of `own`; what a
                                              step, and a long datum's, may take with scratch */
    int step_tokens, keep;
    int longest; /* tokens of the longest datum that a step can train */
    StagePlan stage[STAGES_MOST];
} Plan;

/* `tokens` per training step; 0: the trainer's default. */
Status plan_make(Plan *plan, Model *model, const AdapterSpec *layout, const TrainerLimits *limits,
                 int tokens);
/* Bytes of a step of one datum of `tokens` tokens, with scratch and the minimum kept. */
Status plan_least(size_t *bytes, Trainer *trainer, int tokens);

#endif
