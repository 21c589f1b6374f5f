/* sampling/prompt_scores.h - log-probabilities of a prompt's rows: which are requested, and which
 * are stored with a page. */
#ifndef TINSMITH_SAMPLING_PROMPT_SCORES_H
#define TINSMITH_SAMPLING_PROMPT_SCORES_H

#include "prefix_cache.h"

/* The number of the request's targets that the row at a prompt position scores. */
int row_targets(const RequestSpec *spec, int position);
/* Whether a result of that row is still missing. */
int row_pending(const Request *request, int position);
/* All positions up to this one have their results. An image's rows need none. */
void scores_done(Request *request, int position);
/* Marks a request if one of its new log-probabilities is not a number. */
void scores_mark_nan(Request *request, const float *logprobs, size_t count);
/* A request's scores for page number `page` of its prompt, once its rows have run. */
PageScores scores_of(const Request *request, int page);
/* Whether these scores are all that a request needs from its page number `page`; scores_copy then
 * copies them into the request. */
int scores_suffice(const PageScores *scores, const Request *request, int page);
void scores_copy(const PageScores *scores, Request *request, int page);
/* Stores a request's scores with page `at` of the cache; frees them. */
void scores_store(PrefixCache *prefix, int32_t at, const Request *request, int page);
void scores_free(PrefixCache *prefix, int32_t at);

#endif
