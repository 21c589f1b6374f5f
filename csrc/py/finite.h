/* py/finite.h - whether arrays hold finite numbers alone. */
#ifndef TINSMITH_FINITE_H
#define TINSMITH_FINITE_H

#include "module.h"

/* The index of the first number that is not finite; -1: all are. */
int64_t first_bad(const void *numbers, DType type, int64_t count);

/* first_bad(array) -> int, of float32, float16 or uint16 with bf16's bits. */
PyObject *core_first_bad(PyObject *module, PyObject *array);

#endif
