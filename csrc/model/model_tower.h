/* model/model_tower.h - a base model's vision tower. */
#ifndef TINSMITH_MODEL_MODEL_TOWER_H
#define TINSMITH_MODEL_MODEL_TOWER_H

#include "batch.h"

/* Opens a tower on the model's first stage, to be loaded and sealed. Features get a share of
 * `all_bytes`; 0: of all that the devices have. */
Status model_tower_open(Model *model, const TowerShape *shape, DType type, size_t all_bytes);
/* Frees the tower and all features: images need it opened again. */
void model_tower_close(Model *model);
/* Bytes of the features that are kept. They can be dropped between two steps: the next step that
 * wants some computes them again, to the same bits. */
size_t model_features_bytes(const Model *model);
void model_features_drop(Model *model);
/* Checks a sequence's ids; `who` names it in an error. An id below 0 must be in a whole image that
 * this model can see. `images` gets their number. */
Status model_ids_check(int *images, const Model *model, const int32_t *ids, int count,
                       const char *who);

#endif
