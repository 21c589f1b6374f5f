/* binding/part_methods.h - methods of an adapter: the parts of a call's gradient. */
#ifndef TINSMITH_BINDING_PART_METHODS_H
#define TINSMITH_BINDING_PART_METHODS_H

#include <Python.h>

PyObject *adapter_parts(PyObject *adapter, PyObject *lengths);
PyObject *adapter_take_part(PyObject *adapter, PyObject *node);
PyObject *adapter_put_part(PyObject *adapter, PyObject *args);
PyObject *adapter_end_parts(PyObject *adapter, PyObject *unused);
PyObject *adapter_drop_parts(PyObject *adapter, PyObject *unused);

#endif
