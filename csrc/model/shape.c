/* model/shape.c - the properties of the kinds of layers and of a model's layers (layers.inc), and
 * the place of their keys and values in the page cache. */
#include "shape.h"

#include <string.h>

#include "../device/delta_state.h"
#include "../device/numbers.h"

/* ---- kinds ---- */

int qkv_width(const Shape *s)
{
    return ((s->q_gate ? 0 : s->heads) + 2 * s->kv_heads) * s->head_width;
}

int delta_width(const Shape *s)
{
    int width = delta_channels(s) + s->value_heads * (s->value_width + 2);
    return (width + ROW_PIECE - 1) / ROW_PIECE * ROW_PIECE;
}

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
#define LAYER_KIND(kind, part, has, token, window, sequence) \
    case KIND_##kind: return (KindInfo){#kind, part, has, (size_t)(token), sequence, window};
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

int has_experts(const Shape *s)
{
    int found = 0;
    for (int l = 0; l < s->layers; l++) found |= layer_has(s, l, EXPERTS);
    return found != 0;
}

/* ---- lists ---- */

static int quotient_up(int a, int b)
{
    return (a + b - 1) / b;
}

/* The layer's window; 0: it keeps the keys of all tokens. */
static int layer_window(const Shape *s, int l)
{
    int window = 0;
    for (Part part = 0; part < PARTS; part++) {
        KindInfo info = kind_info(s, s->layer[l].kind[part]);
        if (info.window) window = info.window;
    }
    return window < s->context ? window : 0;
}

Lists lists_of(const Shape *s, Region *region)
{
    Lists lists = {0};
    int count[2] = {0}, states = 0, windowed = 0;
    for (int l = 0; l < s->layers; l++) states |= layer_sequence(s, l) != 0;
    for (int l = 0; l < s->layers; l++) {
        if (!layer_token(s, l)) continue;
        count[!states && layer_window(s, l)]++;
        if (layer_token(s, l) > lists.token) lists.token = layer_token(s, l);
    }
    lists.layers = count[0] && count[1] ? min_int(count[0], count[1]) : count[0] + count[1];
    int few = quotient_up(count[0] + count[1], LISTS_MOST - 1); /* so at most LISTS_MOST lists */
    if (lists.layers < few) lists.layers = few;
    if (!lists.layers) return (Lists){.full = 1};
    lists.full = quotient_up(count[0], lists.layers);
    lists.windowed = quotient_up(count[1], lists.layers);
    if (lists.windowed) lists.window = s->window;
    count[0] = count[1] = 0;
    for (int l = 0; l < s->layers; l++) {
        if (!layer_token(s, l)) continue;
        windowed = !states && layer_window(s, l);
        int at = count[windowed]++;
        region[l] = (Region){windowed * lists.full + at / lists.layers, at % lists.layers};
    }
    return lists;
}

int lists_cut(const Shape *s, Region *region, int first, int end)
{
    int count[LISTS_MOST] = {0}, most = 0;
    for (int l = first; l < end; l++) {
        if (!layer_token(s, l)) continue;
        region[l].at = count[region[l].list]++;
        if (count[region[l].list] > most) most = count[region[l].list];
    }
    return most;
}
