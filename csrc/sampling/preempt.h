/* sampling/preempt.h - pages and states for the sequence at index `entry` of the queue, by
 * preemption if necessary; 0: it has to wait. */
#ifndef TINSMITH_SAMPLING_PREEMPT_H
#define TINSMITH_SAMPLING_PREEMPT_H

#include "scheduler.h"

int preempt_for_state(const Scheduler *scheduler, PagePool *pool, int entry);
/* Pages for `length` tokens. */
int preempt_for_pages(const Scheduler *scheduler, PagePool *pool, int entry, int length);

#endif
