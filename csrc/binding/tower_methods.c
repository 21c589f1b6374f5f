/* binding/tower_methods.c - the vision tower of a tinsmith._core.Model: opened by a dict of
 * numbers, loaded tensor by tensor, sealed. */
#include "tower_methods.h"

#include <stdlib.h>

#include "../model/model_tower.h"
#include "arrays.h"
#include "status.h"
#include "turn.h"

/* A whole number of the config; -1 with an exception. */
static int size_from(PyObject *config, const char *name, int *size)
{
    PyObject *value = PyDict_GetItemString(config, name);
    if (!value) PyErr_Format(PyExc_ValueError, "the tower's config lacks %s", name);
    return value && whole_from(value, size) ? 0 : -1;
}

/* A sequence of at most `most` numbers of the config; returns how many, or -1 with an exception. */
static int numbers_from(PyObject *config, const char *name, double *numbers, int most)
{
    PyObject *value = PyDict_GetItemString(config, name);
    PyObject *items = value ? PySequence_Tuple(value) : NULL;
    if (!value) PyErr_Format(PyExc_ValueError, "the tower's config lacks %s", name);
    if (!items) return -1;
    int count = (int)PyTuple_Size(items), ok = count <= most;
    if (!ok) PyErr_Format(PyExc_ValueError, "%s has %d numbers, at most %d", name, count, most);
    for (int i = 0; ok && i < count; i++) {
        numbers[i] = PyFloat_AsDouble(PyTuple_GetItem(items, i));
        ok = !(numbers[i] == -1.0 && PyErr_Occurred());
    }
    Py_DECREF(items);
    return ok ? count : -1;
}

static int colours_from(PyObject *config, const char *name, float *colours)
{
    double numbers[3];
    int count = numbers_from(config, name, numbers, 3);
    if (count >= 0 && count != 3) PyErr_Format(PyExc_ValueError, "%s needs 3 numbers", name);
    for (int c = 0; c < 3 && count == 3; c++) colours[c] = (float)numbers[c];
    return count == 3 ? 0 : -1;
}

static int shape_from(PyObject *config, TowerShape *shape)
{
    struct {
        const char *name;
        int *size;
    } sizes[] = {
#define X(name) {#name, &shape->name},
        TOWER_SIZES(X)
#undef X
    };
    double deep[DEEPS_MOST];
    size_t count = sizeof sizes / sizeof *sizes - 1; /* `deeps`, the last, is the length of deep */
    for (size_t i = 0; i < count; i++)
        if (size_from(config, sizes[i].name, sizes[i].size) < 0) return -1;
    shape->deeps = numbers_from(config, "deep", deep, DEEPS_MOST);
    for (int k = 0; k < shape->deeps; k++) shape->deep[k] = (int)deep[k];
    PyObject *rescale = PyDict_GetItemString(config, "rescale");
    if (!rescale) PyErr_SetString(PyExc_ValueError, "the tower's config lacks rescale");
    if (shape->deeps < 0 || !rescale) return -1;
    shape->rescale = (float)PyFloat_AsDouble(rescale);
    if (PyErr_Occurred() || colours_from(config, "mean", shape->mean) < 0) return -1;
    return colours_from(config, "std", shape->std);
}

PyObject *model_tower_open_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"config", "weights", "memory", NULL};
    PyModel *self = (PyModel *)object;
    PyObject *config;
    const char *weights = "bf16";
    Py_ssize_t memory = 0;
    TowerShape shape = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|sn:tower_open", names, &PyDict_Type, &config,
                                     &weights, &memory))
        return NULL;
    if (memory < 0) return PyErr_Format(PyExc_ValueError, "memory must be 0 or more");
    DType type = dtype_find(weights);
    if (type != DTYPE_BF16 && type != DTYPE_F32)
        return PyErr_Format(PyExc_ValueError, "weights must be 'bf16' or 'f32', not '%s'", weights);
    if (shape_from(config, &shape) < 0) return NULL;
    Status status;
    ON_TURN(self, status = model_tower_open(self->model, &shape, type, (size_t)memory));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static Status none_open(void)
{
    return fail(STATUS_INVALID, "the model has no vision tower: open one first");
}

