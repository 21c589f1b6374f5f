/* model/layers/delta.c - a gated delta network, the mixer with a state instead of keys; forward and
 * backward.
 *
 *   q, k, v = silu(conv(wq·x)), silu(conv(wk·x)), silu(conv(wv·x));  q, k = q/|q|/√N, k/|k|
 *   y = delta(q, k, v, beta, decay);  out = x + w_out·(norm(y)·silu(w_z·x))
 *
 * A division by a length is rmsnorm with the constant weight 1/√N, and the last gate is swiglu, so
 * both are the ops that other layers use. All products of x are side by side in a row, and one
 * product where the device can (project.c). Backward recomputes everything but the products and the
 * delta rule itself. A sequence keeps the rule's state and its open page (delta_state.h). */
#include "../../device/delta_state.h"
#include "project.h"

#define UNIT_EPS 1e-6f /* added to a head's sum of squares, as in transformers */

typedef struct Sizes {
    int T, D, G, H, N, E, Q, V; /* Q: all of q, or of k; V: all of v */
} Sizes;

static Sizes sizes_of(const LayerPass *p)
{
    const Shape *s = &p->model->shape;
    int G = s->key_heads, H = s->value_heads, N = s->key_width, E = s->value_width;
    return (Sizes){p->batch->T, s->width, G, H, N, E, G * N, H * E};
}

/* A row's products, in the order of their weights; `step` is the row stride. */
typedef struct DeltaRows {
    real *q, *k, *v, *z, *b, *a;
    int step;
} DeltaRows;

static DeltaRows rows_of(const LayerPass *p, real *in)
{
    const Device *d = p->stage->dev;
    Sizes z = sizes_of(p);
    DeltaRows r = {.q = in, .step = delta_width(&p->model->shape)};
    r.k = real_at(d, r.q, (size_t)z.Q);
    r.v = real_at(d, r.k, (size_t)z.Q);
    r.z = real_at(d, r.v, (size_t)z.V);
    r.b = real_at(d, r.z, (size_t)z.V);
    r.a = real_at(d, r.b, (size_t)z.H);
    return r;
}

enum { PRODUCTS = 6 };

typedef struct Products {
    Projection of[PRODUCTS];
} Products;

/* The products of x; with the gradients' rows, the ones of backward. */
static Products products_of(const LayerPass *p, const DeltaRows *r)
{
    const LayerWeights *w = &p->model->layer[p->l];
    const LayerActs *a = &p->acts->layer[p->l];
    Sizes z = sizes_of(p);
    return (Products){
        {PART_OF(r->step, r->q, delta_q, NULL, z.Q), PART_OF(r->step, r->k, delta_k, NULL, z.Q),
         PART_OF(r->step, r->v, delta_v, NULL, z.V), PART_OF(r->step, r->z, delta_z, NULL, z.V),
         FROZEN_PART(r->step, r->b, delta_b, z.H), FROZEN_PART(r->step, r->a, delta_a, z.H)}};
}

/* One of the three convolutions, whose states are adjacent; `at` is its first channel, also in a
 * row of x. */
static void convolve(const LayerPass *p, real *y, const DeltaRows *x, int at, int C)
{
    const Model *m = p->model;
    const Batch *batch = p->batch;
    float *state = cache_state(m, p->cache, p->l), *start = NULL, *ring = NULL;
    if (state) {
        start = state + CONV_START(at);
        ring = state + CONV_START(delta_channels(&m->shape)) + CONV_RING(at);
    }
    Device *d = p->stage->dev;
    d->conv(d, y, start, ring, real_at(d, x->q, (size_t)at),
            m->layer[p->l].delta_conv + (size_t)at * CONV, batch->spans, batch->S, batch->T, C,
            x->step, (int64_t)(p->cache->state_bytes / sizeof(float)));
}

/* Computes the delta rule's inputs from the products. */
static void prepare(const LayerPass *p, const DeltaRows *r)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    Sizes z = sizes_of(p);
    convolve(p, acts->conv_q, r, 0, z.Q);
    convolve(p, acts->conv_k, r, z.Q, z.Q);
    convolve(p, acts->conv_v, r, 2 * z.Q, z.V);
    float eps = UNIT_EPS / (float)z.N;
    d->rmsnorm(d, acts->unit_q, acts->unit_q_rstd, acts->conv_q, p->stage->delta_q_unit, z.T * z.G,
               z.N, eps);
    d->rmsnorm(d, acts->unit_k, acts->unit_k_rstd, acts->conv_k, p->stage->delta_k_unit, z.T * z.G,
               z.N, eps);
    d->delta_gates(d, acts->beta, acts->decay, r->b, r->a, w->delta_rate, w->delta_bias, z.T, z.H,
                   r->step);
}

