/* py/dlpack.c - arrays of anybody's making, borrowed and lent through DLPack.
 *
 * A producer gives a capsule with a pointer to its tensor. Borrowing leaves the capsule as it is
 * and keeps it for as long as the data are read: letting go of it runs its own destructor, which
 * calls the producer's deleter, once. So nothing is ever renamed, and no error path has to give
 * anything back. Both layouts of the standard are read: the versioned one (1.x) is asked for, a
 * producer that doesn't know the question is asked without.
 *
 * Only the host's memory is taken: what lies on a GPU is refused with its device's name. */
#include "dlpack.h"

#include <string.h>

/* ---- the standard's structures (dmlc/dlpack, dlpack.h) ---- */

typedef struct DLDevice {
    int32_t type, id;
} DLDevice;

typedef struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef struct DLManagedTensorVersioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor tensor;
} DLManagedTensorVersioned;

enum { DL_CPU = 1, DL_CUDA_HOST = 3, DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };
static const uint64_t READ_ONLY = 1;
static const char *const PLAIN = "dltensor", *const VERSIONED = "dltensor_versioned";

/* ---- borrowing ---- */

int64_t element_bytes(Element element)
{
    static const int64_t bytes[ELEMENTS] = {4, 2, 4, 8};
    return bytes[element];
}

static const char *device_name(long type)
{
    static const char *const names[] = {"none",   "the CPU", "CUDA", "pinned memory",
                                        "OpenCL", "none",    "none", "Vulkan",
                                        "Metal",  "VPI",     "ROCm"};
    return type >= 0 && type < (long)(sizeof names / sizeof *names) ? names[type] : "a device";
}

static int on_host(PyObject *object, const char *name)
{
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    if (!device) return -1;
    long type, id;
    int ok = PyArg_ParseTuple(device, "ll:__dlpack_device__", &type, &id);
    Py_DECREF(device);
    if (!ok) return -1;
    if (type == DL_CPU || type == DL_CUDA_HOST) return 0;
    PyErr_Format(PyExc_ValueError, "%s is in the memory of %s (device %ld), not of the CPU", name,
                 device_name(type), id);
    return -1;
}

/* The producer's capsule; its refusal (BufferError: a gradient, a layout) becomes a ValueError. */
static PyObject *capsule_of(PyObject *object, const char *name)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__"), *capsule = NULL;
    PyObject *none = PyTuple_New(0), *version = Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
    if (method && none && version) capsule = PyObject_Call(method, none, version);
    if (!capsule && method && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = PyObject_Call(method, none, NULL);
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(version);
    if (!capsule && PyErr_ExceptionMatches(PyExc_BufferError)) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_Format(PyExc_ValueError, "%s can't be shared: %S", name, value);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    return capsule;
}

static int element_of(DLDataType type, const char *name, Element *out)
{
    int kind = type.lanes == 1 ? type.code * 100 + type.bits : -1;
    switch (kind) {
    case DL_FLOAT * 100 + 32: *out = ELEMENT_F32; return 0;
    case DL_BFLOAT * 100 + 16:
    case DL_UINT * 100 + 16: *out = ELEMENT_BF16; return 0;
    case DL_INT * 100 + 32: *out = ELEMENT_I32; return 0;
    case DL_INT * 100 + 64: *out = ELEMENT_I64; return 0;
    }
    static const char *const codes[] = {"int",    "uint",    "float", "opaque",
                                        "bfloat", "complex", "bool"};
    PyErr_Format(PyExc_TypeError,
                 "%s must be float32, bfloat16, or uint16 with bf16's bits (ids: int32 or int64), "
                 "not %s%d",
                 name, type.code < 7 ? codes[type.code] : "type ", (int)type.bits);
    return -1;
}

static int read_tensor(const DLTensor *from, const char *name, Tensor *out)
{
    if (from->ndim < 0 || from->ndim > TENSOR_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions, at most %d are taken", name,
                     (int)from->ndim, TENSOR_DIMS);
        return -1;
    }
    if (element_of(from->dtype, name, &out->element) < 0) return -1;
    out->dims = from->ndim;
    out->length = 1;
    int contiguous = 1;
    for (int i = from->ndim - 1; i >= 0; i--) {
        out->shape[i] = from->shape[i];
        if (from->strides && from->shape[i] > 1 && from->strides[i] != out->length) contiguous = 0;
        out->length *= from->shape[i];
    }
    if (!contiguous && out->length > 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be C-contiguous: its rows one behind the other, without gaps", name);
        return -1;
    }
    out->data = (char *)from->data + from->byte_offset;
    if (out->length > 0 && (uintptr_t)out->data % (uintptr_t)element_bytes(out->element)) {
        PyErr_Format(PyExc_ValueError, "%s must begin at a multiple of its element's size", name);
        return -1;
    }
    return 0;
}

