/* model/layers/layer.h - the interface of a kind of layer (layers.inc), and its place in a pass.
 *
 * A new kind is a row of layers.inc, its rows in weights.inc and acts.inc, and a file with its
 * forward and its backward. */
#ifndef TINSMITH_MODEL_LAYERS_LAYER_H
#define TINSMITH_MODEL_LAYERS_LAYER_H

#include "../acts.h"
#include "../batch.h"
#include "../cache.h"

/* One layer in a forward pass, or in the backward pass after it. */
typedef struct LayerPass {
    const Model *model;
    const Stage *stage; /* the layer's; so are the next three, and grads */
    const Batch *batch;
    const Acts *acts;
    const Cache *cache;
    Adapter *adapter;   /* backward's: gets the gradients */
    const Grads *grads; /* backward's */
    int l;
} LayerPass;

/* out (T,D) = the residual stream x + the part's output for its normed input acts->xn. With `out`
 * NULL it recomputes, to the same bits, the CHEAP rows of acts.inc that backward needs. */
typedef void KindForward(const LayerPass *pass, real *out, const real *x);
/* grads->dx, the gradient of the part's output, → dxn, that of acts->xn, and the adapter's FRESH
 * gradients. acts->xn has been recomputed. dxn NULL: no layer below needs it. */
typedef void KindBackward(const LayerPass *pass, real *dxn);

#define LAYER_KIND(kind, part, has, token, window, sequence) \
    KindForward kind##_forward;                              \
    KindBackward kind##_backward;
#include "../layers.inc"

#endif
