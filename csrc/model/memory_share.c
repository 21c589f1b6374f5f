/* model/memory_share.c - the default share of a device's memory that a training step and a
 * sampler's cache may take.
 *
 * Of the memory that the weights leave, a training step may take half and a sampler's cache a
 * quarter; adapters, their snapshots and sampling steps share the rest. The cache's size changes no
 * result, so it also leaves room for everything already allocated. A datum that does not fit in the
 * step's half, with the minimum kept, may take all that is left. */
#include "memory_share.h"

#include "../device/numbers.h"
#include "acts.h"

enum {
    STEP_SHARE = 2,
    CACHE_SHARE = 4,
    OTHERS_SHARE =
        10, /* share of all memory that a long datum leaves to the system and other processes */
    STATES_LEAST = 4,
    STATES_MOST = 2 * STEP_SEQUENCES
};

/* The memory of `all_bytes` that the weights leave. */
static size_t room(const Model *model, size_t all_bytes)
{
    return all_bytes - min_size(all_bytes, model_held(model));
}

size_t budget_step(const Model *model, size_t all_bytes)
{
    size_t free_bytes;
    if (!all_bytes) model->dev->memory(model->dev, &free_bytes, &all_bytes);
    return room(model, all_bytes) / STEP_SHARE;
}

size_t budget_datum(const Model *model, size_t adapter_bytes)
{
    size_t free_bytes, all_bytes, share = budget_step(model, 0);
    model->dev->memory(model->dev, &free_bytes, &all_bytes);
    size_t left = room(model, all_bytes - all_bytes / OTHERS_SHARE);
    return max_size(share, left - min_size(left, adapter_bytes));
}

size_t budget_rows(const Model *model)
{
    size_t free_bytes, all_bytes;
    model->dev->memory(model->dev, &free_bytes, &all_bytes);
    return (all_bytes - min_size(all_bytes, model_bytes(model))) / STEP_SHARE;
}

int budget_keep(const Model *model, size_t most, KeepBytes *bytes, void *context)
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

size_t frame_bytes(const Model *model)
{
    const Lists *lists = &model->lists;
    return (size_t)lists->layers * lists->token * KV_PAGE * model->dev->cached_bytes;
}

int budget_window_pages(const Model *model, int rows)
{
    /* A sequence holds the pages that the first row of its newest page reads, and those of its last
     * rows (window.c). */
    int before = (model->lists.window + KV_PAGE - 2) / KV_PAGE;
    return before + 1 + (rows + KV_PAGE - 1) / KV_PAGE;
}

int64_t budget_frames(const Model *model, int64_t tokens)
{
    const Lists *lists = &model->lists;
    int64_t pages = (tokens + KV_PAGE - 1) / KV_PAGE, most = budget_window_pages(model, STEP_ROWS);
    if (!lists->full) return pages * lists->windowed;
    return pages * lists->full + (pages < most ? pages : most) * lists->windowed;
}

size_t kv_token_bytes(const Model *model)
{
    const Lists *lists = &model->lists;
    return (size_t)lists->full * (frame_bytes(model) / KV_PAGE);
}

size_t kv_window_bytes(const Model *model)
{
    return (size_t)model->lists.windowed * frame_bytes(model) *
           (size_t)budget_window_pages(model, 1);
}

size_t kv_sequence_bytes(const Model *model)
{
    size_t bytes = 0;
    for (int l = 0; l < model->shape.layers; l++) bytes += layer_sequence(&model->shape, l);
    return bytes;
}

int budget_states(const Model *model, int64_t tokens)
{
    size_t state = kv_sequence_bytes(model), pages = (size_t)tokens * kv_token_bytes(model);
    return state ? (int)max_size(STATES_LEAST, min_size(pages / state, STATES_MOST)) : 0;
}

size_t budget_cache_bytes(const Model *model, int64_t tokens)
{
    size_t pages = (size_t)budget_frames(model, tokens) * frame_bytes(model);
    return pages + (size_t)budget_states(model, tokens) * kv_sequence_bytes(model);
}

int64_t budget_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes)
{
    size_t least = budget_cache_bytes(model, model->shape.context);
    if (!all_bytes) {
        least = 0;
        model->dev->memory(model->dev, &free_bytes, &all_bytes);
        if (!model->weights.base) /* planning: the weights are not loaded yet */
            free_bytes -= min_size(free_bytes, model_held(model));
    }
    size_t bytes = min_size(room(model, all_bytes) / CACHE_SHARE, max_size(free_bytes / 2, least));
    int64_t pages = 1, above = CACHE_TOKENS_MAX / KV_PAGE + 1;
    while (above - pages > 1) {
        int64_t middle = pages + (above - pages) / 2;
        *(budget_cache_bytes(model, middle * KV_PAGE) <= bytes ? &pages : &above) = middle;
    }
    return pages * KV_PAGE;
}
