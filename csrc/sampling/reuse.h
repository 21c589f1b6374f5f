/* sampling/reuse.h - sequences with a common prefix. */
#ifndef TINSMITH_SAMPLING_REUSE_H
#define TINSMITH_SAMPLING_REUSE_H

#include "sequence.h"

/* Nothing of a sequence is in the cache. */
void progress_reset(Progress *progress);
/* `rows` rows of a sequence have run: full pages are remembered, with the scores of their rows. */
void share_ran(Kv *kv, Request *request, Sequence *s, int rows);
/* A request's first sequence has its prompt in the cache. The others begin with its pages, up to
 * the prompt's last token, which each runs for itself. (Where there are states, resume_begin sees
 * to that.) */
void share_prompt(Kv *kv, Request *request);
/* Gives a sequence the pages of its missing tokens that the cache already has. Returns whether it
 * then waits for a page that one of this step's turns computes. */
int share_begin(Kv *kv, const Turn *turns, int count, Request *request, Sequence *s);
/* The page of a sequence's tokens of number n, behind the page of number *parent, if it is known
 * with all scores that the request wants, else -1. *parent is its number then. */
int32_t share_find(const Kv *kv, const Request *request, const Sequence *s, int n,
                   uint64_t *parent);
/* Gives a sequence that holds known pages alone the ones before page number `end`, which are known
 * too. */
void share_pages(Kv *kv, Request *request, Sequence *s, int end);
/* Copies the first rows of its next page from another sequence, if there is a page. */
void share_rows(Kv *kv, Sequence *s, const Sequence *from, int rows);
/* A sequence waits for another one's rows, once: returns whether it had not yet. */
int share_wait(Progress *progress);
/* Whether a turn's sequence still runs in the next step, unless a stop token ends it. */
int share_goes_on(const Turn *turn);

#endif
