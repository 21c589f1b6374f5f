/* sampling/reuse_states.c - where a sequence can resume that shares a prefix with another, if the
 * model's layers have a state.
 *
 * Pages are then useful only with the state after them. States are cached at the ends of a few
 * pages (state_checkpoint.c). Running sequences have states too. Such a state is copied unchanged
 * if both sequences have the same tokens up to there, except perhaps the newest, which is then
 * rerun. Otherwise the copy is rewound to the beginning of its page (delta_state.h).
 *
 * A sequence starts at the furthest of these points. It waits while an earlier one in the queue
 * runs to a point that it would not pass in this step by itself. It checks again in every step, and
 * the first in the queue never waits. For the end of a prompt it waits one step, once: the other
 * may have ended in it (reuse.c). */
#include "../device/numbers.h"
#include "reuse_states.h"
#include "page_table.h"
#include "preempt.h"
#include "prompt_scores.h"
#include "request.h"
#include "reuse.h"
#include "state_checkpoint.h"

/* Where to resume: the rows before it are in the cache, and it has a state. */
typedef struct ResumePoint {
    int at;                /* rows; 0: the beginning */
    int32_t state;         /* the slot of the state to copy */
    int rewinds;           /* whether the copy is rewound to the beginning of its page */
    const Sequence *other; /* runs, and has the rows of an open page; NULL: a cached state */
} ResumePoint;

/* ---- cached states ---- */

/* How many full pages of the sequence's tokens the prefix cache has, its own included. *point is
 * the last of them with a state. */
static int pages_find(const PagePool *pool, const Sequence *s, ResumePoint *point)
{
    uint64_t parent = s->progress.parent;
    int n = s->progress.known;
    for (int32_t page; (page = reuse_find(pool, s, n, &parent)) >= 0; n++) {
        int32_t state = state_find(&pool->states, page);
        if (state >= 0) *point = (ResumePoint){.at = (n + 1) * KV_PAGE, .state = state};
    }
    return n;
}

/* ---- states of running sequences ---- */

/* Whether no scores are missing for the rows before `at` in its page. */
static int page_open(const Request *r, int at)
{
    for (int i = at / KV_PAGE * KV_PAGE; i < at; i++)
        if (row_pending(r, i)) return 0;
    return 1;
}

/* The point at which s can resume from another sequence. They share `common` tokens, of which
 * `known` pages are cached. The other's rows have run up to `cached`, and its state is valid for
 * rows from `first` on. */
static ResumePoint point_of(const Sequence *s, const Sequence *other, int first, int cached,
                            int common, int known)
{
    int at = min_int(min_int(common, s->tokens.length - 1), cached),
        page = first / KV_PAGE * KV_PAGE;
    if (at >= first && at / KV_PAGE <= known && page_open(s->request, at))
        return (ResumePoint){at, other->state.slot, 0, other};
    if (at >= page && page / KV_PAGE <= known)
        return (ResumePoint){page, other->state.slot, 1, other};
    return (ResumePoint){0};
}

static int tokens_common(const Sequence *s, const Sequence *other)
{
    if (request_stamp(s->request) != request_stamp(other->request)) return 0;
    int n = 0, end = min_int(s->tokens.length, other->tokens.length);
    while (n < end && s->tokens.ids[n] == other->tokens.ids[n]) n++;
    return n;
}

/* The rows before a run's point after this step. If its sequence ends in the step, the state is
 * cached at the beginning of a page. */
static int rows_coming(const ScheduledRows *run, const Sequence *s, int common, int known)
{
    int cached = run->from + run->rows;
    for (; (known + 1) * KV_PAGE <= min_int(cached, common); known++) {
        PageScores scores = scores_of(run->sequence->request, known);
        if (!scores_suffice(&scores, s->request, known)) break;
    }
    int at = point_of(s, run->sequence, cached - 1, cached, common, known).at;
    return run_continues(run) ? at : at / KV_PAGE * KV_PAGE;
}

/* ---- the furthest point ---- */

/* Finds the furthest point. Returns whether the sequence waits for a further one. */
static int point_find(const PagePool *pool, const ScheduledRows *runs, int count, Sequence *s,
                      ResumePoint *best)
{
    int known = pages_find(pool, s, best), cached = s->progress.cached, coming = 0, ends = 0;
    for (const ScheduledRows *run = runs; run < runs + count; run++) {
        const Sequence *other = run->sequence;
        int common = tokens_common(s, other), rows = other->progress.cached;
        if (common < REUSE_LEAST) continue;
        if (rows) {
            ResumePoint now = point_of(s, other, other->state.first_row, rows, common, known);
            if (now.at > best->at) *best = now;
        }
        rows = rows_coming(run, s, common, known);
        if (rows < coming || (rows == coming && !ends)) continue;
        coming = rows;
        ends = run->draws;
    }
    if (best->at < cached + REUSE_LEAST) *best = (ResumePoint){0};
    int begin = best->at ? best->at : cached, reach = begin + s->request->client->rows;
    int waits = coming >= begin + REUSE_LEAST && coming >= min_int(reach, s->tokens.length - 1);
    if (waits && (!ends || reuse_wait(&s->progress))) return 1;
    if (known > s->progress.known && known * KV_PAGE > begin)
        checkpoint_plan(&s->state, known * KV_PAGE);
    return 0;
}

/* ---- resuming ---- */

/* Whether the only slot left is a cached one from which the next sequence without a slot would
 * resume too. A group that finds too few slots then runs one by one, each resuming there. */
static int last_is_wanted(const Scheduler *scheduler, PagePool *pool, int entry)
{
    StatePool *states = &pool->states;
    if (states->free_count || !states->cached) return 0;
    while (++entry < scheduler->waiting && scheduler->queue[entry]->state.slot >= 0) {
    }
    if (entry == scheduler->waiting) return 0;
    ResumePoint next = {.state = -1};
    pages_find(pool, scheduler->queue[entry], &next);
    if (next.state < 0) return 0;
    state_touch(states, next.state);
    return states->unused.oldest == next.state;
}

/* Allocates a slot for a sequence that will resume at a point; 0: it has to wait. */
static int slot_allocate(const Scheduler *scheduler, PagePool *pool, int count, int entry,
                         const ResumePoint *point)
{
    if (point->at && !point->other) state_touch(&pool->states, point->state);
    if (point->at && count && last_is_wanted(scheduler, pool, entry)) return 0;
    return preempt_for_state(scheduler, pool, entry);
}

static void resume(PagePool *pool, Sequence *s, const ResumePoint *point)
{
    const Progress *p = &s->progress;
    int rest = point->at % KV_PAGE, before = p->cached;
    page_table_free(pool, &s->pages, p->known);
    reuse_pages(pool, s, point->at / KV_PAGE);
    if (rest) reuse_rows(pool, s, point->other, rest);
    state_slot_restore(pool, s, point->state, point->rewinds || p->cached < point->at);
    pool->prefix.reused += p->cached - before;
}

int reuse_states_begin(const Scheduler *scheduler, PagePool *pool, const ScheduledRows *runs,
                       int count, int entry, int *full)
{
    Sequence *s = scheduler->queue[entry];
    ResumePoint best = {0};
    if (s->state.slot < 0 && *full) return 1;
    if (s->tokens.length - s->progress.cached > 1 && point_find(pool, runs, count, s, &best))
        return 1;
    if (s->state.slot < 0 && !slot_allocate(scheduler, pool, count, entry, &best)) return *full = 1;
    if (best.at) resume(pool, s, &best);
    return 0;
}
