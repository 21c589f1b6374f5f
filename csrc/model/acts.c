/* model/acts.c - places the activations of a forward pass, and says how many layers keep them.
 *
 * The number `keep` sets this for all three kinds of acts.inc's rows:
 *
 *   0        no backward follows: all layers share one set of everything
 *   1        every layer has its own ALWAYS; all layers share one set of the others
 *   2 … L    each step gives one more layer its own DEAR, from the top down
 *   … 2L−1   then its own CHEAP; at 2L−1 nothing is recomputed
 *
 * The lowest layers share one set, which after forward holds the highest of them. With n sets for L
 * layers, backward recomputes L − n layers, each just before it is used. */
#include "acts.h"

int keep_all(const Model *model)
{
    return 2 * model->shape.layers - 1;
}

int keep_layers(const Model *model, Keep kind, int keep)
{
    int L = model->shape.layers;
    if (kind == ALWAYS) return keep ? L : 1;
    int own = keep - (kind - DEAR) * (L - 1);
    return own < 1 ? 1 : own > L ? L : own;
}

/* Bytes of one element of each type. */
#define SIZE_real model->dev->real_bytes
#define SIZE_float sizeof(float)
#define SIZE_int32_t sizeof(int32_t)

/* A row of acts.inc while it is placed layer by layer. */
typedef struct ActRow {
    size_t bytes;
    int has, layer;
    int taken; /* whether `shared` is taken */
    void *shared;
} ActRow;

static ActRow row_of(int T, int width, size_t element_bytes, int has)
{
    return (ActRow){.bytes = (size_t)T * (size_t)width * element_bytes, .has = has};
}

/* The current layer's memory; layers up to `again` share it. NULL if the layer has no such row. */
static void *row_take(ActRow *row, Arena *arena, const Shape *s, int again)
{
    if (!layer_has(s, row->layer, row->has)) return NULL;
    if (row->layer > again) return arena_take(arena, row->bytes);
    if (!row->taken) row->shared = arena_take(arena, row->bytes);
    row->taken = 1;
    return row->shared;
}

/* Memory for all layers; NULL where none has such a row. */
static void *row_take_once(ActRow row, Arena *arena, const Shape *s)
{
    for (; row.layer < s->layers; row.layer++)
        if (layer_has(s, row.layer, row.has)) return arena_take(arena, row.bytes);
    return NULL;
}

void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep)
{
    const Shape *s = &model->shape;
    for (Keep kind = ALWAYS; kind < KEEPS; kind++)
        acts->again[kind] = s->layers - keep_layers(model, kind, keep);
#define KEPT(kind, type, name, width, has)                                                    \
    for (ActRow row = row_of(T, width, SIZE_##type, has); row.layer < s->layers; row.layer++) \
        acts->layer[row.layer].name = row_take(&row, arena, s, acts->again[kind]);
#define FIXED(type, name, count, has)                                                         \
    for (ActRow row = row_of(1, count, SIZE_##type, has); row.layer < s->layers; row.layer++) \
        acts->layer[row.layer].name = row_take(&row, arena, s, -1);
#define SCRATCH(type, name, width, has) \
    acts->name = row_take_once(row_of(T, width, SIZE_##type, has), arena, s);
#include "acts.inc"
}

size_t grads_place(Grads *grads, Arena *arena, const Model *model, int T, int R)
{
    const Shape *s = &model->shape;
    grads->dxn = arena_take(arena, (size_t)T * (size_t)s->width * model->dev->real_bytes);
    size_t head = arena->used;
#define GRADIENT(type, name, width, has) \
    grads->name = row_take_once(row_of(T, width, SIZE_##type, has), arena, s);
#include "acts.inc"
    return head;
}

void acts_count(const Model *m, const Acts *acts, int64_t *counts)
{
    int32_t bounds[2 * EXPERTS_MOST];
    int X = m->shape.experts;
    for (int l = 0; l < m->shape.layers; l++, counts += X) {
        if (!layer_has(&m->shape, l, EXPERTS)) continue;
        m->dev->download(m->dev, bounds, acts->layer[l].e_bounds, 2 * (size_t)X * sizeof *bounds);
        for (int e = 0; e < X; e++) counts[e] += bounds[2 * e + 1] - bounds[2 * e];
    }
}
