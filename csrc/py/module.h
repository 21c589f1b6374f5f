/* py/module.h - what the binding's files share: the types, and how a Status becomes an exception.
 */
#ifndef TINSMITH_MODULE_H
#define TINSMITH_MODULE_H

#include <Python.h>

#include "../sample/sampler.h"
#include "../train/train.h"

typedef struct ModuleState {
    PyTypeObject *model, *adapter, *sampler;
} ModuleState;

typedef struct PyModel {
    PyObject_HEAD Model *model;
} PyModel;

typedef struct PyAdapter {
    PyObject_HEAD PyModel *model;
    Adapter *adapter;
    Trainer *trainer;
} PyAdapter;

typedef struct PySampler {
    PyObject_HEAD PyModel *model;
    PyObject *adapters; /* request → the adapter that it keeps alive */
    Sampler *sampler;
} PySampler;

extern struct PyModuleDef core_module;
extern PyType_Spec model_spec, adapter_spec, sampler_spec;

/* Sets the exception that the status names, with its sentence; returns NULL. */
PyObject *raise_status(Status status);
/* The state of the module that `type` belongs to. */
ModuleState *state_of(PyTypeObject *type);

#endif
