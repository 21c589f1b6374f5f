/* model/optimizers/optimizer.h - an adapter's optimizer step, and the table of optimizers. */
#ifndef TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H
#define TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H

#include "../adapter.h"

/* The optimizer's name; optimizer_find returns OPTIMIZERS for an unknown name. */
const char *optimizer_name(Optimizer optimizer);
Optimizer optimizer_find(const char *name);

/* A setting of an optimizer's step, in [least, below). */
typedef struct Setting {
    const char *name;
    double least, below;
} Setting;

enum { SETTINGS = 8 }; /* of an optimizer, at most */

/* An optimizer's settings; the list ends at one without a name. */
const Setting *optimizer_settings(Optimizer optimizer);

typedef enum Normalization { BY_NOTHING, BY_LOSS_TOKENS, BY_SEQUENCES } Normalization;

typedef struct StepReport {
    double grad_norm, clipped_norm, weight_norm; /* clipped: the norm used in the step */
    double loss, tokens, sequences;
    char warning[GROWTH_TEXT]; /* a sentence about a step that is surely unwanted, or "" */
} StepReport;

/* One step with the gradients so far, which are then cleared. `value` has one value per setting, in
 * the order of optimizer_settings(). */
Status adapter_optim_step(Adapter *adapter, const double *value, Normalization by,
                          StepReport *report);

/* Takes a step with gradient scale·g and one value per setting of the row; *norm is that of the new
 * weights. If it is not below WEIGHT_NORM_MAX, or not a number, nothing has changed. */
typedef Status StepTake(Adapter *adapter, const double *value, float scale, double *norm);

typedef struct OptimizerRow {
    const char *name;
    Setting setting[SETTINGS + 1];
    int clip_norm;             /* index of grad_clip_norm */
    const char *fails, *other; /* why a step may be refused, and the remedy */
    StepTake *take;
} OptimizerRow;

extern const OptimizerRow adamw_row, dimuon_row; /* adamw.c, dimuon.c */

#endif
