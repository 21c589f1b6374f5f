/* forward.c - the transformer, once for all devices, for training and for decoding.
 *
 *   x = embed(tokens);  each layer:  x += wo·attention(rope(norm(wq·xn)), …);  x +=
 * w_down·swiglu(…);  hidden = norm(x)
 *
 * Every product with a frozen matrix is followed by LoRA's, for each segment of rows that has an
 * adapter. */
#include "core.h"

real *real_at(const Device *dev, const real *base, size_t index)
{
    return (real *)((char *)base + index * dev->real_bytes);
}

void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep)
{
    const Shape *s = &model->shape;
    size_t rows = (size_t)T, size = model->dev->real_bytes;
    for (int l = 0; l < s->layers; l++) {
        LayerActs *a = &acts->layer[l];
        if (l > 0 && !keep) {
            *a = acts->layer[0];
            continue;
        }
#define KEPT_REAL(name, width) a->name = arena_take(arena, rows * (size_t)(width) * size);
#define KEPT_F32(name, width) a->name = arena_take(arena, rows * (size_t)(width) * sizeof(float));
#include "acts.inc"
    }
#define SCRATCH_REAL(name, width) acts->name = arena_take(arena, rows * (size_t)(width) * size);
#include "acts.inc"
    acts->q_rstd = arena_take(arena, rows * (size_t)s->heads * sizeof(float));
    acts->k_rstd = arena_take(arena, rows * (size_t)s->kv_heads * sizeof(float));
    acts->cosine = arena_take(arena, rows * (size_t)s->head_width / 2 * sizeof(float));
    acts->sine = arena_take(arena, rows * (size_t)s->head_width / 2 * sizeof(float));
    acts->final_rstd = arena_take(arena, rows * sizeof(float));
}

/* y (T,N) = x·wᵀ + bias, or +=, and each segment's LoRA on top; `slot` names its pair of matrices.
 */
#define PROJECT(y, s, x, slot, bias, N, D, accumulate)                                             \
    do {                                                                                           \
        d->linear(d, y, x, w->slot, bias, T, N, D, accumulate);                                    \
        for (int i = 0; i < batch->segments; i++)                                                  \
            if (batch->segment[i].adapter)                                                         \
                add_lora(&batch->segment[i], batch->segment[i].adapter->layer[l].slot, y, s, x, N, \
                         D);                                                                       \
    } while (0)

static void add_lora(const Segment *segment, Pair pair, real *y, real *s, const real *x, int N,
                     int D)
{
    const Adapter *adapter = segment->adapter;
    if (pair.a < 0) return;
    Device *d = adapter->model->dev;
    size_t row = (size_t)segment->row;
    d->lora(d, real_at(d, y, row * (size_t)N), real_at(d, s, row * (size_t)adapter->rank),
            real_at(d, x, row * (size_t)D), adapter->vector[WEIGHTS] + pair.a,
            adapter->vector[WEIGHTS] + pair.b, segment->rows, N, D, adapter->rank, adapter->scale);
}

/* Head norms where the model has them, then rope. */
void layer_rotate(const Model *m, int l, const Acts *acts, int T)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    int H = s->heads, G = s->kv_heads, E = s->head_width;
    size_t size = d->real_bytes;
    if (s->qk_norm) {
        d->rmsnorm(d, acts->q, acts->q_rstd, a->q_raw, w->q_norm, T * H, E, s->norm_eps);
        d->rmsnorm(d, acts->k, acts->k_rstd, a->k_raw, w->k_norm, T * G, E, s->norm_eps);
    } else {
        d->copy(d, acts->q, a->q_raw, (size_t)T * (size_t)(H * E) * size);
        d->copy(d, acts->k, a->k_raw, (size_t)T * (size_t)(G * E) * size);
    }
    d->rope(d, acts->q, acts->cosine, acts->sine, T, H, E);
    d->rope(d, acts->k, acts->cosine, acts->sine, T, G, E);
}

static void layer_forward(const Model *m, int l, const Batch *batch, const Acts *acts,
                          const Cache *cache, real *next)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width, F = s->ffn;
    size_t row_bytes = (size_t)T * (size_t)D * d->real_bytes;
    real *k_pages = real_at(d, cache->k, (size_t)l * cache->stride);
    real *v_pages = real_at(d, cache->v, (size_t)l * cache->stride);

    d->rmsnorm(d, acts->xn, a->attn_rstd, a->x, w->attn_norm, T, D, s->norm_eps);
    PROJECT(a->q_raw, a->s_wq, acts->xn, wq, w->bq, H * E, D, 0);
    PROJECT(a->k_raw, a->s_wk, acts->xn, wk, w->bk, G * E, D, 0);
    PROJECT(a->v, a->s_wv, acts->xn, wv, w->bv, G * E, D, 0);
    layer_rotate(m, l, acts, T);
    d->kv_write(d, k_pages, v_pages, acts->k, a->v, batch->slot, T, G, E);
    d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, batch->spans, batch->pages, batch->S,
                 T, H, G, E);
    d->copy(d, a->mid, a->x, row_bytes);
    PROJECT(a->mid, a->s_wo, a->att, wo, NULL, D, H * E, 1);

    d->rmsnorm(d, acts->xn, a->mlp_rstd, a->mid, w->mlp_norm, T, D, s->norm_eps);
    PROJECT(a->gate, a->s_w_gate, acts->xn, w_gate, NULL, F, D, 0);
    PROJECT(a->up, a->s_w_up, acts->xn, w_up, NULL, F, D, 0);
    d->swiglu(d, acts->act, a->gate, a->up, T, F);
    d->copy(d, next, a->mid, row_bytes);
    PROJECT(next, a->s_w_down, acts->act, w_down, NULL, D, F, 1);
}

void forward(const Model *m, const Batch *batch, const Acts *acts, const Cache *cache)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    int T = batch->T, L = s->layers;
    d->rope_table(d, acts->cosine, acts->sine, batch->pos, m->inv_freq, T, s->head_width,
                  s->rope_scale);
    d->embed(d, acts->layer[0].x, batch->tokens, m->embed, T, s->vocab, s->width);
    for (int l = 0; l < L && !batch_stopped(batch); l++)
        layer_forward(m, l, batch, acts, cache, l + 1 < L ? acts->layer[l + 1].x : acts->out);
    d->rmsnorm(d, acts->hidden, acts->final_rstd, acts->out, m->final_norm, T, s->width,
               s->norm_eps);
}
