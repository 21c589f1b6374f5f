/* sampling/state_pool.h - slots for the states of sequences. */
#ifndef TINSMITH_SAMPLING_STATE_POOL_H
#define TINSMITH_SAMPLING_STATE_POOL_H

#include "lru.h"
#include "sampler.h"

typedef struct StatePool {
    int count; /* slots; 0: the model's layers have no state */
    int free_count, cached;
    int32_t *free_list;
    int32_t *page;    /* [count] the page at whose end a cached slot is the state */
    int32_t *of_page; /* [pages] the slot that is cached for a page, or -1 */
    Lru unused;       /* cached slots */
} StatePool;

/* Close it even if this fails. */
Status state_pool_open(StatePool *states, int count, int pages);
void state_pool_close(StatePool *states);
/* A free slot, or else the least recently used cached one; -1: there is none. */
int32_t state_allocate(StatePool *states);
void state_free(StatePool *states, int32_t slot);
/* Caches a slot of a sequence for a page that has none. */
void state_cache(StatePool *states, int32_t slot, int32_t page);
/* The slot that is cached for a page, or -1. */
int32_t state_find(const StatePool *states, int32_t page);
/* Marks a cached slot as just used. */
void state_touch(StatePool *states, int32_t slot);
/* Called when a page is evicted: evicts the slot cached for it. */
void state_evict(StatePool *states, int32_t page);

#endif
