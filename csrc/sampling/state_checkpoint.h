/* sampling/state_checkpoint.h - a sequence's state, and which states are cached. */
#ifndef TINSMITH_SAMPLING_STATE_CHECKPOINT_H
#define TINSMITH_SAMPLING_STATE_CHECKPOINT_H

#include "sequence.h"

/* A slot for a sequence that has none; 0: there is none. */
int state_slot_allocate(PagePool *pool, SequenceState *state);
void state_slot_free(PagePool *pool, SequenceState *state);
/* Copies the state in another slot to a sequence that has its rows in the cache. `rewinds`: the
 * copy is rewound to the beginning of the page of its newest row. */
void state_slot_restore(PagePool *pool, Sequence *s, int32_t slot, int rewinds);
/* State and window are to be cached behind that many tokens. */
void checkpoint_plan(SequenceState *state, int tokens);
/* Of the next `rows` rows of a sequence those that one step runs: it ends at a checkpoint. */
int checkpoint_rows(const Sequence *s, int rows);
/* Rows of a sequence have run. */
void checkpoint_advance(PagePool *pool, Sequence *s);
/* Caches a copy of a sequence's state, rewound to the beginning of the page of its newest row,
 * unless there is one or no slot is left. */
void checkpoint_copy(PagePool *pool, const Sequence *s);
/* The same with the slot itself, for a sequence that ends: at the end of its last full page. */
void checkpoint_move(PagePool *pool, Sequence *s);

#endif
