/* binding/finite.h - whether arrays hold only finite numbers. */
#ifndef TINSMITH_BINDING_FINITE_H
#define TINSMITH_BINDING_FINITE_H

#include <Python.h>

/* first_bad(array) -> int, of float32, float16 or uint16 with bf16's bits. */
PyObject *core_first_bad(PyObject *module, PyObject *array);

#endif
