/* model/layers/mlp.h - the products of a dense feed-forward part. */
#ifndef TINSMITH_MODEL_LAYERS_MLP_H
#define TINSMITH_MODEL_LAYERS_MLP_H

#include "project.h"

/* gate and up (T,F), side by side in a row; beside them, of an expert that all rows have, the logit
 * of its share; and down. */
typedef struct Mlp {
    real *gate, *up;
    int F;
    Projection in[3], down;
} Mlp;

/* `out` is down's result, or its gradient, and `shared_logit` that of the share; NULL: there is
 * none. */
Mlp mlp_of(const LayerPass *pass, real *out, real *shared_logit);

#endif