PyObject *model_tower_load_method(PyObject *object, PyObject *args)
{
    PyModel *self = (PyModel *)object;
    const char *slot;
    int index;
    PyObject *array;
    Borrowed tensor;
    if (!PyArg_ParseTuple(args, "siO:tower_load", &slot, &index, &array)) return NULL;
    if (borrow_tensor(array, slot, &tensor) < 0) return NULL;
    Tower *tower = self->model->tower;
    Status status;
    ON_TURN(self, status = tower ? tower_load(tower, slot, index, tensor.data, tensor.type,
                                              tensor.rows, tensor.cols)
                                 : none_open());
    Py_DECREF(tensor.owner);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

PyObject *model_tower_seal_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    turn_take(self);
    Status status = self->model->tower ? tower_seal(self->model->tower) : none_open();
    turn_give(self);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

PyObject *model_tower_close_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    Status status;
    ON_TURN(self, model_tower_close(self->model));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

/* The features of an image in the host's memory, all levels one after another. */
static Status features_read(Model *model, const Image *image, void **numbers, size_t *bytes)
{
    const Features *features;
    Tower *tower = model->tower;
    if (!tower || !tower->sealed) return none_open();
    features_begin(tower);
    TRY(features_want(&features, tower, image, NULL));
    size_t one = (size_t)image_rows(image) * (size_t)tower->shape.out * tower->dev->real_bytes,
           levels = (size_t)(1 + tower->shape.deeps);
    char *to = malloc(levels * one);
    if (!to) return fail(STATUS_MEMORY, "no memory for an image's features");
    Status status = STATUS_OK;
    for (size_t k = 0; k < levels && !status; k++) {
        tower->level[k]->download(tower->level[k], to + k * one, features->level[k], one);
        status = tower->level[k]->sync(tower->level[k]);
    }
    *numbers = to;
    *bytes = levels * one;
    if (status) free(to);
    return status;
}

PyObject *model_tower_features_method(PyObject *object, PyObject *which)
{
    PyModel *self = (PyModel *)object;
    PyObject *number = PyObject_GetAttrString(which, "first");
    long first = number ? PyLong_AsLong(number) : -1;
    Py_XDECREF(number);
    if (PyErr_Occurred()) return NULL;
    const Image *image = first >= INT32_MIN && first < 0 ? image_of((int32_t)first) : NULL;
    if (!image) return PyErr_Format(PyExc_ValueError, "there is no image with the id %ld", first);
    void *numbers = NULL;
    size_t bytes = 0;
    Status status;
    ON_TURN(self, status = features_read(self->model, image, &numbers, &bytes));
    if (status) return raise_status(status);
    int wide = self->model->dev->real_bytes == sizeof(float);
    PyObject *array = array_new(wide ? KIND_FLOAT32 : KIND_UINT16,
                                (int64_t)(bytes / self->model->dev->real_bytes), -1, numbers);
    free(numbers);
    return array;
}

PyObject *model_tower_slots(PyObject *object, void *unused)
{
    (void)unused;
    const Tower *tower = ((PyModel *)object)->model->tower;
    PyObject *list = PyList_New(0);
    for (TowerSlot slot = 0; tower && slot < TOWER_SLOTS; slot++)
        for (int i = 0; list && i < tower_tensor(&tower->shape, slot, 0).many; i++) {
            TowerTensor one = tower_tensor(&tower->shape, slot, i);
            PyObject *row = Py_BuildValue("(siii)", one.name, i, one.rows, one.cols);
            if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
            Py_XDECREF(row);
        }
    return list;
}

PyObject *model_tower_bytes(PyObject *object, void *unused)
{
    (void)unused;
    const Tower *tower = ((PyModel *)object)->model->tower;
    return PyLong_FromSize_t(tower ? tower->bytes : 0);
}

PyObject *model_features_bytes_number(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(model_features_bytes(((PyModel *)object)->model));
}

PyObject *model_features_drop_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    Status status;
    ON_TURN(self, model_features_drop(self->model));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

PyObject *model_tower_images(PyObject *object, void *unused)
{
    (void)unused;
    const Tower *tower = ((PyModel *)object)->model->tower;
    return PyLong_FromLongLong(tower ? tower->features.computed : 0);
}
