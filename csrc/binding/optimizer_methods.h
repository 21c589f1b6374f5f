/* binding/optimizer_methods.h - the methods and attributes of optimizer_methods.c. */
#ifndef TINSMITH_BINDING_OPTIMIZER_METHODS_H
#define TINSMITH_BINDING_OPTIMIZER_METHODS_H

#include <Python.h>

PyObject *adapter_optim_step_method(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *adapter_growth(PyObject *object, void *unused);
int adapter_set_growth(PyObject *object, PyObject *value, void *unused);

#endif
