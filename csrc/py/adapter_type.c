/* py/adapter_type.c - tinsmith._core.Adapter: LoRA matrices, their trainer's calls, and their flat
 * vectors. */
#include <math.h>
#include <string.h>

#include "arrays.h"
#include "module.h"

/* Takes the adapter, and gives it a trainer. */
static PyObject *adapter_wrap(PyTypeObject *type, PyModel *model, Adapter *adapter,
                              const TrainerLimits *limits)
{
    Trainer *trainer = NULL;
    Status status = trainer_open(&trainer, adapter, limits);
    PyAdapter *self = status ? NULL : (PyAdapter *)type->tp_alloc(type, 0);
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
    static char *names[] = {"model",   "rank",        "alpha",      "seed",       "attn", "mlp",
                            "unembed", "step_tokens", "keep_bytes", "step_bytes", NULL};
    PyObject *model;
    unsigned long long seed = 0;
    int attn = 1, mlp = 1, unembed = 1;
    Py_ssize_t keep_bytes = (Py_ssize_t)4 << 30, step_bytes = 0;
    AdapterSpec spec = {.alpha = 32.0f};
    TrainerLimits limits = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$ifKpppinn:Adapter", names,
                                     state_of(type)->model, &model, &spec.rank, &spec.alpha, &seed,
                                     &attn, &mlp, &unembed, &limits.step_tokens, &keep_bytes,
                                     &step_bytes))
        return NULL;
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
    Status status = adapter_open(&adapter, ((PyModel *)model)->model, &spec);
    return status ? raise_status(status) : adapter_wrap(type, (PyModel *)model, adapter, &limits);
}

static void adapter_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyAdapter *self = (PyAdapter *)object;
    trainer_close(self->trainer);
    adapter_close(self->adapter);
    Py_XDECREF(self->model);
    type->tp_free(object);
    Py_DECREF(type);
}

/* ---- training ---- */

/* Its arrays are copies: all that a call looks up, or decides by, is checked before it begins. */
typedef struct Call {
    Borrowed tokens, lengths, targets, counts, input[LOSS_INPUTS];
    Datums datums;
    const Loss *loss;
} Call;

static void call_release(Call *call)
{
    Py_CLEAR(call->tokens.owner);
    Py_CLEAR(call->lengths.owner);
    Py_CLEAR(call->targets.owner);
    Py_CLEAR(call->counts.owner);
    for (int j = 0; j < LOSS_INPUTS; j++) Py_CLEAR(call->input[j].owner);
}

/* The loss's own inputs and keys, out of dicts that may hold no others. */
static int call_options(Call *call, PyObject *inputs, PyObject *config)
{
    const Loss *loss = call->loss;
    Py_ssize_t used = 0;
    for (int j = 0; j < LOSS_INPUTS && loss->input[j].name; j++) {
        PyObject *array = PyDict_GetItemString(inputs, loss->input[j].name);
        if (!array) continue;
        used++;
        if (borrow_copy(array, KIND_FLOAT32, loss->input[j].name, &call->input[j]) < 0) return -1;
        call->datums.input[j] = call->input[j].data;
        call->datums.input_total[j] = call->input[j].length;
    }
    if (used != PyDict_Size(inputs)) {
        PyErr_Format(PyExc_ValueError, "%s takes no such inputs: %R", loss->name, inputs);
        return -1;
    }
    used = 0;
    for (int j = 0; j < LOSS_KEYS && loss->key[j].name; j++) {
        PyObject *value = PyDict_GetItemString(config, loss->key[j].name);
        call->datums.key[j] = loss->key[j].initial;
        if (!value) continue;
        used++;
        call->datums.key[j] = PyFloat_AsDouble(value);
        if (PyErr_Occurred()) return -1;
    }
    if (used == PyDict_Size(config)) return 0;
    PyErr_Format(PyExc_ValueError, "%s takes no such configuration: %R", loss->name, config);
    return -1;
}

