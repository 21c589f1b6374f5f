/* plan.c - what a model, an adapter, a step and a cache take, before anything is allocated, and how
 * large the last two are where nobody says it.
 *
 * Of what the weights leave of a device's memory, a training step may take a half and a sampler's
 * cache a quarter; adapters, their snapshots and sampling steps share the rest. A step's rows are
 * made of the memory that there is in all, not of what is free just now: gradients are summed step
 * by step, and the same run on the same card gives the same bits. The cache, whose size changes no
 * result, also leaves room for what is there already. */
#include <stdlib.h>

#include "core.h"

enum { STEP_TOKENS_MIN = 256, STEP_SHARE = 2, CACHE_SHARE = 4 };

/* What the weights leave of the device's memory. */
static size_t room(const Model *model)
{
    size_t free_bytes, all_bytes, weights = model_bytes(model);
    model->dev->memory(model->dev, &free_bytes, &all_bytes);
    return all_bytes > weights ? all_bytes - weights : 0;
}

int plan_step_tokens(Adapter *adapter)
{
    size_t most = room(adapter->model) / STEP_SHARE, scratch;
    int tokens = adapter->model->dev->step_rows;
    while (tokens > STEP_TOKENS_MIN && step_bytes(adapter, tokens, &scratch) + scratch > most)
        tokens /= 2;
    return tokens;
}

int64_t plan_cache_tokens(const Model *model)
{
    size_t free_bytes, all_bytes, most = room(model) / CACHE_SHARE;
    model->dev->memory(model->dev, &free_bytes, &all_bytes);
    if (!model->weights.base) /* a plan: they will be there */
        free_bytes = free_bytes > model_bytes(model) ? free_bytes - model_bytes(model) : 0;
    if (most > free_bytes / 2) most = free_bytes / 2;
    int64_t tokens = (int64_t)(most / kv_token_bytes(model)) / KV_PAGE * KV_PAGE;
    return tokens < KV_PAGE ? KV_PAGE : tokens < CACHE_TOKENS_MAX ? tokens : CACHE_TOKENS_MAX;
}

Status plan_make(Plan *plan, Model *model, const AdapterSpec *spec, int tokens)
{
    Adapter *adapter = NULL;
    TRY(adapter_measure(&adapter, model, spec, VECTORS));
    size_t scratch = 0, kv_token = kv_token_bytes(model);
    int step_tokens = tokens ? tokens : adapter->step_tokens;
    size_t step = step_bytes(adapter, step_tokens, &scratch);
    *plan = (Plan){.weights = model_bytes(model),
                   .adapter = adapter->memory.used,
                   .step = step,
                   .own = model->dev->own_bytes + scratch,
                   .kv_token = kv_token,
                   .cache = (size_t)plan_cache_tokens(model) * kv_token,
                   .step_tokens = step_tokens};
    model->dev->memory(model->dev, &plan->free, &plan->all);
    adapter_close(adapter);
    return step ? STATUS_OK : fail(STATUS_MEMORY, "no memory for a plan");
}
