/* sampling/model_runner.h - one forward for the rows of a step, then their draws and scores. */
#ifndef TINSMITH_SAMPLING_MODEL_RUNNER_H
#define TINSMITH_SAMPLING_MODEL_RUNNER_H

#include "sequence.h"

/* A model with the memory for its steps. */
typedef struct ModelRunner {
    Model *model;
    PagePool pool;
    Arenas arenas; /* of a step */
    LayerActs *layers;
    atomic_int interrupted; /* set from outside to stop the step in flight */
} ModelRunner;

Status model_runner_step(ModelRunner *runner, const ScheduledRows *runs, int count,
                         StepResult *result);

#endif
