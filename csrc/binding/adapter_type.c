/* binding/adapter_type.c - tinsmith._core.Adapter: LoRA matrices, their trainer's calls, and their
 * flat vectors. */
#include <math.h>
#include <string.h>

#include "../device/finite.h"
#include "../model/optimizers/optimizer.h"
#include "../model/stages.h"
#include "limits.h"
#include "optimizer_methods.h"
#include "part_methods.h"
#include "status.h"
#include "training_call.h"

/* Takes ownership of the adapter, and gives it a trainer. */
static PyObject *adapter_wrap(PyTypeObject *type, PyModel *model, Adapter *adapter,
                              const TrainerLimits *limits)
{
    Trainer *trainer = NULL;
    Status status;
    ON_TURN(model, status = trainer_open(&trainer, adapter, limits));
    PyAdapter *self = status ? NULL : (PyAdapter *)PyType_GenericAlloc(type, 0);
    if (!self) {
        trainer_close(trainer);
        adapter_close(adapter);
        return status ? raise_status(status) : NULL;
    }
    self->model = (PyModel *)Py_NewRef(model);
    self->adapter = adapter;
    self->trainer = trainer;
    return (PyObject *)self;
}

static PyObject *adapter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"model",      "rank",       "alpha",     "seed",
                            "attn",       "mlp",        "unembed",   "step_tokens",
                            "keep_bytes", "step_bytes", "optimizer", NULL};
    PyObject *model;
    const char *optimizer = "adamw";
    unsigned long long seed = 0;
    int attn = 1, mlp = 1, unembed = 1;
    Py_ssize_t keep_bytes = (Py_ssize_t)4 << 30, step_bytes = 0;
    AdapterSpec spec = {.alpha = 32.0f};
    TrainerLimits limits = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$O&fKpppO&nns:Adapter", names,
                                     state_of(type)->model, &model, whole_from, &spec.rank,
                                     &spec.alpha, &seed, &attn, &mlp, &unembed, whole_from,
                                     &limits.step_tokens, &keep_bytes, &step_bytes, &optimizer))
        return NULL;
    spec.optimizer = optimizer_find(optimizer);
    if (spec.optimizer == OPTIMIZERS)
        return PyErr_Format(PyExc_ValueError,
                            "the optimizer '%s' is not built; tinsmith has %s and %s", optimizer,
                            optimizer_name(ADAMW), optimizer_name(DIMUON));
    if (keep_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "keep_bytes must be 0 or more, not %zd", keep_bytes);
    if (step_bytes < 0)
        return PyErr_Format(PyExc_ValueError, "step_bytes must be 0 (the default) or more, not %zd",
                            step_bytes);
    limits.keep_bytes = (size_t)keep_bytes;
    limits.step_bytes = (size_t)step_bytes;
    spec.seed = seed;
    spec.groups = (attn ? ATTN : 0) | (mlp ? MLP : 0) | (unembed ? UNEMBED : 0);
    Adapter *adapter;
    Status status;
    ON_TURN((PyModel *)model, status = adapter_open(&adapter, ((PyModel *)model)->model, &spec));
    return status ? raise_status(status) : adapter_wrap(type, (PyModel *)model, adapter, &limits);
}

static void adapter_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyAdapter *self = (PyAdapter *)object;
    NO_GIL(trainer_close(self->trainer); adapter_close(self->adapter));
    Py_XDECREF(self->model);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* ---- training ---- */

/* The values of the options that all training calls have. */
typedef struct Options {
    int backward, keep, part, stepwise;
} Options;

static Pass pass_of(const Options *options)
{
    return options->backward ? FORWARD_BACKWARD : options->keep ? FORWARD_KEEP : FORWARD;
}

static Status begin_targets(PyTrainingCall *self, Pass pass, int part)
{
    return trainer_forward_backward(&self->step, self->adapter->trainer, &self->call.datums,
                                    self->call.loss, pass, part, self->logp_data);
}

static Status begin_backward(PyTrainingCall *self, Pass pass, int part)
{
    (void)pass, (void)part;
    return trainer_backward(&self->step, self->adapter->trainer, self->given[0].data,
                            self->given[0].length);
}

