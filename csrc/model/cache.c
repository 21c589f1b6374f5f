/* model/cache.c - the offsets of a layer's keys and values in the cache, and sequences' states. */
#include "cache.h"

#include "../device/delta_state.h"
#include "stages.h"

void cache_place(Cache *cache, Arenas *arenas, const Model *model, int pages)
{
    size_t bytes = (size_t)pages * KV_PAGE * (model->lists.token / 2) * model->dev->cached_bytes;
    for (int k = 0; k < model->stages; k++) {
        cached *keys = arena_take(&arenas->of[k], bytes),
               *values = arena_take(&arenas->of[k], bytes);
        cache[k] = (Cache){.k = keys, .v = values};
    }
}

size_t cache_at(const Model *model, const Cache *cache, int l)
{
    size_t row = (model->lists.token / 2) * model->dev->cached_bytes;
    return (size_t)model->region[l].at * row * cache->tokens;
}

int cache_list(const Model *model, const Cache *cache, int l)
{
    return cache->tokens ? model->region[l].list : 0;
}

float *cache_state(const Model *model, const Cache *cache, int l)
{
    size_t below = 0;
    int first = stage_of(model, l)->first;
    while (l-- > first) below += layer_sequence(&model->shape, l);
    return cache->states ? (float *)(void *)(cache->states + below) : NULL;
}

void cache_rewind(const Model *m, const Cache *caches, int number)
{
    const Shape *s = &m->shape;
    int Q = s->key_heads * s->key_width, parts[] = {Q, Q, s->value_heads * s->value_width};
    for (int l = 0; l < s->layers; l++) {
        if (!HAS(DELTA)) continue;
        const Stage *stage = stage_of(m, l);
        const Cache *cache = &caches[stage - m->stage];
        Device *d = stage->dev;
        float *start =
                  cache_state(m, cache, l) + (size_t)number * cache->state_bytes / sizeof *start,
              *ring = start + CONV_START(delta_channels(s));
        for (int i = 0; i < 3; i++) { /* the rows at p % CONV = 1, 2, 3 */
            d->copy(d, ring + parts[i], start, CONV_START(parts[i]) * sizeof *start);
            start += CONV_START(parts[i]);
            ring += CONV_RING(parts[i]);
        }
    }
}
