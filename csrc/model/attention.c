/* model/attention.c - the mixers that attend: full_attention to all keys before a row,
 * sliding_attention to the last `window` of them; forward and back.
 *
 *   q, k, v = wq·x, wk·x, wv·x;  q, k = rope(norm(q)), rope(norm(k));  out += wo·attention(q, k, v)
 *
 * The head norms exist only in models that have them. Backward recomputes q and k from the kept
 * q_raw and k_raw. */
#include "layer.h"

/* Head norms where the model has them, then rope. */
static void rotate(const Pass *p)
{
    Device *d = p->model->dev;
    const Shape *s = &p->model->shape;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    int T = p->batch->T, H = s->heads, G = s->kv_heads, E = s->head_width;
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

/* dq → dq_raw and dk → dk_raw: backward of rope, then of the head norms. */
static void unrotate(const Pass *p)
{
    Device *d = p->model->dev;
    const Shape *s = &p->model->shape;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    int T = p->batch->T, H = s->heads, G = s->kv_heads, E = s->head_width;
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

static void attention_forward(const Pass *p, real *out, int window)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const Batch *batch = p->batch;
    const Acts *acts = p->acts;
    const LayerWeights *w = &m->layer[p->l];
    const LayerActs *a = &acts->layer[p->l];
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width;
    size_t at = cache_at(m, p->cache, p->l);
    real *k_pages = real_at(d, p->cache->k, at), *v_pages = real_at(d, p->cache->v, at);

    const Projection qkv[] = {PROJECTION(a->q_raw, wq, w->bq, H * E),
                              PROJECTION(a->k_raw, wk, w->bk, G * E),
                              PROJECTION(a->v, wv, w->bv, G * E)};
    const Projection wo[] = {PROJECTION(out, wo, NULL, D)};

    project(p, qkv, 3, acts->xn, D, 0);
    if (!out) return;
    rotate(p);
    d->kv_write(d, k_pages, v_pages, acts->k, a->v, batch->slot, T, G, E);
    d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, batch->spans, batch->pages, batch->S,
                 T, H, G, E, window);
    project(p, wo, 1, a->att, H * E, 1);
}

static void attention_backward(const Pass *p, real *dxn, int window)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Shape *s = &m->shape;
    const Batch *batch = p->batch;
    const Acts *acts = p->acts;
    const LayerWeights *w = &m->layer[p->l];
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width;

    const Projection wo[] = {PROJECTION(g->dx, wo, NULL, D)};
    const Projection qkv[] = {PROJECTION(g->dq_raw, wq, NULL, H * E),
                              PROJECTION(g->dk_raw, wk, NULL, G * E),
                              PROJECTION(g->dv, wv, NULL, G * E)};

    unproject(p, wo, 1, g->datt, a->att, H * E);
    rotate(p);
    d->attention_backward(d, g->dq, g->dk, g->dv, g->datt, a->att, a->lse, acts->q, acts->k, a->v,
                          batch->spans, batch->S, T, H, G, E, window);
    unrotate(p);
    unproject(p, qkv, 3, dxn, acts->xn, D);
}

void full_attention_forward(const Pass *p, real *out)
{
    attention_forward(p, out, 0);
}

void full_attention_backward(const Pass *p, real *dxn)
{
    attention_backward(p, dxn, 0);
}

void sliding_attention_forward(const Pass *p, real *out)
{
    attention_forward(p, out, p->model->shape.window);
}

void sliding_attention_backward(const Pass *p, real *dxn)
{
    attention_backward(p, dxn, p->model->shape.window);
}