static Status begin_distill(PyTrainingCall *self, Pass pass, int part)
{
    return trainer_distill(&self->step, self->adapter->trainer, &self->call.datums, self->call.loss,
                           &self->lesson, pass, part, self->logp_data, self->divergence_data);
}

/* Log-probabilities are a new array. */
static int logp_make(PyTrainingCall *self)
{
    self->logp = array_new(KIND_FLOAT32, self->call.datums.target_total, -1, NULL);
    if (!self->logp) return -1;
    self->logp_data = array_data(self->logp);
    return 0;
}

/* WHOLE_CALL, or a part's number. */
static int part_check(int part)
{
    if (part >= WHOLE_CALL && part < GRADIENT_PARTS) return 0;
    PyErr_Format(PyExc_ValueError, "part must be 0 to %d, or -1 for a whole call, not %d",
                 GRADIENT_PARTS - 1, part);
    return -1;
}

static PyObject *adapter_forward_backward_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "lengths",  "targets", "counts", "loss",     "inputs",
                            "config", "backward", "keep",    "part",   "stepwise", NULL};
    PyObject *tokens, *lengths, *targets, *counts, *inputs, *config;
    const char *loss;
    Options o = {.backward = 1, .part = WHOLE_CALL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOsO!O!|$ppO&p:forward_backward", names,
                                     &tokens, &lengths, &targets, &counts, &loss, &PyDict_Type,
                                     &inputs, &PyDict_Type, &config, &o.backward, &o.keep,
                                     whole_from, &o.part, &o.stepwise))
        return NULL;
    if (o.backward && o.keep)
        return PyErr_Format(PyExc_ValueError,
                            "keep=True goes with backward=False: backward() is what it keeps for");
    if (part_check(o.part) < 0) return NULL;
    PyTrainingCall *self = training_call_new((PyAdapter *)object, LOGPROBS_LOSS);
    if (!self) return NULL;
    if (call_loss(&self->call, loss) == 0 &&
        call_arrays(&self->call, tokens, lengths, targets, counts) == 0 &&
        call_options(&self->call, inputs, config) == 0 && logp_make(self) == 0)
        return training_call_begin(self, begin_targets, pass_of(&o), o.part, o.stepwise);
    Py_DECREF(self);
    return NULL;
}

static PyObject *adapter_forward_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "lengths", "targets", "counts", "keep", "stepwise", NULL};
    PyObject *tokens, *lengths, *targets, *counts;
    Options o = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|$pp:forward", names, &tokens, &lengths,
                                     &targets, &counts, &o.keep, &o.stepwise))
        return NULL;
    PyTrainingCall *self = training_call_new((PyAdapter *)object, LOGPROBS);
    if (!self) return NULL;
    self->call.loss = &loss_given;
    if (call_arrays(&self->call, tokens, lengths, targets, counts) == 0 && logp_make(self) == 0)
        return training_call_begin(self, begin_targets, pass_of(&o), WHOLE_CALL, o.stepwise);
    Py_DECREF(self);
    return NULL;
}

static PyObject *adapter_backward_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"dlogprobs", "stepwise", NULL};
    PyObject *dlogp;
    int stepwise = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$p:backward", names, &dlogp, &stepwise))
        return NULL;
    PyTrainingCall *self = training_call_new((PyAdapter *)object, LOSS_ONLY);
    if (!self) return NULL;
    if (borrow_copy(dlogp, KIND_FLOAT32, "dlogprobs", &self->given[0]) == 0)
        return training_call_begin(self, begin_backward, FORWARD_BACKWARD, WHOLE_CALL, stepwise);
    Py_DECREF(self);
    return NULL;
}

/* The teacher's sequences, and the teacher: an adapter, a base model, or None for the student's
 * base model. */
static int lesson_from(PyTrainingCall *self, PyObject *teacher)
{
    ModuleState *state = state_of(Py_TYPE(self->adapter));
    const Borrowed *tokens = &self->given[0], *lengths = &self->given[1];
    PyModel *model = self->adapter->model;
    self->lesson = (Lesson){.tokens = tokens->data,
                            .lengths = lengths->data,
                            .token_total = tokens->length,
                            .count = lengths->length};
    if (Py_IS_TYPE(teacher, state->adapter)) {
        model = ((PyAdapter *)teacher)->model;
        self->lesson.adapter = ((PyAdapter *)teacher)->adapter;
    } else if (Py_IS_TYPE(teacher, state->model)) {
        model = (PyModel *)teacher;
    } else if (teacher != Py_None) {
        wrong_type(teacher, "teacher must be an Adapter, a Model or None, not ");
        return -1;
    }
    self->lesson.model = model->model;
    self->teacher = Py_NewRef(teacher);
    self->other = (PyModel *)Py_NewRef(model);
    return 0;
}

