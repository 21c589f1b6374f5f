/* binding/model_type.c - tinsmith._core.Model: a frozen base model, loaded slot by slot. */
#include <stdlib.h>
#include <string.h>

#include "../model/stages.h"
#include "../train/memory_plan.h"
#include "arrays.h"
#include "model_config.h"
#include "status.h"
#include "tower_methods.h"
#include "turn.h"

static PyObject *model_make(PyTypeObject *type, const Shape *shape, const Borrowed *freq,
                            const DType *weights, const char *device, int threads)
{
    if (freq->length != shape->rotary / 2)
        return PyErr_Format(PyExc_ValueError, "inv_freq has %lld numbers, rotary %d needs %d",
                            (long long)freq->length, shape->rotary, shape->rotary / 2);
    PyModel *self = (PyModel *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    turn_open(self);
    Status status;
    NO_GIL(status = model_open(&self->model, shape, freq->data, weights, device, threads));
    if (!status) return (PyObject *)self;
    Py_DECREF(self);
    return raise_status(status);
}

static PyObject *model_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"config", "inv_freq", "weights", "packed",
                            "device", "threads",  "mapped",  NULL};
    PyObject *config, *inv_freq, *packed = NULL, *self = NULL;
    const char *weights = "bf16", *device = "cpu";
    int threads = 0, mapped = 0;
    int32_t axis[PAIRS_MOST];
    Shape shape = {0};
    Borrowed freq;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|$sO!sO&p:Model", names, &PyDict_Type,
                                     &config, &inv_freq, &weights, &PyDict_Type, &packed, &device,
                                     whole_from, &threads, &mapped))
        return NULL;
    LayerKinds *kinds = NULL;
    DType *types = NULL;
    if (config_shape(config, &shape, &kinds, axis) == 0 &&
        (types = config_types(packed, weights, shape.layers)) != NULL &&
        borrow(inv_freq, KIND_FLOAT32, "inv_freq", &freq) == 0) {
        self = model_make(type, &shape, &freq, types, device, threads);
        Py_DECREF(freq.owner);
    }
    if (self) ((PyModel *)self)->model->mapped = mapped;
    free(types);
    free(kinds);
    return self;
}

static void model_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyModel *self = (PyModel *)object;
    NO_GIL(model_close(self->model));
    pthread_mutex_destroy(&self->turn);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *model_load_method(PyObject *object, PyObject *args)
{
    const char *slot, *packed = NULL;
    int layer, index = 0;
    PyObject *array;
    Borrowed tensor;
    if (!PyArg_ParseTuple(args, "siO|iz:load", &slot, &layer, &array, &index, &packed)) return NULL;
    if (packed && !dtype_info(dtype_find(packed)).block_bytes)
        return PyErr_Format(PyExc_ValueError, "%s: arrays have no type '%s'", slot, packed);
    if ((packed ? borrow_blocks(array, slot, dtype_find(packed), &tensor)
                : borrow_tensor(array, slot, &tensor)) < 0)
        return NULL;
    Status status;
    PyModel *self = (PyModel *)object;
    ON_TURN(self, status = model_load(self->model, slot, layer, index, tensor.data, tensor.type,
                                      tensor.rows, tensor.cols));
    Py_DECREF(tensor.owner);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *model_fill_method(PyObject *object, PyObject *array)
{
    Borrowed block;
    if (borrow(array, KIND_UINT16, "block", &block) < 0) return NULL;
    Status status;
    PyModel *self = (PyModel *)object;
    ON_TURN(self, status = model_fill(self->model, block.data, block.length));
    Py_DECREF(block.owner);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *model_seal_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    turn_take(self);
    Status status = model_seal(self->model);
    turn_give(self);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *model_map_method(PyObject *object, PyObject *args)
{
    int file;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "in:map", &file, &at)) return NULL;
    Status status;
    PyModel *self = (PyModel *)object;
    ON_TURN(self, status = model_map(self->model, file, (size_t)at));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *model_memory_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    const void *memory;
    size_t bytes;
    Status status = model_memory(((PyModel *)object)->model, &memory, &bytes);
    return status ? raise_status(status) : array_view(object, memory, (int64_t)bytes);
}

