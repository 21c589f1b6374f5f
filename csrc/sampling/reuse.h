/* sampling/reuse.h - sequences with a common prefix. */
#ifndef TINSMITH_SAMPLING_REUSE_H
#define TINSMITH_SAMPLING_REUSE_H

#include "sequence.h"

/* Remembers the full pages of a sequence, and the scores of their rows. */
void share_keep(Kv *kv, const Request *request, Sequence *s);
/* A request's first sequence has its prompt in the cache. The others begin with its pages, up to
 * the prompt's last token, which each runs for itself. (Where there are states, resume_begin sees
 * to that.) */
void share_prompt(Kv *kv, Request *request);
/* Gives a sequence the pages of its missing tokens that the cache already has. Returns whether it
 * then waits for a page that one of this step's turns computes. */
int share_begin(Kv *kv, const Turn *turns, int count, Request *request, Sequence *s);
/* Whether a turn's sequence still runs in the next step, unless a stop token ends it. */
int share_goes_on(const Turn *turn);

#endif