static PyObject *adapter_distill_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "tokens",         "lengths",         "targets", "counts",   "loss", "inputs",   "config",
        "teacher_tokens", "teacher_lengths", "teacher", "backward", "part", "stepwise", NULL};
    PyObject *tokens, *lengths, *targets, *counts, *inputs, *config, *read, *ends;
    PyObject *teacher = Py_None;
    const char *loss;
    Options o = {.backward = 1, .part = WHOLE_CALL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOsO!O!OO|$OpO&p:distill", names, &tokens,
                                     &lengths, &targets, &counts, &loss, &PyDict_Type, &inputs,
                                     &PyDict_Type, &config, &read, &ends, &teacher, &o.backward,
                                     whole_from, &o.part, &o.stepwise) ||
        part_check(o.part) < 0)
        return NULL;
    PyTrainingCall *self = training_call_new((PyAdapter *)object, LOGPROBS_DIVERGENCES_LOSS);
    if (!self) return NULL;
    if (call_loss(&self->call, loss) == 0 &&
        call_arrays(&self->call, tokens, lengths, targets, counts) == 0 &&
        call_options(&self->call, inputs, config) == 0 &&
        borrow_copy(read, KIND_INT32, "teacher_tokens", &self->given[0]) == 0 &&
        borrow_copy(ends, KIND_INT32, "teacher_lengths", &self->given[1]) == 0 &&
        lesson_from(self, teacher) == 0 && logp_make(self) == 0)
        self->divergence = array_new(KIND_FLOAT32, self->call.datums.target_total, -1, NULL);
    if (self->divergence) {
        self->divergence_data = array_data(self->divergence);
        return training_call_begin(self, begin_distill, pass_of(&o), o.part, o.stepwise);
    }
    Py_DECREF(self);
    return NULL;
}

static PyObject *adapter_clear_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    Status status = STATUS_OK;
    if (flat_exists(&self->adapter->vector[MOMENT_1]))
        ON_TURN(self->model, status = adapter_clear(self->adapter));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *adapter_interrupt_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((PyAdapter *)object)->trainer->interrupted = 1;
    Py_RETURN_NONE;
}

/* ---- flat vectors ---- */

/* A Vector, or -1 with an exception set. */
static int vector_named(const Adapter *adapter, const char *name)
{
    static const char *const names[] = {
        [WEIGHTS] = "weights", [GRADIENTS] = "gradients", [MOMENT_1] = "m", [MOMENT_2] = "v"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcmp(names[i], name) != 0) continue;
        if (i == MOMENT_2 && adapter->optimizer == DIMUON) break; /* scratch (dimuon.c) */
        if (i == WEIGHTS || flat_exists(&adapter->vector[MOMENT_1])) return (int)i;
        PyErr_Format(PyExc_ValueError, "a snapshot has no %s, only weights", name);
        return -1;
    }
    PyErr_Format(PyExc_ValueError, "an adapter with %s has weights, gradients, m%s, but no '%s'",
                 optimizer_name(adapter->optimizer), adapter->optimizer == ADAMW ? " and v" : "",
                 name);
    return -1;
}

static Status vector_get(const Adapter *adapter, Vector which, float *values)
{
    const Flat *vector = &adapter->vector[which];
    if (flat_exists(vector))
        vector_download(adapter->model, &adapter->bytes, values, vector);
    else
        memset(values, 0, adapter_vector_bytes(adapter));
    return model_sync(adapter->model);
}