/* Reads the arguments of plan() and stage_plan(), and makes the plan. */
static int plan_from(Plan *plan, PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", "tokens", "step_bytes", "datum_bytes", NULL};
    int rank, tokens = 0;
    Py_ssize_t step_bytes = 0, datum_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|O&nn:plan", names, whole_from, &rank,
                                     whole_from, &tokens, &step_bytes, &datum_bytes))
        return -1;
    if (tokens < 0 || step_bytes < 0 || datum_bytes < 0) {
        PyErr_Format(PyExc_ValueError,
                     "tokens, step_bytes and datum_bytes must be 0 (the default) or more");
        return -1;
    }
    PyModel *self = (PyModel *)object;
    AdapterSpec layout = {.rank = rank, .groups = ATTN | MLP | UNEMBED, .alpha = 1.0f};
    TrainerLimits limits = {.step_bytes = (size_t)step_bytes, .datum_bytes = (size_t)datum_bytes};
    turn_take(self);
    Status status = plan_make(plan, self->model, &layout, &limits, tokens);
    turn_give(self);
    if (status) raise_status(status);
    return status ? -1 : 0;
}

static PyObject *model_plan_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    const PyModel *self = (PyModel *)object;
    Plan plan;
    if (plan_from(&plan, object, args, kwargs) < 0) return NULL;
#define SIZE(name) #name, (Py_ssize_t)plan.name
    return Py_BuildValue(
        "{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}",
        SIZE(weights), SIZE(held), SIZE(datum_most), SIZE(adapter), SIZE(step), SIZE(own),
        SIZE(cache), SIZE(cache_tokens), SIZE(kv_token), SIZE(kv_window), SIZE(states),
        SIZE(kv_sequence), SIZE(free), SIZE(all), SIZE(sums), SIZE(scratch), SIZE(step_most),
        SIZE(step_tokens), SIZE(longest), "kept",
        (Py_ssize_t)(plan.keep ? keep_layers(self->model, CHEAP, plan.keep) : 0), "attention_kept",
        (Py_ssize_t)(plan.keep ? keep_layers(self->model, DEAR, plan.keep) : 0));
#undef SIZE
}

static PyObject *model_stage_plan_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    const Model *model = ((PyModel *)object)->model;
    Plan plan;
    if (plan_from(&plan, object, args, kwargs) < 0) return NULL;
    PyObject *list = PyList_New(0);
    for (int k = 0; list && k < model->stages; k++) {
        const Stage *stage = &model->stage[k];
        const StagePlan *one = &plan.stage[k];
#define SIZE(name) #name, (Py_ssize_t)one->name
        PyObject *row =
            Py_BuildValue("{s:s,s:i,s:i,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "device", stage->dev->name,
                          "first", stage->first, "end", stage->end, SIZE(weights), SIZE(adapter),
                          SIZE(step), SIZE(own), SIZE(cache), SIZE(free), SIZE(all));
#undef SIZE
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *model_cache_tokens_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "free", NULL};
    Py_ssize_t all_bytes = 0, free_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|nn:cache_tokens", names, &all_bytes,
                                     &free_bytes))
        return NULL;
    if (all_bytes < 0 || free_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "memory and free must be 0 or more");
    PyModel *self = (PyModel *)object;
    turn_take(self);
    int64_t tokens = budget_cache_tokens(self->model, (size_t)all_bytes, (size_t)free_bytes);
    turn_give(self);
    return PyLong_FromLongLong(tokens);
}

