/* model/layers/project.c - products of rows with a layer's frozen matrices and their LoRA, and
 * back.
 *
 *   y = x·wᵀ + bias + scale·(x·A)·B;   dx = Σ dy·w + scale·(dy·Bᵀ)·Aᵀ,  and A's and B's gradients
 *
 * Matrices that read the same input come as one list, so that their LoRA shares ops, and their
 * products are one where the device can. In forward each segment of rows has its own adapter or
 * none. In backward all rows have the same one. */
#include "project.h"

/* How many of the list's first products are one: their results, weights and biases are each
 * adjacent and in order. Its width goes to N. */
static int together(const Device *d, const Projection *p, const Projection *end, int D, int *N)
{
    const Projection *first = p;
    for (*N = p->N; d->frozen_continues && p + 1 < end; p++) {
        const Projection *next = p + 1;
        int biased = p->bias != NULL;
        if (p->step < *N + next->N || next->step != p->step || next->y != real_at(d, p->y, p->N) ||
            (next->bias != NULL) != biased || (biased && next->bias != p->bias + p->N) ||
            !d->frozen_continues((Device *)d, p->w, next->w, p->N, D))
            break;
        *N += next->N;
    }
    return (int)(p - first) + 1;
}

static Pair pair_of(const Adapter *adapter, int l, const Projection *p)
{
    return *(const Pair *)((const char *)&adapter->layer[l] + p->pair);
}

/* The LoRA of `count` products, for one segment's rows. */
static void add_lora(const LayerPass *pass, const Segment *segment, const Projection *list,
                     int count, const real *x, int D)
{
    Device *d = pass->stage->dev;
    const Adapter *adapter = segment->adapter;
    size_t row = (size_t)segment->row, R = (size_t)adapter->rank;
    Lora group[LORA_GROUP];
    int trained = 0;
    for (const Projection *p = list; p < list + count; p++) {
        Pair pair = pair_of(adapter, pass->l, p);
        if (pair.a < 0) continue;
        group[trained++] = (Lora){.y = real_at(d, p->y, row * (size_t)p->step),
                                  .s = real_at(d, p->s, row * R),
                                  .a = vector_at(adapter, WEIGHTS, pass->stage, pair.a),
                                  .b = vector_at(adapter, WEIGHTS, pass->stage, pair.b),
                                  .N = p->N,
                                  .step = p->step};
    }
    if (trained)
        d->lora(d, group, trained, real_at(d, x, row * (size_t)D), segment->rows, D, adapter->rank,
                adapter->scale);
}

static void add_loras(const LayerPass *pass, const Projection *list, int count, const real *x,
                      int D)
{
    const Batch *batch = pass->batch;
    for (int i = 0; i < batch->segments; i++)
        if (batch->segment[i].adapter) add_lora(pass, &batch->segment[i], list, count, x, D);
}

void project(const LayerPass *pass, const Projection *list, int count, const real *x, int D)
{
    Device *d = pass->stage->dev;
    for (const Projection *p = list, *end = list + count; p < end;) {
        int N, several = together(d, p, end, D, &N);
        d->linear(d, p->y, x, p->w, p->bias, NULL, pass->batch->T, N, D, p->step);
        p += several;
    }
    add_loras(pass, list, count, x, D);
}

void project_onto(const LayerPass *pass, const real *plus, const Projection *one, const real *x,
                  int D)
{
    Device *d = pass->stage->dev;
    d->linear(d, one->y, x, one->w, one->bias, plus, pass->batch->T, one->N, D, one->step);
    add_loras(pass, one, 1, x, D);
}

void unproject(const LayerPass *pass, const Projection *list, int count, real *dx, const real *x,
               int D)
{
    Device *d = pass->stage->dev;
    const Adapter *adapter = pass->adapter;
    int T = pass->batch->T, trained = 0;
    Lora group[LORA_GROUP];
    for (const Projection *p = list, *end = list + count; dx && p < end;) {
        int N, several = together(d, p, end, D, &N);
        d->linear_backward(d, dx, p->y, p->w, T, N, D, p->step, p > list);
        p += several;
    }
    for (const Projection *p = list; p < list + count; p++) {
        Pair pair = pair_of(adapter, pass->l, p);
        if (pair.a < 0) continue;
        size_t at = (size_t)trained * (size_t)T * (size_t)adapter->rank;
        group[trained++] = (Lora){.y = p->y,
                                  .s = p->s,
                                  .ds = real_at(d, pass->grads->ds, at),
                                  .a = vector_at(adapter, WEIGHTS, pass->stage, pair.a),
                                  .b = vector_at(adapter, WEIGHTS, pass->stage, pair.b),
                                  .da = vector_at(adapter, FRESH, pass->stage, pair.a),
                                  .db = vector_at(adapter, FRESH, pass->stage, pair.b),
                                  .N = p->N,
                                  .step = p->step};
    }
    if (trained) d->lora_backward(d, dx, group, trained, x, T, D, adapter->rank, adapter->scale);
}
