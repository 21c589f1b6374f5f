/* model/layers/backward.c - forward.c in reverse: from d loss / d hidden to the adapter's
 * gradients.
 *
 * Base weights are frozen, so a product needs only its input's gradient and LoRA's two. Norm
 * outputs, rotated q and k and swiglu's output are not kept (acts.inc): the forward ops recompute
 * them. A layer whose activations were not kept is recomputed by layer_forward. dx carries the
 * residual stream's gradient down the layers; every norm adds its part to it. */
#include "backward.h"

#include "../stages.h"
#include "forward.h"
#include "layer.h"

static KindBackward *const kind_backward[KINDS] = {
#define LAYER_KIND(kind, part, has, token, window, sequence) [KIND_##kind] = kind##_backward,
#include "../layers.inc"
};

/* dx of out = x + kind(norm(x)) becomes x's. dxn NULL: no layer below needs it. */
static void part_backward(const LayerPass *p, LayerKind kind, real *dxn, float *rstd, const real *x,
                          const float *norm)
{
    Device *d = p->stage->dev;
    int T = p->batch->T, D = p->model->shape.width;
    d->rmsnorm(d, p->acts->xn, rstd, x, norm, T, D, p->model->shape.norm_eps);
    kind_backward[kind](p, dxn);
    if (dxn) d->rmsnorm_backward(d, p->grads->dx, dxn, x, norm, rstd, p->grads->dx, T, D);
}

static void layer_backward(const LayerPass *p)
{
    const LayerKind *kind = p->model->shape.layer[p->l].kind;
    const LayerWeights *w = &p->model->layer[p->l];
    const LayerActs *a = &p->acts->layer[p->l];
    real *dxn = p->grads->dxn; /* below the first layer is the embedding, which is frozen */
    part_backward(p, kind[FEED], dxn, a->mlp_rstd, a->mid, w->mlp_norm);
    part_backward(p, kind[MIXER], p->l > 0 ? dxn : NULL, a->attn_rstd, a->x, w->attn_norm);
}

void backward(const Model *m, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *grads)
{
    int T = batch->T, D = m->shape.width, k = m->stages - 1;
    if (!(adapter->groups & (ATTN | MLP))) return;
    m->dev->rmsnorm_backward(m->dev, grads[k].dx, grads[k].dxn, acts[k].out,
                             stage_last(m)->final_norm, acts[k].final_rstd, NULL, T, D);
    for (; k >= 0; k--) {
        const Stage *stage = &m->stage[k];
        LayerPass p = {m,         stage,   &batch[k], &acts[k],
                       &cache[k], adapter, &grads[k], stage->end - 1};
        for (; p.l >= stage->first && !batch_stopped(batch); p.l--) {
            if (p.l < acts[k].again[CHEAP]) layer_forward(&p, NULL);
            layer_backward(&p);
        }
        if (k > 0)
            stage_copy(stage - 1, grads[k - 1].dx, stage, grads[k].dx,
                       (size_t)T * (size_t)D * m->dev->real_bytes);
    }
}
