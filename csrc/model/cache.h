/* model/cache.h - the pages of keys and values that attention reads, and the states of delta
 * networks. */
#ifndef TINSMITH_MODEL_CACHE_H
#define TINSMITH_MODEL_CACHE_H

#include "model.h"

/* The pages that attention reads. A frame is a page's memory in the layers of one list. Each of
 * these layers has a region for the `tokens` tokens of all frames (cache_at). In training `tokens`
 * is 0: all layers share one list and one region, because each needs them only once. */
typedef struct Cache {
    cached *k, *v;
    size_t tokens;
    char *states;       /* sequences' recurrent states; NULL in training */
    size_t state_bytes; /* of one sequence: all layers of the stage */
} Cache;

/* Places each stage's pages of a pass, which its layers share. */
void cache_place(Cache *cache, Arenas *arenas, const Model *model, int pages);
/* Byte offset of a layer's region in its stage's cache, the same in k and v. */
size_t cache_at(const Model *model, const Cache *cache, int layer);

static inline cached *cached_at(cached *pages, size_t bytes)
{
    return (cached *)((char *)pages + bytes);
}

/* The list of its frames. */
int cache_list(const Model *model, const Cache *cache, int layer);

/* A layer's state of sequence 0; state_bytes is the stride to the next one's. NULL in training. */
float *cache_state(const Model *model, const Cache *cache, int layer);
/* Rewinds a sequence's states of all layers, in all stages' caches, to the beginning of its newest
 * row's page: the next row that it runs is that page's first. */
void cache_rewind(const Model *model, const Cache *caches, int number);

#endif
