/* sampling/state_checkpoint.c - which states are kept, where a model's layers keep one beside the
 * pages.
 *
 * A state is kept for the end of a page that the prefix cache knows, as the state behind it. That
 * is done where a later request can be expected to go on: before the page of a prompt's last token,
 * for the same prompt again; where a sequence ended or was preempted, for the next turn or itself;
 * and where the beginning ends that it had in common with an earlier request, for a third one. The
 * state of a sequence that goes on is copied; that of one that ends changes hands.
 *
 * A state belongs to the page of the newest row, and can be taken back to the beginning of that
 * page, no further (device.h). So a turn ends in the page behind a boundary that is to be kept. */
#include "state_checkpoint.h"
#include "request.h"

/* The last of the first `count` pages of a sequence's tokens, as the prefix cache knows it; -1 if
 * it does not. */
static int32_t page_known(const Kv *kv, const Request *r, const Sequence *s, int count)
{
    const Prefix *prefix = &kv->prefix;
    int32_t page = -1;
    for (int i = 0; i < count; i++) {
        uint64_t behind = page < 0 ? 0 : prefix_number(prefix, page);
        page = prefix_find(prefix, request_stamp(r), behind, s->tokens.ids + i * KV_PAGE);
        if (page < 0) break;
    }
    return page;
}

void keep_copy(Kv *kv, const Request *r, const Sequence *s)
{
    States *states = &kv->states;
    int32_t page = states->count ? page_known(kv, r, s, s->state.first_row / KV_PAGE) : -1;
    if (page < 0 || states_find(states, page) >= 0) return;
    int32_t slot = states_take(states);
    if (slot < 0) return;
    kv_state_copy(kv, s->state.slot, slot, 1);
    states_keep(states, slot, page);
}

void keep_own(Kv *kv, const Request *r, Sequence *s)
{
    int32_t slot = s->state.slot;
    int cached = s->progress.cached;
    if (slot < 0) return;
    int32_t page = page_known(kv, r, s, cached / KV_PAGE);
    if (page < 0 || states_find(&kv->states, page) >= 0) return;
    kv_state_copy(kv, slot, slot, cached % KV_PAGE != 0);
    states_keep(&kv->states, slot, page);
    s->state.slot = -1;
}

/* ---- a sequence's state ---- */

int state_allocate(Kv *kv, SequenceState *state)
{
    state->slot = states_take(&kv->states);
    return state->slot >= 0;
}

void state_drop(Kv *kv, SequenceState *state)
{
    if (state->slot >= 0) states_give(&kv->states, state->slot);
    state->slot = -1;
    state->shared_end = 0;
}

void state_restore(Kv *kv, Sequence *s, int32_t slot, int rewinds)
{
    kv_state_copy(kv, slot, s->state.slot, rewinds);
    s->state.first_row = s->progress.cached;
}

void state_plan(SequenceState *state, int tokens)
{
    state->shared_end = tokens;
}

int keep_rows(const Sequence *s, int rows)
{
    int end = s->state.shared_end, cached = s->progress.cached, most = end + KV_PAGE - cached;
    return end && cached <= end && rows > most ? most : rows;
}

void keep_ran(Kv *kv, const Request *r, Sequence *s)
{
    SequenceState *state = &s->state;
    state->first_row = s->progress.cached - 1;
    if (!state->shared_end || s->progress.cached <= state->shared_end) return;
    keep_copy(kv, r, s);
    state->shared_end = 0;
}
