/* binding/sampler_type.c - tinsmith._core.Sampler: requests in, tokens out, one step at a time. */
#include "arrays.h"
#include "status.h"
#include "turn.h"

static PyObject *sampler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"model", "tokens", "graphs", NULL};
    PyObject *model;
    long long tokens = 0;
    int graphs = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$Lp:Sampler", names, state_of(type)->model,
                                     &model, &tokens, &graphs))
        return NULL;
    PySampler *self = (PySampler *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->adapters = PyDict_New();
    self->model = (PyModel *)Py_NewRef(model);
    Status status = STATUS_OK;
    if (self->adapters)
        ON_TURN(self->model,
                status = sampler_open(&self->sampler, self->model->model, tokens, graphs));
    if (status) raise_status(status);
    if (!self->sampler) Py_CLEAR(self);
    return (PyObject *)self;
}

static void sampler_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PySampler *self = (PySampler *)object;
    NO_GIL(sampler_close(self->sampler));
    Py_XDECREF(self->adapters);
    Py_XDECREF(self->model);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* A request keeps its adapter alive until it is removed. */
static int adapter_keep(PySampler *self, long long id, PyObject *adapter)
{
    PyObject *key = PyLong_FromLongLong(id);
    int failed =
        !key || (adapter ? PyDict_SetItem(self->adapters, key, adapter)
                 : PyDict_Contains(self->adapters, key) == 1 ? PyDict_DelItem(self->adapters, key)
                                                             : 0);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

/* A request's borrowed arrays: the prompt, and the optional ones. */
typedef struct Arrays {
    PyObject *prompt, *stop_ids, *targets, *starts;
    Borrowed held[4];
} Arrays;

static void arrays_release(Arrays *arrays)
{
    for (int i = 0; i < 4; i++) Py_CLEAR(arrays->held[i].owner);
}

static int arrays_borrow(Arrays *a, RequestSpec *spec)
{
    PyObject *const given[] = {a->prompt, a->stop_ids, a->targets, a->starts};
    static const char *const names[] = {"prompt", "stop_ids", "targets", "target_starts"};
    for (int i = 0; i < 4; i++)
        if (given[i] && given[i] != Py_None &&
            borrow(given[i], KIND_INT32, names[i], &a->held[i]) < 0)
            return -1;
    if (!a->held[2].owner != !a->held[3].owner) {
        PyErr_SetString(PyExc_ValueError, "targets and target_starts come together or not at all");
        return -1;
    }
    spec->prompt = a->held[0].data;
    spec->prompt_length = a->held[0].length > INT32_MAX ? INT32_MAX : (int)a->held[0].length;
    spec->stop_ids = a->held[1].data;
    spec->stop_count = a->held[1].length;
    spec->targets = a->held[2].data;
    spec->starts = a->held[3].data;
    spec->target_count = a->held[2].length;
    spec->start_count = a->held[3].length;
    return 0;
}

static PyObject *sampler_add_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {
        "request",     "prompt",       "adapter", "num_samples",   "max_tokens",  "temperature",
        "top_k",       "top_p",        "seed",    "stop_ids",      "topk_sample", "prompt_logprobs",
        "topk_prompt", "prompt_draws", "targets", "target_starts", "prompt_from", "client",
        "session",     "first_sample", NULL};
    PySampler *self = (PySampler *)object;
    PyObject *adapter = Py_None;
    Arrays arrays = {0};
    long long id, client = 0;
    unsigned long long seed = 0, session = 0;
    RequestSpec spec = {
        .samples = 1, .max_tokens = -1, .temperature = 1.0f, .top_k = -1, .top_p = 1.0f};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "LO|O$O&O&fO&fKOO&pO&O&OOO&LKO&:add", names, &id, &arrays.prompt,
            &adapter, whole_from, &spec.samples, whole_from, &spec.max_tokens, &spec.temperature,
            whole_from, &spec.top_k, &spec.top_p, &seed, &arrays.stop_ids, whole_from,
            &spec.topk_sample, &spec.prompt_logprobs, whole_from, &spec.topk_prompt, whole_from,
            &spec.draws, &arrays.targets, &arrays.starts, whole_from, &spec.first_scored, &client,
            &session, whole_from, &spec.first_sample))
        return NULL;
    if (adapter != Py_None && !Py_IS_TYPE(adapter, state_of(Py_TYPE(object))->adapter))
        return wrong_type(adapter, "adapter must be an Adapter or None, not ");
    spec.id = id;
    spec.client = client;
    spec.seed = seed;
    spec.session = session;
    spec.adapter = adapter == Py_None ? NULL : ((PyAdapter *)adapter)->adapter;
    int failed = arrays_borrow(&arrays, &spec) < 0;
    Status status = STATUS_OK;
    turn_take(self->model);
    if (!failed) status = turn_check(self->model);
    if (!failed && !status) NO_GIL(status = sampler_add(self->sampler, &spec));
    if (!failed && !status && adapter != Py_None && adapter_keep(self, id, adapter) < 0) {
        sampler_remove(self->sampler, id);
        failed = 1;
    }
    turn_give(self->model);
    arrays_release(&arrays);
    if (failed) return NULL;
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

