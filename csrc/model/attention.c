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
    const Shape *s = &p->model->shape;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    p->model->dev->rotate(p->model->dev, acts->q, acts->k, acts->q_rstd, acts->k_rstd, a->q_raw,
                          a->k_raw, w->q_norm, w->k_norm, acts->cosine, acts->sine, p->batch->T,
                          s->heads, s->kv_heads, s->head_width, s->rotary, s->norm_eps);
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
    size_t at = cache_at(m, p->cache, p->l);
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
    d->kv_write(d, k_pages, v_pages, acts->k, a->v, batch->slot, T, G, E);
    d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, batch->spans, batch->pages, batch->S,
                 T, H, G, E, window);
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

    real *dq = s->q_gate ? g->dq_wide : g->dq;
    const Projection wo[] = {PROJECTION(g->dx, wo, NULL, D)};
    const Projection qkv[] = {PROJECTION(dq, wq, NULL, H * E * (1 + s->q_gate)),
                              PROJECTION(g->dk, wk, NULL, G * E),
                              PROJECTION(g->dv, wv, NULL, G * E)};

    unproject(p, wo, 1, g->datt, gated(p), H * E);
    if (s->q_gate) d->gate_backward(d, g->datt, g->dq_gate, g->datt, a->att, a->q_gate, T, H * E);
    rotate(p);
    d->attention_backward(d, g->dq, g->dk, g->dv, g->datt, a->att, a->lse, acts->q, acts->k, a->v,
                          batch->spans, batch->S, T, H, G, E, window);
    d->rotate_backward(d, g->dq, g->dk, a->q_raw, a->k_raw, w->q_norm, w->k_norm, acts->q_rstd,
                       acts->k_rstd, acts->cosine, acts->sine, T, H, G, E, s->rotary);
    if (s->q_gate) d->join(d, g->dq_wide, g->dq, g->dq_gate, T * H, E);
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
