/* binding/model_config.c - a model's shape and the types of its matrices, from Python's dicts and
 * back. */
#include "model_config.h"

#include <stdlib.h>

#include "arrays.h"
#include "status.h"

/* The config's keys for the kinds of each part of a layer. */
static const char *const part_key[] = {[MIXER] = "mixers", [FEED] = "feeds"};

/* The value of a required key of the config. */
static PyObject *config_item(PyObject *config, const char *key)
{
    PyObject *value = PyDict_GetItemString(config, key);
    if (!value) PyErr_Format(PyExc_ValueError, "the model's config lacks %s", key);
    return value;
}

/* Reads the kinds of one part of all layers from a sequence of names. */
static int kinds_from(PyObject *config, Part part, int layers, LayerKinds *kinds)
{
    PyObject *names = config_item(config, part_key[part]);
    names = names ? PySequence_Tuple(names) : NULL;
    if (!names) return -1;
    int ok = PyTuple_Size(names) == layers;
    if (!ok)
        PyErr_Format(PyExc_ValueError, "%s names %zd layers, the model has %d", part_key[part],
                     PyTuple_Size(names), layers);
    for (int l = 0; ok && l < layers; l++) {
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, l), NULL);
        ok = name != NULL;
        if (!name) break;
        Status status = kind_find(part, name, &kinds[l].kind[part]);
        ok = status == STATUS_OK;
        if (!ok) raise_status(status);
    }
    Py_DECREF(names);
    return ok ? 0 : -1;
}

/* Reads the axis of each rotated pair, a sequence that may be missing or empty: positions then have
 * one axis. Returns how many keys it read, or −1. */
static int axes_from(PyObject *config, Shape *shape, int32_t *axis)
{
    PyObject *value = PyDict_GetItemString(config, "rope_axis");
    shape->axes = 1;
    shape->axis = axis;
    if (!value) return 0;
    PyObject *items = PySequence_Tuple(value);
    if (!items) return -1;
    Py_ssize_t count = PyTuple_Size(items);
    int ok = count == 0 || (count == shape->rotary / 2 && count <= PAIRS_MOST);
    if (!ok)
        PyErr_Format(PyExc_ValueError, "rope_axis has %zd numbers, rotary %d needs %d", count,
                     shape->rotary, shape->rotary / 2);
    for (Py_ssize_t e = 0; ok && e < count; e++) {
        int number;
        ok = whole_from(PyTuple_GetItem(items, e), &number);
        axis[e] = number;
    }
    if (ok && count) shape->axes = AXES_MOST;
    Py_DECREF(items);
    return ok ? 1 : -1;
}

int config_shape(PyObject *config, Shape *shape, LayerKinds **kinds, int32_t *axis)
{
    struct {
        const char *name;
        int *whole;
        float *real;
    } fields[] = {
#define X(name) {#name, &shape->name, NULL},
        SHAPE_LIST(X)
#undef X
            {"norm_eps", NULL, &shape->norm_eps},
        {"rope_scale", NULL, &shape->rope_scale},
        {"expert_limit", NULL, &shape->expert_limit},
    };
    size_t count = sizeof fields / sizeof *fields;
    Py_ssize_t known = PARTS;
    for (size_t i = 0; i < count; i++) {
        PyObject *value = PyDict_GetItemString(config, fields[i].name);
        if (!value) continue;
        known++;
        double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) return -1;
        if (fields[i].real) {
            *fields[i].real = (float)number;
            continue;
        }
        if (!(number >= 0 && number <= INT32_MAX) || number != (int)number) {
            PyErr_Format(PyExc_ValueError, "%s must be a whole number of 0 or more, not %R",
                         fields[i].name, value);
            return -1;
        }
        *fields[i].whole = (int)number;
    }
    int axes = axes_from(config, shape, axis);
    if (axes < 0) return -1;
    known += axes;
    if (PyDict_Size(config) > known) {
        PyErr_Format(PyExc_ValueError, "the model's config has %zd keys, of which %zd are known",
                     PyDict_Size(config), known);
        return -1;
    }
    shape->layer = *kinds = calloc((size_t)shape->layers + 1, sizeof **kinds);
    if (!*kinds) {
        PyErr_NoMemory();
        return -1;
    }
    for (Part part = 0; part < PARTS; part++)
        if (kinds_from(config, part, shape->layers, *kinds) < 0) return -1;
    return 0;
}

