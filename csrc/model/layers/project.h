/* model/layers/project.h - products with a layer's frozen matrices and their LoRA, forward and
 * back. */
#ifndef TINSMITH_MODEL_LAYERS_PROJECT_H
#define TINSMITH_MODEL_LAYERS_PROJECT_H

#include <stddef.h>

#include "layer.h"

/* A product with one frozen matrix (N,D) of the layer, and with its LoRA. */
typedef struct Projection {
    real *y; /* (T,N): the result; backward's: its gradient */
    real *s; /* (T,R): LoRA's x·A */
    const frozen *w;
    const float *bias; /* (N) or NULL */
    int N, step;       /* y's rows are the row stride: more than N if y is part of a wider row */
    size_t pair;       /* offset of the matrix's Pair in LayerPairs */
} Projection;

/* The matrix in a slot of weights.inc; `w` is the layer's LayerWeights, `a` its LayerActs. */
#define PART_OF(step, y, slot, bias, N) \
    {y, a->s_##slot, w->slot, bias, N, step, offsetof(LayerPairs, slot)}
#define PROJECTION(y, slot, bias, N) PART_OF(N, y, slot, bias, N)

/* One that is never trained. */
#define FROZEN_PART(step, y, slot, N) {y, NULL, w->slot, NULL, N, step, offsetof(LayerPairs, slot)}
#define FROZEN(y, slot, N) FROZEN_PART(N, y, slot, N)

/* y = x·wᵀ + bias for each in the list, plus each segment's LoRA. Adjacent results become one
 * product if the device has their weights as one; likewise in unproject. */
void project(const LayerPass *pass, const Projection *list, int count, const real *x, int D);
/* y = plus + x·wᵀ + bias of one matrix, and its LoRA; plus (T,N) may be y. */
void project_onto(const LayerPass *pass, const real *plus, const Projection *one, const real *x,
                  int D);
/* dx = Σ dy·w over a list that reads the same x, then LoRA's gradients and its part of dx. dx NULL:
 * no layer below needs it. */
void unproject(const LayerPass *pass, const Projection *list, int count, real *dx, const real *x,
               int D);

#endif
