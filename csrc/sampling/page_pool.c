/* sampling/page_pool.c - the pages of the key-value cache: allocated, shared by sequences with a
 * common prefix, forked, freed. Pages in the prefix cache (prefix_cache.c) are evicted for others.
 * It also holds the slots of state_pool.c.
 *
 * A page is KV_PAGE positions of a sequence. It has a frame, their memory, in each list of layers
 * (Lists). Each layer of a list has its own region (cache_at), and a frame has the same number in
 * all of them; the device chooses the layout inside. All lists share the frames. A model without
 * windows has one list.
 *
 * Frames in the windowed lists have their own reference count. When no sequence reads them any more
 * (window.c), they are freed if the prefix cache does not have the page, else cached until evicted.
 * The page keeps its other frames. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../model/stages.h"
#include "page_pool.h"

enum { KNOWN_SHARE = 4 }; /* pages for each one with frames, if all layers have a window */

static int list_count(const PagePool *pool)
{
    return pool->lists.full + pool->lists.windowed;
}

/* ---- opening and closing ---- */

/* The numbers of frames, of pages, and of pages per sequence. */
static void page_pool_measure(PagePool *pool, int64_t tokens)
{
    const Model *m = pool->model;
    int pages = (int)((tokens + KV_PAGE - 1) / KV_PAGE), context = m->shape.context;
    pool->lists = m->lists;
    pool->frames = (int)budget_frames(m, tokens);
    pool->longest = pages;
    pool->pages = pool->lists.full ? pool->frames / pool->lists.full : 0;
    if (pool->lists.full) return;
    if (context > CACHE_TOKENS_MAX) context = CACHE_TOKENS_MAX;
    if (pages >= budget_window_pages(m, STEP_ROWS)) pool->longest = context / KV_PAGE + 1;
    pool->pages = KNOWN_SHARE * pages + pool->longest;
}

/* Places (or measures) each stage's frames, among them that of padding rows, and states. */
static void caches_place(PagePool *pool, Arenas *arenas, int slots)
{
    const Model *m = pool->model;
    for (int k = 0; k < m->stages; k++) {
        Arena *arena = &arenas->of[k];
        size_t bytes = (size_t)(pool->frames + 1) * frame_bytes(m, k) / 2,
               state = state_bytes(m, k);
        Cache *cache = &pool->cache[k];
        *cache = (Cache){.tokens = (size_t)(pool->frames + 1) * KV_PAGE, .state_bytes = state};
        cache->k = arena_take(arena, bytes);
        cache->v = arena_take(arena, bytes);
        if (slots) cache->states = arena_take(arena, (size_t)slots * state);
        arena_take(arena, 1); /* an arena without bytes has no memory */
    }
}

static Status page_pool_memory(PagePool *pool, int64_t tokens, int slots)
{
    const Model *m = pool->model;
    Arenas measured = {0};
    char purpose[96];
    snprintf(purpose, sizeof purpose, "a cache of keys and values of %lld tokens%s",
             (long long)(tokens + KV_PAGE - 1) / KV_PAGE * KV_PAGE,
             slots ? ", with sequences' states" : "");
    caches_place(pool, &measured, slots);
    TRY(arenas_reserve(m, &pool->arenas, &measured, purpose));
    caches_place(pool, &pool->arenas, slots);
    size_t pages = (size_t)pool->pages, lists = (size_t)list_count(pool);
    pool->free_list = malloc(pages * sizeof *pool->free_list);
    pool->refs = calloc(pages, sizeof *pool->refs);
    pool->frame_list = malloc(((size_t)pool->frames + 1) * sizeof *pool->frame_list);
    pool->frame = malloc((pages * lists + 1) * sizeof *pool->frame);
    if (!pool->free_list || !pool->refs || !pool->frame_list || !pool->frame ||
        !lru_open(&pool->windows, pool->pages))
        return fail(STATUS_MEMORY, "no memory for a list of %d cache pages", pool->pages);
    memset(pool->frame, -1, (pages * lists + 1) * sizeof *pool->frame);
    return STATUS_OK;
}