static PyObject *model_cache_bytes_method(PyObject *object, PyObject *argument)
{
    PyModel *self = (PyModel *)object;
    long long tokens = PyLong_AsLongLong(argument);
    if (tokens == -1 && PyErr_Occurred()) return NULL;
    if (tokens < 0 || tokens > CACHE_TOKENS_MAX)
        return PyErr_Format(PyExc_ValueError, "a cache can hold 0 to %d tokens, not %lld",
                            CACHE_TOKENS_MAX, tokens);
    return PyLong_FromSize_t(tokens ? budget_cache_bytes(self->model, tokens) : 0);
}

static PyObject *model_step_bytes_method(PyObject *object, PyObject *memory)
{
    size_t bytes = PyLong_AsSize_t(memory);
    if (bytes == (size_t)-1 && PyErr_Occurred()) return NULL;
    PyModel *self = (PyModel *)object;
    turn_take(self);
    bytes = budget_step(self->model, bytes);
    turn_give(self);
    return PyLong_FromSize_t(bytes);
}

static PyObject *model_trim_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    Status status;
    ON_TURN(self, training_trim(self->model));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *model_training_bytes(PyObject *object, void *unused)
{
    (void)unused;
    PyModel *self = (PyModel *)object;
    turn_take(self);
    size_t bytes = training_bytes(self->model);
    turn_give(self);
    return PyLong_FromSize_t(bytes);
}

static PyObject *model_arena_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(arenas_size(&((PyModel *)object)->model->training.step));
}

static PyObject *model_slots(PyObject *object, void *unused)
{
    (void)unused;
    const Shape *shape = &((PyModel *)object)->model->shape;
    PyObject *list = PyList_New(0);
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < shape->layers; l++) {
            SlotInfo info = slot_info(shape, slot, l);
            if (!info.per_layer && l > 0) break;
            for (int i = 0; list && info.present && i < info.count; i++) {
                PyObject *row = Py_BuildValue("(siiii)", info.name, info.per_layer ? l : -1, i,
                                              info.rows, info.cols);
                if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
                Py_XDECREF(row);
            }
        }
    return list;
}

static PyObject *model_config(PyObject *object, void *unused)
{
    (void)unused;
    return config_of(&((PyModel *)object)->model->shape);
}

static PyObject *model_device(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(((PyModel *)object)->model->device);
}

static PyObject *model_library(PyObject *object, void *unused)
{
    (void)unused;
    const char *library = ((PyModel *)object)->model->dev->library;
    return PyUnicode_DecodeFSDefault(library ? library : "");
}

static PyObject *model_notes(PyObject *object, void *unused)
{
    (void)unused;
    const char *const *notes = ((PyModel *)object)->model->dev->notes;
    PyObject *list = PyList_New(0);
    for (; list && notes && *notes; notes++) {
        PyObject *note = PyUnicode_FromString(*notes);
        if (!note || PyList_Append(list, note) < 0) Py_CLEAR(list);
        Py_XDECREF(note);
    }
    return list;
}

static PyObject *model_weight_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(model_bytes(((PyModel *)object)->model));
}

static PyObject *model_held_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(model_held(((PyModel *)object)->model));
}

