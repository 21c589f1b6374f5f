/* sampling/page_pool.h - pages of the cache, their frames, and states beside them. */
#ifndef TINSMITH_SAMPLING_PAGE_POOL_H
#define TINSMITH_SAMPLING_PAGE_POOL_H

#include "prefix_cache.h"
#include "state_pool.h"
#include "window.h"

typedef struct Kv {
    Model *model;
    Arena arena;
    Cache cache;
    Lists lists;
    int pages, free_count; /* numbers of pages */
    int longest;           /* pages that one sequence can have */
    int32_t *free_list;
    int32_t *users;          /* of each page: how many sequences hold it */
    int frames, free_frames; /* frame number `frames` is for padding rows */
    int32_t *frame_list;     /* the free ones */
    int32_t *frame;          /* [pages · lists] of each page, -1: none; the windowed ones last */
    Windows windows;
    Prefix prefix;
    States states;
} Kv;

Status kv_open(Kv *kv, Model *model, int64_t tokens);
void kv_close(Kv *kv);
/* A page for new content, with a frame in each list, or -1. */
int32_t kv_take(Kv *kv);
/* A sequence holds a page, or holds it no more: with its frames in the windowed lists, or without.
 */
void kv_share(Kv *kv, int32_t page, int windowed);
void kv_drop(Kv *kv, int32_t page, int windowed);
/* A sequence that holds a page holds its windowed frames no more. They are kept if the page is
 * known; where they are wanted they are the last to be given up. */
void kv_leave(Kv *kv, int32_t page, int wanted);
/* Whether a page has a frame in every list. */
int kv_whole(const Kv *kv, int32_t page);
/* A known page is replaced by one with the same content, which a sequence holds. */
void kv_replace(Kv *kv, int32_t page, int32_t by);
KvCount kv_count(const Kv *kv);
/* For tests: fills the memory of all free frames with NaN. */
void kv_spoil(Kv *kv);
/* Empties the prefix cache: the pages that no sequence holds. */
void kv_forget(Kv *kv);
/* Copy-on-write: a page with the first `count` keys of `page`, for a sequence that diverges from
 * it; -1 if there is none. */
int32_t kv_fork(Kv *kv, int32_t page, int count);
/* Copies the state in a slot to another. `rewinds`: the copy is taken back to the beginning of the
 * page of its newest row. */
void kv_state_copy(Kv *kv, int32_t from, int32_t to, int rewinds);

#endif
