/* sampling/resume.c - where a sequence may go on that begins like another one, if the model's
 * layers keep a state beside the pages.
 *
 * Pages are then of use only together with the state behind them. States are kept at the ends of a
 * few pages (state_checkpoint.c). Sequences that run have states too. Such a one is copied as it
 * is, if both sequences have the same tokens up to there, save perhaps the newest, which is then
 * run again. Or its copy is taken back to the beginning of its page (device.h).
 *
 * A sequence begins at the furthest of these places. It waits while an earlier one in line runs
 * towards a place that it would not pass in this step by itself. It looks again in every step, and
 * the first in line never waits. For the end of a prompt a sequence waits one step, once: the other
 * may have ended in it (reuse.c). */
#include "resume.h"
#include "page_table.h"
#include "preempt.h"
#include "prompt_scores.h"
#include "request.h"
#include "reuse.h"
#include "state_checkpoint.h"

enum { LEAST = 16 }; /* the fewest rows that are worth a copy, or a step */

/* A place to go on: the rows before it are in the cache, and there is a state for it. */
typedef struct Place {
    int at;                /* rows; 0: the beginning */
    int32_t state;         /* the slot of the state to copy */
    int rewinds;           /* whether the copy is taken back to the beginning of its page */
    const Sequence *other; /* who runs, and has the rows of a page that is not full; NULL: kept */
} Place;

static int minimum(int a, int b)
{
    return a < b ? a : b;
}

/* ---- states that are kept ---- */

/* How many whole pages of the sequence's tokens the prefix cache knows, at least the sequence's
 * own. The last of them with a state is the place. */
static int pages_known(const Kv *kv, const Request *r, const Sequence *s, Place *place)
{
    uint64_t parent = s->progress.parent;
    int n = s->progress.known;
    for (int32_t page; (page = share_find(kv, r, s, n, &parent)) >= 0; n++) {
        int32_t state = states_find(&kv->states, page);
        if (state >= 0) *place = (Place){.at = (n + 1) * KV_PAGE, .state = state};
    }
    return n;
}

/* ---- states of sequences that run ---- */

/* Whether nothing is asked of the rows before `at` in its page. */
static int part_open(const Request *r, int at)
{
    for (int i = at / KV_PAGE * KV_PAGE; i < at; i++)
        if (row_asked(r, i)) return 0;
    return 1;
}

/* The place that another sequence offers to one that has `common` tokens in common with it, of
 * which `known` pages are known: the other's rows are run up to `cached`, and its state is good for
 * rows from `low` on. */
static Place place_of(const Request *r, const Sequence *s, const Sequence *other, int low,
                      int cached, int common, int known)
{
    int at = minimum(minimum(common, s->tokens.length - 1), cached), back = low / KV_PAGE * KV_PAGE;
    if (at >= low && at / KV_PAGE <= known && part_open(r, at))
        return (Place){at, other->state.slot, 0, other};
    if (at >= back && back / KV_PAGE <= known) return (Place){back, other->state.slot, 1, other};
    return (Place){0};
}

static int tokens_common(const Request *r, const Sequence *s, const Request *other,
                         const Sequence *theirs)
{
    if (request_stamp(r) != request_stamp(other)) return 0;
    int n = 0, end = minimum(s->tokens.length, theirs->tokens.length);
    while (n < end && s->tokens.ids[n] == theirs->tokens.ids[n]) n++;
    return n;
}

/* Rows of the place that a turn's sequence offers after this step. If it ends in it, its state is
 * kept at the beginning of a page. */
static int rows_coming(const Turn *turn, const Request *r, const Sequence *s, int common, int known)
{
    const Sequence *other = turn_sequence(turn);
    int cached = turn->from + turn->rows;
    for (; (known + 1) * KV_PAGE <= minimum(cached, common); known++) {
        PageScores scores = scores_of(turn->request, known);
        if (!scores_suffice(&scores, r, known)) break;
    }
    int at = place_of(r, s, other, cached - 1, cached, common, known).at;
    return share_goes_on(turn) ? at : at / KV_PAGE * KV_PAGE;
}

