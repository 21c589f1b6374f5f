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
#include "reuse.h"
#include "leave.h"
#include "prompt_scores.h"
#include "request.h"
#include "scheduler.h"

enum { PART_LEAST = 16 }; /* the fewest rows that are worth a step and a copy */

/* ---- remembered pages ---- */

/* The next `tokens` of a sequence were found in the cache. */
static void tokens_found(Prefix *prefix, Request *request, Sequence *s, int tokens)
{
    int end = s->cached += tokens, from = end - tokens;
    prefix->reused += tokens;
    if (s != request->sequence) return;
    if (from < request->reached) from = request->reached; /* it was preempted, and finds its own */
    if (end > request->reached) request->reached = end;
    if (end > request->spec.prompt_length) end = request->spec.prompt_length;
    if (end > from) request->reused += end - from;
}

void share_keep(Kv *kv, const Request *request, Sequence *s)
{
    Prefix *prefix = &kv->prefix;
    while ((s->kept + 1) * KV_PAGE <= s->cached) {
        const int32_t *tokens = s->tokens.ids + s->kept * KV_PAGE;
        int32_t own = s->pages[s->kept],
                page = prefix_find(prefix, request_stamp(request), s->behind, tokens);
        if (page < 0)
            prefix_add(prefix, page = own, request_stamp(request), s->behind, tokens);
        else if (!kv_whole(kv, page) && kv_whole(kv, own))
            kv_replace(kv, page, own), page = own;
        scores_keep(prefix, page, request, s->kept);
        s->behind = prefix_number(prefix, page);
        s->kept++;
    }
}

/* Looks for the pages of a sequence's next tokens, and puts those that are known behind its own.
 * Returns behind how many pages it can go on: where all have their frames that are read from there
 * on. `known` says how many are known. */
static int pages_find(const Kv *kv, const Request *request, const Sequence *s, int *known)
{
    const Prefix *prefix = &kv->prefix;
    uint64_t behind = s->behind;
    int n = s->kept, whole = s->seen, furthest = n;
    while ((n + 1) * KV_PAGE < s->tokens.length) { /* the last token is run, for its logits */
        const int32_t *tokens = s->tokens.ids + n * KV_PAGE;
        int32_t page = prefix_find(prefix, request_stamp(request), behind, tokens);
        if (page < 0 || !scores_suffice(&prefix->scores[page], request, n)) break;
        s->pages[n++] = page;
        if (!kv_whole(kv, page)) whole = n;
        if (whole <= leave_first(kv, n * KV_PAGE)) furthest = n;
        behind = prefix_number(prefix, page);
    }
    *known = n;
    return furthest;
}

static void known_pages(Kv *kv, Request *request, Sequence *s)
{
    Prefix *prefix = &kv->prefix;
    if (s->page_count != s->kept) return;
    int known, furthest = pages_find(kv, request, s, &known);
    if (known == s->kept) return;
    s->shared_end = known * KV_PAGE;
    if (furthest == s->kept) return;
    int first = leave_first(kv, furthest * KV_PAGE);
    leave_pages(kv, request, s, first);
    for (; s->kept < furthest; s->kept++) {
        int32_t page = s->pages[s->page_count++];
        scores_take(&prefix->scores[page], request, s->kept);
        kv_share(kv, page, s->kept >= first);
        s->behind = prefix_number(prefix, page);
        tokens_found(prefix, request, s, KV_PAGE);
    }
}

static int page_common(const Request *request, const Sequence *s, const Request *other,
                       const Sequence *theirs)
{
    if (theirs->kept != s->kept || theirs->behind != s->behind) return 0;
    if (request_stamp(other) != request_stamp(request)) return 0;
    int from = s->kept * KV_PAGE, n = 0, end = from + KV_PAGE;
    if (s->tokens.length < end) end = s->tokens.length;
    if (theirs->tokens.length < end) end = theirs->tokens.length;
    while (from + n < end && s->tokens.ids[from + n] == theirs->tokens.ids[from + n]) n++;
    return n;
}

/* ---- running sequences ---- */

void share_prompt(Kv *kv, Request *r)
{
    int common = r->spec.prompt_length - 1, whole = common / KV_PAGE, rest = common % KV_PAGE;
    for (int j = 1; j < r->spec.samples; j++) {
        Sequence *from = &r->sequence[0], *to = &r->sequence[j];
        to->ready = 1;
        if (kv->states.count) continue;
        to->seen = from->seen; /* what is read from the page of the prompt's last token on */
        for (int i = 0; i < whole; i++) {
            kv_share(kv, from->pages[i], i >= to->seen);
            to->pages[to->page_count++] = from->pages[i];
        }
        to->cached = whole * KV_PAGE;
        int32_t page = rest ? kv_fork(kv, from->pages[whole], rest) : -1;
        if (page < 0) continue;
        to->pages[to->page_count++] = page;
        to->cached = common;
    }
}

static int minimum(int a, int b)
{
    return a < b ? a : b;
}

/* Whether a turn's sequence, which has the tokens of s's next page, will complete that page. */
static int page_comes(const Turn *turn, const Request *r, const Sequence *s)
{
    int end = s->cached + KV_PAGE;
    if (end >= s->tokens.length) return 0;
    if (turn->from + turn->rows < end && turn->rows < r->client->rows) return 0;
    PageScores coming = scores_of(turn->request, s->kept);
    return scores_suffice(&coming, r, s->kept);
}

/* Rows of s's next page that may be copied from another sequence: those before its last token, and
 * before the first row whose results are wanted. */
static int rows_open(const Request *r, const Sequence *s)
{
    int n = 0, most = minimum(KV_PAGE, s->tokens.length - 1 - s->cached);
    while (n < most && !row_asked(r, s->cached + n)) n++;
    return n;
}

int share_goes_on(const Turn *turn)
{
    const Sequence *s = &turn->request->sequence[turn->sample];
    return !turn->draws || s->tokens.length + 1 < turn->request->limit;
}

int share_begin(Kv *kv, const Turn *turns, int count, Request *r, Sequence *s)
{
    known_pages(kv, r, s);
    if (s->page_count != s->kept || s->tokens.length - s->cached == 1) return 0;
    const Sequence *source = NULL;
    int copied = PART_LEAST - 1, open = rows_open(r, s), comes = 0;
    for (const Turn *turn = turns; turn < turns + count; turn++) {
        const Sequence *theirs = &turn->request->sequence[turn->sample];
        int common = page_common(r, s, turn->request, theirs);
        if (common == KV_PAGE && page_comes(turn, r, s)) return 1;
        int part = minimum(common, open);
        if (minimum(part, theirs->cached - s->cached) > copied) {
            copied = minimum(part, theirs->cached - s->cached);
            source = theirs;
        }
        int there = turn->from + turn->rows - s->cached; /* after this step */
        comes |= part >= PART_LEAST && there >= part && share_goes_on(turn);
    }
    if (!source) return comes && !s->waited ? s->waited = 1 : 0;
    int32_t page = kv_fork(kv, source->pages[s->kept], copied);
    if (page < 0) return 0;
    s->pages[s->page_count++] = page;
    tokens_found(&kv->prefix, r, s, copied);
    return 0;
}
