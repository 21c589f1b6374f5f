/* model/attention.c - the mixers that attend: full_attention to all keys before a row,
 * sliding_attention to the last `window` of them; forward and back.
 *
 *   q, k, v = wq·x, wk·x, wv·x;  q, k = rope(norm(q)), rope(norm(k));  out += wo·attention(q, k, v)
 *
 * Head norms, sinks, and a gate on attention's output (which wq gives beside q), exist only in
 * models that have them. Backward recomputes q and k from the kept q_raw and k_raw. */
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
    d->rope(d, acts->q, acts->cosine, acts->sine, T, H, E, s->rotary);
    d->rope(d, acts->k, acts->cosine, acts->sine, T, G, E, s->rotary);
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
    d->rope_backward(d, g->dq, acts->cosine, acts->sine, T, H, E, s->rotary);
    d->rope_backward(d, g->dk, acts->cosine, acts->sine, T, G, E, s->rotary);
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

/* What wo multiplies: attention's output, behind its gate where the model has one. */
static real *gated(const Pass *p)
{
    Device *d = p->model->dev;
    const Shape *s = &p->model->shape;
    const LayerActs *a = &p->acts->layer[p->l];
    if (!s->q_gate) return a->att;
    d->gate(d, p->acts->att_gated, a->att, a->q_gate, p->batch->T, s->heads * s->head_width);
    return p->acts->att_gated;
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
    size_t at = cache_at(m, p->cache, p->l), list = (size_t)cache_list(m, p->cache, p->l);
    const int32_t *slot = batch->slot + list * (size_t)T;
    const Span *spans = batch->spans + list * (size_t)batch->S;
    real *k_pages = real_at(d, p->cache->k, at), *v_pages = real_at(d, p->cache->v, at);

    real *q = s->q_gate ? acts->q_wide : a->q_raw;
    const Projection qkv[] = {PROJECTION(q, wq, w->bq, H * E * (1 + s->q_gate)),
                              PROJECTION(a->k_raw, wk, w->bk, G * E),
                              PROJECTION(a->v, wv, w->bv, G * E)};
    const Projection wo[] = {PROJECTION(out, wo, w->bo, D)};

    project(p, qkv, 3, acts->xn, D, 0);
    if (s->q_gate) d->halve(d, a->q_raw, a->q_gate, acts->q_wide, T * H, E);
    if (!out) return;
    rotate(p);
    d->kv_write(d, k_pages, v_pages, acts->k, a->v, slot, T, G, E);
    d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, spans, batch->pages, batch->S, T, H,
                 G, E, window);
    if (s->sinks) d->sink(d, a->att, a->lse, w->sinks, T, H, E);
    project(p, wo, 1, gated(p), H * E, 1);
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

    real *dq = s->q_gate ? g->dq_wide : g->dq_raw;
    const Projection wo[] = {PROJECTION(g->dx, wo, NULL, D)};
    const Projection qkv[] = {PROJECTION(dq, wq, NULL, H * E * (1 + s->q_gate)),
                              PROJECTION(g->dk_raw, wk, NULL, G * E),
                              PROJECTION(g->dv, wv, NULL, G * E)};

    unproject(p, wo, 1, g->datt, gated(p), H * E);
    if (s->q_gate) d->gate_backward(d, g->datt, g->dq_gate, g->datt, a->att, a->q_gate, T, H * E);
    rotate(p);
    d->attention_backward(d, g->dq, g->dk, g->dv, g->datt, a->att, a->lse, acts->q, acts->k, a->v,
                          batch->spans, batch->S, T, H, G, E, window);
    unrotate(p);
    if (s->q_gate) d->join(d, g->dq_wide, g->dq_raw, g->dq_gate, T * H, E);
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
