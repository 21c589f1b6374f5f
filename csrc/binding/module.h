/* binding/module.h - declarations that the binding's files share: the types, how a Status becomes
 * an exception, and the models' turns.
 *
 * Long work is done without the GIL, so any thread may run meanwhile. Calls on a model, its
 * adapters and its samplers take turns: one of them at a time is in the engine. Attributes that are
 * a number can be read at any time, and interrupt() is for another thread's turn. A thread that
 * waits for a turn has released the GIL, so the thread with the turn can take the GIL; never the
 * other way round. A forked child has no turns but its own; a model that was in the middle of a
 * call at the fork is refused there. An object without references is closed by the thread that
 * drops the last one, without a turn: the engine frees memory in any thread (device.h). */
#ifndef TINSMITH_BINDING_MODULE_H
#define TINSMITH_BINDING_MODULE_H

#include <Python.h>
#include <pthread.h>

#include "../sampling/sampler.h"
#include "../train/train.h"

typedef struct ModuleState {
    PyTypeObject *model, *adapter, *sampler;
} ModuleState;

typedef struct PyModel {
    PyObject_HEAD Model *model;
    pthread_mutex_t turn; /* a thread that has it may take it again: freeing garbage runs Python,
                             and so does a training call between its micro-batches */
    int inside;           /* how often it is taken */
    int torn;             /* a fork has cut a call of the parent's off */
    unsigned forks;       /* of the process that the turn belongs to (module.c) */
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
/* limits.c: methods and attributes of an adapter. */
PyObject *adapter_limit(PyObject *adapter, PyObject *args);
PyObject *adapter_step_least(PyObject *adapter, PyObject *tokens);
PyObject *adapter_trim(PyObject *adapter, PyObject *unused);
PyObject *adapter_step_bytes(PyObject *adapter, void *unused);
PyObject *adapter_datum_bytes(PyObject *adapter, void *unused);
int adapter_set_step_bytes(PyObject *adapter, PyObject *value, void *unused);

extern PyType_Spec model_spec, adapter_spec, sampler_spec;

/* A converter of PyArg_Parse's "O&" for a whole number that the engine checks: what an int can't
 * hold becomes its nearest int, so that the engine's own sentence refuses it. */
int whole_from(PyObject *object, void *number);

/* Sets the exception that the status names, with its sentence; returns NULL. */
PyObject *raise_status(Status status);
/* A model's turn: made with the model, waited for, ended. */
void turn_open(PyModel *model);
void turn_take(PyModel *model);
void turn_give(PyModel *model);
/* Refuses a model that a fork has torn. */
Status turn_check(const PyModel *model);

/* Makes a call without the GIL, and without a turn or on one. */
#define NO_GIL(call)            \
    do {                        \
        Py_BEGIN_ALLOW_THREADS; \
        call;                   \
        Py_END_ALLOW_THREADS;   \
    } while (0)
/* Sets the variable `status`, as each such call does. */
#define ON_TURN(model, call)        \
    do {                            \
        turn_take(model);           \
        status = turn_check(model); \
        if (!status) NO_GIL(call);  \
        turn_give(model);           \
    } while (0)

/* The state of the module that `type` belongs to. */
ModuleState *state_of(PyTypeObject *type);

#endif
