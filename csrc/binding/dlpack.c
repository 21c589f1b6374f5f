/* binding/dlpack.c - arrays of other libraries, borrowed and lent through DLPack, zero-copy.
 *
 * A producer gives a capsule with a pointer to its tensor. Borrowing does not rename the capsule,
 * and holds it while the data are read. Releasing it runs its own destructor, which calls the
 * producer's deleter once. So error paths only drop the capsule. Both layouts of the standard are
 * read. The versioned one (1.x) is requested first; a producer without that argument is called
 * without it.
 *
 * A producer on a GPU gets the engine's stream, and makes it wait for its own. Lent GPU arrays are
 * finished, so consumers need not wait. */
#include "dlpack.h"

#include "arrays.h"

#include <stdio.h>
#include <stdlib.h>
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

enum {
    DL_CPU = 1,
    DL_CUDA = 2,
    DL_CUDA_HOST = 3,
    DL_INT = 0,
    DL_UINT = 1,
    DL_FLOAT = 2,
    DL_BFLOAT = 4
};
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

/* The place of a DLPack device; ValueError if the engine has none. */
static int place_of(long type, long id, const char *name, Place *out)
{
    *out = type == DL_CUDA ? PLACE_CUDA + (int)id : PLACE_CPU;
    if (type == DL_CPU || type == DL_CUDA_HOST) return 0;
    if (type == DL_CUDA && id >= 0 && id < PLACES - PLACE_CUDA) return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s is in the memory of %s (device %ld), not of the CPU or of CUDA", name,
                 device_name(type), id);
    return -1;
}

enum { PLACE_BYTES = 32 };

static const char *place_name(Place place, char text[PLACE_BYTES])
{
    if (place == PLACE_CPU) return "the CPU";
    snprintf(text, PLACE_BYTES, "CUDA (device %d)", place - PLACE_CUDA);
    return text;
}

int tensor_place(PyObject *object, const char *name, Place *out)
{
    if (!PyObject_HasAttrString(object, "__dlpack__")) {
        wrong_type(object, "%s must be a NumPy array or have __dlpack__, not ", name);
        return -1;
    }
    PyObject *device = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    if (!device) return -1;
    long part[2] = {0, 0};
    int ok = PyTuple_Check(device) && PyTuple_Size(device) == 2;
    for (int i = 0; ok && i < 2; i++) {
        part[i] = PyLong_AsLong(PyTuple_GetItem(device, i));
        ok = !PyErr_Occurred();
    }
    Py_DECREF(device);
    if (ok) return place_of(part[0], part[1], name, out);
    PyErr_Format(PyExc_TypeError, "__dlpack_device__ of %s must give a pair of whole numbers",
                 name);
    return -1;
}

/* The handle of the engine's stream on the GPU of the array `name`; opens the device. */
static int stream_of(Place place, const char *name, uintptr_t *stream)
{
    Device *dev;
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = turn_begin(place, &dev);
    if (!status) *stream = dev->stream(dev);
    turn_end();
    Py_END_ALLOW_THREADS;
    if (!status) return 0;
    char text[PLACE_BYTES];
    PyErr_Format(PyExc_ValueError, "%s is in the memory of %s, and %s", name,
                 place_name(place, text), status_text());
    return -1;
}

/* Calls __dlpack__ in its new form, then in the older forms: without max_version, and on the CPU
 * without stream. */
