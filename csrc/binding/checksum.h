/* binding/checksum.h - checksums of memory and of the code that packs weights. */
#ifndef TINSMITH_BINDING_CHECKSUM_H
#define TINSMITH_BINDING_CHECKSUM_H

#include <Python.h>

/* checksum(array) -> int, of a one-dimensional array of uint8. */
PyObject *core_checksum(PyObject *module, PyObject *array);
/* weights_code() -> int */
PyObject *core_weights_code(PyObject *module, PyObject *unused);

#endif
