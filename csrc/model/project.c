/* model/project.c - products of rows with a layer's frozen matrices and their LoRA, and back.
 *
 *   y = x·wᵀ + bias + scale·(x·A)·B;   dx = Σ dy·w + scale·(dy·Bᵀ)·Aᵀ,  and A's and B's gradients
 *
 * Matrices that read the same input come as one list, so that their LoRA shares ops. In the forward
 * pass each segment of rows has an adapter of its own, or none. In the backward pass all rows have
 * the same one. */
#include "layer.h"

static Pair pair_of(const Adapter *adapter, int l, const Projection *p)
{
    return *(const Pair *)((const char *)&adapter->layer[l] + p->pair);
}

/* The LoRA of `count` products, for one segment's rows. */
static void add_lora(const Pass *pass, const Segment *segment, const Projection *list, int count,
                     const real *x, int D)
{
    Device *d = pass->model->dev;
    const Adapter *adapter = segment->adapter;
    const float *weights = adapter->vector[WEIGHTS];
    size_t row = (size_t)segment->row, R = (size_t)adapter->rank;
    Lora group[LORA_GROUP];
    int trained = 0;
    for (const Projection *p = list; p < list + count; p++) {
        Pair pair = pair_of(adapter, pass->l, p);
        if (pair.a < 0) continue;
        group[trained++] = (Lora){.y = real_at(d, p->y, row * (size_t)p->N),
                                  .s = real_at(d, p->s, row * R),
                                  .a = weights + pair.a,
                                  .b = weights + pair.b,
                                  .N = p->N};
    }
    if (trained)
        d->lora(d, group, trained, real_at(d, x, row * (size_t)D), segment->rows, D, adapter->rank,
                adapter->scale);
}

void project(const Pass *pass, const Projection *list, int count, const real *x, int D,
             int accumulate)
{
    Device *d = pass->model->dev;
    const Batch *batch = pass->batch;
    for (const Projection *p = list; p < list + count; p++)
        d->linear(d, p->y, x, p->w, p->bias, batch->T, p->N, D, accumulate);
    for (int i = 0; i < batch->segments; i++)
        if (batch->segment[i].adapter) add_lora(pass, &batch->segment[i], list, count, x, D);
}

void unproject(const Pass *pass, const Projection *list, int count, real *dx, const real *x, int D)
{
    Device *d = pass->model->dev;
    const Adapter *adapter = pass->adapter;
    const float *weights = adapter->vector[WEIGHTS];
    float *fresh = adapter->vector[FRESH];
    int T = pass->batch->T, trained = 0;
    Lora group[LORA_GROUP];
    for (const Projection *p = list; p < list + count; p++) {
        if (dx) d->linear_backward(d, dx, p->y, p->w, T, p->N, D, p > list);
        Pair pair = pair_of(adapter, pass->l, p);
        if (pair.a < 0) continue;
        size_t at = (size_t)trained * (size_t)T * (size_t)adapter->rank;
        group[trained++] = (Lora){.y = p->y,
                                  .s = p->s,
                                  .ds = real_at(d, pass->grads->ds, at),
                                  .a = weights + pair.a,
                                  .b = weights + pair.b,
                                  .da = fresh + pair.a,
                                  .db = fresh + pair.b,
                                  .N = p->N};
    }
    if (trained) d->lora_backward(d, dx, group, trained, x, T, D, adapter->rank, adapter->scale);
}
