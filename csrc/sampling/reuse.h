/* sampling/reuse.h - sequences with a common prefix. */
#ifndef TINSMITH_SAMPLING_REUSE_H
#define TINSMITH_SAMPLING_REUSE_H

#include "sequence.h"

enum { REUSE_LEAST = 16 }; /* the fewest rows that are worth a step and a copy */

/* Resets: nothing of a sequence is in the cache. */
void progress_reset(Progress *progress);
/* After `rows` rows of a sequence have run: caches its full pages with their scores. */
void reuse_advance(PagePool *pool, Sequence *s, int rows);
/* Called when a request's first sequence has its prompt in the cache. The others start with its
 * pages, up to the prompt's last token, which each runs itself. (With states, reuse_states_begin
 * does that.) */
void reuse_prompt(PagePool *pool, Request *request);
/* Gives a sequence the cached pages of its missing tokens. Returns whether it waits for a page that
 * this step computes. */
int reuse_begin(PagePool *pool, const ScheduledRows *runs, int count, Sequence *s);
/* The cached page number n of a sequence's tokens, after the page of id *parent, if it has all
 * scores that the request needs, else -1. *parent becomes its id. */
int32_t reuse_find(const PagePool *pool, const Sequence *s, int n, uint64_t *parent);
/* Appends the cached pages up to page number `end` to a sequence that holds only cached pages. */
void reuse_pages(PagePool *pool, Sequence *s, int end);
/* Copies the first rows of its next page from another sequence, if a page is left. */
void reuse_rows(PagePool *pool, Sequence *s, const Sequence *from, int rows);
/* A sequence waits for another's rows only once: returns 1 the first time. */
int reuse_wait(Progress *progress);
/* Whether a sequence still runs after these rows, unless a stop token ends it. */
int run_continues(const ScheduledRows *run);

#endif
