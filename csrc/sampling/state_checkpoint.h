/* sampling/state_checkpoint.h - which states are kept. */
#ifndef TINSMITH_SAMPLING_STATE_CHECKPOINT_H
#define TINSMITH_SAMPLING_STATE_CHECKPOINT_H

#include "sequence.h"

/* Of the next `rows` rows of a sequence those that its turn runs: it ends where a state is to be
 * kept. */
int keep_rows(const Sequence *s, int rows);
/* The rows of a sequence's turn have run. */
void keep_ran(Kv *kv, const Request *request, Sequence *s);
/* Keeps a copy of a sequence's state as it was at the beginning of the page of its newest row,
 * unless there is one or no slot can be had. */
void keep_copy(Kv *kv, const Request *request, const Sequence *s);
/* A sequence gives its state up: it is kept at the end of its last full page, unless there is one
 * or the page is not known. */
void keep_own(Kv *kv, const Request *request, Sequence *s);

#endif