static PyObject *adapter_read(PyObject *object, PyObject *name)
{
    PyAdapter *self = (PyAdapter *)object;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    int which = text ? vector_named(self->adapter, text) : -1;
    PyObject *array = which >= 0 ? array_new(KIND_FLOAT32, self->adapter->size, -1, NULL) : NULL;
    if (!array) return NULL;
    float *values = array_data(array);
    Status status;
    ON_TURN(self->model, status = vector_get(self->adapter, (Vector)which, values));
    if (!status) return array;
    Py_DECREF(array);
    return raise_status(status);
}

static PyObject *adapter_write(PyObject *object, PyObject *args)
{
    PyAdapter *self = (PyAdapter *)object;
    Adapter *adapter = self->adapter;
    const char *name;
    PyObject *array;
    Borrowed from;
    if (!PyArg_ParseTuple(args, "sO:write", &name, &array)) return NULL;
    int which = vector_named(adapter, name);
    if (which < 0 || borrow(array, KIND_FLOAT32, name, &from) < 0) return NULL;
    int64_t bad = -1;
    Status status = STATUS_OK;
    if (from.length != adapter->size)
        PyErr_Format(PyExc_ValueError, "%s has %lld numbers, the adapter %lld", name,
                     (long long)from.length, (long long)adapter->size);
    else
        NO_GIL(bad = first_bad(from.data, DTYPE_F32, from.length));
    if (bad >= 0)
        PyErr_Format(PyExc_ValueError, "%s: number %lld is not finite", name, (long long)bad);
    if (!PyErr_Occurred())
        ON_TURN(self->model, status = adapter_put(adapter, (Vector)which, from.data));
    Py_DECREF(from.owner);
    if (PyErr_Occurred()) return NULL;
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *adapter_snapshot_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    Adapter *copy;
    Status status;
    TrainerLimits limits = {.step_tokens = self->trainer->limits.step_tokens};
    ON_TURN(self->model, status = adapter_snapshot(&copy, self->adapter));
    return status ? raise_status(status)
                  : adapter_wrap(Py_TYPE(object), self->model, copy, &limits);
}

