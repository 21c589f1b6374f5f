/* binding/image_type.c - tinsmith._core.Image: an image of this process. While one exists, the
 * image's pixels are kept. */
#include "arrays.h"
#include "status.h"
#include "turn.h"
#include "types.h"

typedef struct PyImage {
    PyObject_HEAD const Image *image;
} PyImage;

/* The pixels of a token's side; 0: so many bytes are no image of high × wide tokens. */
static int side_of(int64_t bytes, int high, int wide)
{
    int side = 1;
    while ((int64_t)side * side * 3 * high * wide < bytes && side < 1 << 10) side++;
    return (int64_t)side * side * 3 * high * wide == bytes ? side : 0;
}

static PyObject *image_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"pixels", "high", "wide", "first", NULL};
    PyObject *array;
    int high, wide, first = 0;
    Borrowed pixels;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Oii|i:Image", names, &array, &high, &wide,
                                     &first))
        return NULL;
    if (high < 1 || wide < 1 || high > 1 << 14 || wide > 1 << 14 || first > 0)
        return PyErr_Format(PyExc_ValueError,
                            "an image has 1 to 16384 tokens on each side, and first is 0 or an id "
                            "below it, not %d, %d and %d",
                            high, wide, first);
    if (borrow(array, KIND_UINT8, "pixels", &pixels) < 0) return NULL;
    int side = side_of(pixels.length, high, wide);
    if (!side) {
        Py_DECREF(pixels.owner);
        return PyErr_Format(PyExc_ValueError, "%lld bytes are no image of %d by %d tokens",
                            (long long)pixels.length, high, wide);
    }
    PyImage *self = (PyImage *)PyType_GenericAlloc(type, 0);
    Status status = STATUS_OK;
    if (self) NO_GIL(status = image_hold(&self->image, first, pixels.data, high, wide, side));
    Py_DECREF(pixels.owner);
    if (!status) return (PyObject *)self;
    Py_DECREF(self);
    return raise_status(status);
}

static void image_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    const Image *image = ((PyImage *)object)->image;
    if (image) image_release(image);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *image_number(PyObject *object, void *which)
{
    const Image *image = ((PyImage *)object)->image;
    long rows = image_rows(image), side = image->side;
    long numbers[] = {image->first, image->high, image->wide, rows, side, rows * side * side * 3};
    return PyLong_FromLong(numbers[*(const int *)which]);
}

static const int which[] = {0, 1, 2, 3, 4, 5};

static PyObject *image_pixels(PyObject *object, void *unused)
{
    (void)unused;
    const Image *image = ((PyImage *)object)->image;
    return array_view(object, image->pixels,
                      (int64_t)image_rows(image) * image->side * image->side * 3);
}

static PyGetSetDef getset[] = {
    {"first", image_number, NULL, "The id of its first row; row i has first - i.",
     (void *)&which[0]},
    {"high", image_number, NULL, "Its rows of tokens.", (void *)&which[1]},
    {"wide", image_number, NULL, "Its columns of tokens.", (void *)&which[2]},
    {"rows", image_number, NULL, "Its tokens.", (void *)&which[3]},
    {"side", image_number, NULL, "Pixels of a token's side.", (void *)&which[4]},
    {"nbytes", image_number, NULL, "Bytes of its pixels.", (void *)&which[5]},
    {"pixels", image_pixels, NULL, "Its pixels, flat and read-only.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, image_new},
    {Py_tp_dealloc, image_dealloc},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Image(pixels, high, wide, first=0)\n\nAn image of this process."},
    {0, NULL},
};

PyType_Spec image_spec = {
    .name = "tinsmith._core.Image",
    .basicsize = sizeof(PyImage),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
