/* model/layers/experts.c - the feed-forward part of a mixture of experts, forward and backward.
 *
 *   out = x + Σ_k w_down_e·(share_k·swiglu(w_gate_e·x, w_up_e·x)),  e = the k-th expert of the row
 *
 * A pair is a row and one of its experts. Pairs are sorted by expert, so that each chosen expert
 * multiplies all its rows in one product. The share multiplies swiglu's output: so the shares'
 * gradient, which reaches x through the router, needs no product's result. LoRA's shared factors
 * (w_gate's and w_up's A, w_down's B) work on rows, not pairs. experts_with_shared adds one expert
 * for all rows: mlp.c's, with the share sigmoid(shared_gate·x).
 *
 * Backward recomputes the order, the shares and swiglu's output. The gradients of gate and up
 * overwrite gate and up. */
#include "mlp.h"

/* The fields of a layer's pass that the functions below use. */
typedef struct Mix {
    const LayerPass *pass;
    Device *d;
    const Acts *acts;
    const LayerActs *a;
    const LayerWeights *w;
    int T, P, D, F, X, K;
    float limit;
    int64_t gate, up, down; /* strides between experts' matrices, in bytes */
    real *gate_y, *up_y;    /* (P,F), contiguous */
} Mix;

static Mix mix_of(const LayerPass *p)
{
    const Model *m = p->model;
    const Shape *s = &m->shape;
    int T = p->batch->T, K = s->chosen;
    real *y = p->acts->layer[p->l].e_gate_up;
    return (Mix){.pass = p,
                 .d = p->stage->dev,
                 .acts = p->acts,
                 .a = &p->acts->layer[p->l],
                 .w = &m->layer[p->l],
                 .T = T,
                 .P = T * K,
                 .D = s->width,
                 .F = s->expert_ffn,
                 .X = s->experts,
                 .K = K,
                 .limit = s->expert_limit,
                 .gate = (int64_t)matrix_step(m, SLOT_e_gate, p->l),
                 .up = (int64_t)matrix_step(m, SLOT_e_up, p->l),
                 .down = (int64_t)matrix_step(m, SLOT_e_down, p->l),
                 .gate_y = y,
                 .up_y = real_at(p->stage->dev, y, (size_t)(T * K) * (size_t)s->expert_ffn)};
}

static const LayerPairs *pairs_of(const Mix *m, const Adapter *adapter)
{
    return &adapter->layer[m->pass->l];
}

/* Chooses each row's experts, and sorts the pairs. */
static void choose(const Mix *m)
{
    const Acts *acts = m->acts;
    m->d->route(m->d, acts->chosen, acts->share, m->a->router_logits, m->T, m->X, m->K,
                m->pass->model->shape.norm_shares);
    m->d->group(m->d, acts->e_pair, acts->e_row, acts->e_place, m->a->e_bounds, acts->chosen, m->T,
                m->K, m->X);
}

/* ---- forward ---- */

/* Whether gate and up are one product: their weights and biases are contiguous. */
static int is_joint(const Mix *m)
{
    const Model *model = m->pass->model;
    const LayerWeights *w = m->w;
    int l = m->pass->l, biased = w->e_gate_bias != NULL;
    return m->gate == m->up && (const char *)w->e_up == (const char *)w->e_gate + m->gate * m->X &&
           matrix_type(model, SLOT_e_up, l) == matrix_type(model, SLOT_e_gate, l) &&
           (!biased || w->e_up_bias == w->e_gate_bias + (size_t)m->X * (size_t)m->F);
}