/* One item of `packed`: {(slot, layer or -1): type}. */
static int type_from(PyObject *place, PyObject *value, int layers, DType *types)
{
    const char *name, *kind = PyUnicode_AsUTF8AndSize(value, NULL);
    int layer;
    if (!kind) return -1;
    if (!PyTuple_Check(place)) {
        PyErr_SetString(PyExc_TypeError, "packed: a key should be (slot, layer)");
        return -1;
    }
    if (!PyArg_ParseTuple(place, "si:packed", &name, &layer)) return -1;
    Slot slot = slot_named(name);
    DType type = dtype_find(kind);
    if (slot == SLOT_COUNT || layer < -1 || layer >= layers || type == DTYPES) {
        PyErr_Format(PyExc_ValueError, "packed: there is no %s of layer %d, or no type '%s'", name,
                     layer, kind);
        return -1;
    }
    for (int l = 0; l < layers; l++)
        if (layer == -1 || layer == l) types[(size_t)slot * (size_t)layers + (size_t)l] = type;
    return 0;
}

DType *config_types(PyObject *packed, const char *weights, int layers)
{
    DType wide = dtype_find(weights);
    if (wide != DTYPE_BF16 && wide != DTYPE_F32)
        return (DType *)PyErr_Format(PyExc_ValueError, "weights must be 'bf16' or 'f32', not '%s'",
                                     weights);
    size_t count = (size_t)SLOT_COUNT * (size_t)layers;
    DType *types = malloc((count + 1) * sizeof *types);
    if (!types) return (DType *)PyErr_NoMemory();
    for (size_t i = 0; i < count; i++) types[i] = wide;
    PyObject *place, *value;
    for (Py_ssize_t at = 0; packed && PyDict_Next(packed, &at, &place, &value);)
        if (type_from(place, value, layers, types) < 0) {
            free(types);
            return NULL;
        }
    return types;
}

/* The names of the kinds of one part of all layers. */
static PyObject *kinds_tuple(const Shape *s, Part part)
{
    PyObject *names = PyTuple_New(s->layers);
    for (int l = 0; names && l < s->layers; l++) {
        PyObject *name = PyUnicode_FromString(kind_info(s, s->layer[l].kind[part]).name);
        if (name)
            PyTuple_SetItem(names, l, name);
        else
            Py_CLEAR(names);
    }
    return names;
}

/* Moves a value into a dict; -1 if it is NULL or this fails. */
static int config_put(PyObject *config, const char *key, PyObject *value)
{
    int failed = !value || PyDict_SetItemString(config, key, value) < 0;
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

PyObject *config_of(const Shape *s)
{
    PyObject *config =
        Py_BuildValue("{s:d,s:d,s:d}", "norm_eps", (double)s->norm_eps, "rope_scale",
                      (double)s->rope_scale, "expert_limit", (double)s->expert_limit);
    if (!config) return NULL;
    struct {
        const char *name;
        int value;
    } fields[] = {
#define X(name) {#name, s->name},
        SHAPE_LIST(X)
#undef X
    };
    int failed = 0;
    for (size_t i = 0; !failed && i < sizeof fields / sizeof *fields; i++)
        failed = config_put(config, fields[i].name, PyLong_FromLong(fields[i].value));
    for (Part part = 0; !failed && part < PARTS; part++)
        failed = config_put(config, part_key[part], kinds_tuple(s, part));
    if (!failed && s->axes > 1) {
        PyObject *axes = PyList_New(0);
        for (int e = 0; axes && e < s->rotary / 2; e++) {
            PyObject *axis = PyLong_FromLong(s->axis[e]);
            if (!axis || PyList_Append(axes, axis) < 0) Py_CLEAR(axes);
            Py_XDECREF(axis);
        }
        failed = config_put(config, "rope_axis", axes);
    }
    if (failed) Py_CLEAR(config);
    return config;
}
