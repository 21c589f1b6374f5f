/* sampling/reuse.h - sequences with a common prefix. */
#ifndef TINSMITH_SAMPLING_REUSE_H
#define TINSMITH_SAMPLING_REUSE_H

#include "sequence.h"

enum { REUSE_LEAST = 16 }; /* the fewest rows that are worth a step and a copy */

/* Nothing of a sequence is in the cache. */
void progress_reset(Progress *progress);
/* `rows` rows of a sequence have run: full pages are cached, with the scores of their rows. */
void reuse_advance(PagePool *pool, Sequence *s, int rows);
/* A request's first sequence has its prompt in the cache. The others begin with its pages, up to
 * the prompt's last token, which each runs for itself. (Where there are states, reuse_states_begin
 * does that.) */
void reuse_prompt(PagePool *pool, Request *request);
/* Gives a sequence the pages of its missing tokens that the cache already has. Returns whether it
 * then waits for a page that this step computes. */
int reuse_begin(PagePool *pool, const ScheduledRows *runs, int count, Sequence *s);
/* The cached page number n of a sequence's tokens, after the page of id *parent, if it has all
 * scores that the request wants, else -1. *parent becomes its id. */
int32_t reuse_find(const PagePool *pool, const Sequence *s, int n, uint64_t *parent);
/* The pages up to page number `end`, which are cached, become those of a sequence that holds cached
 * pages alone. */
void reuse_pages(PagePool *pool, Sequence *s, int end);
/* Copies the first rows of its next page from another sequence, if there is a page. */
void reuse_rows(PagePool *pool, Sequence *s, const Sequence *from, int rows);
/* A sequence waits for another one's rows, once: returns whether it had not yet. */
int reuse_wait(Progress *progress);
/* Whether a sequence still runs after these rows, unless a stop token ends it. */
int run_continues(const ScheduledRows *run);

#endif
