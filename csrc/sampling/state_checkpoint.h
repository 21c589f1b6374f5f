/* sampling/state_checkpoint.h - a sequence's state, and which states are kept. */
#ifndef TINSMITH_SAMPLING_STATE_CHECKPOINT_H
#define TINSMITH_SAMPLING_STATE_CHECKPOINT_H

#include "sequence.h"

/* A slot for a sequence that has none; 0: there is none. */
int state_allocate(Kv *kv, SequenceState *state);
void state_drop(Kv *kv, SequenceState *state);
/* Copies the state in another slot to a sequence that has its rows in the cache. `rewinds`: the
 * copy is taken back to the beginning of the page of its newest row. */
void state_restore(Kv *kv, Sequence *s, int32_t slot, int rewinds);
/* State and window are kept behind that many tokens. */
void state_plan(SequenceState *state, int tokens);
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
