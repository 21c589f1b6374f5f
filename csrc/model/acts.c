/* model/acts.c - where a forward pass's activations lie, and of how many layers they are kept.
 *
 * One number, `keep`, says it for all three kinds of acts.inc's rows:
 *
 *   0        no backward will follow: one set of everything serves all layers
 *   1        ALWAYS of every layer; one set of the others serves all layers
 *   2 … L    one more layer has a set of DEAR of its own, from the top down
 *   … 2L−1   likewise of CHEAP: nothing is made again
 *
 * Layers that share a set are the lowest, and forward leaves the highest of them in it. Backward
 * comes down to that one first, so a shared set keeps one layer too: with n sets, L − n layers are
 * made again, each just before it is used. */
#include "core.h"

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

void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep)
{
    const Shape *s = &model->shape;
    size_t rows = (size_t)T, size = model->dev->real_bytes;
    for (Keep kind = ALWAYS; kind < KEEPS; kind++)
        acts->again[kind] = s->layers - keep_layers(model, kind, keep);
    for (int l = 0; l < s->layers; l++) {
        LayerActs *a = &acts->layer[l], *first = &acts->layer[0];
#define KEPT(kind, name, bytes) \
    a->name = l > 0 && l <= acts->again[kind] ? first->name : arena_take(arena, rows * (bytes));
#define KEPT_REAL(kind, name, width) KEPT(kind, name, (size_t)(width) * size)
#define KEPT_F32(kind, name, width) KEPT(kind, name, (size_t)(width) * sizeof(float))
#include "acts.inc"
#undef KEPT
    }
#define SCRATCH_REAL(name, width) acts->name = arena_take(arena, rows * (size_t)(width) * size);
#include "acts.inc"
    acts->q_rstd = arena_take(arena, rows * (size_t)s->heads * sizeof(float));
    acts->k_rstd = arena_take(arena, rows * (size_t)s->kv_heads * sizeof(float));
    acts->cosine = arena_take(arena, rows * (size_t)s->head_width / 2 * sizeof(float));
    acts->sine = arena_take(arena, rows * (size_t)s->head_width / 2 * sizeof(float));
    acts->final_rstd = arena_take(arena, rows * sizeof(float));
}
