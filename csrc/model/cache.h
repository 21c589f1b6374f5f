/* model/cache.h - the pages of keys and values that attention reads, and the states of delta
 * networks beside them. */
#ifndef TINSMITH_MODEL_CACHE_H
#define TINSMITH_MODEL_CACHE_H

#include "model.h"

/* The pages that attention reads. A frame is memory for a page in the layers of one list, each of
 * which has a region with room for `tokens` tokens of all frames (cache_at). In training `tokens`
 * is 0: all layers share one list and one region, because each needs them only once. */
typedef struct Cache {
    cached *k, *v;
    size_t tokens;
    char *states;       /* what sequences keep beside their pages; NULL in training */
    size_t state_bytes; /* of one sequence: all layers */
} Cache;

/* A pass's pages, which all layers share. */
Cache cache_place(Arena *arena, const Model *model, int pages);
/* Where a layer's region begins, in k and in v alike: bytes. */
size_t cache_at(const Model *model, const Cache *cache, int layer);

static inline cached *cached_at(cached *pages, size_t bytes)
{
    return (cached *)((char *)pages + bytes);
}

/* The list of its frames. */
int cache_list(const Model *model, const Cache *cache, int layer);

/* What sequence number 0 keeps of a layer; that of the next is state_bytes behind. NULL in
 * training.
 */
float *cache_state(const Model *model, const Cache *cache, int layer);
/* Takes what a sequence keeps of all layers back to the beginning of the page of its newest row:
 * the next row that it runs is that page's first. */
void cache_rewind(const Model *model, const Cache *cache, int number);

#endif
