/* model/optimizer.h - what an adapter's optimizers share: a step's beginning, and the change of
 * weights that snapshots may read. */
#ifndef TINSMITH_OPTIMIZER_H
#define TINSMITH_OPTIMIZER_H

#include "core.h"

/* A norm below this leaves the difference of any two weights finite, for an average of them. */
#define WEIGHT_NORM_MAX 0x1p126

/* A setting of an optimizer: it lies in [least, below). */
typedef struct Setting {
    const char *name;
    double value, least, below;
} Setting;

/* A sentence for the first setting that does not. */
Status settings_check(const Setting *setting, int count);
/* What the gradients are to be multiplied by, normalized and clipped (clip_norm above 0), and the
 * report of the step but for the weights' norm. Refuses an adapter of another optimizer. */
Status step_begin(Adapter *adapter, Optimizer optimizer, double clip_norm, Normalization by,
                  float *scale, StepReport *report);
/* The root of the device's total, which ops were told to add to. */
Status total_root(const Adapter *adapter, double *root);
/* Called before the weights change: makes sure that no other adapter reads them. *before is the old
 * weights, to read until weights_leave(). */
Status weights_change(Adapter *adapter, Weights **before);
void weights_leave(Weights *weights);
/* Makes a vector zero; on a CPU it then takes no memory. */
void adapter_blank(const Adapter *adapter, Vector which);

#endif
