/* binding/call.c - reads the arguments of a training call; errors name the argument. */
#include "call.h"

#include <string.h>

void call_release(Call *call)
{
    Py_CLEAR(call->tokens.owner);
    Py_CLEAR(call->lengths.owner);
    Py_CLEAR(call->targets.owner);
    Py_CLEAR(call->counts.owner);
    for (int j = 0; j < LOSS_INPUTS; j++) Py_CLEAR(call->input[j].owner);
}

int call_options(Call *call, PyObject *inputs, PyObject *config)
{
    const Loss *loss = call->loss;
    Py_ssize_t used = 0;
    for (int j = 0; j < LOSS_INPUTS && loss->input[j].name; j++) {
        PyObject *array = PyDict_GetItemString(inputs, loss->input[j].name);
        if (!array) continue;
        used++;
        if (borrow_copy(array, KIND_FLOAT32, loss->input[j].name, &call->input[j]) < 0) return -1;
        call->datums.input[j] = call->input[j].data;
        call->datums.input_total[j] = call->input[j].length;
    }
    if (used != PyDict_Size(inputs)) {
        PyErr_Format(PyExc_ValueError, "%s takes no such inputs: %R", loss->name, inputs);
        return -1;
    }
    used = 0;
    for (int j = 0; j < LOSS_KEYS && loss->key[j].name; j++) {
        PyObject *value = PyDict_GetItemString(config, loss->key[j].name);
        call->datums.key[j] = loss->key[j].initial;
        if (!value) continue;
        used++;
        call->datums.key[j] = PyFloat_AsDouble(value);
        if (PyErr_Occurred()) return -1;
    }
    if (used == PyDict_Size(config)) return 0;
    PyErr_Format(PyExc_ValueError, "%s takes no such configuration: %R", loss->name, config);
    return -1;
}

int call_arrays(Call *call, PyObject *tokens, PyObject *lengths, PyObject *targets,
                PyObject *counts)
{
    if (borrow_copy(tokens, KIND_INT32, "tokens", &call->tokens) < 0 ||
        borrow_copy(lengths, KIND_INT32, "lengths", &call->lengths) < 0 ||
        borrow_copy(targets, KIND_INT32, "targets", &call->targets) < 0 ||
        borrow_copy(counts, KIND_INT32, "counts", &call->counts) < 0)
        return -1;
    if (call->lengths.length != call->counts.length || call->lengths.length > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "lengths has %lld datums, counts %lld",
                     (long long)call->lengths.length, (long long)call->counts.length);
        return -1;
    }
    Datums *d = &call->datums;
    d->count = (int)call->lengths.length;
    d->tokens = call->tokens.data;
    d->lengths = call->lengths.data;
    d->targets = call->targets.data;
    d->counts = call->counts.data;
    d->token_total = call->tokens.length;
    d->target_total = call->targets.length;
    return 0;
}

int call_loss(Call *call, const char *name)
{
    call->loss = loss_find(name);
    if (call->loss) return 0;
    PyObject *known = PyUnicode_FromString(loss_at(0)->name);
    for (int i = 1; known && loss_at(i); i++) {
        PyObject *longer = PyUnicode_FromFormat("%U, %s", known, loss_at(i)->name);
        Py_DECREF(known);
        known = longer;
    }
    if (known) PyErr_Format(PyExc_ValueError, "no loss is called '%s'; there are: %U", name, known);
    Py_XDECREF(known);
    return -1;
}
