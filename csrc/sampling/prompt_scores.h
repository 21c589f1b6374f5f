/* sampling/prompt_scores.h - the results that a request wants from its prompt's rows, and those
 * that are stored with a page. */
#ifndef TINSMITH_SAMPLING_PROMPT_SCORES_H
#define TINSMITH_SAMPLING_PROMPT_SCORES_H

#include "prefix_cache.h"

/* Ids from the request's own lists that are scored in the row of a prompt's position. */
int row_targets(const RequestSpec *spec, int position);
/* Whether a result of that row is still missing. */
int row_asked(const Request *request, int position);
/* New log-probabilities of a request, which is marked where one of them is not a number. */
void scores_look(Request *request, const float *logprobs, size_t count);
/* The scores that a request has for page number `page` of its prompt, once its rows have been
 * run. */
PageScores scores_of(const Request *request, int page);
/* Whether those scores are all that a request wants from its own page of that number; if so, copies
 * them into the request. */
int scores_suffice(const PageScores *known, const Request *request, int page);
void scores_take(const PageScores *known, Request *request, int page);
/* Remembers it with a page of the cache; forgets it. */
void scores_keep(Prefix *prefix, int32_t at, const Request *request, int page);
void scores_drop(Prefix *prefix, int32_t at);

#endif
