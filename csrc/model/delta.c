/* model/delta.c - the mixer that keeps a state instead of keys: a gated delta network; forward and
 * back.
 *
 *   q, k, v = silu(conv(wq·x)), silu(conv(wk·x)), silu(conv(wv·x));  q, k = q/|q|/√N, k/|k|
 *   y = delta(q, k, v, beta, decay);  out = x + w_out·(norm(y)·silu(w_z·x))
 *
 * A division by a length is rmsnorm with the constant weight 1/√N, and the last gate is swiglu, so
 * both are the ops that other layers use. Backward recomputes everything but the products and the
 * delta rule itself. A sequence keeps the rule's state and its open page (device.h). */
#include "layer.h"

#define UNIT_EPS 1e-6f /* beside the sum of a head's squares, as in transformers */

typedef struct Sizes {
    int T, D, G, H, N, E, Q, V; /* Q: all of q, or of k; V: all of v */
} Sizes;

static Sizes sizes_of(const Pass *p)
{
    const Shape *s = &p->model->shape;
    int G = s->key_heads, H = s->value_heads, N = s->key_width, E = s->value_width;
    return (Sizes){p->batch->T, s->width, G, H, N, E, G * N, H * E};
}

/* One of the three convolutions, which all keep their rows in one place; `at` is its first channel.
 */
static void convolve(const Pass *p, real *y, const real *x, int at, int C)
{
    const Model *m = p->model;
    const Batch *batch = p->batch;
    float *state = cache_state(m, p->cache, p->l), *start = NULL, *ring = NULL;
    if (state) {
        start = state + CONV_START(at);
        ring = state + CONV_START(delta_channels(&m->shape)) + CONV_RING(at);
    }
    m->dev->conv(m->dev, y, start, ring, x, m->layer[p->l].delta_conv + (size_t)at * CONV,
                 batch->spans, batch->S, batch->T, C,
                 (int64_t)(p->cache->state_bytes / sizeof(float)));
}

/* What the delta rule reads, from the products. */
static void prepare(const Pass *p)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Sizes z = sizes_of(p);
    convolve(p, acts->conv_q, a->delta_q, 0, z.Q);
    convolve(p, acts->conv_k, a->delta_k, z.Q, z.Q);
    convolve(p, acts->conv_v, a->delta_v, 2 * z.Q, z.V);
    float eps = UNIT_EPS / (float)z.N;
    d->rmsnorm(d, acts->unit_q, acts->unit_q_rstd, acts->conv_q, m->delta_q_unit, z.T * z.G, z.N,
               eps);
    d->rmsnorm(d, acts->unit_k, acts->unit_k_rstd, acts->conv_k, m->delta_k_unit, z.T * z.G, z.N,
               eps);
    d->delta_gates(d, acts->beta, acts->decay, a->delta_b, a->delta_a, w->delta_rate, w->delta_bias,
                   z.T, z.H);
}

/* The delta rule's output, normed and gated: what delta_out multiplies. */
static void gated(const Pass *p)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Sizes z = sizes_of(p);
    d->rmsnorm(d, acts->delta_normed, acts->delta_rstd, a->delta_y, m->layer[p->l].delta_norm,
               z.T * z.H, z.E, m->shape.norm_eps);
    d->swiglu(d, acts->delta_gated, a->delta_z, acts->delta_normed, z.T, z.V, z.V);
}

void linear_attention_forward(const Pass *p, real *out, const real *x)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Batch *batch = p->batch;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Sizes z = sizes_of(p);

    const Projection in[] = {
        PROJECTION(a->delta_q, delta_q, NULL, z.Q), PROJECTION(a->delta_k, delta_k, NULL, z.Q),
        PROJECTION(a->delta_v, delta_v, NULL, z.V), PROJECTION(a->delta_z, delta_z, NULL, z.V),
        FROZEN(a->delta_b, delta_b, z.H),           FROZEN(a->delta_a, delta_a, z.H)};
    const Projection last[] = {PROJECTION(out, delta_out, NULL, z.D)};

    project(p, in, 6, acts->xn, z.D);
    if (!out) return;
    prepare(p);
    float *state = cache_state(m, p->cache, p->l), *open = NULL;
    if (state) {
        int C = delta_channels(&m->shape);
        state += CONV_START(C) + CONV_RING(C);
        open = state + DELTA_STATE(z.H, z.N, z.E);
    }
    d->delta(d, a->delta_y, a->delta_w, state ? NULL : a->delta_pages, state, open, acts->unit_q,
             acts->unit_k, acts->conv_v, acts->beta, acts->decay, batch->spans, batch->S, z.T, z.G,
             z.H, z.N, z.E, (int64_t)(p->cache->state_bytes / sizeof(float)));
    gated(p);
    project_onto(p, x, last, acts->delta_gated, z.V);
}