static PyObject *dlpack_call(PyObject *object, const char *name, Place place)
{
    uintptr_t stream = 0;
    if (place != PLACE_CPU && stream_of(place, name, &stream) < 0) return NULL;
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__"), *capsule = NULL;
    PyObject *none = PyTuple_New(0), *settings = PyDict_New();
    PyObject *version = Py_BuildValue("(ii)", 1, 0);
    PyObject *handle = PyLong_FromSize_t((size_t)stream);
    if (method && none && settings && version && handle &&
        (place == PLACE_CPU || PyDict_SetItemString(settings, "stream", handle) == 0) &&
        PyDict_SetItemString(settings, "max_version", version) == 0)
        capsule = PyObject_Call(method, none, settings);
    if (!capsule && method && settings && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        if (PyDict_DelItemString(settings, "max_version") == 0)
            capsule = PyObject_Call(method, none, settings);
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(settings);
    Py_XDECREF(version);
    Py_XDECREF(handle);
    return capsule;
}

/* The producer's capsule. Its BufferError (for a gradient, or a layout) becomes a ValueError. */
static PyObject *capsule_of(PyObject *object, const char *name, Place place)
{
    PyObject *capsule = dlpack_call(object, name, place);
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
    int kind = type.lanes == 1 ? type.code << 8 | type.bits : -1;
    switch (kind) {
    case DL_FLOAT << 8 | 32: *out = ELEMENT_F32; return 0;
    case DL_BFLOAT << 8 | 16:
    case DL_UINT << 8 | 16: *out = ELEMENT_BF16; return 0;
    case DL_INT << 8 | 32: *out = ELEMENT_I32; return 0;
    case DL_INT << 8 | 64: *out = ELEMENT_I64; return 0;
    }
    static const char *const codes[] = {"int",    "uint",    "float", "opaque",
                                        "bfloat", "complex", "bool"};
    PyErr_Format(PyExc_TypeError,
                 "%s must be float32, bfloat16, or uint16 with bf16's bits (ids: int32 or int64), "
                 "not %s%d of %d lanes",
                 name, type.code < 7 ? codes[type.code] : "another type of ", (int)type.bits,
                 (int)type.lanes);
    return -1;
}

/* Adds |a·b| to *sum; returns whether that overflows an int64. */
static int adds_too_much(int64_t a, int64_t b, int64_t *sum)
{
    int64_t product;
    if (a < 0) a = a == INT64_MIN ? INT64_MAX : -a;
    return __builtin_mul_overflow(a, b, &product) || __builtin_add_overflow(*sum, product, sum);
}

#define MOST (INT64_C(1) << 56) /* bytes of a processor's address space */

/* Why a tensor's numbers describe impossible memory; NULL: they do not. */
static const char *tensor_fault(const DLTensor *from)
{
    int64_t element = ((int64_t)from->dtype.bits * from->dtype.lanes + 7) / 8;
    int64_t bytes = element, reach = element, step;
    int empty = 0, vast = from->byte_offset > MOST;
    if (!element) return "has elements without bits";
    if (from->ndim && !from->shape) return "came without its shape";
    for (int i = 0; i < from->ndim; i++) {
        int64_t size = from->shape[i];
        if (size < 0) return "has a dimension below 0";
        empty |= size == 0;
        vast |= __builtin_mul_overflow(bytes, size ? size : 1, &bytes);
        if (from->strides && size > 1)
            vast |= __builtin_mul_overflow(from->strides[i], element, &step) ||
                    adds_too_much(step, size - 1, &reach);
    }
    if (vast || bytes > MOST || reach > MOST) return "has sizes that no memory holds";
    return empty || from->data ? NULL : "came without its data";
}

/* The tensor of a capsule, with the checks that hold for any type and order; NULL with an
 * exception. */
static const DLTensor *capsule_tensor(PyObject *capsule, const char *name, int *readonly)
{
    const DLTensor *tensor = NULL;
    if (PyCapsule_IsValid(capsule, VERSIONED)) {
        const DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, VERSIONED);
        *readonly = (managed->flags & READ_ONLY) != 0;
        if (managed->major == 1)
            tensor = &managed->tensor;
        else
            PyErr_Format(PyExc_ValueError, "%s came as DLPack %u.%u, version 1 is known", name,
                         managed->major, managed->minor);
    } else if (PyCapsule_IsValid(capsule, PLAIN)) {
        const DLManagedTensor *managed = PyCapsule_GetPointer(capsule, PLAIN);
        tensor = &managed->tensor;
    } else {
        wrong_type(capsule, "__dlpack__ of %s gave no DLPack capsule but a ", name);
    }
    if (!tensor) return NULL;
    const char *fault = NULL;
    if (tensor->ndim < 0 || tensor->ndim > TENSOR_DIMS)
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions, at most %d are taken", name,
                     (int)tensor->ndim, TENSOR_DIMS);
    else if ((fault = tensor_fault(tensor)))
        PyErr_Format(PyExc_ValueError, "%s %s", name, fault);
    return PyErr_Occurred() ? NULL : tensor;
}

static int read_tensor(const DLTensor *from, const char *name, Tensor *out)
{
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
    out->data = from->data ? (char *)from->data + from->byte_offset : NULL;
    if (out->length > 0 && (uintptr_t)out->data % (uintptr_t)element_bytes(out->element)) {
        PyErr_Format(PyExc_ValueError, "%s must begin at a multiple of its element's size", name);
        return -1;
    }
    return 0;
}

/* The capsule's destructor may run Python, so a pending exception is saved. */
void tensor_drop(Tensor *tensor)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_CLEAR(tensor->capsule);
    PyErr_Restore(type, value, trace);
}

