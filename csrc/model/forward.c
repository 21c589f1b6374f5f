/* model/forward.c - the transformer, once for all devices, for training and for decoding.
 *
 *   x = embed(tokens);  each layer:  x += wo·attention(rope(norm(wq·xn)), …);  x +=
 * w_down·swiglu(…);  hidden = norm(x)
 *
 * Products with frozen matrices that read the same input are followed by their LoRA's, together,
 * for each segment of rows that has an adapter. */
#include "core.h"

/* A product with one frozen matrix, and where its LoRA is among a layer's. */
typedef struct Product {
    real *y, *s;
    const frozen *w;
    const float *bias;
    int N;
    size_t pair; /* offset of the matrix's Pair in LayerPairs */
} Product;

#define PRODUCT(y, slot, bias, N) {y, a->s_##slot, w->slot, bias, N, offsetof(LayerPairs, slot)}

/* The LoRA of `count` products, for one segment's rows. */
static void add_lora(Device *d, int l, const Segment *segment, const Product *list, int count,
                     const real *x, int D)
{
    const Adapter *adapter = segment->adapter;
    const float *weights = adapter->vector[WEIGHTS];
    size_t row = (size_t)segment->row, R = (size_t)adapter->rank;
    Lora group[LORA_GROUP];
    int trained = 0;
    for (const Product *p = list; p < list + count; p++) {
        Pair pair = *(const Pair *)((const char *)&adapter->layer[l] + p->pair);
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

/* y (T,N) = x·wᵀ + bias, or +=, for each product in the list, and each segment's LoRA on top. */
static void project(Device *d, int l, const Batch *batch, const Product *list, int count,
                    const real *x, int D, int accumulate)
{
    for (const Product *p = list; p < list + count; p++)
        d->linear(d, p->y, x, p->w, p->bias, batch->T, p->N, D, accumulate);
    for (int i = 0; i < batch->segments; i++)
        if (batch->segment[i].adapter) add_lora(d, l, &batch->segment[i], list, count, x, D);
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

void layer_forward(const Model *m, int l, const Batch *batch, const Acts *acts, const Cache *cache,
                   real *next)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width, F = s->ffn;
    size_t row_bytes = (size_t)T * (size_t)D * d->real_bytes;
    real *k_pages = real_at(d, cache->k, (size_t)l * cache->stride);
    real *v_pages = real_at(d, cache->v, (size_t)l * cache->stride);

    const Product qkv[] = {PRODUCT(a->q_raw, wq, w->bq, H * E), PRODUCT(a->k_raw, wk, w->bk, G * E),
                           PRODUCT(a->v, wv, w->bv, G * E)};
    const Product out[] = {PRODUCT(a->mid, wo, NULL, D)};
    const Product gated[] = {PRODUCT(a->gate, w_gate, NULL, F), PRODUCT(a->up, w_up, NULL, F)};
    const Product down[] = {PRODUCT(next, w_down, NULL, D)};

    d->rmsnorm(d, acts->xn, a->attn_rstd, a->x, w->attn_norm, T, D, s->norm_eps);
    project(d, l, batch, qkv, 3, acts->xn, D, 0);
    if (next || l < acts->again[DEAR]) {
        layer_rotate(m, l, acts, T);
        d->kv_write(d, k_pages, v_pages, acts->k, a->v, batch->slot, T, G, E);
        d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, batch->spans, batch->pages,
                     batch->S, T, H, G, E, 0);
        d->copy(d, a->mid, a->x, row_bytes);
        project(d, l, batch, out, 1, a->att, H * E, 1);
    }

    d->rmsnorm(d, acts->xn, a->mlp_rstd, a->mid, w->mlp_norm, T, D, s->norm_eps);
    project(d, l, batch, gated, 2, acts->xn, D, 0);
    if (!next) return;
    d->swiglu(d, acts->act, a->gate, a->up, T, F);
    d->copy(d, next, a->mid, row_bytes);
    project(d, l, batch, down, 1, acts->act, F, 1);
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
