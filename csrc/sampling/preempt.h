/* sampling/preempt.h - the sequence in a place of the queue gets what it needs to run, if need be
 * by preemption; 0: it has to wait. */
#ifndef TINSMITH_SAMPLING_PREEMPT_H
#define TINSMITH_SAMPLING_PREEMPT_H

#include "scheduler.h"

/* A slot for its state, where the model's layers keep one. */
int room_state(const Scheduler *scheduler, Kv *kv, int place);
/* Pages for `length` tokens. */
int room_pages(const Scheduler *scheduler, Kv *kv, int place, int length);

#endif