Status page_pool_open(PagePool *pool, Model *model, int64_t tokens)
{
    *pool = (PagePool){.model = model};
    page_pool_measure(pool, tokens);
    int slots = budget_states(model, (int64_t)pool->longest * KV_PAGE);
    Status status = page_pool_memory(pool, tokens, slots);
    size_t bytes = arenas_size(&pool->arenas);
    if (!status) status = prefix_open(&pool->prefix, pool->pages, bytes);
    if (!status) status = state_pool_open(&pool->states, slots, pool->pages);
    if (status) {
        page_pool_close(pool);
        return status;
    }
    for (int i = 0; i < pool->pages; i++) pool->free_list[i] = pool->pages - 1 - i;
    for (int i = 0; i < pool->frames; i++) pool->frame_list[i] = pool->frames - 1 - i;
    pool->free_count = pool->pages;
    pool->free_frames = pool->frames;
    return STATUS_OK;
}

void page_pool_close(PagePool *pool)
{
    arenas_release(&pool->arenas);
    free(pool->free_list);
    free(pool->refs);
    lru_close(&pool->windows);
    free(pool->frame_list);
    free(pool->frame);
    prefix_close(&pool->prefix);
    state_pool_close(&pool->states);
    *pool = (PagePool){0};
}

/* ---- frames ---- */

static int32_t *frames_of(const PagePool *pool, int32_t page)
{
    return pool->frame + page * list_count(pool);
}

/* Frees a page's frames in the lists from this one on. */
static void frames_free(PagePool *pool, int32_t page, int list)
{
    for (int32_t *frame = frames_of(pool, page); list < list_count(pool); list++) {
        if (frame[list] >= 0) pool->frame_list[pool->free_frames++] = frame[list];
        frame[list] = -1;
    }
}

int page_is_whole(const PagePool *pool, int32_t page)
{
    return frames_of(pool, page)[list_count(pool) - 1] >= 0;
}

static void free_list_add(PagePool *pool, int32_t page)
{
    lru_remove(&pool->windows, page);
    frames_free(pool, page, 0);
    pool->free_list[pool->free_count++] = page;
}

/* Evicts the least recently used page and its cached state; 0: there is none. */
static int page_evict(PagePool *pool)
{
    int32_t page = prefix_evict(&pool->prefix);
    if (page < 0) return 0;
    state_evict(&pool->states, page);
    free_list_add(pool, page);
    return 1;
}

/* Evicts a page's frames in the windowed lists; 0: there are none, or only expected ones. */
static int window_evict(PagePool *pool, int expected)
{
    int32_t page = pool->windows.oldest;
    if (page < 0 || pool->refs[page].expected > expected) return 0;
    lru_remove(&pool->windows, page);
    frames_free(pool, page, pool->lists.full);
    return 1;
}

/* Evicts until a page can be allocated: first windowed frames not expected to be read, then pages,
 * then the other windowed frames. */
static int evict_for_page(PagePool *pool)
{
    int frames = list_count(pool);
    while (pool->free_frames < frames || !pool->free_count) {
        int lacks = pool->free_frames < frames;
        if (lacks && window_evict(pool, 0)) continue;
        if (page_evict(pool)) continue;
        if (!lacks || !window_evict(pool, 1)) return 0;
    }
    return 1;
}

/* ---- pages ---- */

static void window_touch(PagePool *pool, int32_t page)
{
    if (pool->refs[page].windows++ == 0) lru_remove(&pool->windows, page);
}

int32_t page_allocate(PagePool *pool)
{
    if (!evict_for_page(pool)) return -1;
    int32_t page = pool->free_list[--pool->free_count], *frame = frames_of(pool, page);
    for (int i = 0; i < list_count(pool); i++) frame[i] = pool->frame_list[--pool->free_frames];
    pool->refs[page].count = 1;
    window_touch(pool, page);
    return page;
}

