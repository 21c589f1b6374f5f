/* sampling/page_pool.c - the pages of the key-value cache: allocated, shared by sequences with a
 * common prefix, forked, freed. Pages whose content is in the prefix cache (prefix_cache.c) are
 * reused last. Beside them lie the slots of state_pool.c.
 *
 * A page is KV_PAGE positions of a sequence. It has a frame, the memory for them, in each list of
 * layers (core.h). Each layer of a list has a region of its own (cache_at), and a frame's number is
 * the same in all of them; the layout inside is up to the device. All lists share the frames. When
 * no sequence reads a page's frames in the windowed lists any more, they are given back, or kept as
 * long as nobody needs the room (window.c); the page goes on with the others. In a model without
 * windows a page has one frame, of all layers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "page_pool.h"

enum { KNOWN_SHARE = 4 }; /* pages without any frame of their own, for each that has one */

static int lists_count(const Kv *kv)
{
    return kv->lists.full + kv->lists.windowed;
}

/* ---- opening and closing ---- */

/* How many frames and pages there are, and how many of a single sequence. */
static void kv_measure(Kv *kv, int64_t tokens)
{
    const Model *m = kv->model;
    int pages = (int)((tokens + KV_PAGE - 1) / KV_PAGE), context = m->shape.context;
    kv->lists = m->lists;
    kv->frames = (int)budget_frames(m, tokens);
    kv->longest = pages;
    kv->pages = kv->lists.full ? kv->frames / kv->lists.full : 0;
    if (kv->lists.full) return;
    if (context > CACHE_TOKENS_MAX) context = CACHE_TOKENS_MAX;
    if (pages >= budget_window_pages(m, STEP_ROWS)) kv->longest = context / KV_PAGE + 1;
    kv->pages = KNOWN_SHARE * pages + kv->longest;
}

static Status kv_memory(Kv *kv, int64_t tokens, int slots)
{
    size_t bytes = (size_t)(kv->frames + 1) * frame_bytes(kv->model) / 2,
           states = (size_t)slots * kv->cache.state_bytes;
    char purpose[96];
    snprintf(purpose, sizeof purpose, "a cache of keys and values of %lld tokens%s",
             (long long)(tokens + KV_PAGE - 1) / KV_PAGE * KV_PAGE,
             slots ? ", with sequences' states" : "");
    TRY(arena_reserve(&kv->arena, 2 * bytes + states + 768, purpose));
    kv->cache.k = arena_take(&kv->arena, bytes);
    kv->cache.v = arena_take(&kv->arena, bytes);
    if (slots) kv->cache.states = arena_take(&kv->arena, states);
    size_t pages = (size_t)kv->pages, lists = (size_t)lists_count(kv);
    kv->free_list = malloc(pages * sizeof *kv->free_list);
    kv->users = calloc(pages, sizeof *kv->users);
    kv->frame_list = malloc(((size_t)kv->frames + 1) * sizeof *kv->frame_list);
    kv->frame = malloc((pages * lists + 1) * sizeof *kv->frame);
    if (!kv->free_list || !kv->users || !kv->frame_list || !kv->frame)
        return fail(STATUS_MEMORY, "no memory for a list of %d cache pages", kv->pages);
    memset(kv->frame, -1, (pages * lists + 1) * sizeof *kv->frame);
    return STATUS_OK;
}

Status kv_open(Kv *kv, Model *model, int64_t tokens)
{
    *kv = (Kv){.model = model, .arena.dev = model->dev};
    kv_measure(kv, tokens);
    kv->cache.tokens = (size_t)(kv->frames + 1) * KV_PAGE; /* and the frame of padding rows */
    kv->cache.state_bytes = kv_sequence_bytes(model);
    int slots = budget_states(model, (int64_t)kv->longest * KV_PAGE);
    Status status = kv_memory(kv, tokens, slots);
    size_t bytes = (size_t)(kv->frames + 1) * frame_bytes(model);
    if (!status) status = prefix_open(&kv->prefix, kv->pages, bytes);
    if (!status && kv->lists.windowed) status = windows_open(&kv->windows, kv->pages);
    if (!status) status = states_open(&kv->states, slots, kv->pages);
    if (status) {
        kv_close(kv);
        return status;
    }
    for (int i = 0; i < kv->pages; i++) kv->free_list[i] = kv->pages - 1 - i;
    for (int i = 0; i < kv->frames; i++) kv->frame_list[i] = kv->frames - 1 - i;
    kv->free_count = kv->pages;
    kv->free_frames = kv->frames;
    return STATUS_OK;
}

void kv_close(Kv *kv)
{
    if (kv->arena.dev) arena_release(&kv->arena);
    free(kv->free_list);
    free(kv->users);
    free(kv->frame_list);
    free(kv->frame);
    prefix_close(&kv->prefix);
    windows_close(&kv->windows);
    states_close(&kv->states);
    *kv = (Kv){0};
}

/* ---- frames ---- */

/* Gives a page's frames back, in the lists from this one on. */
static void frames_give(Kv *kv, int32_t page, int from)
{
    int lists = lists_count(kv);
    for (int32_t *frame = kv->frame + page * lists; from < lists; from++) {
        if (frame[from] >= 0) kv->frame_list[kv->free_frames++] = frame[from];
        frame[from] = -1;
    }
}

int kv_whole(const Kv *kv, int32_t page)
{
    int lists = lists_count(kv);
    return kv->frame[page * lists + lists - 1] >= 0;
}

static void page_free(Kv *kv, int32_t page)
{
    frames_give(kv, page, 0);
    kv->free_list[kv->free_count++] = page;
}

