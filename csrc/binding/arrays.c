/* binding/arrays.c - the only file that uses NumPy. */
#include "arrays.h"

#include "../device/dtype.h"

#define PY_ARRAY_UNIQUE_SYMBOL tinsmith_numpy
#include <numpy/arrayobject.h>
#include <stdarg.h>

enum { LARGE = 1 << 20 }; /* bytes from which a copy runs without the GIL */

int arrays_init(void)
{
    import_array1(-1);
    return 0;
}

static const struct {
    int typenum;
    const char *name;
} kinds[] = {
    [KIND_INT32] = {NPY_INT32, "int32"},
    [KIND_FLOAT32] = {NPY_FLOAT32, "float32"},
    [KIND_UINT16] = {NPY_UINT16, "uint16"},
    [KIND_UINT8] = {NPY_UINT8, "uint8"},
};

void *wrong_type(PyObject *object, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    PyObject *text = PyUnicode_FromFormatV(format, args);
    va_end(args);
    PyObject *name = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__name__");
    if (text && name) PyErr_Format(PyExc_TypeError, "%U%S", text, name);
    Py_XDECREF(text);
    Py_XDECREF(name);
    return NULL;
}

static PyArrayObject *as_array(PyObject *object, const char *name, const char *wanted)
{
    if (!PyArray_Check(object)) {
        wrong_type(object, "%s must be %s, not ", name, wanted);
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISNOTSWAPPED(array) ||
        !PyArray_ISALIGNED(array)) {
        PyErr_Format(PyExc_ValueError, "%s must be C-contiguous, aligned, and of native byte order",
                     name);
        return NULL;
    }
    return array;
}

int borrow(PyObject *object, Kind kind, const char *name, Borrowed *out)
{
    PyArrayObject *array = as_array(object, name, "a NumPy array");
    if (!array) return -1;
    if (PyArray_TYPE(array) != kinds[kind].typenum || PyArray_NDIM(array) != 1) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be a one-dimensional %s array, not %d-dimensional %S", name,
                     kinds[kind].name, PyArray_NDIM(array), (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    *out = (Borrowed){
        .owner = Py_NewRef(object), .data = PyArray_DATA(array), .length = PyArray_SIZE(array)};
    return 0;
}

int borrow_copy(PyObject *object, Kind kind, const char *name, Borrowed *out)
{
    if (borrow(object, kind, name, out) < 0) return -1;
    PyObject *copy = array_new(kind, out->length, -1, out->data);
    Py_DECREF(out->owner);
    out->owner = copy;
    if (!out->owner) return -1;
    out->data = array_data(out->owner);
    return 0;
}

int borrow_numbers(PyObject *object, const char *name, Borrowed *out)
{
    PyArrayObject *array = as_array(object, name, "a NumPy array");
    if (!array) return -1;
    int type = PyArray_TYPE(array);
    if (type != NPY_FLOAT32 && type != NPY_FLOAT16 && type != NPY_UINT16) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be float32, float16, or uint16 with bf16 bits, not %S", name,
                     (PyObject *)PyArray_DESCR(array));
        return -1;
    }
    *out = (Borrowed){.owner = Py_NewRef(object),
                      .data = PyArray_DATA(array),
                      .length = PyArray_SIZE(array),
                      .type = type == NPY_FLOAT32   ? DTYPE_F32
                              : type == NPY_FLOAT16 ? DTYPE_F16
                                                    : DTYPE_BF16};
    return 0;
}

int borrow_tensor(PyObject *object, const char *name, Borrowed *out)
{
    if (borrow_numbers(object, name, out) < 0) return -1;
    PyArrayObject *array = (PyArrayObject *)object;
    int dims = PyArray_NDIM(array), fits = dims == 1 || dims == 2;
    npy_intp rows = dims == 2 ? PyArray_DIM(array, 0) : 1;
    npy_intp cols = fits ? PyArray_DIM(array, dims - 1) : 0;
    if (!fits)
        PyErr_Format(PyExc_ValueError, "%s must have one or two dimensions, not %d", name, dims);
    else if (rows > INT32_MAX || cols > INT32_MAX)
        PyErr_Format(PyExc_ValueError, "%s is too large", name);
    out->rows = (int)rows;
    out->cols = (int)cols;
    if (!PyErr_Occurred()) return 0;
    Py_CLEAR(out->owner);
    return -1;
}

int borrow_blocks(PyObject *object, const char *name, DType type, Borrowed *out)
{
    PyArrayObject *array = as_array(object, name, "a NumPy array");
    if (!array) return -1;
    TypeInfo info = dtype_info(type);
    npy_intp one = (npy_intp)info.block_bytes;
    if (PyArray_TYPE(array) != NPY_UINT8 || PyArray_NDIM(array) != 2 ||
        PyArray_DIM(array, 1) % one || PyArray_DIM(array, 0) > INT32_MAX ||
        PyArray_DIM(array, 1) / one > INT32_MAX / info.block) {
        PyErr_Format(PyExc_ValueError,
                     "%s: an array of %s must be uint8 of two dimensions, its rows whole blocks of "
                     "%zd bytes",
                     name, info.name, (Py_ssize_t)one);
        return -1;
    }
    *out = (Borrowed){.owner = Py_NewRef(object),
                      .data = PyArray_DATA(array),
                      .length = PyArray_SIZE(array),
                      .rows = (int)PyArray_DIM(array, 0),
                      .cols = (int)(PyArray_DIM(array, 1) / one * info.block),
                      .type = type};
    return 0;
}

PyObject *array_new(Kind kind, int64_t rows, int64_t cols, const void *data)
{
    npy_intp shape[2] = {rows, cols};
    PyObject *array = PyArray_SimpleNew(cols < 0 ? 1 : 2, shape, kinds[kind].typenum);
    if (array && data) {
        size_t bytes = (size_t)PyArray_NBYTES((PyArrayObject *)array);
        PyThreadState *state = bytes < LARGE ? NULL : PyEval_SaveThread();
        memcpy(array_data(array), data, bytes);
        if (state) PyEval_RestoreThread(state);
    }
    return array;
}

PyObject *array_view(PyObject *owner, const void *memory, int64_t bytes)
{
    npy_intp shape[1] = {bytes};
    PyObject *array = PyArray_SimpleNewFromData(1, shape, NPY_UINT8, (void *)memory);
    if (!array) return NULL;
    PyArray_CLEARFLAGS((PyArrayObject *)array, NPY_ARRAY_WRITEABLE);
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) == 0) return array;
    Py_DECREF(array);
    return NULL;
}

void *array_data(PyObject *array)
{
    return PyArray_DATA((PyArrayObject *)array);
}

size_t kind_bytes(Kind kind)
{
    static const size_t bytes[] = {
        [KIND_INT32] = 4, [KIND_FLOAT32] = 4, [KIND_UINT16] = 2, [KIND_UINT8] = 1};
    return bytes[kind];
}

int whole_from(PyObject *object, void *number)
{
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (value == -1 && !overflow && PyErr_Occurred()) return 0;
    if (overflow > 0 || value > INT32_MAX) value = INT32_MAX;
    if (overflow < 0 || value < INT32_MIN) value = INT32_MIN;
    *(int *)number = (int)value;
    return 1;
}
