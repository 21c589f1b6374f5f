/* model/backward.c - forward.c's list, reversed: from d loss / d hidden to every adapter's
 * gradient.
 *
 * Base weights are frozen, so a product needs only its input's gradient, and LoRA's own two. What
 * acts.inc does not keep (norm outputs, rotated q and k, swiglu's output) is computed again by the
 * ops that made it, and a layer whose activations made room for those of another one by
 * layer_forward itself. dx carries the residual stream's gradient down the layers; every norm adds
 * its part to it. */
#include "core.h"

void grads_place(Grads *g, Arena *arena, const Model *model, int T, int R)
{
    const Shape *s = &model->shape;
    size_t row = (size_t)T * model->dev->real_bytes;
    size_t q = (size_t)s->heads * (size_t)s->head_width,
           k = (size_t)s->kv_heads * (size_t)s->head_width;
    g->dx = arena_take(arena, row * (size_t)s->width);
    g->dxn = arena_take(arena, row * (size_t)s->width);
    g->dq = arena_take(arena, row * q);
    g->dq_raw = arena_take(arena, row * q);
    g->dk = arena_take(arena, row * k);
    g->dk_raw = arena_take(arena, row * k);
    g->dv = arena_take(arena, row * k);
    g->datt = arena_take(arena, row * q);
    g->dact = arena_take(arena, row * (size_t)s->ffn);
    g->ds = arena_take(arena, row * (size_t)(LORA_GROUP * R));
}

/* One of forward's products: its output's gradient, and what its input's and LoRA's need. */
typedef struct Product {
    real *dy, *s;
    const frozen *w;
    Pair pair;
    int N;
} Product;

#define PRODUCT(dy, slot, N) {dy, a->s_##slot, w->slot, p->slot, N}

/* dx = Σ dy·w over products that read the same x, then LoRA's gradients and its part of dx. dx
 * NULL: nothing below needs it. */
static void unproject(Device *d, Adapter *adapter, const Product *list, int count, real *dx,
                      real *ds, const real *x, int T, int D)
{
    const float *weights = adapter->vector[WEIGHTS];
    float *fresh = adapter->vector[FRESH];
    Lora group[LORA_GROUP];
    int trained = 0;
    for (const Product *p = list; p < list + count; p++) {
        if (dx) d->linear_backward(d, dx, p->dy, p->w, T, p->N, D, p > list);
        if (p->pair.a < 0) continue;
        size_t at = (size_t)trained * (size_t)T * (size_t)adapter->rank;
        group[trained++] = (Lora){.y = p->dy,
                                  .s = p->s,
                                  .ds = real_at(d, ds, at),
                                  .a = weights + p->pair.a,
                                  .b = weights + p->pair.b,
                                  .da = fresh + p->pair.a,
                                  .db = fresh + p->pair.b,
                                  .N = p->N};
    }
    if (trained) d->lora_backward(d, dx, group, trained, x, T, D, adapter->rank, adapter->scale);
}

static void mlp_backward(const Model *m, Adapter *adapter, int l, int T, const Acts *acts,
                         const Grads *g)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    const LayerPairs *p = &adapter->layer[l];
    int D = s->width, F = s->ffn;
    const Product down[] = {PRODUCT(g->dx, w_down, D)};
    const Product gated[] = {PRODUCT(a->gate, w_gate, F), PRODUCT(a->up, w_up, F)};
    d->swiglu(d, acts->act, a->gate, a->up, T, F);
    unproject(d, adapter, down, 1, g->dact, g->ds, acts->act, T, F);
    d->swiglu_backward(d, a->gate, a->up, g->dact, a->gate, a->up, T,
                       F); /* from here they are gradients */
    d->rmsnorm(d, acts->xn, a->mlp_rstd, a->mid, w->mlp_norm, T, D, s->norm_eps);
    unproject(d, adapter, gated, 2, g->dxn, g->ds, acts->xn, T, D);
    d->rmsnorm_backward(d, g->dx, g->dxn, a->mid, w->mlp_norm, a->mlp_rstd, T, D);
}

/* dq → dq_raw and dk → dk_raw: the turn back, then the head norms. */
static void unrotate(const Model *m, int l, int T, const Acts *acts, const Grads *g)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    int H = s->heads, G = s->kv_heads, E = s->head_width;
    size_t q_bytes = (size_t)T * (size_t)(H * E) * d->real_bytes,
           k_bytes = q_bytes / (size_t)H * (size_t)G;
    d->rope_backward(d, g->dq, acts->cosine, acts->sine, T, H, E);
    d->rope_backward(d, g->dk, acts->cosine, acts->sine, T, G, E);
    if (!s->qk_norm) {
        d->copy(d, g->dq_raw, g->dq, q_bytes);
        d->copy(d, g->dk_raw, g->dk, k_bytes);
        return;
    }
    d->zero(d, g->dq_raw, q_bytes);
    d->zero(d, g->dk_raw, k_bytes);
    d->rmsnorm_backward(d, g->dq_raw, g->dq, a->q_raw, w->q_norm, acts->q_rstd, T * H, E);
    d->rmsnorm_backward(d, g->dk_raw, g->dk, a->k_raw, w->k_norm, acts->k_rstd, T * G, E);
}

static void attention_block_backward(const Model *m, Adapter *adapter, int l, const Batch *batch,
                                     const Acts *acts, const Grads *g)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const LayerWeights *w = &m->layer[l];
    const LayerActs *a = &acts->layer[l];
    const LayerPairs *p = &adapter->layer[l];
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width;
    const Product out[] = {PRODUCT(g->dx, wo, D)};
    const Product qkv[] = {PRODUCT(g->dq_raw, wq, H * E), PRODUCT(g->dk_raw, wk, G * E),
                           PRODUCT(g->dv, wv, G * E)};
    unproject(d, adapter, out, 1, g->datt, g->ds, a->att, T, H * E);
    layer_rotate(m, l, acts, T);
    d->attention_backward(d, g->dq, g->dk, g->dv, g->datt, a->att, a->lse, acts->q, acts->k, a->v,
                          batch->spans, batch->S, T, H, G, E, 0);
    unrotate(m, l, T, acts, g);
    d->rmsnorm(d, acts->xn, a->attn_rstd, a->x, w->attn_norm, T, D, s->norm_eps);
    real *dxn = l > 0 ? g->dxn : NULL; /* below the first layer is the embedding, which is frozen */
    unproject(d, adapter, qkv, 3, dxn, g->ds, acts->xn, T, D);
    if (dxn) d->rmsnorm_backward(d, g->dx, dxn, a->x, w->attn_norm, a->attn_rstd, T, D);
}

void backward(const Model *m, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *g)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    if (!(adapter->groups & (ATTN | MLP))) return;
    d->zero(d, g->dx, (size_t)batch->T * (size_t)s->width * d->real_bytes);
    d->rmsnorm_backward(d, g->dx, g->dxn, acts->out, m->final_norm, acts->final_rstd, batch->T,
                        s->width);
    for (int l = s->layers - 1; l >= 0 && !batch_stopped(batch); l--) {
        if (l < acts->again[CHEAP]) layer_forward(m, l, batch, acts, cache, NULL);
        mlp_backward(m, adapter, l, batch->T, acts, g);
        attention_block_backward(m, adapter, l, batch, acts, g);
    }
}