static int call_arrays(Call *call, PyObject *tokens, PyObject *lengths, PyObject *targets,
                       PyObject *counts)
{
    if (borrow_copy(tokens, KIND_INT32, "tokens", &call->tokens) < 0 ||
        borrow_copy(lengths, KIND_INT32, "lengths", &call->lengths) < 0 ||
        borrow_copy(targets, KIND_INT32, "targets", &call->targets) < 0 ||
        borrow_copy(counts, KIND_INT32, "counts", &call->counts) < 0)
        return -1;
    if (call->lengths.length != call->counts.length || call->lengths.length > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "lengths has %lld datums, counts %lld",
                     (long long)call->lengths.length, (long long)call->counts.length);
        return -1;
    }
    Datums *d = &call->datums;
    d->count = (int)call->lengths.length;
    d->tokens = call->tokens.data;
    d->lengths = call->lengths.data;
    d->targets = call->targets.data;
    d->counts = call->counts.data;
    d->token_total = call->tokens.length;
    d->target_total = call->targets.length;
    return 0;
}

/* The loss of that name, or ValueError with the names that there are. */
static int call_loss(Call *call, const char *name)
{
    call->loss = loss_find(name);
    if (call->loss) return 0;
    PyObject *known = PyUnicode_FromString(loss_at(0)->name);
    for (int i = 1; known && loss_at(i); i++)
        Py_SETREF(known, PyUnicode_FromFormat("%U, %s", known, loss_at(i)->name));
    if (known) PyErr_Format(PyExc_ValueError, "no loss is called '%s'; there are: %U", name, known);
    Py_XDECREF(known);
    return -1;
}

/* (logprobs, loss_sum) of a call whose arrays and options have been taken. */
static PyObject *call_run(PyObject *object, Call *call, Pass pass)
{
    PyObject *logp = array_new(KIND_FLOAT32, call->datums.target_total, -1, NULL);
    double sum = 0.0;
    Status status = STATUS_OK;
    if (logp) {
        float *out = array_data(logp);
        Py_BEGIN_ALLOW_THREADS status = trainer_forward_backward(
            ((PyAdapter *)object)->trainer, &call->datums, call->loss, pass, out, &sum);
        Py_END_ALLOW_THREADS
    }
    if (status) {
        Py_DECREF(logp);
        return raise_status(status);
    }
    return logp ? Py_BuildValue("(Nd)", logp, sum) : NULL;
}

static PyObject *adapter_forward_backward_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "lengths", "targets",  "counts", "loss",
                            "inputs", "config",  "backward", "keep",   NULL};
    PyObject *tokens, *lengths, *targets, *counts, *inputs, *config, *result = NULL;
    const char *loss;
    int with_backward = 1, keep = 0;
    Call call = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOsO!O!|$pp:forward_backward", names, &tokens,
                                     &lengths, &targets, &counts, &loss, &PyDict_Type, &inputs,
                                     &PyDict_Type, &config, &with_backward, &keep))
        return NULL;
    if (call_loss(&call, loss) < 0) return NULL;
    if (with_backward && keep)
        return PyErr_Format(PyExc_ValueError,
                            "keep=True goes with backward=False: backward() is what it keeps for");
    if (call_arrays(&call, tokens, lengths, targets, counts) == 0 &&
        call_options(&call, inputs, config) == 0)
        result = call_run(object, &call,
                          with_backward ? FORWARD_BACKWARD
                          : keep        ? FORWARD_KEEP
                                        : FORWARD);
    call_release(&call);
    return result;
}

static PyObject *adapter_forward_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens", "lengths", "targets", "counts", "keep", NULL};
    PyObject *tokens, *lengths, *targets, *counts, *result = NULL;
    int keep = 0;
    Call call = {.loss = &loss_given};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO|$p:forward", names, &tokens, &lengths,
                                     &targets, &counts, &keep))
        return NULL;
    if (call_arrays(&call, tokens, lengths, targets, counts) == 0)
        result = call_run(object, &call, keep ? FORWARD_KEEP : FORWARD);
    call_release(&call);
    if (result) Py_SETREF(result, Py_NewRef(PyTuple_GET_ITEM(result, 0)));
    return result;
}

static PyObject *adapter_backward_method(PyObject *object, PyObject *dlogp)
{
    Borrowed from;
    if (borrow_copy(dlogp, KIND_FLOAT32, "dlogprobs", &from) < 0) return NULL;
    double sum = 0.0;
    Status status;
    Py_BEGIN_ALLOW_THREADS status =
        trainer_backward(((PyAdapter *)object)->trainer, from.data, from.length, &sum);
    Py_END_ALLOW_THREADS Py_DECREF(from.owner);
    return status ? raise_status(status) : PyFloat_FromDouble(sum);
}

