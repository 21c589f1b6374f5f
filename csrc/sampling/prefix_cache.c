/* sampling/prefix_cache.c - the prefix cache: full pages that outlive their sequences, found by
 * their content.
 *
 * A page's keys and values depend only on the tokens up to its end and on the weights, to the bit,
 * because the ops are batch-invariant. So a page is cached under the weights (an adapter's stamp),
 * its parent, the page before it, and its own KV_PAGE tokens. A prompt that shares a prefix with an
 * earlier sequence reuses its pages. Tokens are compared, not only their hash. An unreferenced page
 * stays until page_allocate finds no free page: then the least recently used one is evicted. The
 * pages after an evicted page can no longer be found, because each inserted page gets a new id. A
 * page's scores are stored with it (prompt_scores.c). */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "prefix_cache.h"
#include "prompt_scores.h"

typedef struct CachedPage {
    uint64_t id, parent, stamp; /* id 0: the page is not cached; parent 0: it is a first page */
    int32_t next;               /* in its bucket; -1: the last */
    int32_t tokens[KV_PAGE];
} CachedPage;

enum { SCORES_SHARE = 16 }; /* stored scores take at most 1/16 of the cache's bytes */

Status prefix_open(PrefixCache *prefix, int pages, size_t bytes)
{
    *prefix = (PrefixCache){.pages = pages, .scores_limit = bytes / SCORES_SHARE};
    prefix->buckets = 16;
    while (prefix->buckets < pages) prefix->buckets *= 2;
    prefix->cached = calloc((size_t)pages, sizeof *prefix->cached);
    prefix->scores = calloc((size_t)pages, sizeof *prefix->scores);
    prefix->bucket = malloc((size_t)prefix->buckets * sizeof *prefix->bucket);
    if (!prefix->cached || !prefix->scores || !prefix->bucket ||
        !lru_open(&prefix->unused, pages)) {
        prefix_close(prefix);
        return fail(STATUS_MEMORY, "no memory to remember %d cache pages", pages);
    }
    memset(prefix->bucket, -1, (size_t)prefix->buckets * sizeof *prefix->bucket);
    return STATUS_OK;
}

void prefix_close(PrefixCache *prefix)
{
    for (int32_t page = 0; prefix->scores && page < prefix->pages; page++)
        scores_free(prefix, page);
    assert(prefix->scores_bytes == 0);
    free(prefix->cached);
    free(prefix->scores);
    free(prefix->bucket);
    lru_close(&prefix->unused);
    *prefix = (PrefixCache){0};
}

/* ---- by content ---- */

static int32_t *bucket_of(const PrefixCache *prefix, uint64_t stamp, uint64_t parent,
                          const int32_t *tokens)
{
    uint64_t hash = stamp * 0x9e3779b97f4a7c15u + parent;
    for (int i = 0; i < KV_PAGE; i++) {
        hash = (hash ^ (uint32_t)tokens[i]) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 32;
    }
    return &prefix->bucket[hash & (uint64_t)(prefix->buckets - 1)];
}

int32_t prefix_find(const PrefixCache *prefix, uint64_t stamp, uint64_t parent,
                    const int32_t *tokens)
{
    int32_t page = *bucket_of(prefix, stamp, parent, tokens);
    for (; page >= 0; page = prefix->cached[page].next) {
        const CachedPage *c = &prefix->cached[page];
        if (c->stamp == stamp && c->parent == parent &&
            memcmp(c->tokens, tokens, sizeof c->tokens) == 0)
            return page;
    }
    return -1;
}

/* The link to a page in its bucket. */
static int32_t *link_to(const PrefixCache *prefix, int32_t page)
{
    const CachedPage *c = &prefix->cached[page];
    int32_t *link = bucket_of(prefix, c->stamp, c->parent, c->tokens);
    while (*link != page) link = &prefix->cached[*link].next;
    return link;
}

static void prefix_remove(PrefixCache *prefix, int32_t page)
{
    CachedPage *c = &prefix->cached[page];
    *link_to(prefix, page) = c->next;
    c->id = 0;
    scores_free(prefix, page);
}

void prefix_insert(PrefixCache *prefix, int32_t page, uint64_t stamp, uint64_t parent,
                   const int32_t *tokens)
{
    CachedPage *c = &prefix->cached[page];
    if (c->id) prefix_remove(prefix, page); /* its parent was evicted */
    int32_t *bucket = bucket_of(prefix, stamp, parent, tokens);
    *c = (CachedPage){++prefix->last_id, parent, stamp, *bucket, {0}};
    memcpy(c->tokens, tokens, sizeof c->tokens);
    *bucket = page;
}

uint64_t prefix_id(const PrefixCache *prefix, int32_t page)
{
    return prefix->cached[page].id;
}

void prefix_move(PrefixCache *prefix, int32_t from, int32_t to)
{
    if (prefix->cached[to].id) prefix_remove(prefix, to);
    *link_to(prefix, from) = to;
    prefix->cached[to] = prefix->cached[from];
    prefix->scores[to] = prefix->scores[from];
    prefix->cached[from].id = 0;
    prefix->scores[from] = (PageScores){0};
}

/* ---- unreferenced pages ---- */

int prefix_release(PrefixCache *prefix, int32_t page)
{
    if (!prefix->cached[page].id) return 0;
    lru_append(&prefix->unused, page);
    return 1;
}

void prefix_touch(PrefixCache *prefix, int32_t page)
{
    lru_remove(&prefix->unused, page);
}

int32_t prefix_evict(PrefixCache *prefix)
{
    int32_t page = prefix->unused.oldest;
    if (page < 0) return -1;
    lru_remove(&prefix->unused, page);
    prefix_remove(prefix, page);
    return page;
}