/* (drawn tokens, finished requests) of the newest step. */
static PyObject *step_result(const Sampler *sampler, const StepResult *step)
{
    PyObject *drawn = PyList_New(0), *done = PyList_New(0);
    for (int i = 0; drawn && i < step->count; i++) {
        const Drawn *one = &step->drawn[i];
        PyObject *row =
            Py_BuildValue("(Lii)", (long long)one->request, one->sample, (int)one->token);
        if (!row || PyList_Append(drawn, row) < 0) Py_CLEAR(drawn);
        Py_XDECREF(row);
    }
    const Request *r;
    for (int i = 0; done && (r = sampler_request(sampler, i)); i++) {
        if (!r->done) continue;
        PyObject *id = PyLong_FromLongLong(r->spec.id);
        if (!id || PyList_Append(done, id) < 0) Py_CLEAR(done);
        Py_XDECREF(id);
    }
    if (drawn && done) return Py_BuildValue("(NN)", drawn, done);
    Py_XDECREF(drawn);
    Py_XDECREF(done);
    return NULL;
}

static PyObject *sampler_step_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PySampler *self = (PySampler *)object;
    StepResult step;
    Status status;
    turn_take(self->model);
    status = turn_check(self->model);
    if (!status) NO_GIL(status = sampler_step(self->sampler, &step));
    PyObject *result = status ? raise_status(status) : step_result(self->sampler, &step);
    turn_give(self->model);
    return result;
}

