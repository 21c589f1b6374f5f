/* model/layers.c - the properties of the kinds of layers and of a model's layers (layers.inc), and
 * where in a cache of pages their keys and values lie. */
#include <string.h>

#include "core.h"

/* ---- kinds ---- */

int delta_channels(const Shape *s)
{
    return 2 * s->key_heads * s->key_width + s->value_heads * s->value_width;
}

size_t delta_bytes(const Shape *s)
{
    int C = delta_channels(s), G = s->key_heads, H = s->value_heads, N = s->key_width,
        E = s->value_width;
    return sizeof(float) *
           (CONV_START(C) + CONV_RING(C) + DELTA_STATE(H, N, E) + DELTA_OPEN(G, H, N, E));
}

KindInfo kind_info(const Shape *s, LayerKind kind)
{
    switch (kind) {
#define LAYER_KIND(kind, part, has, token, sequence) \
    case KIND_##kind: return (KindInfo){#kind, part, has, (size_t)(token), sequence};
#include "layers.inc"
    case KINDS: break;
    }
    return (KindInfo){0};
}

Status kind_find(Part part, const char *name, LayerKind *found)
{
    static const char *const called[] = {[MIXER] = "mixer", [FEED] = "feed-forward part"};
    for (LayerKind kind = 0; kind < KINDS; kind++) {
        KindInfo info = kind_info(&(Shape){0}, kind);
        if (info.part != part || strcmp(info.name, name) != 0) continue;
        *found = kind;
        return STATUS_OK;
    }
    return fail(STATUS_INVALID, "no kind of %s is called '%s'", called[part], name);
}

/* ---- a model's layers ---- */

int layer_has(const Shape *s, int l, int what)
{
    int has = 0;
    for (Part part = 0; part < PARTS; part++) has |= kind_info(s, s->layer[l].kind[part]).has;
    return has & what;
}

size_t layer_token(const Shape *s, int l)
{
    size_t elements = 0;
    for (Part part = 0; part < PARTS; part++)
        elements += kind_info(s, s->layer[l].kind[part]).token;
    return elements;
}

size_t layer_sequence(const Shape *s, int l)
{
    size_t bytes = 0;
    for (Part part = 0; part < PARTS; part++)
        bytes += kind_info(s, s->layer[l].kind[part]).sequence;
    return bytes;
}

Cache cache_place(Arena *arena, const Model *model, int pages)
{
    size_t most = 0;
    for (int l = 0; l < model->shape.layers; l++) {
        size_t token = layer_token(&model->shape, l);
        if (token > most) most = token;
    }
    size_t bytes = (size_t)pages * KV_PAGE * (most / 2) * model->dev->real_bytes;
    real *k = arena_take(arena, bytes), *v = arena_take(arena, bytes);
    return (Cache){.k = k, .v = v};
}

size_t cache_at(const Model *model, const Cache *cache, int l)
{
    size_t below = 0;
    while (l-- > 0) below += layer_token(&model->shape, l);
    return below / 2 * cache->tokens;
}

float *cache_state(const Model *model, const Cache *cache, int l)
{
    size_t below = 0;
    while (l-- > 0) below += layer_sequence(&model->shape, l);
    return cache->states ? (float *)(void *)(cache->states + below) : NULL;
}
