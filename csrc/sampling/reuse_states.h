/* sampling/reuse_states.h - sequences with a common prefix, where layers have a state. */
#ifndef TINSMITH_SAMPLING_REUSE_STATES_H
#define TINSMITH_SAMPLING_REUSE_STATES_H

#include "scheduler.h"

/* As reuse_begin, for the sequence at a place of the queue, which also gets a slot. If there is
 * none it waits, and those after it that have none will too: `full` is set. */
int reuse_states_begin(const Scheduler *scheduler, PagePool *pool, const ScheduledRows *runs,
                       int count, int entry, int *full);

#endif
