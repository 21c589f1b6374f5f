/* model/layers/forward.h - the transformer's forward pass. */
#ifndef TINSMITH_MODEL_LAYERS_FORWARD_H
#define TINSMITH_MODEL_LAYERS_FORWARD_H

#include "../acts.h"
#include "../batch.h"
#include "../cache.h"

/* batch → the last stage's acts->hidden (T,D), through the cache. Each array has one entry for each
 * stage; only the last stage's batch may have rows to read. */
void forward(const Model *model, const Batch *batch, const Acts *acts, const Cache *cache);

/* One layer, from its x to `next`. With `next` NULL it only recomputes the rows that backward needs
 * and that were not kept. */
struct LayerPass;
void layer_forward(const struct LayerPass *pass, real *next);

#endif
