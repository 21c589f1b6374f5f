/* model/shape.c - the properties of the kinds of layers and of a model's layers (layers.inc), the
 * place of their keys and values in the page cache, and which shapes are refused. */
#include "shape.h"

#include <math.h>
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

/* ---- checks ---- */

static Status delta_check(const Shape *s)
{
    int most = 1 << 16;
    if (s->key_heads < 1 || s->value_heads < 1 || s->value_heads > most ||
        s->value_heads % s->key_heads)
        return fail(STATUS_INVALID,
                    "value_heads (%d) must be a multiple of key_heads (%d), up to %d",
                    s->value_heads, s->key_heads, most);
    int widths[] = {s->key_width, s->value_width};
    for (int i = 0; i < 2; i++)
        if (widths[i] < 1 || widths[i] % DELTA_UNIT || widths[i] > DELTA_MOST)
            return fail(STATUS_INVALID, "%s must be a multiple of %d up to %d, not %d",
                        i ? "value_width" : "key_width", DELTA_UNIT, DELTA_MOST, widths[i]);
    return STATUS_OK;
}

static Status experts_check(const Shape *s)
{
    if (s->experts < 1 || s->experts > EXPERTS_MOST)
        return fail(STATUS_INVALID, "experts must be at least 1 and at most %d, not %d",
                    EXPERTS_MOST, s->experts);
    if (s->chosen < 1 || s->chosen > s->experts || s->chosen > CHOSEN_MOST)
        return fail(STATUS_INVALID, "chosen must be at least 1 and at most %d, not %d",
                    s->experts < CHOSEN_MOST ? s->experts : CHOSEN_MOST, s->chosen);
    if (s->expert_ffn < 1 || s->expert_ffn > 1 << 20)
        return fail(STATUS_INVALID, "expert_ffn must be at least 1 and at most %d, not %d", 1 << 20,
                    s->expert_ffn);
    if (s->norm_shares > 1)
        return fail(STATUS_INVALID, "norm_shares must be 0 or 1, not %d", s->norm_shares);
    if (!(s->expert_limit >= 0.0f) || !isfinite(s->expert_limit))
        return fail(STATUS_INVALID, "expert_limit must be 0 (none) or more, not %g",
                    (double)s->expert_limit);
    return STATUS_OK;
}

Status shape_check(const Shape *s)
{
    struct {
        const char *name;
        int value, most;
    } size[] = {{"layers", s->layers, 1 << 16},     {"width", s->width, 1 << 20},
                {"heads", s->heads, 1 << 16},       {"kv_heads", s->kv_heads, 1 << 16},
                {"head_width", s->head_width, 256}, {"ffn", s->ffn, 1 << 20},
                {"vocab", s->vocab, 1 << 24},       {"context", s->context, INT32_MAX - KV_PAGE}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        if (size[i].value < 1 || size[i].value > size[i].most)
            return fail(STATUS_INVALID, "a model's %s must be at least 1 and at most %d, not %d",
                        size[i].name, size[i].most, size[i].value);
    if (s->heads % s->kv_heads)
        return fail(STATUS_INVALID, "heads (%d) must be a multiple of kv_heads (%d)", s->heads,
                    s->kv_heads);
    if (s->rotary % 2 || s->rotary > s->head_width)
        return fail(STATUS_INVALID, "rotary must be even and at most head_width (%d), not %d",
                    s->head_width, s->rotary);
    if (s->q_gate > 1) return fail(STATUS_INVALID, "q_gate must be 0 or 1, not %d", s->q_gate);
    for (int e = 0; s->axes > 1 && e < s->rotary / 2; e++)
        if (s->axis[e] < 0 || s->axis[e] >= s->axes)
            return fail(STATUS_INVALID, "rope_axis must be 0 to %d, not %d", s->axes - 1,
                        s->axis[e]);
    if (!(s->norm_eps > 0.0f) || !isfinite(s->norm_eps))
        return fail(STATUS_INVALID, "norm_eps must be positive, not %g", (double)s->norm_eps);
    if (!(s->rope_scale > 0.0f) || !isfinite(s->rope_scale))
        return fail(STATUS_INVALID, "rope_scale must be positive, not %g", (double)s->rope_scale);
    for (int l = 0; l < s->layers; l++) {
        if (s->layer[l].kind[MIXER] == KIND_sliding_attention && s->window < 1)
            return fail(STATUS_INVALID, "layer %d has a sliding window, which must be at least 1",
                        l);
        if (s->layer[l].kind[MIXER] == KIND_linear_attention) TRY(delta_check(s));
        if (layer_has(s, l, EXPERTS)) TRY(experts_check(s));
    }
    return STATUS_OK;
}