/* Evicts the least recently used page, with the state behind it; -1 if there is none. */
static int32_t evict(Kv *kv)
{
    int32_t page = prefix_evict(&kv->prefix);
    if (page < 0) return -1;
    states_forget(&kv->states, page);
    if (kv->lists.windowed) windows_lift(&kv->windows, page);
    page_free(kv, page);
    return page;
}

/* Gives up a page's frames in the windowed lists that nobody holds; 0 if there are none. */
static int window_give(Kv *kv, int wanted)
{
    int32_t page = kv->lists.windowed ? windows_oldest(&kv->windows, wanted) : -1;
    if (page < 0) return 0;
    windows_lift(&kv->windows, page);
    frames_give(kv, page, kv->lists.full);
    return 1;
}

/* Room for a page: first frames that were left behind, then pages that no sequence holds, then what
 * is left of frames that none holds. */
static int make_room(Kv *kv)
{
    int frames = lists_count(kv);
    while (kv->free_frames < frames || !kv->free_count) {
        int lacks = kv->free_frames < frames;
        if (lacks && window_give(kv, 0)) continue;
        if (evict(kv) >= 0) continue;
        if (!lacks || !window_give(kv, 1)) return 0;
    }
    return 1;
}

/* ---- pages ---- */

int32_t kv_take(Kv *kv)
{
    if (!make_room(kv)) return -1;
    int32_t page = kv->free_list[--kv->free_count];
    int lists = lists_count(kv);
    for (int i = 0; i < lists; i++) kv->frame[page * lists + i] = kv->frame_list[--kv->free_frames];
    kv->users[page] = 1;
    if (kv->lists.windowed) windows_hold(&kv->windows, page);
    return page;
}

void kv_share(Kv *kv, int32_t page, int windowed)
{
    if (kv->users[page]++ == 0) prefix_lift(&kv->prefix, page);
    if (windowed && kv->lists.windowed) windows_hold(&kv->windows, page);
}

void kv_leave(Kv *kv, int32_t page, int wanted)
{
    if (!kv->lists.windowed || !windows_leave(&kv->windows, page)) return;
    if (prefix_number(&kv->prefix, page))
        windows_lay(&kv->windows, page, wanted);
    else
        frames_give(kv, page, kv->lists.full);
}

void kv_drop(Kv *kv, int32_t page, int windowed)
{
    if (windowed) kv_leave(kv, page, 1);
    if (--kv->users[page] == 0 && !prefix_lay(&kv->prefix, page)) page_free(kv, page);
}

void kv_replace(Kv *kv, int32_t page, int32_t by)
{
    int idle = kv->users[page] == 0;
    if (idle) prefix_lift(&kv->prefix, page);
    prefix_move(&kv->prefix, page, by);
    if (idle) page_free(kv, page);
}

void kv_forget(Kv *kv)
{
    while (evict(kv) >= 0) {
    }
}

int32_t kv_fork(Kv *kv, int32_t page, int count)
{
    int32_t copy = kv_take(kv);
    if (copy < 0) return -1;
    const Model *m = kv->model;
    Device *d = m->dev;
    int lists = lists_count(kv);
    for (int l = 0; l < m->shape.layers; l++) {
        if (!layer_token(&m->shape, l)) continue;
        size_t at = cache_at(m, &kv->cache, l);
        int list = cache_list(m, &kv->cache, l);
        d->kv_copy(d, cached_at(kv->cache.k, at), cached_at(kv->cache.v, at),
                   kv->frame[page * lists + list], kv->frame[copy * lists + list], count,
                   m->shape.kv_heads, m->shape.head_width);
    }
    return copy;
}

void kv_state_copy(Kv *kv, int32_t from, int32_t to, int rewinds)
{
    const Model *m = kv->model;
    const Cache *cache = &kv->cache;
    size_t bytes = cache->state_bytes;
    if (from != to)
        m->dev->copy(m->dev, cache->states + (size_t)to * bytes,
                     cache->states + (size_t)from * bytes, bytes);
    if (rewinds) cache_rewind(m, cache, to);
}

/* ---- for tests ---- */

KvCount kv_count(const Kv *kv)
{
    KvCount count = {kv->lists.full, kv->lists.windowed, .frames = kv->frames,
                     .free = kv->free_frames};
    for (int32_t page = 0; page < kv->pages; page++) {
        int windows = kv->lists.windowed ? windows_users(&kv->windows, page) : kv->users[page];
        count.held += kv->users[page] > 0;
        count.windows += windows > 0;
        count.known += !kv->users[page] && prefix_number(&kv->prefix, page);
        count.kept += !windows && kv->lists.windowed && kv_whole(kv, page);
    }
    return count;
}

void kv_spoil(Kv *kv)
{
    const Model *m = kv->model;
    Device *d = m->dev;
    size_t bytes = m->lists.token / 2 * KV_PAGE * d->cached_bytes;
    char *nan = malloc(bytes);
    if (nan) memset(nan, 0xff, bytes);
    for (int l = 0; l < m->shape.layers && nan; l++) {
        if (!layer_token(&m->shape, l)) continue;
        size_t at = cache_at(m, &kv->cache, l);
        for (int i = 0; i < kv->free_frames; i++) {
            size_t frame = at + (size_t)kv->frame_list[i] * bytes;
            d->upload(d, (char *)(void *)kv->cache.k + frame, nan, bytes);
            d->upload(d, (char *)(void *)kv->cache.v + frame, nan, bytes);
        }
    }
    free(nan);
}