/* What the teacher reads, and who it is: an adapter, a base model, or None, the student's own. */
static int lesson_from(PyAdapter *self, PyObject *teacher, const Borrowed *tokens,
                       const Borrowed *lengths, Lesson *lesson)
{
    ModuleState *state = state_of(Py_TYPE(self));
    *lesson = (Lesson){.model = self->model->model,
                       .tokens = tokens->data,
                       .lengths = lengths->data,
                       .token_total = tokens->length,
                       .count = lengths->length};
    if (Py_IS_TYPE(teacher, state->adapter)) {
        lesson->adapter = ((PyAdapter *)teacher)->adapter;
        lesson->model = lesson->adapter->model;
    } else if (Py_IS_TYPE(teacher, state->model)) {
        lesson->model = ((PyModel *)teacher)->model;
    } else if (teacher != Py_None) {
        PyErr_Format(PyExc_TypeError, "teacher must be an Adapter, a Model or None, not %s",
                     Py_TYPE(teacher)->tp_name);
        return -1;
    }
    return 0;
}

static PyObject *adapter_distill_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tokens",   "lengths", "targets",        "counts",          "loss",
                            "inputs",   "config",  "teacher_tokens", "teacher_lengths", "teacher",
                            "backward", NULL};
    PyObject *tokens, *lengths, *targets, *counts, *inputs, *config, *read, *ends;
    PyObject *teacher = Py_None, *logp = NULL, *divergence = NULL;
    const char *loss;
    int with_backward = 1;
    Call call = {0};
    Borrowed taught = {0}, taught_lengths = {0};
    Lesson lesson;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOsO!O!OO|$Op:distill", names, &tokens,
                                     &lengths, &targets, &counts, &loss, &PyDict_Type, &inputs,
                                     &PyDict_Type, &config, &read, &ends, &teacher, &with_backward))
        return NULL;
    if (call_loss(&call, loss) < 0) return NULL;
    double sum = 0.0;
    Status status = STATUS_OK;
    if (call_arrays(&call, tokens, lengths, targets, counts) == 0 &&
        call_options(&call, inputs, config) == 0 &&
        borrow_copy(read, KIND_INT32, "teacher_tokens", &taught) == 0 &&
        borrow_copy(ends, KIND_INT32, "teacher_lengths", &taught_lengths) == 0 &&
        lesson_from((PyAdapter *)object, teacher, &taught, &taught_lengths, &lesson) == 0) {
        logp = array_new(KIND_FLOAT32, call.datums.target_total, -1, NULL);
        divergence = array_new(KIND_FLOAT32, call.datums.target_total, -1, NULL);
    }
    if (logp && divergence) {
        float *out = array_data(logp), *rows = array_data(divergence);
        Py_BEGIN_ALLOW_THREADS status =
            trainer_distill(((PyAdapter *)object)->trainer, &call.datums, call.loss, &lesson,
                            with_backward, out, rows, &sum);
        Py_END_ALLOW_THREADS
    }
    call_release(&call);
    Py_XDECREF(taught.owner);
    Py_XDECREF(taught_lengths.owner);
    if (!status && logp && divergence) return Py_BuildValue("(NNd)", logp, divergence, sum);
    Py_XDECREF(logp);
    Py_XDECREF(divergence);
    return status ? raise_status(status) : NULL;
}

static int normalization_from(const char *name, Normalization *by)
{
    *by = BY_NOTHING;
    if (!name) return 0;
    if (strcmp(name, "num_loss_tokens") == 0) *by = BY_LOSS_TOKENS;
    if (strcmp(name, "num_sequences") == 0) *by = BY_SEQUENCES;
    if (*by != BY_NOTHING) return 0;
    PyErr_Format(PyExc_ValueError,
                 "grad_accumulation_normalization must be 'num_loss_tokens', 'num_sequences' or "
                 "None, not '%s'",
                 name);
    return -1;
}