/* Its destructor may run Python, which must not meet the exception that is on its way. */
void tensor_drop(Tensor *tensor)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_CLEAR(tensor->capsule);
    PyErr_Restore(type, value, trace);
}

int tensor_borrow(PyObject *object, const char *name, Tensor *out)
{
    *out = (Tensor){0};
    if (!PyObject_HasAttrString(object, "__dlpack__")) {
        PyErr_Format(PyExc_TypeError, "%s must be a NumPy array or have __dlpack__, not %s", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (on_host(object, name) < 0) return -1;
    PyObject *capsule = out->capsule = capsule_of(object, name);
    if (!capsule) return -1;
    int status = -1;
    if (PyCapsule_IsValid(capsule, VERSIONED)) {
        const DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, VERSIONED);
        out->readonly = (managed->flags & READ_ONLY) != 0;
        if (managed->major == 1)
            status = read_tensor(&managed->tensor, name, out);
        else
            PyErr_Format(PyExc_ValueError, "%s came as DLPack %u.%u, version 1 is known", name,
                         managed->major, managed->minor);
    } else if (PyCapsule_IsValid(capsule, PLAIN)) {
        const DLManagedTensor *managed = PyCapsule_GetPointer(capsule, PLAIN);
        status = read_tensor(&managed->tensor, name, out);
    } else {
        PyErr_Format(PyExc_TypeError, "__dlpack__ of %s gave no DLPack capsule but %R", name,
                     capsule);
    }
    if (status < 0) tensor_drop(out);
    return status;
}

/* ---- lending ---- */

/* A NumPy array on loan: whoever took the capsule's content calls the deleter, else the capsule
 * does. */
typedef struct Loan {
    DLManagedTensorVersioned versioned;
    DLManagedTensor plain;
    PyObject *array;
    int64_t shape[TENSOR_DIMS];
} Loan;

static void loan_end(Loan *loan)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(loan->array);
    PyMem_RawFree(loan);
    PyGILState_Release(gil);
}

static void versioned_deleter(DLManagedTensorVersioned *self)
{
    loan_end(self->context);
}

static void plain_deleter(DLManagedTensor *self)
{
    loan_end(self->context);
}

static void capsule_destructor(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, VERSIONED)) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, VERSIONED);
        managed->deleter(managed);
    } else if (PyCapsule_IsValid(capsule, PLAIN)) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, PLAIN);
        managed->deleter(managed);
    }
}

PyObject *dlpack_lend(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array;
    int bf16, versioned;
    Tensor own;
    if (!PyArg_ParseTuple(args, "Opp:dlpack_lend", &array, &bf16, &versioned)) return NULL;
    if (tensor_borrow(array, "the array", &own) < 0) return NULL;
    Loan *loan = PyMem_RawCalloc(1, sizeof *loan);
    if (!loan) {
        tensor_drop(&own);
        return PyErr_NoMemory();
    }
    memcpy(loan->shape, own.shape, sizeof loan->shape);
    DLDataType type = {own.element == ELEMENT_I32 || own.element == ELEMENT_I64 ? DL_INT : DL_FLOAT,
                       (uint8_t)(element_bytes(own.element) * 8), 1};
    if (own.element == ELEMENT_BF16) type.code = bf16 ? DL_BFLOAT : DL_UINT;
    DLTensor tensor = {own.data, {DL_CPU, 0}, own.dims, type, loan->shape, NULL, 0};
    loan->array = Py_NewRef(array);
    loan->versioned = (DLManagedTensorVersioned){
        1, 0, loan, versioned_deleter, own.readonly ? READ_ONLY : 0, tensor};
    loan->plain = (DLManagedTensor){tensor, loan, plain_deleter};
    tensor_drop(&own);
    void *content = versioned ? (void *)&loan->versioned : (void *)&loan->plain;
    PyObject *capsule = PyCapsule_New(content, versioned ? VERSIONED : PLAIN, capsule_destructor);
    if (!capsule) loan_end(loan);
    return capsule;
}
