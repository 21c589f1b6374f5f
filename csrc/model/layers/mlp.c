/* model/layers/mlp.c - the dense feed-forward part, forward and back.
 *
 *   out = x + w_down·swiglu(w_gate·x, w_up·x)
 *
 * gate and up stand side by side in a row, and are one product where the device can (project.c).
 * Backward recomputes swiglu's output. The gradients of gate and up overwrite gate and up. */
#include "project.h"

void mlp_forward(const LayerPass *p, real *out, const real *x)
{
    Device *d = p->model->dev;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    int T = p->batch->T, D = p->model->shape.width, F = p->model->shape.ffn;

    real *gate = a->gate_up, *up = real_at(d, gate, (size_t)F);
    const Projection gated[] = {PART_OF(2 * F, gate, w_gate, NULL, F),
                                PART_OF(2 * F, up, w_up, NULL, F)};
    const Projection down[] = {PROJECTION(out, w_down, NULL, D)};

    project(p, gated, 2, acts->xn, D);
    if (!out) return;
    d->swiglu(d, acts->act, gate, up, T, F, 2 * F, 2 * F);
    project_onto(p, x, down, acts->act, F);
}

void mlp_backward(const LayerPass *p, real *dxn)
{
    Device *d = p->model->dev;
    const LayerWeights *w = &p->model->layer[p->l];
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    const Grads *g = p->grads;
    int T = p->batch->T, D = p->model->shape.width, F = p->model->shape.ffn;

    const Projection down[] = {PROJECTION(g->dx, w_down, NULL, D)};
    real *gate = a->gate_up, *up = real_at(d, gate, (size_t)F);
    const Projection gated[] = {PART_OF(2 * F, gate, w_gate, NULL, F),
                                PART_OF(2 * F, up, w_up, NULL, F)};

    d->swiglu(d, acts->act, gate, up, T, F, 2 * F, 2 * F);
    unproject(p, down, 1, g->dact, acts->act, F);
    d->swiglu_backward(d, gate, up, g->dact, gate, up, T, F, 2 * F, 2 * F);
    unproject(p, gated, 2, dxn, acts->xn, D);
}
