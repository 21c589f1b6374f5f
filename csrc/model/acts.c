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
 * layers, backward recomputes L − n layers, each just before it is used. Each stage does so with
 * its own layers; L is that of the stage with the most. */
#include "acts.h"

#include "stages.h"

static int stage_layers(const Stage *stage)
{
    return stage->end - stage->first;
}

/* Of the stage with the most. */
static int layers_most(const Model *model)
{
    int most = 0;
    for (int k = 0; k < model->stages; k++)
        if (stage_layers(&model->stage[k]) > most) most = stage_layers(&model->stage[k]);
    return most;
}

int keep_all(const Model *model)
{
    return 2 * layers_most(model) - 1;
}

/* How many of L layers keep the rows of this kind, where a stage has `most` layers at most. */
static int stage_keep(int L, int most, Keep kind, int keep)
{
    if (kind == ALWAYS) return keep ? L : 1;
    int own = keep - (kind - DEAR) * (most - 1);
    return own < 1 ? 1 : own > L ? L : own;
}

int keep_layers(const Model *model, Keep kind, int keep)
{
    int kept = 0;
    for (int k = 0; k < model->stages; k++)
        kept += stage_keep(stage_layers(&model->stage[k]), layers_most(model), kind, keep);
    return kept;
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

static ActRow row_of(int layer, int T, int width, size_t element_bytes, int has)
{
    return (ActRow){.bytes = (size_t)T * (size_t)width * element_bytes, .has = has, .layer = layer};
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

/* Memory for all layers of a stage; NULL where none has such a row. */
static void *row_take_once(ActRow row, Arena *arena, const Shape *s, int end)
{
    for (; row.layer < end; row.layer++)
        if (layer_has(s, row.layer, row.has)) return arena_take(arena, row.bytes);
    return NULL;
}

static void stage_place(Acts *acts, Arena *arena, const Model *model, const Stage *stage, int T,
                        int R, int keep)
{
    const Shape *s = &model->shape;
    int first = stage->first, end = stage->end, most = layers_most(model);
    for (Keep kind = ALWAYS; kind < KEEPS; kind++)
        acts->again[kind] = end - stage_keep(end - first, most, kind, keep);
#define KEPT(kind, type, name, width, has)                                                     \
    for (ActRow row = row_of(first, T, width, SIZE_##type, has); row.layer < end; row.layer++) \
        acts->layer[row.layer].name = row_take(&row, arena, s, acts->again[kind]);
#define FIXED(type, name, count, has)                                                          \
    for (ActRow row = row_of(first, 1, count, SIZE_##type, has); row.layer < end; row.layer++) \
        acts->layer[row.layer].name = row_take(&row, arena, s, -1);
#define SCRATCH(type, name, width, has) \
    acts->name = row_take_once(row_of(first, T, width, SIZE_##type, has), arena, s, end);
#include "acts.inc"
}

void acts_place(Acts *acts, Arenas *arenas, const Model *model, int T, int R, int keep)
{
    for (int k = 0; k < model->stages; k++) {
        acts[k].layer = acts[0].layer;
        stage_place(&acts[k], &arenas->of[k], model, &model->stage[k], T, R, keep);
    }
}

size_t grads_place(Grads *grads, Arenas *arenas, const Model *model, int T, int R)
{
    const Shape *s = &model->shape;
    size_t head = 0;
    for (int k = 0; k < model->stages; k++, grads++) {
        const Stage *stage = &model->stage[k];
        Arena *arena = &arenas->of[k];
        grads->dxn = arena_take(arena, (size_t)T * (size_t)s->width * model->dev->real_bytes);
        head = arena->used;
#define GRADIENT(type, name, width, has) \
    grads->name =                        \
        row_take_once(row_of(stage->first, T, width, SIZE_##type, has), arena, s, stage->end);
#include "acts.inc"
    }
    return head;
}

void acts_count(const Model *m, const Acts *acts, int64_t *counts)
{
    int32_t bounds[2 * EXPERTS_MOST];
    int X = m->shape.experts;
    for (int l = 0; l < m->shape.layers; l++, counts += X) {
        if (!layer_has(&m->shape, l, EXPERTS)) continue;
        Device *dev = stage_of(m, l)->dev;
        dev->download(dev, bounds, acts->layer[l].e_bounds, 2 * (size_t)X * sizeof *bounds);
        for (int e = 0; e < X; e++) counts[e] += bounds[2 * e + 1] - bounds[2 * e];
    }
}