/* y (P,F) += LoRA of w_gate or w_up, for one segment's rows; s (T,R) = x·A is kept. */
static void add_wide_lora(const Mix *m, const Segment *g, Pair pair, real *y, real *s)
{
    Device *d = m->d;
    const Acts *acts = m->acts;
    const float *a = vector_at(g->adapter, WEIGHTS, m->pass->stage, pair.a),
                *b = vector_at(g->adapter, WEIGHTS, m->pass->stage, pair.b);
    int R = g->adapter->rank;
    size_t row = (size_t)g->row;
    d->grouped_matmul(d, real_at(d, s, row * (size_t)R), real_at(d, acts->xn, row * (size_t)m->D),
                      a, 0, 0, NULL, 1, g->rows, R, m->D, 1.0f, 0);
    d->gather(d, acts->e_s, s, acts->e_row, m->P, R);
    d->grouped_matmul(d, y, acts->e_s, b, pair.b_step, 0, m->a->e_part, m->X, m->P, m->F, R,
                      g->adapter->scale, 1);
}

/* out (T,D) += LoRA of w_down, for one segment's rows; s (T,R) is the sum over a row's pairs. */
static void add_narrow_lora(const Mix *m, const Segment *g, Pair pair, real *out, real *s)
{
    Device *d = m->d;
    const Acts *acts = m->acts;
    const float *a = vector_at(g->adapter, WEIGHTS, m->pass->stage, pair.a),
                *b = vector_at(g->adapter, WEIGHTS, m->pass->stage, pair.b);
    int R = g->adapter->rank;
    size_t row = (size_t)g->row;
    real *own = real_at(d, s, row * (size_t)R);
    d->grouped_matmul(d, acts->e_s, acts->e_act, a, pair.a_step, 0, m->a->e_part, m->X, m->P, R,
                      m->F, 1.0f, 0);
    d->unite(d, own, acts->e_s, acts->e_place + row * (size_t)m->K, NULL, g->rows, m->K, R);
    d->grouped_matmul(d, real_at(d, out, row * (size_t)m->D), own, b, 0, 0, NULL, 1, g->rows, m->D,
                      R, g->adapter->scale, 1);
}

/* Whether the segment has a trained LoRA; puts the bounds of its pairs into m->a->e_part. */
static int segment_begin(const Mix *m, const Segment *g)
{
    const Acts *acts = m->acts;
    if (!g->adapter || pairs_of(m, g->adapter)->e_gate.a < 0) return 0;
    m->d->group_part(m->d, m->a->e_part, m->a->e_bounds, acts->e_row, m->X, g->row, g->rows);
    return 1;
}

void experts_forward(const LayerPass *p, real *out, const real *x)
{
    Mix m = mix_of(p);
    Device *d = m.d;
    const Acts *acts = m.acts;
    const LayerActs *a = m.a;
    const LayerWeights *w = m.w;
    const Batch *batch = p->batch;

    const Projection router[] = {{a->router_logits, NULL, w->router, w->router_bias, m.X, m.X,
                                  offsetof(LayerPairs, router)}};
    project(p, router, 1, acts->xn, m.D);
    choose(&m);
    d->gather(d, acts->e_x, acts->xn, acts->e_row, m.P, m.D);
    int joint = is_joint(&m);
    d->grouped_linear(d, m.gate_y, acts->e_x, w->e_gate, m.gate, w->e_gate_bias, a->e_bounds, m.X,
                      m.P, m.F, m.D, joint ? 2 : 1);
    if (!joint)
        d->grouped_linear(d, m.up_y, acts->e_x, w->e_up, m.up, w->e_up_bias, a->e_bounds, m.X, m.P,
                          m.F, m.D, 1);
    for (const Segment *g = batch->segment; g < batch->segment + batch->segments; g++) {
        if (!segment_begin(&m, g)) continue;
        add_wide_lora(&m, g, pairs_of(&m, g->adapter)->e_gate, m.gate_y, a->s_e_gate);
        add_wide_lora(&m, g, pairs_of(&m, g->adapter)->e_up, m.up_y, a->s_e_up);
    }
    if (!out) return;
    d->swiglu_share(d, acts->e_act, m.gate_y, m.up_y, acts->share, acts->e_pair, m.P, m.F, m.F,
                    m.limit);
    d->grouped_linear(d, acts->e_x, acts->e_act, w->e_down, m.down, NULL, a->e_bounds, m.X, m.P,
                      m.D, m.F, 1);
    d->unite(d, out, acts->e_x, acts->e_place, x, m.T, m.K, m.D);
    if (w->e_down_bias)
        d->share_bias(d, out, acts->share, acts->chosen, w->e_down_bias, m.T, m.K, m.D);
    for (const Segment *g = batch->segment; g < batch->segment + batch->segments; g++)
        if (segment_begin(&m, g))
            add_narrow_lora(&m, g, pairs_of(&m, g->adapter)->e_down, out, a->s_e_down);
}

