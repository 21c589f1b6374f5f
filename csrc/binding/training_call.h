/* binding/training_call.h - tinsmith._core.TrainingCall: a training call that is executed
 * micro-batch by micro-batch. */
#ifndef TINSMITH_BINDING_TRAINING_CALL_H
#define TINSMITH_BINDING_TRAINING_CALL_H

#include "../train/objective_divergence.h"
#include "call.h"

typedef enum CallResult {
    LOGPROBS,
    LOGPROBS_LOSS,
    LOSS_ONLY,
    LOGPROBS_DIVERGENCES_LOSS
} CallResult;

typedef struct PyTrainingCall {
    PyObject_HEAD PyAdapter *adapter;
    PyModel *other;    /* another model that it computes on, or NULL */
    PyObject *teacher; /* keeps the teacher alive */
    Call call;         /* its arrays */
    Borrowed given[2]; /* more of them */
    Lesson lesson;
    PyObject *logp, *divergence;
    float *logp_data, *divergence_data;
    CallResult result;
    double loss;     /* once it has finished */
    TrainStep *step; /* NULL: it has ended */
} PyTrainingCall;

/* What a call begins with, in its turn: sets self->step. */
typedef Status BeginCall(PyTrainingCall *self, Pass pass, int part);

/* A call without arrays. */
PyTrainingCall *training_call_new(PyAdapter *adapter, CallResult result);
/* Begins the call, and returns it if it is `stepwise`; otherwise executes it, and returns its
 * result. Takes the reference; NULL with an exception. */
PyObject *training_call_begin(PyTrainingCall *self, BeginCall *begin, Pass pass, int part,
                              int stepwise);

#endif
