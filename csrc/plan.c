/* plan.c - what a model, an adapter, a step and a cache take, before anything is allocated, and how
 * large the last two are where nobody says it.
 *
 * Of what the weights leave of a device's memory, a training step may take a half and a sampler's
 * cache a quarter; adapters, their snapshots and sampling steps share the rest. A step's rows are
 * made of the memory that there is in all, not of what is free just now: gradients are summed step
 * by step, and the same run on the same card gives the same bits. The cache, whose size changes no
 * result, also leaves room for what is there already; and so does what a step keeps of its layers
 * (acts.c), which is as much as fits. Rows are few enough that all of it does: who has longer
 * datums, or gives a step less, trains for the time that it takes to make the rest again. */
#include <stdlib.h>

#include "core.h"

enum { STEP_TOKENS_MIN = 256, STEP_SHARE = 2, CACHE_SHARE = 4 };

#define MIB (1.0 / 1048576.0)

static size_t minimum(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t maximum(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* What the weights leave of so much memory. */
static size_t room(const Model *model, size_t all_bytes)
{
    return all_bytes - minimum(all_bytes, model_bytes(model));
}

size_t plan_step_most(const Model *model, size_t all_bytes)
{
    size_t free_bytes;
    if (!all_bytes) model->dev->memory(model->dev, &free_bytes, &all_bytes);
    return room(model, all_bytes) / STEP_SHARE;
}

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
           !(step_fits(adapter, tokens, keep_all(model), plan_step_most(model, 0)) &&
             step_fits(adapter, tokens, 1, adapter->step_most)))
        tokens /= 2;
    return tokens;
}

int plan_keep(const Model *model, size_t most, KeepBytes *bytes, void *context)
{
    int fits = 0, above = keep_all(model) + 1;
    if (bytes(context, above - 1) <= most) return above - 1;
    while (above - fits > 1) {
        int middle = fits + (above - fits) / 2;
        if (bytes(context, middle) <= most)
            fits = middle;
        else
            above = middle;
    }
    return fits;
}

Status step_keep(int *keep, const Adapter *adapter, int T, size_t scratch, KeepBytes *bytes,
                 void *context)
{
    Device *dev = adapter->model->dev;
    size_t free_bytes, all_bytes, most = adapter->step_most;
    dev->memory(dev, &free_bytes, &all_bytes);
    most = minimum(most, free_bytes + adapter->arena.size);
    *keep = most > scratch ? plan_keep(adapter->model, most - scratch, bytes, context) : 0;
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

int64_t plan_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes)
{
    size_t token = kv_token_bytes(model), least = (size_t)model->shape.context * token;
    if (!all_bytes) {
        least = 0;
        model->dev->memory(model->dev, &free_bytes, &all_bytes);
        if (!model->weights.base) /* a plan: they will be there */
            free_bytes -= minimum(free_bytes, model_bytes(model));
    }
    size_t bytes = minimum(room(model, all_bytes) / CACHE_SHARE, maximum(free_bytes / 2, least));
    int64_t tokens = (int64_t)(bytes / token) / KV_PAGE * KV_PAGE;
    return tokens < KV_PAGE ? KV_PAGE : tokens < CACHE_TOKENS_MAX ? tokens : CACHE_TOKENS_MAX;
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
    int keep = most > scratch ? plan_keep(model, most - scratch, planned_bytes, &step) : 0;
    *plan = (Plan){.weights = model_bytes(model),
                   .adapter = adapter_vector_bytes(adapter),
                   .step = planned_bytes(&step, keep ? keep : 1),
                   .own = model->dev->own_bytes + scratch,
                   .kv_token = kv_token,
                   .cache = (size_t)plan_cache_tokens(model, 0, 0) * kv_token,
                   .scratch = scratch,
                   .step_most = most,
                   .step_tokens = step.tokens,
                   .keep = keep,
                   .longest = longest(adapter)};
    model->dev->memory(model->dev, &plan->free, &plan->all);
    adapter_close(adapter);
    return made ? STATUS_OK : fail(STATUS_MEMORY, "no memory for a plan");
}
