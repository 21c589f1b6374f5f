/* model/layers/mlp.c - the dense feed-forward part, forward and backward.
 *
 *   out = x + w_down·swiglu(w_gate·x, w_up·x)
 *
 * gate and up are side by side in a row, and one product where the device can (project.c). Backward
 * recomputes swiglu's output. The gradients of gate and up overwrite gate and up. */
#include "mlp.h"

Mlp mlp_of(const LayerPass *p, real *out, real *shared_logit)
{
    const LayerWeights *w = &p->model->layer[p->l];
    const LayerActs *a = &p->acts->layer[p->l];
    int D = p->model->shape.width, F = p->model->shape.ffn;
    real *gate = a->gate_up, *up = real_at(p->stage->dev, gate, (size_t)F);
    return (Mlp){.gate = gate,
                 .up = up,
                 .F = F,
                 .in = {PART_OF(2 * F, gate, w_gate, NULL, F), PART_OF(2 * F, up, w_up, NULL, F),
                        FROZEN(shared_logit, shared_gate, 1)},
                 .down = PROJECTION(out, w_down, NULL, D)};
}

void mlp_forward(const LayerPass *p, real *out, const real *x)
{
    Device *d = p->stage->dev;
    const Acts *acts = p->acts;
    int T = p->batch->T, D = p->model->shape.width;
    Mlp m = mlp_of(p, out, NULL);

    project(p, m.in, 2, acts->xn, D);
    if (!out) return;
    d->swiglu(d, acts->act, m.gate, m.up, T, m.F, 2 * m.F, 2 * m.F);
    project_onto(p, x, &m.down, acts->act, m.F);
}

void mlp_backward(const LayerPass *p, real *dxn)
{
    Device *d = p->stage->dev;
    const Acts *acts = p->acts;
    const Grads *g = p->grads;
    int T = p->batch->T, D = p->model->shape.width;
    Mlp m = mlp_of(p, g->dx, NULL);

    d->swiglu(d, acts->act, m.gate, m.up, T, m.F, 2 * m.F, 2 * m.F);
    unproject(p, &m.down, 1, g->dact, acts->act, m.F);
    d->swiglu_backward(d, m.gate, m.up, g->dact, m.gate, m.up, T, m.F, 2 * m.F, 2 * m.F);
    unproject(p, m.in, 2, dxn, acts->xn, D);
}
