/* binding/limits.h - methods and attributes of an adapter: the memory of its training steps. */
#ifndef TINSMITH_BINDING_LIMITS_H
#define TINSMITH_BINDING_LIMITS_H

#include <Python.h>

PyObject *adapter_limit(PyObject *adapter, PyObject *args);
PyObject *adapter_step_least(PyObject *adapter, PyObject *tokens);
PyObject *adapter_step_tokens(PyObject *adapter, void *unused);
int adapter_set_step_tokens(PyObject *adapter, PyObject *value, void *unused);
PyObject *adapter_step_bytes(PyObject *adapter, void *unused);
PyObject *adapter_datum_bytes(PyObject *adapter, void *unused);
int adapter_set_step_bytes(PyObject *adapter, PyObject *value, void *unused);

#endif
