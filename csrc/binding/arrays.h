/* binding/arrays.h - arrays to and from Python, and whole numbers. Only arrays.c uses NumPy's
 * names. */
#ifndef TINSMITH_BINDING_ARRAYS_H
#define TINSMITH_BINDING_ARRAYS_H

#include <Python.h>
#include <stdint.h>

#include "../device/device.h"

typedef enum Kind { KIND_INT32, KIND_FLOAT32, KIND_UINT16, KIND_UINT8 } Kind;

/* A C-contiguous array borrowed from Python; release with Py_CLEAR(owner). */
typedef struct Borrowed {
    PyObject *owner;
    const void *data;
    int64_t length;
    int rows, cols; /* of a weight: a vector has one row */
    DType type;     /* borrow_numbers, borrow_tensor, borrow_blocks */
} Borrowed;

int arrays_init(void);
/* A one-dimensional array of exactly this kind; -1 with a TypeError or ValueError that names the
 * given type or shape. */
int borrow(PyObject *object, Kind kind, const char *name, Borrowed *out);
/* A copy of it. No other thread can change a copy, so the checked values are the used ones, even
 * without the GIL. */
int borrow_copy(PyObject *object, Kind kind, const char *name, Borrowed *out);
/* float32, float16, or uint16 that holds bf16 bits, of any shape. */
int borrow_numbers(PyObject *object, const char *name, Borrowed *out);
/* A weight: the same, of one or two dimensions. */
int borrow_tensor(PyObject *object, const char *name, Borrowed *out);
/* A weight in a type with blocks: uint8, each row the blocks of one row of the weight. */
int borrow_blocks(PyObject *object, const char *name, DType type, Borrowed *out);
/* A new array; cols < 0: one dimension. `data` may be NULL (left for the caller to fill). */
PyObject *array_new(Kind kind, int64_t rows, int64_t cols, const void *data);
/* Memory of an object as a read-only array of bytes, which keeps the object alive. */
PyObject *array_view(PyObject *owner, const void *memory, int64_t bytes);
void *array_data(PyObject *array);
/* Bytes of one element. */
size_t kind_bytes(Kind kind);

/* A converter for PyArg_Parse's "O&" and a whole number that the engine checks: a number out of
 * int's range becomes the nearest int, so that the engine's own sentence refuses it. */
int whole_from(PyObject *object, void *number);

/* TypeError: the format's text, then the name of an object's type; returns NULL. */
void *wrong_type(PyObject *object, const char *format, ...);

#endif