static PyObject *adapter_optim_step_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"learning_rate", "beta1",          "beta2",         "eps",
                            "weight_decay",  "grad_clip_norm", "normalization", NULL};
    AdamW o = {NAN, NAN, NAN, NAN, NAN, NAN}; /* each must be given; AdamW refuses what was not */
    const char *normalization = NULL;
    Normalization by;
    StepReport report;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$ddddddz:optim_step", names, &o.lr, &o.beta1,
                                     &o.beta2, &o.eps, &o.weight_decay, &o.clip_norm,
                                     &normalization))
        return NULL;
    if (normalization_from(normalization, &by) < 0) return NULL;
    Adapter *adapter = ((PyAdapter *)object)->adapter;
    Status status = adapter_trainable(adapter);
    if (status) return raise_status(status);
    Py_BEGIN_ALLOW_THREADS status = adapter_optim_step(adapter, &o, by, &report);
    Py_END_ALLOW_THREADS if (status) return raise_status(status);
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d}", "grad_norm", report.grad_norm,
                         "grad_norm_clipped", report.clipped_norm, "weight_norm",
                         report.weight_norm, "loss", report.loss, "loss_tokens", report.tokens,
                         "loss_sequences", report.sequences);
}

static PyObject *adapter_clear_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    Adapter *adapter = ((PyAdapter *)object)->adapter;
    Status status = adapter->vector[GRADIENTS] ? adapter_clear(adapter) : STATUS_OK;
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
        if (adapter->vector[i]) return (int)i;
        PyErr_Format(PyExc_ValueError, "a snapshot has no %s, only weights", name);
        return -1;
    }
    PyErr_Format(PyExc_ValueError, "an adapter has weights, gradients, m and v, but no '%s'", name);
    return -1;
}

static PyObject *adapter_read(PyObject *object, PyObject *name)
{
    Adapter *adapter = ((PyAdapter *)object)->adapter;
    const char *text = PyUnicode_AsUTF8(name);
    int which = text ? vector_named(adapter, text) : -1;
    PyObject *array = which >= 0 ? array_new(KIND_FLOAT32, adapter->size, -1, NULL) : NULL;
    if (!array) return NULL;
    Device *dev = adapter->model->dev;
    dev->download(dev, array_data(array), adapter->vector[which],
                  (size_t)adapter->size * sizeof(float));
    Status status = dev->sync(dev);
    if (!status) return array;
    Py_DECREF(array);
    return raise_status(status);
}

static PyObject *adapter_write(PyObject *object, PyObject *args)
{
    Adapter *adapter = ((PyAdapter *)object)->adapter;
    const char *name;
    PyObject *array;
    Borrowed from;
    if (!PyArg_ParseTuple(args, "sO:write", &name, &array)) return NULL;
    int which = vector_named(adapter, name);
    if (which < 0 || borrow(array, KIND_FLOAT32, name, &from) < 0) return NULL;
    const float *values = from.data;
    int64_t bad = -1;
    for (int64_t i = 0; i < from.length && bad < 0; i++)
        if (!isfinite(values[i])) bad = i;
    if (from.length != adapter->size)
        PyErr_Format(PyExc_ValueError, "%s has %lld numbers, the adapter %lld", name,
                     (long long)from.length, (long long)adapter->size);
    else if (bad >= 0)
        PyErr_Format(PyExc_ValueError, "%s: number %lld is not finite", name, (long long)bad);
    Status status = PyErr_Occurred() ? STATUS_OK : adapter_put(adapter, (Vector)which, values);
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
    TrainerLimits limits = {.step_tokens = self->trainer->limits.step_tokens};
    Status status = adapter_snapshot(&copy, self->adapter);
    return status ? raise_status(status)
                  : adapter_wrap(Py_TYPE(object), self->model, copy, &limits);
}

