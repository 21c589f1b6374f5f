/* binding/types.h - the objects of the module's types, and the module's state. */
#ifndef TINSMITH_BINDING_TYPES_H
#define TINSMITH_BINDING_TYPES_H

#include <Python.h>
#include <pthread.h>

#include "../sampling/sampler.h"
#include "../train/trainer.h"

typedef struct ModuleState {
    PyTypeObject *model, *adapter, *sampler, *training_call, *image;
} ModuleState;

typedef struct PyModel {
    PyObject_HEAD Model *model;
    pthread_mutex_t turn; /* recursive: garbage collection may run Python */
    int inside;           /* recursion depth */
    int torn;             /* a fork has cut off a call of the parent */
    unsigned forks;       /* of the process that owns the turn (turn.c) */
} PyModel;

typedef struct PyAdapter {
    PyObject_HEAD PyModel *model;
    Adapter *adapter;
    Trainer *trainer;
} PyAdapter;

typedef struct PySampler {
    PyObject_HEAD PyModel *model;
    PyObject *adapters; /* request → its adapter, kept alive */
    Sampler *sampler;
} PySampler;

extern PyType_Spec model_spec, adapter_spec, sampler_spec, training_call_spec, image_spec;

/* The state of the module of `type`. */
static inline ModuleState *state_of(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

#endif
