/* model/layers/backward.h - the transformer's backward pass. */
#ifndef TINSMITH_MODEL_LAYERS_BACKWARD_H
#define TINSMITH_MODEL_LAYERS_BACKWARD_H

#include "../acts.h"
#include "../batch.h"
#include "../cache.h"

/* The last stage's grads->dxn = d loss / d hidden → adapter's FRESH gradients of all layers. Each
 * array has one entry for each stage. */
void backward(const Model *model, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *grads);

#endif
