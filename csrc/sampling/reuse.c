/* sampling/reuse.c - sequences with a common prefix compute it once: a sequence waits while another
 * one computes it, or copies the rows that exist.
 *
 * Requests that come together (a group's rollouts, a teacher's prompts with the group's answers)
 * all need the same page when they start. The first in the queue computes it. Another one waits if
 * the first completes the page in this step, or runs at least as many of its rows as the other
 * could itself. It then finds the page in the prefix cache (prefix_cache.c), and is never later
 * than if it were alone. It checks again in every step, so it never waits for a sequence that was
 * stopped or preempted. The first in the queue never waits.
 *
 * With windowed layers, a page is useful only with the earlier pages that the rows after it read. A
 * sequence resumes at the furthest page where these have all frames (window.c), and recomputes the
 * rest.
 *
 * If two sequences share only part of a page, at the end of a prompt, its rows are copied from a
 * sequence that continues in that page. A sequence waits only one step for such rows, once: the
 * other may have ended in it. */
#include <assert.h>

#include "../device/numbers.h"
#include "reuse.h"
#include "page_table.h"
#include "prompt_scores.h"
#include "request.h"
#include "scheduler.h"
#include "state_checkpoint.h"
#include "window.h"

/* ---- cached pages ---- */

void progress_reset(Progress *progress)
{
    progress->cached = progress->known = 0;
    progress->parent = 0;
}

/* Notes that a sequence's next page is in the prefix cache. */
static void page_known(const PrefixCache *prefix, Progress *progress, int32_t page)
{
    progress->parent = prefix_id(prefix, page);
    progress->known++;
}

/* Caches the full pages of a sequence, and the scores of their rows. */
static void pages_cache(PagePool *pool, Sequence *s)
{
    PrefixCache *prefix = &pool->prefix;
    Progress *p = &s->progress;
    uint64_t stamp = request_stamp(s->request);
    while ((p->known + 1) * KV_PAGE <= p->cached) {
        const int32_t *tokens = s->tokens.ids + p->known * KV_PAGE;
        int32_t own = s->pages.page[p->known], page = prefix_find(prefix, stamp, p->parent, tokens);
        if (page < 0)
            prefix_insert(prefix, page = own, stamp, p->parent, tokens);
        else if (!page_is_whole(pool, page) && page_is_whole(pool, own))
            page_replace(pool, page, own), page = own;
        scores_store(prefix, page, s->request, p->known);
        page_known(prefix, p, page);
    }
}

void reuse_advance(PagePool *pool, Sequence *s, int rows)
{
    int cached = s->progress.cached += rows;
    if (s->sample == 0 && cached > s->request->reached) s->request->reached = cached;
    pages_cache(pool, s);
}

/* Counts a sequence's tokens from `from` on as found in the cache. */
static void tokens_found(PrefixCache *prefix, const Sequence *s, int from)
{
    Request *r = s->request;
    int end = s->progress.cached;
    prefix->reused += end - from;
    if (s->sample) return;
    if (from < r->reached) from = r->reached; /* preempted: it finds its own pages */
    if (end > r->reached) r->reached = end;
    end = min_int(end, r->spec.prompt_length);
    if (end > from) r->reused += end - from;
}

int32_t reuse_find(const PagePool *pool, const Sequence *s, int n, uint64_t *parent)
{
    const PrefixCache *prefix = &pool->prefix;
    if ((n + 1) * KV_PAGE >= s->tokens.length)
        return -1; /* the last token must run, for its logits */
    int32_t page =
        prefix_find(prefix, request_stamp(s->request), *parent, s->tokens.ids + n * KV_PAGE);
    if (page < 0 || !scores_suffice(&prefix->scores[page], s->request, n)) return -1;
    *parent = prefix_id(prefix, page);
    return page;
}

void reuse_pages(PagePool *pool, Sequence *s, int end)
{
    Progress *p = &s->progress;
    while (p->known < end) {
        uint64_t parent = p->parent;
        int32_t page = reuse_find(pool, s, p->known, &parent);
        assert(page >= 0);
        scores_copy(&pool->prefix.scores[page], s->request, p->known);
        page_table_touch(pool, &s->pages, page);
        page_known(&pool->prefix, p, page);
    }
    p->cached = end * KV_PAGE;
}

void reuse_rows(PagePool *pool, Sequence *s, const Sequence *from, int rows)
{
    if (page_table_fork(pool, &s->pages, from->pages.page[s->progress.known], rows))
        s->progress.cached += rows;
}

int reuse_wait(Progress *progress)
{
    return progress->waited ? 0 : (progress->waited = 1);
}