void page_touch(PagePool *pool, int32_t page, int windowed)
{
    if (pool->refs[page].count++ == 0) prefix_touch(&pool->prefix, page);
    if (windowed) window_touch(pool, page);
}

void page_free_window(PagePool *pool, int32_t page, int expected)
{
    if (--pool->refs[page].windows || !pool->lists.windowed) return;
    pool->refs[page].expected = expected;
    if (!prefix_id(&pool->prefix, page))
        frames_free(pool, page, pool->lists.full);
    else if (expected)
        lru_append(&pool->windows, page);
    else
        lru_prepend(&pool->windows, page);
}

void page_free(PagePool *pool, int32_t page, int windowed)
{
    if (windowed) page_free_window(pool, page, 1);
    if (--pool->refs[page].count == 0 && !prefix_release(&pool->prefix, page))
        free_list_add(pool, page);
}

void page_replace(PagePool *pool, int32_t page, int32_t by)
{
    int unused = pool->refs[page].count == 0;
    if (unused) prefix_touch(&pool->prefix, page);
    prefix_move(&pool->prefix, page, by);
    if (unused) free_list_add(pool, page);
}

void pages_evict(PagePool *pool)
{
    while (page_evict(pool)) {
    }
}

int32_t page_fork(PagePool *pool, int32_t page, int count)
{
    int32_t copy = page_allocate(pool);
    const Model *m = pool->model;
    for (int l = 0; copy >= 0 && l < m->shape.layers; l++) {
        if (!layer_token(&m->shape, l)) continue;
        const Stage *stage = stage_of(m, l);
        const Cache *cache = &pool->cache[stage - m->stage];
        Device *d = stage->dev;
        size_t at = cache_at(m, cache, l);
        int list = cache_list(m, cache, l);
        d->kv_copy(d, cached_at(cache->k, at), cached_at(cache->v, at), frames_of(pool, page)[list],
                   frames_of(pool, copy)[list], count, m->shape.kv_heads, m->shape.head_width);
    }
    return copy;
}

void state_copy(PagePool *pool, int32_t from, int32_t to, int rewinds)
{
    const Model *m = pool->model;
    for (int k = 0; k < m->stages && from != to; k++) {
        const Cache *cache = &pool->cache[k];
        Device *dev = m->stage[k].dev;
        size_t bytes = cache->state_bytes;
        dev->copy(dev, cache->states + (size_t)to * bytes, cache->states + (size_t)from * bytes,
                  bytes);
    }
    if (rewinds) cache_rewind(m, pool->cache, to);
}

/* ---- for tests ---- */

CacheCounts page_pool_counts(const PagePool *pool)
{
    Lists lists = pool->lists;
    CacheCounts count = {.full = lists.full, .windowed = lists.windowed};
    count.frames = pool->frames;
    count.free = pool->free_frames;
    for (int32_t page = 0; page < pool->pages; page++) {
        int used = pool->refs[page].count > 0, read = pool->refs[page].windows > 0;
        count.used += used;
        count.used_windows += read;
        count.cached += !used && prefix_id(&pool->prefix, page);
        count.cached_windows += !read && lists.windowed && page_is_whole(pool, page);
    }
    return count;
}

void page_pool_spoil(PagePool *pool)
{
    const Model *m = pool->model;
    size_t bytes = m->lists.token / 2 * KV_PAGE * m->dev->cached_bytes;
    char *nan = malloc(bytes);
    if (nan) memset(nan, 0xff, bytes);
    for (int l = 0; l < m->shape.layers && nan; l++) {
        if (!layer_token(&m->shape, l)) continue;
        const Stage *stage = stage_of(m, l);
        const Cache *cache = &pool->cache[stage - m->stage];
        Device *d = stage->dev;
        size_t at = cache_at(m, cache, l);
        for (int i = 0; i < pool->free_frames; i++) {
            size_t frame = at + (size_t)pool->frame_list[i] * bytes;
            d->upload(d, (char *)(void *)cache->k + frame, nan, bytes);
            d->upload(d, (char *)(void *)cache->v + frame, nan, bytes);
        }
    }
    free(nan);
}
