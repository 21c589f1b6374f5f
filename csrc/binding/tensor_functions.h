/* binding/tensor_functions.h - the module's functions on a caller's tensors. */
#ifndef TINSMITH_BINDING_TENSOR_FUNCTIONS_H
#define TINSMITH_BINDING_TENSOR_FUNCTIONS_H

#include <Python.h>

PyObject *core_topk(PyObject *module, PyObject *args);
PyObject *core_gather(PyObject *module, PyObject *args);
PyObject *core_jsd(PyObject *module, PyObject *args);

#endif
