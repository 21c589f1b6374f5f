/* sampling/state_pool.c - slots for the states of sequences, if a model's layers have a state
 * (delta_state.h): free, held by a sequence, or cached for others.
 *
 * Every running sequence holds a slot. A cached slot belongs to a page of the prefix cache: it is
 * the state after that page's last token. Another sequence with the same prefix copies it and
 * resumes there; pages without a state are useless. A cached slot is evicted with its page, or if
 * no slot is free, the least recently used first. So if memory is short, fewer sequences run at
 * once, and none fails. */
#include <stdlib.h>

#include "state_pool.h"

Status state_pool_open(StatePool *states, int count, int pages)
{
    *states = (StatePool){count, count, .unused = {NULL, LRU_END, LRU_END}};
    if (!count) return STATUS_OK;
    states->page = malloc((size_t)count * sizeof *states->page);
    states->free_list = malloc((size_t)count * sizeof *states->free_list);
    states->of_page = malloc((size_t)pages * sizeof *states->of_page);
    if (!states->page || !states->free_list || !states->of_page ||
        !lru_open(&states->unused, count))
        return fail(STATUS_MEMORY, "no memory for a list of %d sequences' states", count);
    for (int i = 0; i < count; i++) states->free_list[i] = count - 1 - i;
    for (int page = 0; page < pages; page++) states->of_page[page] = -1;
    return STATUS_OK;
}

void state_pool_close(StatePool *states)
{
    free(states->page);
    free(states->free_list);
    free(states->of_page);
    lru_close(&states->unused);
    *states = (StatePool){0};
}

/* ---- cached slots ---- */

/* A cached slot no longer belongs to its page. */
static void detach(StatePool *states, int32_t at)
{
    lru_remove(&states->unused, at);
    states->of_page[states->page[at]] = -1;
    states->cached--;
}

int32_t state_find(const StatePool *states, int32_t page)
{
    return states->count ? states->of_page[page] : -1;
}

void state_touch(StatePool *states, int32_t at)
{
    lru_remove(&states->unused, at);
    lru_append(&states->unused, at);
}

void state_cache(StatePool *states, int32_t at, int32_t page)
{
    states->page[at] = page;
    states->of_page[page] = at;
    lru_append(&states->unused, at);
    states->cached++;
}

void state_evict(StatePool *states, int32_t page)
{
    int32_t at = state_find(states, page);
    if (at < 0) return;
    detach(states, at);
    state_free(states, at);
}

/* ---- slots of sequences ---- */

int32_t state_allocate(StatePool *states)
{
    if (states->free_count) return states->free_list[--states->free_count];
    int32_t at = states->unused.oldest;
    if (at >= 0) detach(states, at);
    return at;
}

void state_free(StatePool *states, int32_t at)
{
    states->free_list[states->free_count++] = at;
}