static PyObject *adapter_ema_update_method(PyObject *object, PyObject *args)
{
    PyObject *leader;
    double decay;
    if (!PyArg_ParseTuple(args, "O!d:ema_update", Py_TYPE(object), &leader, &decay)) return NULL;
    PyAdapter *self = (PyAdapter *)object;
    const Adapter *ahead = ((PyAdapter *)leader)->adapter;
    Status status;
    ON_TURN(self->model, status = adapter_ema_update(self->adapter, ahead, decay));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

/* ---- attributes ---- */

typedef struct Listing {
    PyObject *list;
    int rank;
} Listing;

static void list_matrix(void *context, const SlotInfo *info, int layer, int index, Pair pair)
{
    Listing *listing = context;
    for (int part = 0; part < 2 && listing->list; part++) {
        int common = info->factors == (part ? ONE_B : ONE_A);
        if (common && index > 0) continue;
        PyObject *row =
            Py_BuildValue("(siisLii)", info->name, layer, common ? -1 : index, part ? "B" : "A",
                          (long long)(part ? pair.b : pair.a), part ? listing->rank : info->cols,
                          part ? info->rows : listing->rank);
        if (!row || PyList_Append(listing->list, row) < 0) Py_CLEAR(listing->list);
        Py_XDECREF(row);
    }
}

static PyObject *adapter_layout(PyObject *object, void *unused)
{
    (void)unused;
    const Adapter *adapter = ((PyAdapter *)object)->adapter;
    Listing listing = {PyList_New(0), adapter->rank};
    adapter_visit(adapter, list_matrix, &listing);
    return listing.list;
}

static PyObject *adapter_optimizer(PyObject *object, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(optimizer_name(((PyAdapter *)object)->adapter->optimizer));
}

static PyObject *adapter_routed(PyObject *object, void *unused)
{
    (void)unused;
    const Trainer *trainer = ((PyAdapter *)object)->trainer;
    if (!trainer->routed) Py_RETURN_NONE;
    const Shape *shape = &trainer->adapter->model->shape;
    PyObject *array = array_new(KIND_INT32, shape->layers, shape->experts, NULL);
    int32_t *counts = array ? array_data(array) : NULL;
    for (int64_t i = 0; counts && i < (int64_t)shape->layers * shape->experts; i++)
        counts[i] = (int32_t)trainer->routed[i];
    return array;
}

static PyObject *adapter_model(PyObject *object, void *unused)
{
    (void)unused;
    return Py_NewRef(((PyAdapter *)object)->model);
}

#define GETTER(name, value)                                         \
    static PyObject *adapter_##name(PyObject *object, void *unused) \
    {                                                               \
        (void)unused;                                               \
        const PyAdapter *self = (PyAdapter *)object;                \
        return value;                                               \
    }

GETTER(rank, PyLong_FromLong(self->adapter->rank))
GETTER(alpha, PyFloat_FromDouble((double)self->adapter->alpha))
GETTER(size, PyLong_FromLongLong(self->adapter->size))
GETTER(step, PyLong_FromLong(self->adapter->step))
GETTER(stamp, PyLong_FromUnsignedLongLong(self->adapter->stamp))
GETTER(has_gradients, PyBool_FromLong(flat_exists(&self->adapter->vector[GRADIENTS])))

static PyObject *adapter_bytes(PyObject *object, void *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    turn_take(self->model);
    size_t bytes = adapter_memory(self->adapter);
    turn_give(self->model);
    return PyLong_FromSize_t(bytes);
}

static int adapter_set_step(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    int overflow = 0;
    long step = value ? PyLong_AsLongAndOverflow(value, &overflow) : -1;
    if (PyErr_Occurred()) return -1;
    if (step < 0 || step > INT32_MAX || overflow) {
        PyErr_SetString(PyExc_ValueError, "step must be a whole number of 0 or more");
        return -1;
    }
    PyAdapter *self = (PyAdapter *)object;
    turn_take(self->model);
    self->adapter->step = (int)step;
    turn_give(self->model);
    return 0;
}

static PyObject *adapter_pending(PyObject *object, void *unused)
{
    (void)unused;
    const Adapter *adapter = ((PyAdapter *)object)->adapter;
    return Py_BuildValue("(ddd)", adapter->loss, adapter->tokens, adapter->sequences);
}

static int adapter_set_pending(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    double loss, tokens, sequences;
    if (!value || !PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "pending must be a tuple (loss, tokens, sequences)");
        return -1;
    }
    if (!PyArg_ParseTuple(value, "ddd:pending", &loss, &tokens, &sequences)) return -1;
    if (!isfinite(loss) || !(tokens >= 0) || !(sequences >= 0) || !isfinite(tokens + sequences)) {
        PyErr_SetString(PyExc_ValueError, "pending must be finite, and its counts 0 or more");
        return -1;
    }
    PyAdapter *self = (PyAdapter *)object;
    turn_take(self->model);
    self->adapter->loss = loss;
    self->adapter->tokens = tokens;
    self->adapter->sequences = sequences;
    turn_give(self->model);
    return 0;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"forward_backward", KEYWORDS(adapter_forward_backward_method),
     "forward_backward(tokens, lengths, targets, counts, loss, inputs, config, *, backward=True, "
     "keep=False,\n    part=-1, stepwise=False)\n"
     "-> (logprobs, loss_sum)\n\nAdds to the gradients; on any error nothing was added."},
    {"forward", KEYWORDS(adapter_forward_method),
     "forward(tokens, lengths, targets, counts, *, keep=False, stepwise=False) -> logprobs\n\nWith "
     "keep, backward may follow."},
    {"backward", KEYWORDS(adapter_backward_method),
     "backward(dlogprobs, *, stepwise=False) -> loss_sum\n\nAdds to the gradients, from the "
     "forward "
     "that was kept."},
    {"distill", KEYWORDS(adapter_distill_method),
     "distill(tokens, lengths, targets, counts, loss, inputs, config, teacher_tokens,\n"
     "teacher_lengths, *, teacher=None, backward=True, part=-1, stepwise=False)\n"
     "-> (logprobs, divergences, loss_sum)\n\n"
     "forward_backward for a loss with a teacher."},
    {"parts", adapter_parts, METH_O,
     "parts(lengths) -> [(first, last)]\n\nThe datums of each part of a call."},
    {"take_part", adapter_take_part, METH_O,
     "take_part(node) -> (vector, loss, tokens, sequences)\n\nTakes a sum out of the tree."},
    {"put_part", adapter_put_part, METH_VARARGS,
     "put_part(node, vector, loss, tokens, sequences)\n\nPuts a sum into the tree."},
    {"end_parts", adapter_end_parts, METH_NOARGS,
     "end_parts() -> loss_sum\n\nAdds the sum of all parts to the gradients."},
    {"drop_parts", adapter_drop_parts, METH_NOARGS, "drop_parts()\n\nDrops the sums of parts."},
    {"optim_step", KEYWORDS(adapter_optim_step_method),
     "optim_step(*, normalization=None, **settings)\n"
     "-> {grad_norm, grad_norm_clipped, weight_norm, loss, loss_tokens, loss_sequences, warning}"
     "\n\nOne step of the adapter's optimizer, with all its settings; clears the gradients."},
    {"clear_gradients", adapter_clear_method, METH_NOARGS,
     "clear_gradients()\n\nDrops the gradients so far."},
    {"limit", adapter_limit, METH_VARARGS,
     "limit(step_bytes, datum_bytes)\n\nWhat a step may take, and one whose datum needs more."},
    {"step_least", adapter_step_least, METH_O,
     "step_least(tokens) -> int\n\nBytes that a step of one such datum takes at least."},
    {"interrupt", adapter_interrupt_method, METH_NOARGS,
     "interrupt()\n\nFrom another thread: the forward_backward under way stops with "
     "KeyboardInterrupt, adding nothing."},
    {"read", adapter_read, METH_O,
     "read(what) -> float32 (size,)\n\nA copy of weights, gradients, m or v."},
    {"write", adapter_write, METH_VARARGS,
     "write(what, array)\n\nReplaces weights, gradients, m or v."},
    {"snapshot", adapter_snapshot_method, METH_NOARGS,
     "snapshot() -> Adapter\n\nThe weights as they are now."},
    {"ema_update", adapter_ema_update_method, METH_VARARGS,
     "ema_update(leader, decay)\n\nweights = decay · weights + (1 − decay) · the leader's."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"model", adapter_model, NULL, "The base model.", NULL},
    {"rank", adapter_rank, NULL, "LoRA's rank.", NULL},
    {"alpha", adapter_alpha, NULL, "LoRA's alpha; the scale is alpha / rank.", NULL},
    {"size", adapter_size, NULL, "Trained parameters.", NULL},
    {"bytes", adapter_bytes, NULL, "Bytes of its vectors now.", NULL},
    {"step_bytes", adapter_step_bytes, adapter_set_step_bytes, "Bytes that a step may take.", NULL},
    {"datum_bytes", adapter_datum_bytes, NULL, "Those of one whose datum needs more.", NULL},
    {"stamp", adapter_stamp, NULL, "A number of the weights in this process.", NULL},
    {"step_tokens", adapter_step_tokens, adapter_set_step_tokens, "Rows of a micro-batch.", NULL},
    {"step", adapter_step, adapter_set_step, "Optimizer steps taken.", NULL},
    {"pending", adapter_pending, adapter_set_pending,
     "(loss, tokens, sequences) of the calls behind the gradients.", NULL},
    {"has_gradients", adapter_has_gradients, NULL, "Whether calls were made since the last step.",
     NULL},
    {"growth", adapter_growth, adapter_set_growth,
     "(step, norm before, after) of the step that made the weights too large; step 0: none.", NULL},
    {"optimizer", adapter_optimizer, NULL, "What it is trained with: adamw or dimuon.", NULL},
    {"routed", adapter_routed, NULL,
     "(layers, experts) int32: how many rows of the last training call went to each expert; zeros "
     "for a layer without, None where no layer has any.",
     NULL},
    {"layout", adapter_layout, NULL,
     "(slot, layer or -1, index, 'A' or 'B', offset, rows, cols) in the flat vectors; index -1: "
     "one "
     "for all matrices of the layer's slot.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, adapter_new},
    {Py_tp_dealloc, adapter_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Adapter(model, *, rank, alpha=32.0, seed=0, attn=True, mlp=True, unembed=True, "
                "step_tokens=0, keep_bytes=4 << 30, step_bytes=0, optimizer=\"adamw\")"},
    {0, NULL},
};

PyType_Spec adapter_spec = {
    .name = "tinsmith._core.Adapter",
    .basicsize = sizeof(PyAdapter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
