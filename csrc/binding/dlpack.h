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
    PyObject *capsule; /* keeps data alive: its destructor gives it back to its producer */
    void *data;
    Element element;
    int dims, readonly;
    int64_t shape[TENSOR_DIMS], length;
} Tensor;

/* Where an array with __dlpack__ lies. TypeError for one without; ValueError for a place where the
 * engine has no device. */
int tensor_place(PyObject *object, const char *name, Place *out);
/* Borrows such an array (NumPy's, torch's, JAX's, CuPy's) in this place. A TypeError or ValueError
 * says what `name` was expected to be and what came: element type, device, order. uint16 is read as
 * the bits of bf16. No copy is made. On a GPU the producer gets the engine's stream, which then
 * waits for the producer's. */
int tensor_borrow(PyObject *object, const char *name, Place place, Tensor *out);
void tensor_drop(Tensor *tensor);
/* Bytes of one element. */
int64_t element_bytes(Element element);

/* dlpack_check(capsule, name, type): refuses, as tensor_borrow does, a capsule that says it is of
 * another type of device, or whose numbers describe no memory that there can be. */
PyObject *dlpack_check(PyObject *module, PyObject *args);

/* dlpack_lend(array, bf16, versioned, shape) -> capsule: a NumPy array, or one of the engine's on a
 * GPU in this shape, as DLPack, for another library's from_dlpack. With bf16 a uint16 array is lent
 * as bf16. */
PyObject *dlpack_lend(PyObject *module, PyObject *args);

#endif