int tensor_borrow(PyObject *object, const char *name, Place place, Tensor *out)
{
    char text[2][PLACE_BYTES];
    Place own;
    *out = (Tensor){0};
    if (tensor_place(object, name, &own) < 0) return -1;
    if (own != place) {
        PyErr_Format(PyExc_ValueError,
                     "%s is in the memory of %s, and other arrays of this call in that of %s: all "
                     "must be on one device",
                     name, place_name(own, text[0]), place_name(place, text[1]));
        return -1;
    }
    out->capsule = capsule_of(object, name, place);
    if (!out->capsule) return -1;
    const DLTensor *tensor = capsule_tensor(out->capsule, name, &out->readonly);
    int status = tensor ? place_of(tensor->device.type, tensor->device.id, name, &own) : -1;
    if (!status && own != place) {
        PyErr_Format(PyExc_ValueError, "%s is in the memory of %s, but its __dlpack_device__ is %s",
                     name, place_name(own, text[0]), place_name(place, text[1]));
        status = -1;
    }
    if (!status) status = read_tensor(tensor, name, out);
    if (status < 0) tensor_drop(out);
    return status;
}

PyObject *dlpack_check(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *capsule;
    const char *name;
    long type;
    int readonly;
    if (!PyArg_ParseTuple(args, "Osl:dlpack_check", &capsule, &name, &type)) return NULL;
    const DLTensor *tensor = capsule_tensor(capsule, name, &readonly);
    if (!tensor) return NULL;
    if (tensor->device.type == type) Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError,
                        "%s is in the memory of %s, but its __dlpack_device__ is %s", name,
                        device_name(tensor->device.type), device_name(type));
}

/* ---- lending ---- */

/* A lent NumPy array, or the capsule of a device's array. A consumer that took the loan's capsule
 * calls the deleter; otherwise the capsule does. */
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
    free(loan);
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

/* The DLPack description of a device's array in the given shape. */
static int device_tensor(const DeviceArray *array, PyObject *shape, DLTensor *out, int64_t *dims)
{
    static const DLDataType types[] = {[KIND_INT32] = {DL_INT, 32, 1},
                                       [KIND_FLOAT32] = {DL_FLOAT, 32, 1},
                                       [KIND_UINT16] = {DL_BFLOAT, 16, 1}};
    Py_ssize_t count = shape ? PyTuple_Size(shape) : -1;
    int64_t length = 1;
    for (Py_ssize_t i = 0; i < count && count <= TENSOR_DIMS; i++) {
        dims[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
        if (dims[i] == -1 && PyErr_Occurred()) return -1;
        length *= dims[i];
    }
    if (count < 0 || count > TENSOR_DIMS || length != array->length) {
        PyErr_Format(PyExc_ValueError, "shape must be of %lld elements and at most %d dimensions",
                     (long long)array->length, TENSOR_DIMS);
        return -1;
    }
    DLDevice device = {DL_CUDA, array->place - PLACE_CUDA};
    *out = (DLTensor){array->memory, device, (int32_t)count, types[array->kind], dims, NULL, 0};
    return 0;
}

static int host_tensor(PyObject *array, int bf16, DLTensor *out, int64_t *dims, int *readonly)
{
    Tensor own;
    if (tensor_borrow(array, "the array", PLACE_CPU, &own) < 0) return -1;
    memcpy(dims, own.shape, sizeof own.shape);
    DLDataType type = {own.element == ELEMENT_I32 || own.element == ELEMENT_I64 ? DL_INT : DL_FLOAT,
                       (uint8_t)(element_bytes(own.element) * 8), 1};
    if (own.element == ELEMENT_BF16) type.code = bf16 ? DL_BFLOAT : DL_UINT;
    *out = (DLTensor){own.data, {DL_CPU, 0}, own.dims, type, dims, NULL, 0};
    *readonly = own.readonly;
    tensor_drop(&own);
    return 0;
}

PyObject *dlpack_lend(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array, *shape = NULL;
    int bf16, versioned, readonly = 0;
    DLTensor tensor;
    if (!PyArg_ParseTuple(args, "Opp|O!:dlpack_lend", &array, &bf16, &versioned, &PyTuple_Type,
                          &shape))
        return NULL;
    Loan *loan = calloc(1, sizeof *loan);
    if (!loan) return PyErr_NoMemory();
    const DeviceArray *device = device_array_of(array);
    if (device ? device_tensor(device, shape, &tensor, loan->shape) < 0
               : host_tensor(array, bf16, &tensor, loan->shape, &readonly) < 0) {
        free(loan);
        return NULL;
    }
    loan->array = Py_NewRef(array);
    loan->versioned =
        (DLManagedTensorVersioned){1, 0, loan, versioned_deleter, readonly ? READ_ONLY : 0, tensor};
    loan->plain = (DLManagedTensor){tensor, loan, plain_deleter};
    void *content = versioned ? (void *)&loan->versioned : (void *)&loan->plain;
    PyObject *capsule = PyCapsule_New(content, versioned ? VERSIONED : PLAIN, capsule_destructor);
    if (!capsule) loan_end(loan);
    return capsule;
}
