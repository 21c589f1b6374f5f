/* model/mlp.c - the dense feed-forward part, forward and back.
 *
 *   out += w_down·swiglu(w_gate·x, w_up·x)
 *
 * Backward recomputes swiglu's output. The gradients of gate and up overwrite gate and up. */
#include "layer.h"

void mlp_forward(const Pass *p, real *out)
{
    Device *d = p->model->dev;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    int T = p->batch->T, D = p->model->shape.width, F = p->model->shape.ffn;

    const Projection gated[] = {PROJECTION(a->gate, w_gate, NULL, F),
                                PROJECTION(a->up, w_up, NULL, F)};
    const Projection down[] = {PROJECTION(out, w_down, NULL, D)};

    project(p, gated, 2, acts->xn, D, 0);
    if (!out) return;
    d->swiglu(d, acts->act, a->gate, a->up, T, F);
    project(p, down, 1, acts->act, F, 1);
}

void mlp_backward(const Pass *p, real *dxn)
{
    Device *d = p->model->dev;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    int T = p->batch->T, D = p->model->shape.width, F = p->model->shape.ffn;

    const Projection down[] = {PROJECTION(g->dx, w_down, NULL, D)};
    const Projection gated[] = {PROJECTION(a->gate, w_gate, NULL, F),
                                PROJECTION(a->up, w_up, NULL, F)};

    d->swiglu(d, acts->act, a->gate, a->up, T, F);
    unproject(p, down, 1, g->dact, acts->act, F);
    d->swiglu_backward(d, a->gate, a->up, g->dact, a->gate, a->up, T, F);
    unproject(p, gated, 2, dxn, acts->xn, D);
}
