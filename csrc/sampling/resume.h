/* sampling/resume.h - sequences with a common prefix where the model's layers keep a state. */
#ifndef TINSMITH_SAMPLING_RESUME_H
#define TINSMITH_SAMPLING_RESUME_H

#include "scheduler.h"

/* As share_begin, for the sequence in a place of the queue, which also gets a slot. If there is
 * none it waits, and those behind it that have none will too: `full` is set. */
int resume_begin(const Scheduler *scheduler, Kv *kv, const Turn *turns, int count, int place,
                 int *full);

#endif