/* ---- backward ---- */

/* dact (P,F) += w_down's LoRA part; and the gradients of its factors; dy (T,D). */
static void narrow_lora_backward(const Mix *m, Pair pair, real *dact, const real *dy)
{
    Device *d = m->d;
    const Acts *acts = m->acts;
    const Grads *grads = m->pass->grads;
    const Adapter *adapter = m->pass->adapter;
    const Stage *stage = m->pass->stage;
    const float *a = vector_at(adapter, WEIGHTS, stage, pair.a),
                *b = vector_at(adapter, WEIGHTS, stage, pair.b);
    float *da = vector_at(adapter, FRESH, stage, pair.a),
          *db = vector_at(adapter, FRESH, stage, pair.b);
    int R = adapter->rank;
    d->grouped_matmul(d, grads->ds, dy, b, 0, 1, NULL, 1, m->T, R, m->D, adapter->scale, 0);
    d->grouped_gradient(d, db, 0, m->a->s_e_down, dy, NULL, 1, m->T, m->D, R, adapter->scale);
    d->gather(d, grads->de_s, grads->ds, acts->e_row, m->P, R);
    d->grouped_gradient(d, da, pair.a_step, acts->e_act, grads->de_s, m->a->e_bounds, m->X, m->P, R,
                        m->F, 1.0f);
    d->grouped_matmul(d, dact, grads->de_s, a, pair.a_step, 1, m->a->e_bounds, m->X, m->P, m->F, R,
                      1.0f, 1);
}

/* dx (T,D) += w_gate's or w_up's LoRA part, unless dx is NULL; and the gradients of its factors; dy
 * (P,F). */
static void wide_lora_backward(const Mix *m, Pair pair, real *dx, const real *dy, const real *s)
{
    Device *d = m->d;
    const Acts *acts = m->acts;
    const Grads *grads = m->pass->grads;
    const Adapter *adapter = m->pass->adapter;
    const Stage *stage = m->pass->stage;
    const float *a = vector_at(adapter, WEIGHTS, stage, pair.a),
                *b = vector_at(adapter, WEIGHTS, stage, pair.b);
    float *da = vector_at(adapter, FRESH, stage, pair.a),
          *db = vector_at(adapter, FRESH, stage, pair.b);
    int R = adapter->rank;
    d->gather(d, acts->e_s, s, acts->e_row, m->P, R);
    d->grouped_gradient(d, db, pair.b_step, acts->e_s, dy, m->a->e_bounds, m->X, m->P, m->F, R,
                        adapter->scale);
    d->grouped_matmul(d, grads->de_s, dy, b, pair.b_step, 1, m->a->e_bounds, m->X, m->P, R, m->F,
                      adapter->scale, 0);
    d->unite(d, grads->ds, grads->de_s, acts->e_place, NULL, m->T, m->K, R);
    d->grouped_gradient(d, da, 0, acts->xn, grads->ds, NULL, 1, m->T, R, m->D, 1.0f);
    if (dx) d->grouped_matmul(d, dx, grads->ds, a, 0, 1, NULL, 1, m->T, m->D, R, 1.0f, 1);
}

