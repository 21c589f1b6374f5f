/* binding/dlpack.h - arrays of other libraries, borrowed and lent through DLPack. */
#ifndef TINSMITH_BINDING_DLPACK_H
#define TINSMITH_BINDING_DLPACK_H

#include <Python.h>
#include <stdint.h>

#include "place.h"

enum { TENSOR_DIMS = 8 };

typedef enum Element { ELEMENT_F32, ELEMENT_BF16, ELEMENT_I32, ELEMENT_I64, ELEMENTS } Element;

/* A C-contiguous array in its producer's memory, until tensor_drop. */
typedef struct Tensor {
    PyObject *capsule; /* keeps data alive: its destructor returns it to the producer */
    void *data;
    Element element;
    int dims, readonly;
    int64_t shape[TENSOR_DIMS], length;
} Tensor;

/* The place of an array with __dlpack__. TypeError for one without; ValueError for a place without
 * a device of the engine. */
int tensor_place(PyObject *object, const char *name, Place *out);
/* Borrows such an array (NumPy's, torch's, JAX's, CuPy's) in this place, without a copy. A
 * TypeError or ValueError says what `name` should be and what it is: element type, device, order.
 * uint16 is read as bf16 bits. On a GPU the engine's stream waits for the producer's, which gets
 * its handle. */
int tensor_borrow(PyObject *object, const char *name, Place place, Tensor *out);
void tensor_drop(Tensor *tensor);
/* Bytes of one element. */
int64_t element_bytes(Element element);

/* dlpack_check(capsule, name, type): refuses, like tensor_borrow, a capsule of another device type,
 * or one whose numbers describe impossible memory. */
PyObject *dlpack_check(PyObject *module, PyObject *args);

/* dlpack_lend(array, bf16, versioned, shape) -> capsule: a NumPy array, or an engine's array on a
 * GPU in this shape, as DLPack, for another library's from_dlpack. With bf16, a uint16 array is
 * lent as bf16. */
PyObject *dlpack_lend(PyObject *module, PyObject *args);

#endif
