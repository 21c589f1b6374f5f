/* sampling/prefix_cache.h - full pages that outlive their sequences, found by their content. */
#ifndef TINSMITH_SAMPLING_PREFIX_CACHE_H
#define TINSMITH_SAMPLING_PREFIX_CACHE_H

#include "lru.h"
#include "sampler.h"

/* The scores of the last `rows` rows of a page; 0: none are stored. */
typedef struct PageScores {
    int rows, top;       /* per row the log-probability of the next token, and the `top` best */
    int32_t after;       /* the next token of the page's last row */
    float *logprobs;     /* [KV_PAGE] */
    float *top_logprobs; /* [KV_PAGE · top] */
    int32_t *top_ids;
} PageScores;

typedef struct PrefixCache {
    int pages;
    struct CachedPage *cached; /* [pages] private to prefix_cache.c */
    PageScores *scores;        /* [pages] prompt_scores.c's */
    size_t scores_bytes, scores_limit;
    int32_t *bucket; /* [buckets] the first page of each, or -1 */
    int buckets;
    Lru unused; /* cached pages that no sequence references */
    uint64_t last_id;
    int64_t reused; /* tokens found here instead of computed */
} PrefixCache;

/* For a cache of `pages` pages that takes `bytes` bytes in total. */
Status prefix_open(PrefixCache *prefix, int pages, size_t bytes);
void prefix_close(PrefixCache *prefix);
/* A page's reference count has become 0: it may be evicted. Returns 0 if it is not cached. */
int prefix_release(PrefixCache *prefix, int32_t page);
/* A page is referenced again. */
void prefix_touch(PrefixCache *prefix, int32_t page);
/* Evicts the least recently used page, and returns it; -1 if there is none. */
int32_t prefix_evict(PrefixCache *prefix);
/* The page with these KV_PAGE tokens after the page of id `parent` (0: none), under the weights of
 * that stamp; -1 if there is none. */
int32_t prefix_find(const PrefixCache *prefix, uint64_t stamp, uint64_t parent,
                    const int32_t *tokens);
/* Caches a page by its content, with a new id. */
void prefix_insert(PrefixCache *prefix, int32_t page, uint64_t stamp, uint64_t parent,
                   const int32_t *tokens);
/* 0: the page is not cached. */
uint64_t prefix_id(const PrefixCache *prefix, int32_t page);
/* Moves content, scores and id to another page, which is referenced. */
void prefix_move(PrefixCache *prefix, int32_t from, int32_t to);

#endif
