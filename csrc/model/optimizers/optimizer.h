/* model/optimizers/optimizer.h - what optimizers and adapters share: the row of an optimizer, and
 * the change of weights that snapshots may read. */
#ifndef TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H
#define TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H

#include "../core.h"

/* A norm below this leaves the difference of any two weights finite, for an average of them. */
#define WEIGHT_NORM_MAX 0x1p126

/* Takes a step with gradient scale·g, with a value for each of the row's settings, and gives the
 * norm of the weights behind it. If that is not below WEIGHT_NORM_MAX, or not a number, no step was
 * taken, and nothing has changed. */
typedef Status StepTake(Adapter *adapter, const double *value, float scale, double *norm);

typedef struct OptimizerRow {
    const char *name;
    Setting setting[SETTINGS + 1];
    int clip_norm;             /* which of them is grad_clip_norm */
    const char *fails, *other; /* why a step may not be taken, and what then helps */
    StepTake *take;
} OptimizerRow;

extern const OptimizerRow adamw_row, dimuon_row; /* adamw.c, dimuon.c */

/* The root of the device's total, which ops were told to add to. */
Status total_root(const Adapter *adapter, double *root);
/* Called before the weights change: makes sure that no other adapter reads them. *before is the old
 * weights, to read until weights_leave(). */
Status weights_change(Adapter *adapter, Weights **before);
void weights_leave(Weights *weights);
/* Makes a vector zero; on a CPU it then takes no memory. */
void adapter_blank(const Adapter *adapter, Vector which);

#endif
