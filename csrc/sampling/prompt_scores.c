/* sampling/prompt_scores.c - the scores that a request needs from its prompt's rows, and those
 * stored with a page of the cache.
 *
 * A row's scores depend only on the tokens and the weights, to the bit, like its keys and values:
 * scores are always at temperature 1. A scored prompt reuses a page only if every score it needs is
 * stored with it: per row the log-probability of the next token and the K best. The next token of a
 * page's last row is in the next page, so it is stored too. The K best are in order, ties by lower
 * id, so each list begins with the shorter ones. Scores of a request's targets and draws are not
 * stored: such a request runs the rows. So does a session whose weights may change: it gets the
 * scores of the weights that run them.
 *
 * A row's K best take 8·K bytes. Stored scores have a limit. At the limit, the next pages of the
 * cache lose their scores: pages are allocated in order, so those are the oldest. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "prompt_scores.h"

int row_targets(const RequestSpec *spec, int position)
{
    return spec->targets ? spec->starts[position + 1] - spec->starts[position] : 0;
}

int row_pending(const Request *r, int position)
{
    const RequestSpec *spec = &r->spec;
    if (position + 1 >= spec->prompt_length || position + 1 <= r->scored) return 0;
    if (spec->draws || row_targets(spec, position)) return 1;
    return (spec->prompt_logprobs || spec->topk_prompt) && spec->prompt[position + 1] >= 0;
}

void scores_done(Request *r, int position)
{
    const RequestSpec *spec = &r->spec;
    r->scored = position;
    while (r->scored + 1 < spec->prompt_length && spec->prompt[r->scored + 1] < 0 &&
           !row_pending(r, r->scored))
        r->scored++;
}

void scores_mark_nan(Request *r, const float *logprobs, size_t count)
{
    for (size_t i = 0; i < count; i++) r->overflowed |= isnan(logprobs[i]);
}

PageScores scores_of(const Request *r, int page)
{
    const RequestSpec *spec = &r->spec;
    int begin = page * KV_PAGE, end = begin + KV_PAGE;
    int first = spec->first_scored > 1 ? spec->first_scored - 1 : 0;
    int every = spec->prompt_logprobs || spec->topk_prompt || spec->draws;
    if (!every || spec->session || first >= end || end >= spec->prompt_length)
        return (PageScores){0};
    size_t at = (size_t)begin + 1, k = (size_t)spec->topk_prompt;
    return (PageScores){.rows = end - (first > begin ? first : begin),
                        .top = spec->topk_prompt,
                        .after = spec->prompt[end],
                        .logprobs = r->prompt_logprobs + at,
                        .top_logprobs = r->top_logprobs + at * k,
                        .top_ids = r->top_ids + at * k};
}

int scores_suffice(const PageScores *scores, const Request *r, int page)
{
    const RequestSpec *spec = &r->spec;
    int begin = page * KV_PAGE, end = begin + KV_PAGE;
    for (int p = begin; p < end; p++) {
        if (!row_pending(r, p)) continue;
        if (spec->draws || row_targets(spec, p)) return 0;
        if (end - p > scores->rows || spec->topk_prompt > scores->top) return 0;
        if (p + 1 == end && spec->prompt[end] != scores->after) return 0;
    }
    return 1;
}

void scores_copy(const PageScores *scores, Request *r, int page)
{
    int begin = page * KV_PAGE;
    size_t k = (size_t)r->spec.topk_prompt, top = (size_t)scores->top;
    for (int p = begin; p < begin + KV_PAGE; p++) {
        if (!row_pending(r, p)) continue;
        size_t to = (size_t)p + 1, row = (size_t)(p - begin);
        r->prompt_logprobs[to] = scores->logprobs[row];
        scores_mark_nan(r, scores->logprobs + row, 1);
        memcpy(r->top_logprobs + to * k, scores->top_logprobs + row * top, k * sizeof(float));
        memcpy(r->top_ids + to * k, scores->top_ids + row * top, k * sizeof(int32_t));
        scores_done(r, p + 1);
    }
}

/* ---- stored with the pages ---- */

/* Numbers of a page's scores, of 4 bytes each. */
static size_t last_id(const PageScores *scores)
{
    return KV_PAGE * (1 + 2 * (size_t)scores->top);
}

void scores_free(PrefixCache *prefix, int32_t at)
{
    PageScores *scores = &prefix->scores[at];
    if (scores->rows) prefix->scores_bytes -= last_id(scores) * sizeof(float);
    free(scores->logprobs);
    *scores = (PageScores){0};
}

void scores_store(PrefixCache *prefix, int32_t at, const Request *r, int page)
{
    PageScores scores = scores_of(r, page), *old = &prefix->scores[at];
    if (!scores.rows) return;
    assert(r->scored >= (page + 1) * KV_PAGE);
    if (old->rows >= scores.rows && old->top >= scores.top && old->after == scores.after) return;
    size_t bytes = last_id(&scores) * sizeof(float), top = KV_PAGE * (size_t)scores.top;
    if (bytes > prefix->scores_limit) return;
    scores_free(prefix, at);
    for (int32_t i = at; prefix->scores_bytes + bytes > prefix->scores_limit;)
        scores_free(prefix, i = (i + 1) % prefix->pages);
    float *to = malloc(bytes);
    if (!to) return; /* those rows will be run again */
    memcpy(to, scores.logprobs, KV_PAGE * sizeof *to);
    memcpy(to + KV_PAGE, scores.top_logprobs, top * sizeof *to);
    memcpy(to + KV_PAGE + top, scores.top_ids, top * sizeof *to);
    scores.logprobs = to;
    scores.top_logprobs = to + KV_PAGE;
    scores.top_ids = (int32_t *)(void *)(to + KV_PAGE + top);
    *old = scores;
    prefix->scores_bytes += bytes;
}
