/* sampling/preempt.c - pages and states for a sequence that is to run, if need be by preemption.
 *
 * A sequence that finds none free preempts the last sequence in line that has any, and takes them.
 * The first in line belongs to the oldest request of all until it is done, so it always advances,
 * and each sequence comes to be the first. What was preempted is computed again, to the same
 * bits. */
#include "preempt.h"
#include "page_table.h"
#include "state_checkpoint.h"

/* Preempts the last sequence in line, behind a given place, that holds anything; 0 if there is
 * none. None of those runs in this step yet. */
static int preempt(const Scheduler *scheduler, Kv *kv, int place)
{
    for (int i = scheduler->count - 1; i > place; i--) {
        Sequence *s = waiter_sequence(&scheduler->waiter[i]);
        if (!s->pages.count && s->state.slot < 0) continue;
        sequence_drop(kv, scheduler->waiter[i].request, s);
        return 1;
    }
    return 0;
}

int room_state(const Scheduler *scheduler, Kv *kv, int place)
{
    SequenceState *state = &waiter_sequence(&scheduler->waiter[place])->state;
    while (kv->states.count && state->slot < 0)
        if (!state_allocate(kv, state) && !preempt(scheduler, kv, place)) return 0;
    return 1;
}

int room_pages(const Scheduler *scheduler, Kv *kv, int place, int length)
{
    PageTable *pages = &waiter_sequence(&scheduler->waiter[place])->pages;
    while (pages->count * KV_PAGE < length)
        if (!page_table_allocate(kv, pages) && !preempt(scheduler, kv, place)) return 0;
    return 1;
}