/* delta_out's input: the delta rule's output, normed and gated. */
static void gated(const LayerPass *p, const DeltaRows *r)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Sizes z = sizes_of(p);
    d->rmsnorm(d, acts->delta_normed, acts->delta_rstd, a->delta_y, m->layer[p->l].delta_norm,
               z.T * z.H, z.E, m->shape.norm_eps);
    d->swiglu(d, acts->delta_gated, r->z, acts->delta_normed, z.T, z.V, r->step, z.V);
}

void linear_attention_forward(const LayerPass *p, real *out, const real *x)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Batch *batch = p->batch;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Sizes z = sizes_of(p);

    DeltaRows r = rows_of(p, a->delta_in);
    const Products in = products_of(p, &r);
    const Projection last[] = {PROJECTION(out, delta_out, NULL, z.D)};

    project(p, in.of, PRODUCTS, acts->xn, z.D);
    if (!out) return;
    prepare(p, &r);
    float *state = cache_state(m, p->cache, p->l), *open = NULL;
    if (state) {
        int C = delta_channels(&m->shape);
        state += CONV_START(C) + CONV_RING(C);
        open = state + DELTA_STATE(z.H, z.N, z.E);
    }
    d->delta(d, a->delta_y, a->delta_w, state ? NULL : a->delta_pages, state, open, acts->unit_q,
             acts->unit_k, acts->conv_v, acts->beta, acts->decay, batch->spans, batch->S, z.T, z.G,
             z.H, z.N, z.E, (int64_t)(p->cache->state_bytes / sizeof(float)));
    gated(p, &r);
    project_onto(p, x, last, acts->delta_gated, z.V);
}

/* dunit → dconv of one of q and k, through the division by its length, then through the
 * convolution. */
static void unprepare(const LayerPass *p, real *dx, real *dconv, const real *dunit, const real *x,
                      const real *conv, const float *unit, const float *rstd, int at)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Batch *batch = p->batch;
    Sizes z = sizes_of(p);
    d->rmsnorm_backward(d, dconv, dunit, conv, unit, rstd, NULL, z.T * z.G, z.N);
    d->conv_backward(d, dx, dconv, x, m->layer[p->l].delta_conv + (size_t)at * CONV, batch->spans,
                     batch->S, z.T, z.Q, delta_width(&m->shape));
}

void linear_attention_backward(const LayerPass *p, real *dxn)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    const Batch *batch = p->batch;
    const LayerWeights *w = &m->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    Sizes z = sizes_of(p);

    const Projection last[] = {PROJECTION(g->dx, delta_out, NULL, z.D)};
    DeltaRows r = rows_of(p, a->delta_in), dr = rows_of(p, g->ddelta_in);
    const Products in = products_of(p, &dr);

    prepare(p, &r);
    gated(p, &r);
    unproject(p, last, 1, g->ddelta_gated, acts->delta_gated, z.V);
    d->swiglu_backward(d, dr.z, g->ddelta_gated, g->ddelta_gated, r.z, acts->delta_normed, z.T, z.V,
                       r.step, z.V);
    d->rmsnorm_backward(d, g->ddelta_y, g->ddelta_gated, a->delta_y, w->delta_norm,
                        acts->delta_rstd, NULL, z.T * z.H, z.E);
    d->delta_backward(d, g->dunit_q, g->dunit_k, g->dconv_v, g->dbeta, g->ddecay, g->ddelta_y,
                      a->delta_w, a->delta_pages, acts->unit_q, acts->unit_k, acts->conv_v,
                      acts->beta, acts->decay, batch->spans, batch->S, z.T, z.G, z.H, z.N, z.E);
    d->delta_gates_backward(d, dr.b, dr.a, g->dbeta, g->ddecay, r.b, r.a, w->delta_rate,
                            w->delta_bias, z.T, z.H, r.step);
    unprepare(p, dr.q, g->dconv_q, g->dunit_q, r.q, acts->conv_q, p->stage->delta_q_unit,
              acts->unit_q_rstd, 0);
    unprepare(p, dr.k, g->dconv_k, g->dunit_k, r.k, acts->conv_k, p->stage->delta_k_unit,
              acts->unit_k_rstd, z.Q);
    d->conv_backward(d, dr.v, g->dconv_v, r.v, w->delta_conv + (size_t)z.Q * 2 * CONV, batch->spans,
                     batch->S, z.T, z.V, r.step);
    unproject(p, in.of, PRODUCTS, dxn, acts->xn, z.D);
}
