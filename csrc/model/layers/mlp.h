/* model/layers/mlp.h - the products of a dense feed-forward part. */
#ifndef TINSMITH_MODEL_LAYERS_MLP_H
#define TINSMITH_MODEL_LAYERS_MLP_H

#include "project.h"

/* gate and up (T,F), side by side in a row; the logit of a shared expert's share; and down. */
typedef struct Mlp {
    real *gate, *up;
    int F;
    Projection in[3], down;
} Mlp;

/* `out` is down's result or its gradient; `shared_logit` likewise of the share, or NULL: none. */
Mlp mlp_of(const LayerPass *pass, real *out, real *shared_logit);

#endif
