/* sampling/reuse.c - sequences with a common prefix compute it once: a sequence waits while another
 * one computes it, or copies the rows that exist.
 *
 * Requests that come together (a group's rollouts, a teacher's prompts with the group's answers)
 * all need the same page when they start. The first in line computes it. Another one waits if the
 * first completes the page in this step, or runs at least as many of its rows as the other could
 * itself. It then finds the page in the prefix cache (prefix_cache.c), and is never later than if
 * it were alone. It looks again in every step, so it never waits for a sequence that was stopped or
 * preempted. The first in line never waits.
 *
 * Where layers have a window, a page is of use only together with those that the rows behind it
 * read there. A sequence goes on at the furthest place where these have all their frames (leave.c
 * says which are kept), and computes the rest again.
 *
 * Where two sequences share only part of a page, the rest of a prompt, its rows are copied from a
 * sequence that goes on in that page. For all of them a sequence waits one step, once: the other
 * may have ended in it. */
#include <assert.h>

#include "reuse.h"
#include "leave.h"
#include "page_table.h"
#include "prompt_scores.h"
#include "request.h"
#include "scheduler.h"
#include "state_checkpoint.h"

enum { PART_LEAST = 16 }; /* the fewest rows that are worth a step and a copy */

/* ---- remembered pages ---- */

void progress_reset(Progress *progress)
{
    progress->cached = progress->known = 0;
    progress->parent = 0;
}

/* A sequence goes on behind a page that is known. */
static void page_passed(const Prefix *prefix, Progress *progress, int32_t page)
{
    progress->parent = prefix_number(prefix, page);
    progress->known++;
}

/* Remembers the full pages of a sequence, and the scores of their rows. */
static void pages_remember(Kv *kv, const Request *r, Sequence *s)
{
    Prefix *prefix = &kv->prefix;
    Progress *p = &s->progress;
    while ((p->known + 1) * KV_PAGE <= p->cached) {
        const int32_t *tokens = s->tokens.ids + p->known * KV_PAGE;
        int32_t own = s->pages.page[p->known],
                page = prefix_find(prefix, request_stamp(r), p->parent, tokens);
        if (page < 0)
            prefix_add(prefix, page = own, request_stamp(r), p->parent, tokens);
        else if (!kv_whole(kv, page) && kv_whole(kv, own))
            kv_replace(kv, page, own), page = own;
        scores_keep(prefix, page, r, p->known);
        page_passed(prefix, p, page);
    }
}

void share_ran(Kv *kv, Request *r, Sequence *s, int rows)
{
    int cached = s->progress.cached += rows;
    if (s == r->sequence && cached > r->reached) r->reached = cached;
    pages_remember(kv, r, s);
}

/* The tokens from there on were found in the cache. */
static void tokens_found(Prefix *prefix, Request *r, const Sequence *s, int from)
{
    int end = s->progress.cached;
    prefix->reused += end - from;
    if (s != r->sequence) return;
    if (from < r->reached) from = r->reached; /* it was preempted, and finds its own */
    if (end > r->reached) r->reached = end;
    if (end > r->spec.prompt_length) end = r->spec.prompt_length;
    if (end > from) r->reused += end - from;
}

int32_t share_find(const Kv *kv, const Request *r, const Sequence *s, int n, uint64_t *parent)
{
    const Prefix *prefix = &kv->prefix;
    const int32_t *tokens = s->tokens.ids + n * KV_PAGE;
    if ((n + 1) * KV_PAGE >= s->tokens.length)
        return -1; /* the last token is run, for its logits */
    int32_t page = prefix_find(prefix, request_stamp(r), *parent, tokens);
    if (page < 0 || !scores_suffice(&prefix->scores[page], r, n)) return -1;
    *parent = prefix_number(prefix, page);
    return page;
}

void share_pages(Kv *kv, Request *r, Sequence *s, int end)
{
    Progress *p = &s->progress;
    while (p->known < end) {
        uint64_t parent = p->parent;
        int32_t page = share_find(kv, r, s, p->known, &parent);
        assert(page >= 0);
        scores_take(&kv->prefix.scores[page], r, p->known);
        page_table_touch(kv, &s->pages, page);
        page_passed(&kv->prefix, p, page);
    }
    p->cached = end * KV_PAGE;
}

void share_rows(Kv *kv, Sequence *s, const Sequence *from, int rows)
{
    if (!page_table_fork(kv, &s->pages, from->pages.page[s->progress.known], rows)) return;
    s->progress.cached += rows;
}

int share_wait(Progress *progress)
{
    return progress->waited ? 0 : (progress->waited = 1);
}

