/* sampling/page_pool.h - pages of the cache, their frames, and states. */
#ifndef TINSMITH_SAMPLING_PAGE_POOL_H
#define TINSMITH_SAMPLING_PAGE_POOL_H

#include "prefix_cache.h"
#include "state_pool.h"

/* Reference counts of a page, and of its frames in the windowed lists. */
typedef struct PageRefs {
    int32_t count, windows;
    int expected; /* whether a later sequence may read those frames */
} PageRefs;

typedef struct PagePool {
    Model *model;
    Arenas arenas;
    Cache cache[STAGES_MOST]; /* each stage's */
    Lists lists;
    int pages, free_count;
    int longest; /* pages that one sequence can have */
    int32_t *free_list;
    PageRefs *refs;          /* [pages] */
    Lru windows;             /* pages whose windowed frames are cached, unreferenced */
    int frames, free_frames; /* frame number `frames` is for padding rows */
    int32_t *frame_list;     /* free frames */
    int32_t *frame;          /* [pages · lists] frames of each page, -1: none; windowed ones last */
    PrefixCache prefix;
    StatePool states;
} PagePool;

Status page_pool_open(PagePool *pool, Model *model, int64_t tokens);
void page_pool_close(PagePool *pool);
/* A new page with a frame in each list and one reference; -1: none is left. */
int32_t page_allocate(PagePool *pool);
/* Adds or drops a reference to a page, with its windowed frames or without. */
void page_touch(PagePool *pool, int32_t page, int windowed);
void page_free(PagePool *pool, int32_t page, int windowed);
/* Drops only the reference to its windowed frames. If `expected` to be read, they are evicted
 * last. */
void page_free_window(PagePool *pool, int32_t page, int expected);
/* Whether a page has a frame in every list. */
int page_is_whole(const PagePool *pool, int32_t page);
/* Replaces a cached page by a referenced one with the same content. */
void page_replace(PagePool *pool, int32_t page, int32_t by);
/* Copy-on-write: a new page with the first `count` keys of `page`; -1: none is left. */
int32_t page_fork(PagePool *pool, int32_t page, int count);
/* Empties the prefix cache. */
void pages_evict(PagePool *pool);
/* Copies a slot's state to another slot. `rewinds`: the copy is rewound to the beginning of the
 * page of its newest row. */
void state_copy(PagePool *pool, int32_t from, int32_t to, int rewinds);
CacheCounts page_pool_counts(const PagePool *pool);
/* For tests: fills the memory of all free frames with NaN. */
void page_pool_spoil(PagePool *pool);

#endif