/* A request keeps its old adapter alive until it has the new one. */
static PyObject *sampler_set_adapter_method(PyObject *object, PyObject *args)
{
    PySampler *self = (PySampler *)object;
    PyObject *adapter;
    long long id;
    if (!PyArg_ParseTuple(args, "LO!:set_adapter", &id, state_of(Py_TYPE(object))->adapter,
                          &adapter))
        return NULL;
    turn_take(self->model);
    const Request *r = sampler_find(self->sampler, id);
    const Adapter *before = r ? r->spec.adapter : NULL;
    Status status = sampler_set_adapter(self->sampler, id, ((PyAdapter *)adapter)->adapter);
    int failed = !status && adapter_keep(self, id, adapter) < 0;
    if (failed) sampler_set_adapter(self->sampler, id, before);
    turn_give(self->model);
    if (failed) return NULL;
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

static PyObject *sampler_stop_method(PyObject *object, PyObject *args)
{
    PySampler *self = (PySampler *)object;
    long long id;
    int sample;
    if (!PyArg_ParseTuple(args, "Li:stop", &id, &sample)) return NULL;
    turn_take(self->model);
    Status status = sampler_stop(self->sampler, id, sample);
    turn_give(self->model);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

/* Removes a request, in the caller's turn. */
static int request_forget(PySampler *self, long long id)
{
    NO_GIL(sampler_remove(self->sampler, id));
    return adapter_keep(self, id, NULL);
}

static PyObject *sampler_spoil_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    PySampler *self = (PySampler *)object;
    turn_take(self->model);
    NO_GIL(sampler_spoil(self->sampler));
    turn_give(self->model);
    Py_RETURN_NONE;
}

static PyObject *sampler_cancel_method(PyObject *object, PyObject *argument)
{
    PySampler *self = (PySampler *)object;
    long long id = PyLong_AsLongLong(argument);
    if (id == -1 && PyErr_Occurred()) return NULL;
    turn_take(self->model);
    int failed = request_forget(self, id) < 0;
    turn_give(self->model);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *sampler_interrupt_method(PyObject *object, PyObject *unused)
{
    (void)unused;
    sampler_interrupt(((PySampler *)object)->sampler);
    Py_RETURN_NONE;
}

/* A request's best ids or log-probabilities (rows, K); None if it asked for none. */
static PyObject *top_array(Kind kind, int rows, int k, const void *data)
{
    return k ? array_new(kind, rows, k, data) : Py_NewRef(Py_None);
}

/* A sample's drawn tokens after the first `from`. */
static PyObject *sample_result(const Request *r, int sample, int from)
{
    static const char *const reasons[] = {
        [RUNNING] = NULL, [STOPPED] = "stop", [LENGTH] = "length", [OVERFLOWED] = NULL};
    const Tokens *t = request_tokens(r, sample);
    int k = r->spec.topk_sample, rows = t->drawn - from;
    int64_t top = (int64_t)from * k;
    return Py_BuildValue(
        "{s:N,s:N,s:z,s:N,s:N}", "tokens",
        array_new(KIND_INT32, rows, -1, t->ids + r->spec.prompt_length + from), "logprobs",
        array_new(KIND_FLOAT32, rows, -1, t->logprobs + from), "stop_reason", reasons[t->finish],
        "topk_ids", top_array(KIND_INT32, rows, k, k ? t->top_ids + top : NULL), "topk_logprobs",
        top_array(KIND_FLOAT32, rows, k, k ? t->top_logprobs + top : NULL));
}

static PyObject *sampler_look_method(PyObject *object, PyObject *args)
{
    PySampler *self = (PySampler *)object;
    PyObject *result = NULL;
    long long id;
    int sample, from;
    if (!PyArg_ParseTuple(args, "Lii:look", &id, &sample, &from)) return NULL;
    turn_take(self->model);
    const Request *r = sampler_find(self->sampler, id);
    if (!r || sample < 0 || sample >= r->spec.samples || from < 0 ||
        from > request_tokens(r, sample)->drawn)
        PyErr_Format(PyExc_ValueError, "request %lld has no sample %d with %d tokens", id, sample,
                     from);
    else
        result = sample_result(r, sample, from);
    turn_give(self->model);
    return result;
}

static PyObject *request_result(Sampler *sampler, long long id)
{
    const Request *r = sampler_find(sampler, id);
    if (!r) return PyErr_Format(PyExc_ValueError, "no request %lld is here", id);
    for (int j = 0; j < r->spec.samples; j++)
        if (request_tokens(r, j)->finish == RUNNING)
            return PyErr_Format(PyExc_ValueError, "request %lld is not done", id);
    PyObject *samples = PyList_New(0);
    for (int j = 0; samples && j < r->spec.samples; j++) {
        PyObject *one = sample_result(r, j, 0);
        if (!one || PyList_Append(samples, one) < 0) Py_CLEAR(samples);
        Py_XDECREF(one);
    }
    if (!samples) return NULL;
    int P = r->spec.prompt_length, k = r->spec.topk_prompt;
    PyObject *scores = r->spec.prompt_logprobs ? array_new(KIND_FLOAT32, P, -1, r->prompt_logprobs)
                                               : Py_NewRef(Py_None);
    PyObject *targets = r->spec.targets
                            ? array_new(KIND_FLOAT32, r->spec.target_count, -1, r->target_logprobs)
                            : Py_NewRef(Py_None);
    return Py_BuildValue(
        "{s:N,s:i,s:N,s:N,s:N,s:N,s:N,s:N}", "samples", samples, "prompt_reused", r->reused,
        "prompt_logprobs", scores, "topk_ids", top_array(KIND_INT32, P, k, r->top_ids),
        "topk_logprobs", top_array(KIND_FLOAT32, P, k, r->top_logprobs), "target_logprobs", targets,
        "drawn_ids", top_array(KIND_INT32, P - 1, r->spec.draws, r->drawn_ids), "drawn_logprobs",
        top_array(KIND_FLOAT32, P - 1, r->spec.draws, r->drawn_logprobs));
}

static PyObject *sampler_take_method(PyObject *object, PyObject *argument)
{
    PySampler *self = (PySampler *)object;
    long long id = PyLong_AsLongLong(argument);
    if (id == -1 && PyErr_Occurred()) return NULL;
    turn_take(self->model);
    const Request *r = sampler_find(self->sampler, id);
    Status status = r && r->overflowed && r->done ? logprobs_overflow(r->spec.adapter) : STATUS_OK;
    PyObject *result = status ? NULL : request_result(self->sampler, id);
    if ((status || result) && request_forget(self, id) < 0) {
        Py_CLEAR(result);
        status = STATUS_OK; /* that failure is reported */
    }
    turn_give(self->model);
    return status ? raise_status(status) : result;
}

static PyObject *sampler_active(PyObject *object, void *unused)
{
    (void)unused;
    const PySampler *self = (PySampler *)object;
    const Request *r;
    long active = 0;
    turn_take(self->model);
    for (int i = 0; (r = sampler_request(self->sampler, i)); i++) active += !r->done;
    turn_give(self->model);
    return PyLong_FromLong(active);
}

static PyObject *sampler_reused(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(sampler_stats(((PySampler *)object)->sampler).reused);
}

static PyObject *sampler_cache_counts(PyObject *object, void *unused)
{
    (void)unused;
    PySampler *self = (PySampler *)object;
    turn_take(self->model);
    CacheCounts count = sampler_cache(self->sampler);
    turn_give(self->model);
    return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "frames", count.frames, "free",
                         count.free, "held", count.used, "windows", count.used_windows, "known",
                         count.cached, "kept", count.cached_windows, "full", count.full, "windowed",
                         count.windowed);
}

static PyObject *sampler_states(PyObject *object, void *unused)
{
    (void)unused;
    SamplerStats stats = sampler_stats(((PySampler *)object)->sampler);
    return Py_BuildValue("(ii)", stats.states, stats.cached_states);
}

static PyObject *sampler_replays(PyObject *object, void *unused)
{
    (void)unused;
    SamplerStats stats = sampler_stats(((PySampler *)object)->sampler);
    return Py_BuildValue("(LL)", (long long)stats.steps, (long long)stats.replays);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))sampler_add_method, METH_VARARGS | METH_KEYWORDS,
     "add(request, prompt, adapter=None, *, num_samples=1, max_tokens=-1, temperature=1.0, "
     "top_k=-1, top_p=1.0,\n"
     "    seed=0, stop_ids=…, topk_sample=0, prompt_logprobs=False, topk_prompt=0,\n"
     "    prompt_draws=0, targets=None, target_starts=None, prompt_from=0, client=0,\n"
     "    session=0, first_sample=0)\n\nQueues a request."},
    {"step", sampler_step_method, METH_NOARGS,
     "step() -> (list[(request, sample, token)], list[request])\n\nOne forward: what was drawn, "
     "and which requests are done."},
    {"set_adapter", sampler_set_adapter_method, METH_VARARGS,
     "set_adapter(request, adapter)\n\nA session's request goes on with other weights."},
    {"stop", sampler_stop_method, METH_VARARGS,
     "stop(request, sample)\n\nEnds a sample after its newest token."},
    {"interrupt", sampler_interrupt_method, METH_NOARGS,
     "interrupt()\n\nFrom another thread: the step under way stops with KeyboardInterrupt, drawing "
     "nothing."},
    {"spoil", sampler_spoil_method, METH_NOARGS,
     "spoil()\n\nFor tests: fills the cache's free memory with NaN."},
    {"cancel", sampler_cancel_method, METH_O, "cancel(request)\n\nForgets a request."},
    {"look", sampler_look_method, METH_VARARGS,
     "look(request, sample, first) -> dict\n\nWhat a sample has drawn after its first tokens."},
    {"take", sampler_take_method, METH_O,
     "take(request) -> dict\n\nA done request's result, which is then forgotten; "
     "FloatingPointError where its log-probabilities are not numbers."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"active", sampler_active, NULL, "Requests queued or running.", NULL},
    {"reused", sampler_reused, NULL, "Tokens that were found in the cache, not computed.", NULL},
    {"cache", sampler_cache_counts, NULL, "What the cache's frames are used for.", NULL},
    {"states", sampler_states, NULL,
     "(slots, kept): sequences whose states have room, and states kept for later requests.", NULL},
    {"replays", sampler_replays, NULL,
     "(steps, replays): those that only decoded on a device that records them, and replayed ones.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, sampler_new},
    {Py_tp_dealloc, sampler_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_doc, "Sampler(model, *, tokens=0, graphs=True)\n\nContinuous batching "
                "over one model."},
    {0, NULL},
};

PyType_Spec sampler_spec = {
    .name = "tinsmith._core.Sampler",
    .basicsize = sizeof(PySampler),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
