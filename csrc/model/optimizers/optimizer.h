/* model/optimizers/optimizer.h - the step of the optimizer that an adapter is trained with, and the
 * table of optimizers. */
#ifndef TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H
#define TINSMITH_MODEL_OPTIMIZERS_OPTIMIZER_H

#include "../adapter.h"

/* The optimizer's name; optimizer_find gives OPTIMIZERS for a name of none. */
const char *optimizer_name(Optimizer optimizer);
Optimizer optimizer_find(const char *name);

/* A setting of an optimizer's step: it lies in [least, below). */
typedef struct Setting {
    const char *name;
    double least, below;
} Setting;

enum { SETTINGS = 8 }; /* of an optimizer, at most */

/* An optimizer's settings, up to one without a name. */
const Setting *optimizer_settings(Optimizer optimizer);

typedef enum Normalization { BY_NOTHING, BY_LOSS_TOKENS, BY_SEQUENCES } Normalization;

typedef struct StepReport {
    double grad_norm, clipped_norm, weight_norm; /* clipped: what the step was made with */
    double loss, tokens, sequences;
    char warning[GROWTH_TEXT]; /* a sentence about a step that nobody can have wanted, or "" */
} StepReport;

/* One step with the gradients so far, which are then cleared. `value` is that of each setting, in
 * the order of optimizer_settings(). */
Status adapter_optim_step(Adapter *adapter, const double *value, Normalization by,
                          StepReport *report);

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

#endif
