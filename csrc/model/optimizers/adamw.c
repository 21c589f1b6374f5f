/* model/optimizers/adamw.c - AdamW: its settings, and its step over an adapter's flat vectors.
 *
 * The op `adamw_norm` computes the norm of the weights that the step would leave, so that a step
 * with a result that is not finite writes nothing; `adamw` then writes them. Its state is both
 * moments. The formula and its rounding are torch's (device/ops.inc). */
#include <math.h>

#include "optimizer.h"

enum { LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_CLIP_NORM };

static Status step_take(Adapter *adapter, const double *o, float scale, double *norm)
{
    Device *dev = adapter->model->dev;
    float *const *vector = adapter->vector;
    int step = adapter->step + 1;
    dev->zero(dev, adapter->total, sizeof(double));
    dev->adamw_norm(dev, adapter->total, vector[MOMENT_1], vector[MOMENT_2], vector[WEIGHTS],
                    vector[GRADIENTS], adapter->size, step, scale, o[LEARNING_RATE], o[BETA1],
                    o[BETA2], o[EPS], o[WEIGHT_DECAY]);
    TRY(total_root(adapter, norm));
    if (!(*norm < WEIGHT_NORM_MAX)) return STATUS_OK;
    Weights *before;
    const float *old = vector[WEIGHTS];
    TRY(weights_change(adapter, &before));
    dev->adamw(dev, vector[WEIGHTS], vector[MOMENT_1], vector[MOMENT_2], old, vector[GRADIENTS],
               adapter->size, step, scale, o[LEARNING_RATE], o[BETA1], o[BETA2], o[EPS],
               o[WEIGHT_DECAY]);
    Status status = dev->sync(dev);
    weights_leave(before);
    return status;
}

const OptimizerRow adamw_row = {
    .name = "adamw",
    .setting = {[LEARNING_RATE] = {"learning_rate", 0.0, INFINITY},
                [BETA1] = {"beta1", 0.0, 1.0},
                [BETA2] = {"beta2", 0.0, 1.0},
                [EPS] = {"eps", 0.0, INFINITY},
                [WEIGHT_DECAY] = {"weight_decay", 0.0, INFINITY},
                [GRAD_CLIP_NORM] = {"grad_clip_norm", 0.0, INFINITY}},
    .clip_norm = GRAD_CLIP_NORM,
    .fails = "",
    .other = "an eps above 0",
    .take = step_take,
};
