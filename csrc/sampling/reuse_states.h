/* sampling/reuse_states.h - sequences with a common prefix, where layers have a state. */
#ifndef TINSMITH_SAMPLING_REUSE_STATES_H
#define TINSMITH_SAMPLING_REUSE_STATES_H

#include "scheduler.h"

/* Like reuse_begin, for the sequence at index `entry` of the queue, which also gets a slot. If none
 * is left it waits, and `full` makes later sequences without a slot wait too. */
int reuse_states_begin(const Scheduler *scheduler, PagePool *pool, const ScheduledRows *runs,
                       int count, int entry, int *full);

#endif
