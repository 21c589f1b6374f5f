/* py/dlpack.h - arrays of anybody's making, borrowed and lent through DLPack. */
#ifndef TINSMITH_DLPACK_H
#define TINSMITH_DLPACK_H

#include <Python.h>
#include <stdint.h>

enum { TENSOR_DIMS = 8 };

typedef enum Element { ELEMENT_F32, ELEMENT_BF16, ELEMENT_I32, ELEMENT_I64, ELEMENTS } Element;

/* A C-contiguous array in the host's memory, until tensor_drop. */
typedef struct Tensor {
    PyObject *capsule; /* keeps data alive: its destructor gives it back to who made it */
    void *data;
    Element element;
    int dims, readonly;
    int64_t shape[TENSOR_DIMS], length;
} Tensor;

/* Borrows an array with __dlpack__: NumPy's, torch's, JAX's, CuPy's. TypeError or ValueError says
 * what `name` was expected to be and what came: element type, device, order. uint16 is taken for
 * the bits of bf16. No copy is made. */
int tensor_borrow(PyObject *object, const char *name, Tensor *out);
void tensor_drop(Tensor *tensor);
/* Bytes of one element. */
int64_t element_bytes(Element element);

/* lend(array, bf16, versioned) -> capsule: a NumPy array as DLPack, for from_dlpack of others;
 * uint16 as bf16 where it is asked for. */
PyObject *dlpack_lend(PyObject *module, PyObject *args);

#endif
