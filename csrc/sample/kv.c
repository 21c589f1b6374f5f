/* sample/kv.c - the pages of the key-value cache: allocated, shared by sequences with a common
 * prefix, forked, freed. Pages whose content is in the prefix cache (prefix.c) are reused last.
 * Beside them lie the slots of states.c.
 *
 * A page holds KV_PAGE positions of every layer that keeps keys and values. Each layer has a region
 * of its own (cache_at), and a page's number is the same in all of them. The layout inside a page
 * is up to the device. */
#include <stdio.h>
#include <stdlib.h>

#include "sampler.h"

Status kv_open(Kv *kv, Model *model, int64_t tokens)
{
    int64_t pages = (tokens + KV_PAGE - 1) / KV_PAGE;
    *kv = (Kv){.model = model, .arena.dev = model->dev, .pages = (int)pages};
    kv->cache.tokens = (size_t)(pages + 1) * KV_PAGE; /* and the page of padding rows */
    kv->cache.state_bytes = kv_sequence_bytes(model);
    int slots = budget_states(model, pages * KV_PAGE);
    size_t bytes = kv->cache.tokens * kv_token_bytes(model) / 2,
           states = (size_t)slots * kv->cache.state_bytes;
    char purpose[96];
    snprintf(purpose, sizeof purpose, "a cache of keys and values of %lld tokens%s",
             (long long)pages * KV_PAGE, slots ? ", with sequences' states" : "");
    TRY(arena_reserve(&kv->arena, 2 * bytes + states + 768, purpose));
    kv->cache.k = arena_take(&kv->arena, bytes);
    kv->cache.v = arena_take(&kv->arena, bytes);
    if (slots) kv->cache.states = arena_take(&kv->arena, states);
    kv->free_list = malloc((size_t)pages * sizeof *kv->free_list);
    kv->users = calloc((size_t)pages, sizeof *kv->users);
    if (!kv->free_list || !kv->users) {
        kv_close(kv);
        return fail(STATUS_MEMORY, "no memory for a list of %lld cache pages", (long long)pages);
    }
    Status status = prefix_open(&kv->prefix, kv->pages, 2 * bytes);
    if (!status) status = states_open(&kv->states, slots, kv->pages);
    if (status) {
        kv_close(kv);
        return status;
    }
    for (int i = 0; i < kv->pages; i++) kv->free_list[i] = kv->pages - 1 - i;
    kv->free_count = kv->pages;
    return STATUS_OK;
}

void kv_close(Kv *kv)
{
    if (kv->arena.dev) arena_release(&kv->arena);
    free(kv->free_list);
    free(kv->users);
    prefix_close(&kv->prefix);
    states_close(&kv->states);
    *kv = (Kv){0};
}

/* Evicts the least recently used page, with the state behind it; -1 if there is none. */
static int32_t evict(Kv *kv)
{
    int32_t page = prefix_evict(&kv->prefix);
    if (page >= 0) states_forget(&kv->states, page);
    return page;
}

int32_t kv_take(Kv *kv)
{
    int32_t page = kv->free_count ? kv->free_list[--kv->free_count] : evict(kv);
    if (page >= 0) kv->users[page] = 1;
    return page;
}

void kv_share(Kv *kv, int32_t page)
{
    if (kv->users[page]++ == 0) prefix_lift(&kv->prefix, page);
}

void kv_drop(Kv *kv, int32_t page)
{
    if (--kv->users[page] == 0 && !prefix_lay(&kv->prefix, page))
        kv->free_list[kv->free_count++] = page;
}

void kv_forget(Kv *kv)
{
    for (int32_t page; (page = evict(kv)) >= 0;) kv->free_list[kv->free_count++] = page;
}

int32_t kv_fork(Kv *kv, int32_t page, int count)
{
    int32_t copy = kv_take(kv);
    if (copy < 0) return -1;
    const Model *m = kv->model;
    Device *d = m->dev;
    for (int l = 0; l < m->shape.layers; l++) {
        size_t at = cache_at(m, &kv->cache, l);
        if (layer_token(&m->shape, l))
            d->kv_copy(d, real_at(d, kv->cache.k, at), real_at(d, kv->cache.v, at), page, copy,
                       count, m->shape.kv_heads, m->shape.head_width);
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
