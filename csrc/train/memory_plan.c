/* train/memory_plan.c - the memory of a model, an adapter, a step and a cache, before anything is
 * allocated. */
#include "memory_plan.h"

#include "../model/memory_share.h"
#include "../model/stages.h"
#include "objective_logprob.h"

/* Tokens of the longest datum that can be trained, at most the model's context. */
static Status longest(Trainer *trainer, int *fits)
{
    StepNeeds needs;
    int above = trainer->adapter->model->shape.context + 1;
    while (above - *fits > 1) {
        int middle = *fits + (above - *fits) / 2;
        TRY(targets_needs(trainer, middle, &needs));
        *(needs.least <= trainer->limits.datum_bytes ? fits : &above) = middle;
    }
    return STATUS_OK;
}

static StagePlan stage_plan(const Trainer *trainer, const StepNeeds *step, int64_t cached, int k)
{
    const Model *model = trainer->adapter->model;
    const Stage *stage = &model->stage[k];
    StagePlan plan = {.weights = stage_held(model, k),
                      .adapter = 4 * arena_step(trainer->adapter->bytes.of[k]),
                      .step = step->stage_bytes[k],
                      .own = stage->dev->own_bytes + step->stage_scratch[k],
                      .cache = budget_stage_cache(model, k, cached)};
    stage_memory(model, k, &plan.free, &plan.all);
    return plan;
}

static Status plan_of(Plan *plan, Trainer *trainer, int tokens)
{
    const Model *model = trainer->adapter->model;
    int64_t cached = budget_cache_tokens(model, 0, 0);
    StepNeeds step;
    if (!tokens) tokens = trainer->limits.step_tokens;
    TRY(targets_needs(trainer, tokens, &step));
    *plan = (Plan){.weights = model_bytes(model),
                   .held = model_held(model),
                   .adapter = 4 * arena_step(adapter_vector_bytes(trainer->adapter)),
                   .sums = (1 + PART_LEVELS) * arena_step(adapter_vector_bytes(trainer->adapter)),
                   .step = step.bytes,
                   .cache = budget_cache_bytes(model, cached),
                   .cache_tokens = (size_t)cached,
                   .kv_token = kv_token_bytes(model),
                   .kv_window = kv_window_bytes(model),
                   .states = (size_t)budget_states(model, cached),
                   .kv_sequence = kv_sequence_bytes(model),
                   .scratch = step.scratch,
                   .step_most = trainer->limits.step_bytes,
                   .datum_most = trainer->limits.datum_bytes,
                   .step_tokens = tokens,
                   .keep = step.keep ? step.keep : step.least <= trainer->limits.datum_bytes};
    for (int k = 0; k < model->stages; k++) {
        StagePlan one = plan->stage[k] = stage_plan(trainer, &step, cached, k);
        plan->own += one.own;
        plan->free += one.free;
        plan->all += one.all;
    }
    return longest(trainer, &plan->longest);
}

Status plan_least(size_t *bytes, Trainer *trainer, int tokens)
{
    StepNeeds needs;
    TRY(targets_needs(trainer, tokens, &needs));
    *bytes = needs.least;
    return STATUS_OK;
}

Status plan_make(Plan *plan, Model *model, const AdapterSpec *layout, const TrainerLimits *limits,
                 int tokens)
{
    Adapter *adapter = NULL;
    Trainer *trainer = NULL;
    TRY(adapter_check(layout));
    TRY(adapter_measure(&adapter, model, layout));
    Status status = trainer_open(&trainer, adapter, limits);
    if (!status) status = plan_of(plan, trainer, tokens);
    trainer_close(trainer);
    adapter_close(adapter);
    return status;
}