/* accumulate: dxn already holds another part's gradient, and is added to. */
static void pairs_backward(const LayerPass *p, real *dxn, int accumulate)
{
    Mix m = mix_of(p);
    Device *d = m.d;
    const Acts *acts = m.acts;
    const LayerActs *a = m.a;
    const LayerWeights *w = m.w;
    const Grads *g = p->grads;
    const LayerPairs *pairs = pairs_of(&m, p->adapter);
    int trained = pairs->e_gate.a >= 0;

    choose(&m);
    d->swiglu_share(d, acts->e_act, m.gate_y, m.up_y, acts->share, acts->e_pair, m.P, m.F, m.F,
                    m.limit);
    d->gather(d, g->de_x, g->dx, acts->e_row, m.P, m.D);
    d->grouped_linear_backward(d, g->de_act, g->de_x, w->e_down, m.down, a->e_bounds, m.X, m.P, m.D,
                               m.F, 0);
    if (trained) narrow_lora_backward(&m, pairs->e_down, g->de_act, g->dx);
    d->swiglu_share_backward(d, m.gate_y, m.up_y, g->dshare, g->de_act, m.gate_y, m.up_y,
                             acts->share, acts->e_pair, m.P, m.F, m.F, m.limit);
    if (w->e_down_bias)
        d->share_bias_backward(d, g->dshare, g->dx, acts->chosen, w->e_down_bias, m.T, m.K, m.D);
    if (dxn) {
        d->route_backward(d, g->drouter_logits, g->dshare, acts->chosen, acts->share,
                          a->router_logits, m.T, m.X, m.K, p->model->shape.norm_shares);
        d->linear_backward(d, dxn, g->drouter_logits, w->router, m.T, m.X, m.D, m.X, accumulate);
        d->grouped_linear_backward(d, g->de_x, m.gate_y, w->e_gate, m.gate, a->e_bounds, m.X, m.P,
                                   m.F, m.D, 0);
        d->grouped_linear_backward(d, g->de_x, m.up_y, w->e_up, m.up, a->e_bounds, m.X, m.P, m.F,
                                   m.D, 1);
        d->unite(d, dxn, g->de_x, acts->e_place, dxn, m.T, m.K, m.D);
    }
    if (!trained) return;
    wide_lora_backward(&m, pairs->e_gate, dxn, m.gate_y, a->s_e_gate);
    wide_lora_backward(&m, pairs->e_up, dxn, m.up_y, a->s_e_up);
}

void experts_backward(const LayerPass *p, real *dxn)
{
    pairs_backward(p, dxn, 0);
}

/* ---- with a shared expert ---- */

void experts_with_shared_forward(const LayerPass *p, real *out, const real *x)
{
    Device *d = p->stage->dev;
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    int T = p->batch->T;
    Mlp m = mlp_of(p, out, a->shared_logit);

    experts_forward(p, out, x);
    project(p, m.in, 3, acts->xn, p->model->shape.width);
    if (!out) return;
    d->sigmoid(d, acts->shared_share, a->shared_logit, T);
    d->swiglu_share(d, acts->act, m.gate, m.up, acts->shared_share, NULL, T, m.F, 2 * m.F, 0.0f);
    project_onto(p, out, &m.down, acts->act, m.F);
}

void experts_with_shared_backward(const LayerPass *p, real *dxn)
{
    Device *d = p->stage->dev;
    const Acts *acts = p->acts;
    const Grads *g = p->grads;
    int T = p->batch->T;
    Mlp m = mlp_of(p, g->dx, g->dshared_logit);

    d->sigmoid(d, acts->shared_share, acts->layer[p->l].shared_logit, T);
    d->swiglu_share(d, acts->act, m.gate, m.up, acts->shared_share, NULL, T, m.F, 2 * m.F, 0.0f);
    unproject(p, &m.down, 1, g->dact, acts->act, m.F);
    d->swiglu_share_backward(d, m.gate, m.up, g->dshared_share, g->dact, m.gate, m.up,
                             acts->shared_share, NULL, T, m.F, 2 * m.F, 0.0f);
    d->sigmoid_backward(d, g->dshared_logit, g->dshared_share, acts->shared_share, T);
    unproject(p, m.in, 3, dxn, acts->xn, p->model->shape.width);
    pairs_backward(p, dxn, 1);
}