static PyMethodDef methods[] = {
    {"load", model_load_method, METH_VARARGS,
     "load(slot, layer, array, index=0, packed=None)\n\nCopies one tensor in: (rows, cols), or "
     "(cols,) for vectors, or a row's blocks of the type `packed` in each row of a uint8 array. "
     "`index` numbers a layer's matrices of one slot."},
    {"fill", model_fill_method, METH_O,
     "fill(block)\n\nMakes every matrix that was not loaded of a block of bf16's bits, again and "
     "again, copied on the device: random weights for a benchmark."},
    {"seal", model_seal_method, METH_NOARGS,
     "seal()\n\nEnds loading; ValueError names what is missing."},
    {"map", model_map_method, METH_VARARGS,
     "map(file, at)\n\nInstead of loading: the weights are bytes of an open file, those of another "
     "such model's memory()."},
    {"memory", model_memory_method, METH_NOARGS,
     "memory() -> array\n\nThe bytes of a sealed model's weights, on the CPU; read-only."},
    {"plan", (PyCFunction)(void (*)(void))model_plan_method, METH_VARARGS | METH_KEYWORDS,
     "plan(rank, tokens=0) -> dict[str, int]\n\nBytes of weights, adapter, step, cache, and what "
     "the device has."},
    {"stage_plan", (PyCFunction)(void (*)(void))model_stage_plan_method,
     METH_VARARGS | METH_KEYWORDS,
     "stage_plan(rank, tokens=0) -> list[dict]\n\nEach stage's device, layers, and part of the "
     "plan."},
    {"cache_tokens", (PyCFunction)(void (*)(void))model_cache_tokens_method,
     METH_VARARGS | METH_KEYWORDS,
     "cache_tokens(memory=0, free=0) -> int\n\nTokens that a sampler's cache holds by default."},
    {"cache_bytes", model_cache_bytes_method, METH_O,
     "cache_bytes(tokens) -> int\n\nBytes of a sampler's cache for so many tokens."},
    {"trim", model_trim_method, METH_NOARGS,
     "trim()\n\nFrees the memory that training calls share; no result changes."},
    {"tower_open", (PyCFunction)(void (*)(void))model_tower_open_method,
     METH_VARARGS | METH_KEYWORDS,
     "tower_open(config, weights='bf16', memory=0)\n\nBegins the vision tower: its tensors can be "
     "loaded."},
    {"tower_load", model_tower_load_method, METH_VARARGS,
     "tower_load(slot, index, array)\n\nCopies one tensor of the tower in."},
    {"tower_seal", model_tower_seal_method, METH_NOARGS,
     "tower_seal()\n\nEnds the tower's loading; ValueError names what is missing."},
    {"tower_close", model_tower_close_method, METH_NOARGS,
     "tower_close()\n\nFrees the tower and all images' features."},
    {"features_drop", model_features_drop_method, METH_NOARGS,
     "features_drop()\n\nFrees all images' features; no result changes."},
    {"tower_features", model_tower_features_method, METH_O,
     "tower_features(image) -> array\n\nAn image's features, computed if they are not kept."},
    {"step_bytes", model_step_bytes_method, METH_O,
     "step_bytes(memory) -> int\n\nBytes that a training step may take by default."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"slots", model_slots, NULL, "(slot, layer or -1, index, rows, cols) of every tensor to load.",
     NULL},
    {"arena_bytes", model_arena_bytes, NULL, "Bytes of the arena of training steps now.", NULL},
    {"training_bytes", model_training_bytes, NULL,
     "Bytes that training calls on it share now: a step's, and vectors for gradients.", NULL},
    {"config", model_config, NULL, "The shape, as it was given.", NULL},
    {"tower_slots", model_tower_slots, NULL,
     "(slot, index, rows, cols) of every tensor of an open tower.", NULL},
    {"tower_bytes", model_tower_bytes, NULL, "Bytes of an open tower's weights.", NULL},
    {"features_bytes", model_features_bytes_number, NULL,
     "Bytes of the images' features that are kept.", NULL},
    {"tower_images", model_tower_images, NULL, "Images that ran through it.", NULL},
    {"device", model_device, NULL, "The device's name.", NULL},
    {"library", model_library, NULL, "The library that makes products, or ''.", NULL},
    {"notes", model_notes, NULL, "Sentences on what is slower than it could be.", NULL},
    {"weight_bytes", model_weight_bytes, NULL, "Bytes of all weights.", NULL},
    {"held_bytes", model_held_bytes, NULL, "Those of them that take memory.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, model_new},
    {Py_tp_dealloc, model_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Model(config, inv_freq, *, weights='bf16', packed={}, device='cpu', threads=0, "
                "mapped=False)\n\nA frozen "
                "base model."},
    {0, NULL},
};

PyType_Spec model_spec = {
    .name = "tinsmith._core.Model",
    .basicsize = sizeof(PyModel),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