/* ---- the furthest place ---- */

/* Finds it. Returns whether the sequence waits for a further one. */
static int look(const Kv *kv, const Turn *turns, int count, const Request *r, Sequence *s,
                Place *best)
{
    int known = pages_known(kv, r, s, best), cached = s->progress.cached, coming = 0, ends = 0;
    for (const Turn *turn = turns; turn < turns + count; turn++) {
        const Sequence *other = turn_sequence(turn);
        int common = tokens_common(r, s, turn->request, other);
        if (common < LEAST) continue;
        if (other->progress.cached) {
            Place now = place_of(r, s, other, other->state.first_row, other->progress.cached,
                                 common, known);
            if (now.at > best->at) *best = now;
        }
        int rows = rows_coming(turn, r, s, common, known);
        if (rows < coming || (rows == coming && !ends)) continue;
        coming = rows;
        ends = turn->draws;
    }
    if (best->at < cached + LEAST) *best = (Place){0};
    int begin = best->at ? best->at : cached, reach = begin + r->client->rows;
    int waits = coming >= begin + LEAST && coming >= minimum(reach, s->tokens.length - 1);
    if (waits && (!ends || share_wait(&s->progress))) return 1;
    if (known > s->progress.known && known * KV_PAGE > begin)
        state_plan(&s->state, known * KV_PAGE);
    return 0;
}

/* ---- going on ---- */

/* Whether no slot is left but one that is kept, from which the next sequence in line that has none
 * would go on too: those of a group that finds too few slots take turns, and begin there. */
static int last_is_wanted(const Scheduler *scheduler, Kv *kv, int place)
{
    States *states = &kv->states;
    if (states->free_count || !states->kept) return 0;
    while (++place < scheduler->count &&
           waiter_sequence(&scheduler->waiter[place])->state.slot >= 0) {
    }
    if (place == scheduler->count) return 0;
    Place next = {.state = -1};
    const Waiter *after = &scheduler->waiter[place];
    pages_known(kv, after->request, waiter_sequence(after), &next);
    if (next.state < 0) return 0;
    states_use(states, next.state);
    return states->unused.oldest == next.state;
}

/* Takes a slot for a sequence that has none and will go on at a place; 0: it has to wait. */
static int slot_take(const Scheduler *scheduler, Kv *kv, int count, int place, const Place *best)
{
    if (best->at && !best->other) states_use(&kv->states, best->state);
    if (best->at && count && last_is_wanted(scheduler, kv, place)) return 0;
    return room_state(scheduler, kv, place);
}

/* Puts a sequence that has a slot at a place. */
static void go_to(Kv *kv, Request *r, Sequence *s, const Place *place)
{
    const Progress *p = &s->progress;
    int whole = place->at / KV_PAGE, rest = place->at % KV_PAGE, before = p->cached;
    page_table_free(kv, &s->pages, p->known);
    share_pages(kv, r, s, whole);
    if (rest) share_rows(kv, s, place->other, rest);
    state_restore(kv, s, place->state, place->rewinds || p->cached < place->at);
    kv->prefix.reused += p->cached - before;
}

int resume_begin(const Scheduler *scheduler, Kv *kv, const Turn *turns, int count, int place,
                 int *full)
{
    const Waiter *waiter = &scheduler->waiter[place];
    Request *r = waiter->request;
    Sequence *s = waiter_sequence(waiter);
    Place best = {0};
    if (s->state.slot < 0 && *full) return 1;
    if (s->tokens.length - s->progress.cached > 1 && look(kv, turns, count, r, s, &best)) return 1;
    if (s->state.slot < 0 && !slot_take(scheduler, kv, count, place, &best)) return *full = 1;
    if (best.at) go_to(kv, r, s, &best);
    return 0;
}
