/* model/head.c - rows → logits → log-probabilities of their targets, in chunks, and the way back.
 *
 * The full N×V logits never exist. One buffer holds a chunk of them, of the device's chunk_bytes,
 * and their gradient overwrites them. The caller sets the order of rows (Pack). A row's result does
 * not depend on it; a sum over rows (the gradient of the head's LoRA) does. */
#include "head.h"

#include "stages.h"

int head_rows(const Model *model)
{
    const Device *d = model->dev;
    size_t rows = d->chunk_bytes / ((size_t)model->shape.vocab * sizeof(float));
    size_t most = (size_t)d->step_rows;
    return (int)(rows < 32 ? 32 : rows > most ? most : rows);
}

void head_place_chunk(Head *h, Arena *arena, const Model *model, int R)
{
    size_t size = model->dev->real_bytes, C = (size_t)h->chunk, D = (size_t)model->shape.width;
    h->x = arena_take(arena, C * D * size);
    h->dx = arena_take(arena, C * D * size);
    h->s = arena_take(arena, C * (size_t)R * size);
    h->ds = arena_take(arena, C * (size_t)R * size);
    h->logits = arena_take(arena, C * (size_t)model->shape.vocab * sizeof(float));
    h->lse = arena_take(arena, 2 * C * sizeof(float));
}

void head_place(Head *h, Arena *arena, const Model *model, int T, int64_t targets)
{
    int most = head_rows(model);
    size_t count = (size_t)targets;
    h->T = T;
    h->chunk = T < most ? T : most;
    h->rows = arena_take(arena, (size_t)T * sizeof(int32_t));
    h->start = arena_take(arena, (size_t)(T + 1) * sizeof(int32_t));
    h->ids = arena_take(arena, count * sizeof(int32_t));
    h->logp = arena_take(arena, count * sizeof(float));
    h->dlogp = arena_take(arena, count * sizeof(float));
}

void head_upload(Head *h, Device *dev, const int32_t *rows, const int32_t *start,
                 const int32_t *ids, int64_t targets)
{
    dev->upload(dev, h->rows, rows, (size_t)h->T * sizeof(int32_t));
    dev->upload(dev, h->start, start, (size_t)(h->T + 1) * sizeof(int32_t));
    dev->upload(dev, h->ids, ids, (size_t)targets * sizeof(int32_t));
}

int head_chunk(const Head *h, int row)
{
    return h->T - row < h->chunk ? h->T - row : h->chunk;
}

void rows_logits(const Model *m, const Adapter *adapter, float *logits, real *s, const real *x,
                 int rows)
{
    const Stage *stage = stage_last(m);
    Device *d = stage->dev;
    int D = m->shape.width, V = m->shape.vocab;
    d->head(d, logits, x, stage->head, rows, V, D);
    if (!adapter || adapter->head.a < 0) return;
    d->head_lora(d, logits, s, x, vector_at(adapter, WEIGHTS, stage, adapter->head.a),
                 vector_at(adapter, WEIGHTS, stage, adapter->head.b), rows, V, D, adapter->rank,
                 adapter->scale);
}

void head_logits(const Head *h, const Adapter *adapter, const real *hidden, int row, int rows)
{
    const Model *m = adapter->model;
    m->dev->gather(m->dev, h->x, hidden, h->rows + row, rows, m->shape.width);
    rows_logits(m, adapter, h->logits, h->s, h->x, rows);
}

void head_logprob(const Head *h, const Model *model, int row, int rows)
{
    Device *d = model->dev;
    d->logprob(d, h->lse, h->logp, h->logits, h->ids, h->start + row, rows, model->shape.vocab);
}

void head_logprob_backward(const Head *h, const Model *model, int row, int rows)
{
    Device *d = model->dev;
    d->logprob_backward(d, (real *)h->logits, h->logits, h->lse, h->dlogp, h->ids, h->start + row,
                        rows, model->shape.vocab, 0);
}

void head_logits_backward(const Head *h, Adapter *adapter, real *dhidden, int row, int rows)
{
    const Model *m = adapter->model;
    const Stage *stage = stage_last(m);
    Device *d = stage->dev;
    int D = m->shape.width, V = m->shape.vocab;
    Pair pair = adapter->head;
    real *dlogits = (real *)h->logits;
    d->linear_backward(d, h->dx, dlogits, stage->head, rows, V, D, V, 0);
    if (pair.a >= 0) {
        Lora lora = {.y = dlogits,
                     .s = h->s,
                     .ds = h->ds,
                     .a = vector_at(adapter, WEIGHTS, stage, pair.a),
                     .b = vector_at(adapter, WEIGHTS, stage, pair.b),
                     .da = vector_at(adapter, FRESH, stage, pair.a),
                     .db = vector_at(adapter, FRESH, stage, pair.b),
                     .N = V,
                     .step = V};
        d->lora_backward(d, h->dx, &lora, 1, h->x, rows, D, adapter->rank, adapter->scale);
    }
    d->scatter(d, dhidden, h->dx, h->rows + row, rows, D);
}
