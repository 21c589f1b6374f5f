/* sampling/state_pool.h - slots for what sequences keep beside their pages. */
#ifndef TINSMITH_SAMPLING_STATE_POOL_H
#define TINSMITH_SAMPLING_STATE_POOL_H

#include "lru.h"
#include "sampler.h"

typedef struct States {
    int count; /* slots; 0: the model's layers keep nothing beside the pages */
    int free_count, kept;
    int32_t *free_list;
    int32_t *page;    /* [count] behind whose last token a kept slot is the state */
    int32_t *of_page; /* [pages] the slot that is kept for a page, or -1 */
    Lru unused;       /* kept ones */
} States;

/* Even a failed one is closed. */
Status states_open(States *states, int count, int pages);
void states_close(States *states);
/* A slot for a sequence: a free one, or the kept one that was not used for longest; -1: none. */
int32_t states_take(States *states);
void states_give(States *states, int32_t slot);
/* The slot that is kept for a page, or -1. */
int32_t states_find(const States *states, int32_t page);
/* A kept slot is used now. */
void states_use(States *states, int32_t slot);
/* Keeps a slot that was taken for a page that has none. */
void states_keep(States *states, int32_t slot, int32_t page);
/* The page is forgotten, so is the slot that was kept for it. */
void states_forget(States *states, int32_t page);

#endif