/* Behind how many pages a sequence can go on: where all have their frames that are read from there
 * on. `known` says how many are known. */
static int pages_find(const Kv *kv, const Request *r, const Sequence *s, int *known)
{
    uint64_t parent = s->progress.parent;
    int n = s->progress.known, whole = s->pages.window_begin, furthest = n;
    for (int32_t page; (page = share_find(kv, r, s, n, &parent)) >= 0;) {
        n++;
        if (!kv_whole(kv, page)) whole = n;
        if (whole <= leave_first(kv, n * KV_PAGE)) furthest = n;
    }
    *known = n;
    return furthest;
}

static void known_pages(Kv *kv, Request *r, Sequence *s)
{
    int known, from = s->progress.cached;
    if (s->pages.count != s->progress.known) return;
    int furthest = pages_find(kv, r, s, &known);
    if (known == s->progress.known) return;
    state_plan(&s->state, known * KV_PAGE);
    if (furthest == s->progress.known) return;
    leave_pages(kv, r, s, leave_first(kv, furthest * KV_PAGE));
    share_pages(kv, r, s, furthest);
    tokens_found(&kv->prefix, r, s, from);
}

static int page_common(const Request *r, const Sequence *s, const Request *other,
                       const Sequence *theirs)
{
    const Progress *p = &s->progress;
    if (theirs->progress.known != p->known || theirs->progress.parent != p->parent) return 0;
    if (request_stamp(other) != request_stamp(r)) return 0;
    int from = p->known * KV_PAGE, n = from, end = from + KV_PAGE;
    if (s->tokens.length < end) end = s->tokens.length;
    if (theirs->tokens.length < end) end = theirs->tokens.length;
    while (n < end && s->tokens.ids[n] == theirs->tokens.ids[n]) n++;
    return n - from;
}

/* ---- running sequences ---- */

void share_prompt(Kv *kv, Request *r)
{
    int common = r->spec.prompt_length - 1, whole = common / KV_PAGE, rest = common % KV_PAGE;
    const Sequence *from = &r->sequence[0];
    for (int j = 1; j < r->spec.samples; j++) {
        Sequence *to = &r->sequence[j];
        to->progress.ready = 1;
        if (kv->states.count) continue;
        page_table_share(kv, &to->pages, &from->pages, whole);
        to->progress.cached = whole * KV_PAGE;
        if (rest && page_table_fork(kv, &to->pages, from->pages.page[whole], rest))
            to->progress.cached = common;
    }
}

static int minimum(int a, int b)
{
    return a < b ? a : b;
}

/* Whether a turn's sequence, which has the tokens of s's next page, will complete that page. */
static int page_comes(const Turn *turn, const Request *r, const Sequence *s)
{
    int end = s->progress.cached + KV_PAGE;
    if (end >= s->tokens.length) return 0;
    if (turn->from + turn->rows < end && turn->rows < r->client->rows) return 0;
    PageScores coming = scores_of(turn->request, s->progress.known);
    return scores_suffice(&coming, r, s->progress.known);
}

/* Rows of s's next page that may be copied from another sequence: those before its last token, and
 * before the first row whose results are wanted. */
static int rows_open(const Request *r, const Sequence *s)
{
    int n = 0, cached = s->progress.cached, most = minimum(KV_PAGE, s->tokens.length - 1 - cached);
    while (n < most && !row_asked(r, cached + n)) n++;
    return n;
}

int share_goes_on(const Turn *turn)
{
    const Sequence *s = turn_sequence(turn);
    return !turn->draws || s->tokens.length + 1 < turn->request->limit;
}

int share_begin(Kv *kv, const Turn *turns, int count, Request *r, Sequence *s)
{
    known_pages(kv, r, s);
    int cached = s->progress.cached;
    if (s->pages.count != s->progress.known || s->tokens.length - cached == 1) return 0;
    const Sequence *source = NULL;
    int copied = PART_LEAST - 1, open = rows_open(r, s), comes = 0;
    for (const Turn *turn = turns; turn < turns + count; turn++) {
        const Sequence *theirs = turn_sequence(turn);
        int common = page_common(r, s, turn->request, theirs);
        if (common == KV_PAGE && page_comes(turn, r, s)) return 1;
        int part = minimum(common, open), rows = minimum(part, theirs->progress.cached - cached);
        if (rows > copied) {
            copied = rows;
            source = theirs;
        }
        int there = turn->from + turn->rows - cached; /* after this step */
        comes |= part >= PART_LEAST && there >= part && share_goes_on(turn);
    }
    if (!source) return comes && share_wait(&s->progress);
    share_rows(kv, s, source, copied);
    tokens_found(&kv->prefix, r, s, cached);
    return 0;
}
