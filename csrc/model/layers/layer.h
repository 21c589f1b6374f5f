/* model/layers/layer.h - the interface of a kind of layer (layers.inc): its place in a pass, and
 * products with the layer's frozen matrices and their LoRA, forward and back.
 *
 * A new kind is a row of layers.inc, its rows in weights.inc and acts.inc, and a file with its
 * forward and its backward. */
#ifndef TINSMITH_MODEL_LAYERS_LAYER_H
#define TINSMITH_MODEL_LAYERS_LAYER_H

#include "../core.h"

/* One layer in a forward pass, or in the backward pass behind it. */
typedef struct Pass {
    const Model *model;
    const Batch *batch;
    const Acts *acts;
    const Cache *cache;
    Adapter *adapter;   /* backward's: whose gradients */
    const Grads *grads; /* backward's */
    int l;
} Pass;

/* out (T,D) = the residual stream x + the part's output for its normed input acts->xn. Where `out`
 * is NULL it recomputes, to the same bits, the rows that acts.inc calls CHEAP
 * and that backward needs. */
typedef void KindForward(const Pass *pass, real *out, const real *x);
/* grads->dx, the gradient of the part's output, → dxn, that of acts->xn, and the adapter's FRESH
 * gradients. acts->xn has been recomputed. dxn NULL: nothing below needs it. */
typedef void KindBackward(const Pass *pass, real *dxn);

#define LAYER_KIND(kind, part, has, token, window, sequence) \
    KindForward kind##_forward;                              \
    KindBackward kind##_backward;
#include "../layers.inc"

/* One layer, from its x to `next`. Where `next` is NULL, recomputes the rows that backward needs
 * and that were not kept (forward.c). */
void layer_forward(const Pass *pass, real *next);

/* ---- project.c ---- */

/* A product with one frozen matrix (N,D) of the layer, and with its LoRA. */
typedef struct Projection {
    real *y; /* (T,N): the result; backward's: its gradient */
    real *s; /* (T,R): LoRA's x·A */
    const frozen *w;
    const float *bias; /* (N) or NULL */
    int N, step;       /* y's rows are `step` apart: more than N where y is part of a wider row */
    size_t pair;       /* offset of the matrix's Pair in LayerPairs */
} Projection;

/* The matrix in a slot of weights.inc; `w` is the layer's LayerWeights, `a` its LayerActs. */
#define PART_OF(step, y, slot, bias, N) \
    {y, a->s_##slot, w->slot, bias, N, step, offsetof(LayerPairs, slot)}
#define PROJECTION(y, slot, bias, N) PART_OF(N, y, slot, bias, N)

/* One that is never trained. */
#define FROZEN_PART(step, y, slot, N) {y, NULL, w->slot, NULL, N, step, offsetof(LayerPairs, slot)}
#define FROZEN(y, slot, N) FROZEN_PART(N, y, slot, N)

/* y = x·wᵀ + bias for each in the list, and on top each segment's LoRA. Those whose results stand
 * side by side are one product where the device has their weights as one; likewise unproject. */
void project(const Pass *pass, const Projection *list, int count, const real *x, int D);
/* y = plus + x·wᵀ + bias of one matrix, and its LoRA; plus (T,N) may be y. */
void project_onto(const Pass *pass, const real *plus, const Projection *one, const real *x, int D);
/* dx = Σ dy·w over a list that reads the same x, then LoRA's gradients and its part of dx. dx NULL:
 * nothing below needs it. */
void unproject(const Pass *pass, const Projection *list, int count, real *dx, const real *x, int D);

#endif
