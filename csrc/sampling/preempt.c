/* sampling/preempt.c - pages and states for a scheduled sequence, by preemption if necessary.
 *
 * If none is free, the last sequence in the queue that has any is preempted. The first in the queue
 * belongs to the oldest request until it is done, so it always advances, and each sequence becomes
 * the first in time. A preempted sequence is recomputed, to the same bits. */
#include "preempt.h"
#include "page_table.h"
#include "state_checkpoint.h"

/* Preempts the last sequence in the queue after `entry` that holds pages or a state; 0: there is
 * none. None of these is scheduled in this step yet. */
static int preempt(const Scheduler *scheduler, PagePool *pool, int entry)
{
    for (int i = scheduler->waiting - 1; i > entry; i--) {
        Sequence *s = scheduler->queue[i];
        if (!s->pages.count && s->state.slot < 0) continue;
        sequence_free(pool, s);
        return 1;
    }
    return 0;
}

int preempt_for_state(const Scheduler *scheduler, PagePool *pool, int entry)
{
    SequenceState *state = &scheduler->queue[entry]->state;
    while (pool->states.count && state->slot < 0)
        if (!state_slot_allocate(pool, state) && !preempt(scheduler, pool, entry)) return 0;
    return 1;
}

int preempt_for_pages(const Scheduler *scheduler, PagePool *pool, int entry, int length)
{
    PageTable *pages = &scheduler->queue[entry]->pages;
    while (pages->count * KV_PAGE < length)
        if (!page_table_allocate(pool, pages) && !preempt(scheduler, pool, entry)) return 0;
    return 1;
}