void cache_rewind(const Model *m, const Cache *cache, int number)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    int Q = s->key_heads * s->key_width, parts[] = {Q, Q, s->value_heads * s->value_width};
    for (int l = 0; l < s->layers; l++) {
        if (!HAS(DELTA)) continue;
        float *start =
                  cache_state(m, cache, l) + (size_t)number * cache->state_bytes / sizeof *start,
              *ring = start + CONV_START(delta_channels(s));
        for (int i = 0; i < 3; i++) { /* the rows at p % CONV = 1, 2, 3 */
            d->copy(d, ring + parts[i], start, CONV_START(parts[i]) * sizeof *start);
            start += CONV_START(parts[i]);
            ring += CONV_RING(parts[i]);
        }
    }
}

/* dunit → dconv of one of q and k, through the division by its length, then through the
 * convolution. */
static void unprepare(const Pass *p, real *dx, real *dconv, const real *dunit, const real *x,
                      const real *conv, const float *unit, const float *rstd, int at)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Batch *batch = p->batch;
    Sizes z = sizes_of(p);
    d->rmsnorm_backward(d, dconv, dunit, conv, unit, rstd, NULL, z.T * z.G, z.N);
    d->conv_backward(d, dx, dconv, x, m->layer[p->l].delta_conv + (size_t)at * CONV, batch->spans,
                     batch->S, z.T, z.Q);
}

void linear_attention_backward(const Pass *p, real *dxn)
{
    const Model *m = p->model;
    Device *d = m->dev;
    const Batch *batch = p->batch;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    Sizes z = sizes_of(p);

    const Projection last[] = {PROJECTION(g->dx, delta_out, NULL, z.D)};
    const Projection in[] = {
        PROJECTION(g->ddelta_q, delta_q, NULL, z.Q), PROJECTION(g->ddelta_k, delta_k, NULL, z.Q),
        PROJECTION(g->ddelta_v, delta_v, NULL, z.V), PROJECTION(g->ddelta_z, delta_z, NULL, z.V),
        FROZEN(g->ddelta_b, delta_b, z.H),           FROZEN(g->ddelta_a, delta_a, z.H)};

    prepare(p);
    gated(p);
    unproject(p, last, 1, g->ddelta_gated, acts->delta_gated, z.V);
    d->swiglu_backward(d, g->ddelta_z, g->ddelta_gated, g->ddelta_gated, a->delta_z,
                       acts->delta_normed, z.T, z.V, z.V);
    d->rmsnorm_backward(d, g->ddelta_y, g->ddelta_gated, a->delta_y, w->delta_norm,
                        acts->delta_rstd, NULL, z.T * z.H, z.E);
    d->delta_backward(d, g->dunit_q, g->dunit_k, g->dconv_v, g->dbeta, g->ddecay, g->ddelta_y,
                      a->delta_w, a->delta_pages, acts->unit_q, acts->unit_k, acts->conv_v,
                      acts->beta, acts->decay, batch->spans, batch->S, z.T, z.G, z.H, z.N, z.E);
    d->delta_gates_backward(d, g->ddelta_b, g->ddelta_a, g->dbeta, g->ddecay, a->delta_b,
                            a->delta_a, w->delta_rate, w->delta_bias, z.T, z.H);
    unprepare(p, g->ddelta_q, g->dconv_q, g->dunit_q, a->delta_q, acts->conv_q, m->delta_q_unit,
              acts->unit_q_rstd, 0);
    unprepare(p, g->ddelta_k, g->dconv_k, g->dunit_k, a->delta_k, acts->conv_k, m->delta_k_unit,
              acts->unit_k_rstd, z.Q);
    d->conv_backward(d, g->ddelta_v, g->dconv_v, a->delta_v, w->delta_conv + (size_t)z.Q * 2 * CONV,
                     batch->spans, batch->S, z.T, z.V);
    unproject(p, in, 6, dxn, acts->xn, z.D);
}