/* The most pages after which a sequence can resume: the pages in its window have their frames.
 * *known is how many are cached. */
static int pages_find(const PagePool *pool, const Sequence *s, int *known)
{
    uint64_t parent = s->progress.parent;
    int n = s->progress.known, whole = s->pages.window_begin, furthest = n;
    for (int32_t page; (page = reuse_find(pool, s, n, &parent)) >= 0;) {
        n++;
        if (!page_is_whole(pool, page)) whole = n;
        if (whole <= window_first_page(pool, n * KV_PAGE)) furthest = n;
    }
    *known = n;
    return furthest;
}

/* Reuses the next pages of a sequence that holds only cached ones. */
static void pages_reuse(PagePool *pool, Sequence *s)
{
    int known, from = s->progress.cached, furthest = pages_find(pool, s, &known);
    if (known == s->progress.known) return;
    checkpoint_plan(&s->state, known * KV_PAGE);
    if (furthest == s->progress.known) return;
    window_free_before(pool, s, window_first_page(pool, furthest * KV_PAGE));
    reuse_pages(pool, s, furthest);
    tokens_found(&pool->prefix, s, from);
}

/* ---- running sequences ---- */

void reuse_prompt(PagePool *pool, Request *r)
{
    int common = r->spec.prompt_length - 1, whole = common / KV_PAGE, rest = common % KV_PAGE;
    const Sequence *from = &r->sequence[0];
    for (int j = 1; j < r->spec.samples; j++) {
        Sequence *to = &r->sequence[j];
        to->progress.ready = 1;
        if (pool->states.count) continue;
        page_table_copy(pool, &to->pages, &from->pages, whole);
        to->progress.cached = whole * KV_PAGE;
        if (rest && page_table_fork(pool, &to->pages, from->pages.page[whole], rest))
            to->progress.cached = common;
    }
}

/* How many tokens of a sequence's next page another one has in the same page. */
static int page_common(const Sequence *s, const Sequence *other)
{
    const Progress *p = &s->progress;
    if (other->progress.known != p->known || other->progress.parent != p->parent) return 0;
    if (request_stamp(other->request) != request_stamp(s->request)) return 0;
    int from = p->known * KV_PAGE, n = from,
        end = min_int(from + KV_PAGE, min_int(s->tokens.length, other->tokens.length));
    while (n < end && s->tokens.ids[n] == other->tokens.ids[n]) n++;
    return n - from;
}

/* Whether s can wait for a run whose sequence has the tokens of s's next page: the run completes
 * that page, or is no slower than s would be. */
static int page_comes(const ScheduledRows *run, const Sequence *s)
{
    int end = s->progress.cached + KV_PAGE;
    if (end >= s->tokens.length) return 0;
    if (run->from + run->rows < end && run->rows < s->request->client->rows) return 0;
    PageScores coming = scores_of(run->sequence->request, s->progress.known);
    return scores_suffice(&coming, s->request, s->progress.known);
}

/* Rows of s's next page that may be copied from another sequence: those before its last token, and
 * before the first row with missing scores. */
static int rows_open(const Sequence *s)
{
    int cached = s->progress.cached, most = min_int(KV_PAGE, s->tokens.length - 1 - cached), n = 0;
    while (n < most && !row_pending(s->request, cached + n)) n++;
    return n;
}

int run_continues(const ScheduledRows *run)
{
    const Sequence *s = run->sequence;
    return !run->draws || s->tokens.length + 1 < s->request->limit;
}

int reuse_begin(PagePool *pool, const ScheduledRows *runs, int count, Sequence *s)
{
    const Progress *p = &s->progress;
    if (s->pages.count == p->known) pages_reuse(pool, s);
    if (s->pages.count != p->known || s->tokens.length - p->cached == 1) return 0;
    const Sequence *source = NULL;
    int copied = REUSE_LEAST - 1, open = rows_open(s), comes = 0, cached = p->cached;
    for (const ScheduledRows *run = runs; run < runs + count; run++) {
        int common = page_common(s, run->sequence), part = min_int(common, open),
            rows = min_int(part, run->sequence->progress.cached - cached);
        if (common == KV_PAGE && page_comes(run, s)) return 1;
        if (rows > copied) {
            copied = rows;
            source = run->sequence;
        }
        int there = run->from + run->rows - cached; /* after this step */
        comes |= part >= REUSE_LEAST && there >= part && run_continues(run);
    }
    if (!source) return comes && reuse_wait(&s->progress);
    reuse_rows(pool, s, source, copied);
    tokens_found(&pool->prefix, s, cached);
    return 0;
}
