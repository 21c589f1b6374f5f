/* model/layers/backward.h - the transformer's backward pass. */
#ifndef TINSMITH_MODEL_LAYERS_BACKWARD_H
#define TINSMITH_MODEL_LAYERS_BACKWARD_H

#include "../acts.h"
#include "../batch.h"
#include "../cache.h"

/* grads->dxn = d loss / d hidden → adapter's FRESH gradients of all layers. */
void backward(const Model *model, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *grads);

#endif
