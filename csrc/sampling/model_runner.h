/* sampling/model_runner.h - one forward for the rows of a step, and what is drawn and scored in
 * them. */
#ifndef TINSMITH_SAMPLING_MODEL_RUNNER_H
#define TINSMITH_SAMPLING_MODEL_RUNNER_H

#include "sequence.h"

/* What the model runs steps in. */
typedef struct ModelRunner {
    Model *model;
    PagePool pool;
    Arena arena; /* of a step */
    LayerActs *layers;
    atomic_int interrupted; /* set from outside: the step under way stops */
} ModelRunner;

Status model_runner_step(ModelRunner *runner, const ScheduledRows *runs, int count,
                         StepResult *result);

#endif
