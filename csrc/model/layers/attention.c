/* model/layers/attention.c - the attention mixers: full_attention over all keys before a row,
 * sliding_attention over the last `window` of them; forward and backward.
 *
 *   q, k, v = wq·x, wk·x, wv·x;  q, k = rope(norm(q)), rope(norm(k));  out = x + wo·attention(q, k,
 * v)
 *
 * Head norms, sinks, and a gate on attention's output (wq computes it with q) exist only in some
 * models. Backward recomputes q and k from the kept rows. */
#include "project.h"

/* A row's q, k and v, side by side so that they can be one product. A q with a gate is computed
 * together with it and then split off (halve): its rows are a separate array. */
typedef struct AttentionRows {
    real *q, *k, *v;
    int q_step, kv_step; /* from one row to the next */
} AttentionRows;

static AttentionRows rows_of(const LayerPass *p, real *qkv, real *q_alone)
{
    const Device *d = p->stage->dev;
    const Shape *s = &p->model->shape;
    int Q = s->heads * s->head_width, KV = s->kv_heads * s->head_width, all = qkv_width(s);
    if (s->q_gate) return (AttentionRows){q_alone, qkv, real_at(d, qkv, (size_t)KV), Q, all};
    return (AttentionRows){qkv, real_at(d, qkv, (size_t)Q), real_at(d, qkv, (size_t)(Q + KV)), all,
                           all};
}

/* Head norms where the model has them, then rope. */
static void rotate(const LayerPass *p, const AttentionRows *r)
{
    const Shape *s = &p->model->shape;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    p->stage->dev->rotate(p->stage->dev, acts->q, acts->k, acts->q_rstd, acts->k_rstd, r->q, r->k,
                          w->q_norm, w->k_norm, acts->cosine, acts->sine, p->batch->T, s->heads,
                          s->kv_heads, s->head_width, s->rotary, r->q_step, r->kv_step,
                          s->norm_eps);
}

/* wo's input: attention's output, gated if the model has a gate. */
static real *gated(const LayerPass *p)
{
    Device *d = p->stage->dev;
    const Shape *s = &p->model->shape;
    const LayerActs *a = &p->acts->layer[p->l];
    if (!s->q_gate) return a->att;
    d->gate(d, p->acts->att_gated, a->att, a->q_gate, p->batch->T, s->heads * s->head_width);
    return p->acts->att_gated;
}

static void attention_forward(const LayerPass *p, real *out, const real *x, int window)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Shape *s = &m->shape;
    const Batch *batch = p->batch;
    const Acts *acts = p->acts;
    const LayerWeights *w = &m->layer[p->l];
    const LayerActs *a = &acts->layer[p->l];
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width;
    size_t at = cache_at(m, p->cache, p->l), list = (size_t)cache_list(m, p->cache, p->l);
    const int32_t *slot = batch->slot + list * (size_t)T;
    const Span *spans = batch->spans + list * (size_t)batch->S;
    cached *k_pages = cached_at(p->cache->k, at), *v_pages = cached_at(p->cache->v, at);

    AttentionRows r = rows_of(p, a->qkv, a->q_alone);
    int Q = H * E * (1 + s->q_gate);
    const Projection qkv[] = {
        PART_OF(s->q_gate ? Q : r.q_step, s->q_gate ? acts->q_wide : r.q, wq, w->bq, Q),
        PART_OF(r.kv_step, r.k, wk, w->bk, G * E), PART_OF(r.kv_step, r.v, wv, w->bv, G * E)};
    const Projection wo[] = {PROJECTION(out, wo, w->bo, D)};

    project(p, qkv, 3, acts->xn, D);
    if (s->q_gate) d->halve(d, r.q, a->q_gate, acts->q_wide, T * H, E);
    if (!out) return;
    rotate(p, &r);
    d->kv_write(d, k_pages, v_pages, acts->k, r.v, slot, T, G, E, r.kv_step);
    d->attention(d, a->att, a->lse, acts->q, k_pages, v_pages, spans, batch->pages, batch->S, T, H,
                 G, E, window, 0);
    if (s->sinks) d->sink(d, a->att, a->lse, w->sinks, T, H, E);
    project_onto(p, x, wo, gated(p), H * E);
}

static void attention_backward(const LayerPass *p, real *dxn, int window)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Shape *s = &m->shape;
    const Batch *batch = p->batch;
    const Acts *acts = p->acts;
    const LayerWeights *w = &m->layer[p->l];
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    int T = batch->T, D = s->width, H = s->heads, G = s->kv_heads, E = s->head_width;

    AttentionRows r = rows_of(p, a->qkv, a->q_alone), dr = rows_of(p, g->dqkv, g->dq_alone);
    int Q = H * E * (1 + s->q_gate);
    const Projection wo[] = {PROJECTION(g->dx, wo, NULL, D)};
    const Projection qkv[] = {
        PART_OF(s->q_gate ? Q : dr.q_step, s->q_gate ? g->dq_wide : dr.q, wq, NULL, Q),
        PART_OF(dr.kv_step, dr.k, wk, NULL, G * E), PART_OF(dr.kv_step, dr.v, wv, NULL, G * E)};

    unproject(p, wo, 1, g->datt, gated(p), H * E);
    if (s->q_gate) d->gate_backward(d, g->datt, g->dq_gate, g->datt, a->att, a->q_gate, T, H * E);
    rotate(p, &r);
    d->attention_backward(d, dr.q, dr.k, dr.v, g->datt, a->att, a->lse, acts->q, acts->k, r.v,
                          batch->spans, batch->S, T, H, G, E, window, r.q_step, r.kv_step);
    d->rotate_backward(d, dr.q, dr.k, r.q, r.k, w->q_norm, w->k_norm, acts->q_rstd, acts->k_rstd,
                       acts->cosine, acts->sine, T, H, G, E, s->rotary, r.q_step, r.kv_step);
    if (s->q_gate) d->join(d, g->dq_wide, dr.q, g->dq_gate, T * H, E);
    unproject(p, qkv, 3, dxn, acts->xn, D);
}

void full_attention_forward(const LayerPass *p, real *out, const real *x)
{
    attention_forward(p, out, x, 0);
}

void full_attention_backward(const LayerPass *p, real *dxn)
{
    attention_backward(p, dxn, 0);
}

void sliding_attention_forward(const LayerPass *p, real *out, const real *x)
{
    attention_forward(p, out, x, p->model->shape.window);
}

void sliding_attention_backward(const LayerPass *p, real *dxn)
{
    attention_backward(p, dxn, p->model->shape.window);
}
