/* sampling/state_checkpoint.h - a sequence's state, and which states are cached. */
#ifndef TINSMITH_SAMPLING_STATE_CHECKPOINT_H
#define TINSMITH_SAMPLING_STATE_CHECKPOINT_H

#include "sequence.h"

/* Allocates a sequence's slot; 0: none is left. */
int state_slot_allocate(PagePool *pool, SequenceState *state);
void state_slot_free(PagePool *pool, SequenceState *state);
/* Copies another slot's state to a sequence whose rows are in the cache. `rewinds`: the copy is
 * rewound to the beginning of the page of its newest row. */
void state_slot_restore(PagePool *pool, Sequence *s, int32_t slot, int rewinds);
/* Plans to cache the state and window after that many tokens. */
void checkpoint_plan(SequenceState *state, int tokens);
/* How many of a sequence's next `rows` rows one step runs: it ends in the page after a
 * checkpoint. */
int checkpoint_rows(const Sequence *s, int rows);
/* Called after rows of a sequence have run. */
void checkpoint_advance(PagePool *pool, Sequence *s);
/* Caches a copy of a sequence's state, rewound to the beginning of the page of its newest row,
 * unless one is cached there or no slot is left. */
void checkpoint_copy(PagePool *pool, const Sequence *s);
/* The same with the slot itself, for a sequence that ends: at the end of its last full page. */
void checkpoint_move(PagePool *pool, Sequence *s);

#endif