static PyObject *adapter_follow_method(PyObject *object, PyObject *args)
{
    PyObject *leader;
    double decay;
    if (!PyArg_ParseTuple(args, "O!d:follow", Py_TYPE(object), &leader, &decay)) return NULL;
    Status status =
        adapter_follow(((PyAdapter *)object)->adapter, ((PyAdapter *)leader)->adapter, decay);
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
        PyObject *row =
            Py_BuildValue("(siisLii)", info->name, layer, index, part ? "B" : "A",
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
GETTER(bytes, PyLong_FromSize_t(adapter_memory(self->adapter) + self->trainer->arena.size))
GETTER(step, PyLong_FromLong(self->adapter->step))
GETTER(step_bytes, PyLong_FromSize_t(self->trainer->limits.step_bytes))

static int adapter_set_step_bytes(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    Trainer *trainer = ((PyAdapter *)object)->trainer;
    size_t bytes = value ? PyLong_AsSize_t(value) : 0;
    if (bytes == (size_t)-1 && PyErr_Occurred()) return -1;
    trainer->limits.step_bytes = bytes ? bytes : budget_step(trainer->adapter->model, 0);
    return 0;
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
    ((PyAdapter *)object)->adapter->step = (int)step;
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
    Adapter *adapter = ((PyAdapter *)object)->adapter;
    adapter->loss = loss;
    adapter->tokens = tokens;
    adapter->sequences = sequences;
    return 0;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"forward_backward", KEYWORDS(adapter_forward_backward_method),
     "forward_backward(tokens, lengths, targets, counts, loss, inputs, config, *, backward=True, "
     "keep=False)\n"
     "-> (logprobs, loss_sum)\n\nAdds to the gradients; on any error nothing was added."},
    {"forward", KEYWORDS(adapter_forward_method),
     "forward(tokens, lengths, targets, counts, *, keep=False) -> logprobs\n\nWith keep, backward "
     "may follow."},
    {"backward", adapter_backward_method, METH_O,
     "backward(dlogprobs) -> loss_sum\n\nAdds to the gradients, from the forward that was kept."},
    {"distill", KEYWORDS(adapter_distill_method),
     "distill(tokens, lengths, targets, counts, loss, inputs, config, teacher_tokens,\n"
     "teacher_lengths, *, teacher=None, backward=True) -> (logprobs, divergences, loss_sum)\n\n"
     "forward_backward for a loss with a teacher."},
    {"optim_step", KEYWORDS(adapter_optim_step_method),
     "optim_step(*, learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm, "
     "normalization=None)\n"
     "-> {grad_norm, grad_norm_clipped, weight_norm, loss, loss_tokens, loss_sequences}\n\nOne "
     "AdamW step; clears the gradients."},
    {"clear_gradients", adapter_clear_method, METH_NOARGS,
     "clear_gradients()\n\nDrops the gradients so far."},
    {"interrupt", adapter_interrupt_method, METH_NOARGS,
     "interrupt()\n\nFrom another thread: the forward_backward under way stops with "
     "KeyboardInterrupt, adding nothing."},
    {"read", adapter_read, METH_O,
     "read(what) -> float32 (size,)\n\nA copy of weights, gradients, m or v."},
    {"write", adapter_write, METH_VARARGS,
     "write(what, array)\n\nReplaces weights, gradients, m or v."},
    {"snapshot", adapter_snapshot_method, METH_NOARGS,
     "snapshot() -> Adapter\n\nThe weights as they are now."},
    {"follow", adapter_follow_method, METH_VARARGS,
     "follow(leader, decay)\n\nweights = decay · weights + (1 − decay) · the leader's."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"model", adapter_model, NULL, "The base model.", NULL},
    {"rank", adapter_rank, NULL, "LoRA's rank.", NULL},
    {"alpha", adapter_alpha, NULL, "LoRA's alpha; the scale is alpha / rank.", NULL},
    {"size", adapter_size, NULL, "Trained parameters.", NULL},
    {"bytes", adapter_bytes, NULL, "Bytes that it holds: its vectors, and a step's.", NULL},
    {"step_bytes", adapter_step_bytes, adapter_set_step_bytes, "Bytes that a step may take.", NULL},
    {"step", adapter_step, adapter_set_step, "Optimizer steps taken.", NULL},
    {"pending", adapter_pending, adapter_set_pending,
     "(loss, tokens, sequences) of the calls behind the gradients.", NULL},
    {"layout", adapter_layout, NULL,
     "(slot, layer or -1, index, 'A' or 'B', offset, rows, cols) in the flat vectors.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, adapter_new},
    {Py_tp_dealloc, adapter_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Adapter(model, *, rank, alpha=32.0, seed=0, attn=True, mlp=True, unembed=True, "
                "step_tokens=0, keep_bytes=4 << 30, step_bytes=0)"},
    {0, NULL},
};

PyType_Spec adapter_spec = {
    .name = "tinsmith._core.Adapter",
    .basicsize = sizeof(PyAdapter),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
