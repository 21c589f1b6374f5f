/* py/optimizer.h - the methods of optimizer.c. */
#ifndef TINSMITH_PY_OPTIMIZER_H
#define TINSMITH_PY_OPTIMIZER_H

#include "module.h"

PyObject *adapter_optim_step_method(PyObject *object, PyObject *args, PyObject *kwargs);

#endif
