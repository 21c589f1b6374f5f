/* sampling/state_checkpoint.c - which states are cached, if a model's layers have a state.
 *
 * A state is cached at the end of a page in the prefix cache, where a later request is likely to
 * resume: before the page of a prompt's last token, for the same prompt again; where a sequence
 * ended or was preempted, for the next turn or itself; and at the end of a prefix shared with an
 * earlier request, for a third one. A running sequence's state is copied; an ending one's slot is
 * cached itself.
 *
 * A state belongs to the page of the newest row, and can only be rewound to the beginning of that
 * page (delta_state.h). So a step ends in the page after a checkpoint. */
#include "state_checkpoint.h"
#include "request.h"

/* The last of the first `count` pages of a sequence's tokens in the prefix cache, or -1. */
static int32_t page_cached(const PagePool *pool, const Sequence *s, int count)
{
    const PrefixCache *prefix = &pool->prefix;
    int32_t page = -1;
    for (int i = 0; i < count; i++) {
        uint64_t parent = page < 0 ? 0 : prefix_id(prefix, page);
        const int32_t *tokens = s->tokens.ids + i * KV_PAGE;
        page = prefix_find(prefix, request_stamp(s->request), parent, tokens);
        if (page < 0) break;
    }
    return page;
}

void checkpoint_copy(PagePool *pool, const Sequence *s)
{
    StatePool *states = &pool->states;
    int32_t page = states->count ? page_cached(pool, s, s->state.first_row / KV_PAGE) : -1;
    if (page < 0 || state_find(states, page) >= 0) return;
    int32_t slot = state_allocate(states);
    if (slot < 0) return;
    state_copy(pool, s->state.slot, slot, 1);
    state_cache(states, slot, page);
}

void checkpoint_move(PagePool *pool, Sequence *s)
{
    int32_t slot = s->state.slot;
    int cached = s->progress.cached;
    if (slot < 0) return;
    int32_t page = page_cached(pool, s, cached / KV_PAGE);
    if (page < 0 || state_find(&pool->states, page) >= 0) return;
    state_copy(pool, slot, slot, cached % KV_PAGE != 0);
    state_cache(&pool->states, slot, page);
    s->state.slot = -1;
}

void checkpoint_plan(SequenceState *state, int tokens)
{
    state->checkpoint = tokens;
}

int checkpoint_rows(const Sequence *s, int rows)
{
    int end = s->state.checkpoint, cached = s->progress.cached, most = end + KV_PAGE - cached;
    return end && cached <= end && rows > most ? most : rows;
}

void checkpoint_advance(PagePool *pool, Sequence *s)
{
    SequenceState *state = &s->state;
    state->first_row = s->progress.cached - 1;
    if (!state->checkpoint || s->progress.cached <= state->checkpoint) return;
    checkpoint_copy(pool, s);
    state->checkpoint = 0;
}

/* ---- the slot of a sequence ---- */

int state_slot_allocate(PagePool *pool, SequenceState *state)
{
    state->slot = state_allocate(&pool->states);
    return state->slot >= 0;
}

void state_slot_free(PagePool *pool, SequenceState *state)
{
    if (state->slot >= 0) state_free(&pool->states, state->slot);
    *state = (SequenceState){.slot = -1};
}

void state_slot_restore(PagePool *pool, Sequence *s, int32_t slot, int rewinds)
{
    state_copy(pool, slot, s->state.slot, rewinds);
    s->state.first_row = s->progress.cached;
}
