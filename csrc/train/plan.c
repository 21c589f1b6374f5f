/* train/plan.c - what a model, an adapter, a step and a cache take, before anything is allocated.
 *
 * A step's rows are made of the memory that there is in all, not of what is free just now:
 * gradients are summed step by step, and the same run on the same card gives the same bits. What a
 * step keeps of its layers (acts.c) changes no result, and is as much as fits in what is free. Rows
 * are few enough that all of it does: longer datums, or a smaller limit, cost the time that it
 * takes to make the rest again. */
#include <stdlib.h>

#include "train.h"

enum { STEP_TOKENS_MIN = 256 };

#define MIB (1.0 / 1048576.0)

/* Whether a step of one datum of T tokens fits in `most` bytes. */
static int step_fits(Adapter *adapter, int T, int keep, size_t most)
{
    size_t scratch = 0, bytes = step_bytes(adapter, T, keep, &scratch);
    return bytes + scratch <= most;
}

int plan_step_tokens(Adapter *adapter)
{
    const Model *model = adapter->model;
    int tokens = model->dev->step_rows;
    while (tokens > STEP_TOKENS_MIN &&
           !(step_fits(adapter, tokens, keep_all(model), budget_step(model, 0)) &&
             step_fits(adapter, tokens, 1, adapter->step_most)))
        tokens /= 2;
    return tokens;
}

Status step_keep(int *keep, const Adapter *adapter, int T, size_t scratch, KeepBytes *bytes,
                 void *context)
{
    Device *dev = adapter->model->dev;
    size_t free_bytes, all_bytes, most = adapter->step_most;
    dev->memory(dev, &free_bytes, &all_bytes);
    if (most > free_bytes + adapter->arena.size) most = free_bytes + adapter->arena.size;
    *keep = most > scratch ? budget_keep(adapter->model, most - scratch, bytes, context) : 0;
    if (*keep) return STATUS_OK;
    *keep = 1;
    size_t least = bytes(context, 1) + scratch;
    if (least <= adapter->step_most) return STATUS_OK; /* it is not free: so the arena will say */
    return fail(STATUS_MEMORY,
                "a training step of %d tokens needs at least %.2f MiB on device %s, with nothing "
                "kept that can be computed again, and may take %.2f MiB: give it shorter datums, "
                "or more memory",
                T, (double)least * MIB, dev->name, (double)adapter->step_most * MIB);
}

/* Tokens of the longest datum that can be trained; the model's context is the most. */
static int longest(Adapter *adapter)
{
    int fits = 0, above = adapter->model->shape.context + 1;
    while (above - fits > 1) {
        int middle = fits + (above - fits) / 2;
        if (step_fits(adapter, middle, 1, adapter->step_most))
            fits = middle;
        else
            above = middle;
    }
    return fits;
}

typedef struct Planned {
    Adapter *adapter;
    int tokens;
} Planned;

static size_t planned_bytes(void *context, int keep)
{
    const Planned *step = context;
    return step_bytes(step->adapter, step->tokens, keep, NULL);
}

Status plan_make(Plan *plan, Model *model, const AdapterSpec *spec, int tokens)
{
    Adapter *adapter = NULL;
    TRY(adapter_measure(&adapter, model, spec));
    size_t scratch = 0, kv_token = kv_token_bytes(model), most = adapter->step_most;
    Planned step = {adapter, tokens ? tokens : adapter->step_tokens};
    int made = step_bytes(adapter, step.tokens, 1, &scratch) > 0;
    int keep = most > scratch ? budget_keep(model, most - scratch, planned_bytes, &step) : 0;
    *plan = (Plan){.weights = model_bytes(model),
                   .adapter = adapter_vector_bytes(adapter),
                   .step = planned_bytes(&step, keep ? keep : 1),
                   .own = model->dev->own_bytes + scratch,
                   .kv_token = kv_token,
                   .cache = (size_t)budget_cache_tokens(model, 0, 0) * kv_token,
                   .scratch = scratch,
                   .step_most = most,
                   .step_tokens = step.tokens,
                   .keep = keep,
                   .longest = longest(adapter)};
    model->dev->memory(model->dev, &plan->free, &plan->all);
    adapter_close(adapter);
    return made ? STATUS_OK : fail(STATUS_MEMORY, "no memory for a plan");
}
