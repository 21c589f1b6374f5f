/* sampling/state_pool.c - slots for what a sequence keeps beside its pages, where a model's layers
 * keep something (device.h): free, held by a sequence, or kept for others.
 *
 * Every sequence that runs holds a slot. A kept one is attached to a page that the prefix cache
 * remembers: it is the state behind that page's last token. Another sequence that begins with the
 * same tokens copies it and goes on there; without it, the pages alone are of no use. A kept slot
 * is given up when its page is, or when a sequence finds no free one: the least recently used
 * first. So fewer sequences run at once where memory is short, and none fails. */
#include <stdlib.h>

#include "state_pool.h"

Status states_open(States *states, int count, int pages)
{
    *states = (States){.count = count, .free_count = count, .oldest = -1, .newest = -1};
    if (!count) return STATUS_OK;
    states->slot = calloc((size_t)count, sizeof *states->slot);
    states->free_list = malloc((size_t)count * sizeof *states->free_list);
    states->of_page = malloc((size_t)pages * sizeof *states->of_page);
    if (!states->slot || !states->free_list || !states->of_page)
        return fail(STATUS_MEMORY, "no memory for a list of %d sequences' states", count);
    for (int i = 0; i < count; i++) states->free_list[i] = count - 1 - i;
    for (int page = 0; page < pages; page++) states->of_page[page] = -1;
    return STATUS_OK;
}

void states_close(States *states)
{
    free(states->slot);
    free(states->free_list);
    free(states->of_page);
    *states = (States){0};
}

/* ---- kept ones, in the order of their use ---- */

static void order_join(States *states, int32_t at)
{
    states->slot[at].older = states->newest;
    states->slot[at].newer = -1;
    *(states->newest < 0 ? &states->oldest : &states->slot[states->newest].newer) = at;
    states->newest = at;
}

static void order_leave(States *states, int32_t at)
{
    const StateSlot *slot = &states->slot[at];
    *(slot->older < 0 ? &states->oldest : &states->slot[slot->older].newer) = slot->newer;
    *(slot->newer < 0 ? &states->newest : &states->slot[slot->newer].older) = slot->older;
}

/* A kept slot is no longer attached to its page. */
static void detach(States *states, int32_t at)
{
    order_leave(states, at);
    states->of_page[states->slot[at].page] = -1;
    states->kept--;
}

int32_t states_find(const States *states, int32_t page)
{
    return states->count ? states->of_page[page] : -1;
}

void states_use(States *states, int32_t at)
{
    order_leave(states, at);
    order_join(states, at);
}

void states_keep(States *states, int32_t at, int32_t page)
{
    states->slot[at].page = page;
    states->of_page[page] = at;
    order_join(states, at);
    states->kept++;
}

void states_forget(States *states, int32_t page)
{
    int32_t at = states_find(states, page);
    if (at < 0) return;
    detach(states, at);
    states_give(states, at);
}

/* ---- taken and given back ---- */

int32_t states_take(States *states)
{
    if (states->free_count) return states->free_list[--states->free_count];
    int32_t at = states->oldest;
    if (at >= 0) detach(states, at);
    return at;
}

void states_give(States *states, int32_t at)
{
    states->free_list[states->free_count++] = at;
}
