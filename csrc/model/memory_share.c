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
#include "stages.h"

enum {
    STEP_SHARE = 2,
    CACHE_SHARE = 4,
    OTHERS_SHARE =
        10, /* share of all memory that a long datum leaves to the system and other processes */
    STATES_LEAST = 4,
    STATES_MOST = 2 * STEP_SEQUENCES
};

/* A stage's part of `all_bytes` (0: what its device has) that the weights leave. Each stage is
 * meant to have as much. */
static size_t room(const Model *model, int k, size_t all_bytes, size_t weights)
{
    size_t free_bytes, all = all_bytes / (size_t)model->stages;
    if (!all_bytes) stage_memory(model, k, &free_bytes, &all);
    return all - min_size(all, weights);
}

size_t budget_step(const Model *model, size_t all_bytes)
{
    size_t sum = 0;
    for (int k = 0; k < model->stages; k++)
        sum += room(model, k, all_bytes, stage_held(model, k)) / STEP_SHARE;
    return sum;
}

size_t budget_datum(const Model *model, size_t adapter_bytes)
{
    size_t free_bytes, all_bytes, share = budget_step(model, 0), left = 0;
    for (int k = 0; k < model->stages; k++) {
        stage_memory(model, k, &free_bytes, &all_bytes);
        all_bytes -= all_bytes / OTHERS_SHARE;
        left += all_bytes - min_size(all_bytes, stage_held(model, k));
    }
    return max_size(share, left - min_size(left, adapter_bytes));
}

size_t budget_rows(const Model *model)
{
    size_t sum = 0;
    for (int k = 0; k < model->stages; k++)
        sum += room(model, k, 0, model->stage[k].bytes) / STEP_SHARE;
    return sum;
}

int budget_keep(const Model *model, KeepFits *fits, void *context)
{
    int least = 0, above = keep_all(model) + 1;
    if (fits(context, above - 1)) return above - 1;
    while (above - least > 1) {
        int middle = least + (above - least) / 2;
        *(fits(context, middle) ? &least : &above) = middle;
    }
    return least;
}

size_t frame_bytes(const Model *model, int k)
{
    return (size_t)model->stage[k].cached * model->lists.token * KV_PAGE * model->dev->cached_bytes;
}

/* Of all stages. */
static size_t frames_bytes(const Model *model)
{
    size_t bytes = 0;
    for (int k = 0; k < model->stages; k++) bytes += frame_bytes(model, k);
    return bytes;
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
    return (size_t)lists->full * (frames_bytes(model) / KV_PAGE);
}

size_t kv_window_bytes(const Model *model)
{
    return (size_t)model->lists.windowed * frames_bytes(model) *
           (size_t)budget_window_pages(model, 1);
}

size_t state_bytes(const Model *model, int k)
{
    size_t bytes = 0;
    for (int l = model->stage[k].first; l < model->stage[k].end; l++)
        bytes += layer_sequence(&model->shape, l);
    return bytes;
}

size_t kv_sequence_bytes(const Model *model)
{
    size_t bytes = 0;
    for (int k = 0; k < model->stages; k++) bytes += state_bytes(model, k);
    return bytes;
}

int budget_states(const Model *model, int64_t tokens)
{
    size_t state = kv_sequence_bytes(model), pages = (size_t)tokens * kv_token_bytes(model);
    return state ? (int)max_size(STATES_LEAST, min_size(pages / state, STATES_MOST)) : 0;
}

size_t budget_stage_cache(const Model *model, int k, int64_t tokens)
{
    size_t pages = (size_t)budget_frames(model, tokens) * frame_bytes(model, k);
    return pages + (size_t)budget_states(model, tokens) * state_bytes(model, k);
}

size_t budget_cache_bytes(const Model *model, int64_t tokens)
{
    size_t bytes = 0;
    for (int k = 0; k < model->stages; k++) bytes += budget_stage_cache(model, k, tokens);
    return bytes;
}

/* The most bytes of a stage's cache. */
static size_t cache_most(const Model *model, int k, size_t all_bytes, size_t free_bytes)
{
    size_t least = budget_stage_cache(model, k, model->shape.context), share;
    share = room(model, k, all_bytes, stage_held(model, k)) / CACHE_SHARE;
    free_bytes /= (size_t)model->stages;
    if (!all_bytes) {
        least = 0;
        stage_memory(model, k, &free_bytes, &all_bytes);
        if (!model->stage[k].weights.base) /* planning: the weights are not loaded yet */
            free_bytes -= min_size(free_bytes, stage_held(model, k));
    }
    return min_size(share, max_size(free_bytes / 2, least));
}

int64_t budget_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes)
{
    int64_t fewest = CACHE_TOKENS_MAX / KV_PAGE;
    for (int k = 0; k < model->stages; k++) {
        size_t bytes = cache_most(model, k, all_bytes, free_bytes);
        int64_t pages = 1, above = fewest + 1;
        while (above - pages > 1) {
            int64_t middle = pages + (above - pages) / 2;
            *(budget_stage_cache(model, k, middle * KV_PAGE) <= bytes ? &pages : &above) = middle;
        }
        fewest = pages;
    }
    return fewest * KV_PAGE;
}
