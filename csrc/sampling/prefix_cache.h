/* sampling/prefix_cache.h - full pages that outlive their sequences, found by their content. */
#ifndef TINSMITH_SAMPLING_PREFIX_CACHE_H
#define TINSMITH_SAMPLING_PREFIX_CACHE_H

#include "lru.h"
#include "sampler.h"

/* The scores of the tokens after the last `rows` rows of a page. 0: nothing is known. */
typedef struct PageScores {
    int rows, top;       /* of each row the log-probability of its next token, and the `top` best */
    int32_t after;       /* the next token of the page's last row */
    float *logprobs;     /* [KV_PAGE] */
    float *top_logprobs; /* [KV_PAGE · top] */
    int32_t *top_ids;
} PageScores;

typedef struct Prefix {
    int pages;
    struct Memory *memory; /* [pages] private to prefix_cache.c: the known content of a page */
    PageScores *scores;    /* [pages] prompt_scores.c's */
    size_t scores_bytes, scores_most;
    int32_t *bucket; /* [buckets] the first page of each, or -1 */
    int buckets;
    Lru unused;       /* remembered pages that no sequence holds */
    uint64_t numbers; /* given so far */
    int64_t reused;   /* tokens that were found here instead of computed */
} Prefix;

/* For a cache of `pages` pages that takes `bytes` bytes in all. */
Status prefix_open(Prefix *prefix, int pages, size_t bytes);
void prefix_close(Prefix *prefix);
/* No sequence holds this page any more. It is kept if its content is known, else 0. */
int prefix_lay(Prefix *prefix, int32_t page);
/* A sequence holds a page again that prefix_lay kept. */
void prefix_lift(Prefix *prefix, int32_t page);
/* Evicts the least recently used page, and returns it; -1 if there is none. */
int32_t prefix_evict(Prefix *prefix);
/* The page with these KV_PAGE tokens behind the page of number `before` (0: none), under the
 * weights of that stamp; -1 if there is none. */
int32_t prefix_find(const Prefix *prefix, uint64_t stamp, uint64_t before, const int32_t *tokens);
/* Remembers a page's content; its number is new. */
void prefix_add(Prefix *prefix, int32_t page, uint64_t stamp, uint64_t before,
                const int32_t *tokens);
uint64_t prefix_number(const Prefix *prefix, int32_t page);
/* What is known of a page, its number too, is known of another from now on, which a sequence holds
 * and whose content is the same. */
void prefix_move(Prefix *prefix, int32_t from, int32_t to);

#endif
