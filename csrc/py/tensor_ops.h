/* py/tensor_ops.h - the module's functions on a caller's tensors. */
#ifndef TINSMITH_PY_TENSOR_OPS_H
#define TINSMITH_PY_TENSOR_OPS_H

#include <Python.h>

PyObject *core_topk(PyObject *module, PyObject *args);
PyObject *core_gather(PyObject *module, PyObject *args);
PyObject *core_jsd(PyObject *module, PyObject *args);

#endif
