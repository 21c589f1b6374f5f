/* model/optimizers/adamw.c - AdamW: its settings, and its step over an adapter's flat vectors.
 *
 * The op `adamw_norm` computes the norm of the weights that the step would leave, so that a step
 * with a result that is not finite writes nothing; `adamw` then writes them. Its state is both
 * moments. The formula and its rounding are torch's (device/ops.inc). */
#include <math.h>

#include "../stages.h"
#include "optimizer.h"

enum { LEARNING_RATE, BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_CLIP_NORM };

typedef struct Step {
    int number; /* from 1 */
    float scale;
    const double *setting;
} Step;

static void norm_add(const Adapter *a, const Stage *stage, double *total, int64_t from, int64_t n,
                     const void *context)
{
    const Step *step = context;
    const double *o = step->setting;
    stage->dev->adamw_norm(stage->dev, total, vector_at(a, MOMENT_1, stage, from),
                           vector_at(a, MOMENT_2, stage, from), vector_at(a, WEIGHTS, stage, from),
                           vector_at(a, GRADIENTS, stage, from), n, step->number, step->scale,
                           o[LEARNING_RATE], o[BETA1], o[BETA2], o[EPS], o[WEIGHT_DECAY]);
}

static void stage_take(const Adapter *a, const Step *step, const Flat *before, int k)
{
    Device *dev = a->model->stage[k].dev;
    const double *o = step->setting;
    int64_t n = (int64_t)(a->bytes.of[k] / sizeof(float));
    if (n)
        dev->adamw(dev, a->vector[WEIGHTS].of[k], a->vector[MOMENT_1].of[k],
                   a->vector[MOMENT_2].of[k], before->of[k], a->vector[GRADIENTS].of[k], n,
                   step->number, step->scale, o[LEARNING_RATE], o[BETA1], o[BETA2], o[EPS],
                   o[WEIGHT_DECAY]);
}

static Status step_take(Adapter *adapter, const double *setting, float scale, double *norm)
{
    const Step step = {adapter->step + 1, scale, setting};
    TRY(layers_root(adapter, norm_add, &step, norm));
    if (!(*norm < WEIGHT_NORM_MAX)) return STATUS_OK;
    Weights *before;
    const Flat old = adapter->vector[WEIGHTS];
    TRY(weights_change(adapter, &before));
    for (int k = 0; k < adapter->model->stages; k++) stage_take(adapter, &step, &old, k);
    Status status = model_sync(adapter->model);
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
