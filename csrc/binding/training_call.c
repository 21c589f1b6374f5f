/* binding/training_call.c - tinsmith._core.TrainingCall: a training call that is executed
 * micro-batch by micro-batch.
 *
 * It is an iterator: each next() executes a micro-batch in a turn of its own, so others may use the
 * model in between. The last one raises StopIteration with the call's result as its value, which is
 * what `yield from` evaluates to. A call that is closed or forgotten before its end leaves no
 * trace.
 */
#include "training_call.h"

#include "status.h"

PyTrainingCall *training_call_new(PyAdapter *adapter, CallResult result)
{
    PyTypeObject *type = state_of(Py_TYPE(adapter))->training_call;
    PyTrainingCall *self = (PyTrainingCall *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->adapter = (PyAdapter *)Py_NewRef(adapter);
    self->result = result;
    return self;
}

/* ---- turns ---- */

/* Takes the turns of both models, always in the same order, so that calls can't deadlock. */
static Status turns_take(const PyTrainingCall *self)
{
    PyModel *own = self->adapter->model, *other = self->other ? self->other : own;
    PyModel *first = (uintptr_t)own < (uintptr_t)other ? own : other;
    turn_take(first);
    if (other != own) turn_take(first == own ? other : own);
    TRY(turn_check(own));
    return turn_check(other);
}

static void turns_give(const PyTrainingCall *self)
{
    if (self->other && self->other != self->adapter->model) turn_give(self->other);
    turn_give(self->adapter->model);
}

/* Executes one micro-batch; with `all`, all that are left. */
static Status call_next(PyTrainingCall *self, int all, int *done, int *count)
{
    Status status = turns_take(self);
    *done = 0, *count = 1;
    if (!status)
        NO_GIL(do status = trainer_next(self->step, done, count);
               while (!status && all && *done < *count));
    if (!status && *done == *count) self->loss = trainer_loss(self->step);
    turns_give(self);
    return status;
}

static void call_end(PyTrainingCall *self)
{
    if (self->step) {
        Status status = turns_take(self);
        if (!status) NO_GIL(trainer_end(self->step));
        turns_give(self);
    }
    self->step = NULL;
    call_release(&self->call);
    for (int i = 0; i < 2; i++) Py_CLEAR(self->given[i].owner);
}

/* ---- its result ---- */

static PyObject *call_result(PyTrainingCall *self)
{
    switch (self->result) {
    case LOGPROBS: return Py_NewRef(self->logp);
    case LOGPROBS_LOSS: return Py_BuildValue("(Od)", self->logp, self->loss);
    case LOSS_ONLY: return PyFloat_FromDouble(self->loss);
    case LOGPROBS_DIVERGENCES_LOSS:
        return Py_BuildValue("(OOd)", self->logp, self->divergence, self->loss);
    }
    return NULL;
}

PyObject *training_call_begin(PyTrainingCall *self, BeginCall *begin, Pass pass, int part,
                              int stepwise)
{
    int done, count;
    PyObject *result = NULL;
    Status status = turns_take(self);
    if (!status) NO_GIL(status = begin(self, pass, part));
    if (!status && stepwise) {
        turns_give(self);
        return (PyObject *)self;
    }
    if (!status) status = call_next(self, 1, &done, &count);
    call_end(self); /* in this turn: the adapter is free for the next one */
    turns_give(self);
    if (status)
        raise_status(status);
    else
        result = call_result(self);
    Py_DECREF(self);
    return result;
}

/* ---- the iterator ---- */

static PyObject *training_call_iternext(PyObject *object)
{
    PyTrainingCall *self = (PyTrainingCall *)object;
    int done, count;
    if (!self->step) return NULL; /* StopIteration */
    Status status = call_next(self, 0, &done, &count);
    if (!status && done < count) return Py_BuildValue("(ii)", done, count);
    PyObject *result = status ? NULL : call_result(self);
    if (status) raise_status(status);
    PyObject *args = result ? PyTuple_Pack(1, result) : NULL; /* a tuple is one value */
    PyObject *stop = args ? PyObject_CallObject(PyExc_StopIteration, args) : NULL;
    if (stop) PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    Py_XDECREF(args);
    Py_XDECREF(result);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* the end may run Python's code */
    call_end(self);
    PyErr_Restore(type, value, traceback);
    return NULL;
}

static PyObject *training_call_close(PyObject *object, PyObject *unused)
{
    (void)unused;
    call_end((PyTrainingCall *)object);
    Py_RETURN_NONE;
}

static void training_call_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyTrainingCall *self = (PyTrainingCall *)object;
    call_end(self);
    Py_XDECREF(self->logp);
    Py_XDECREF(self->divergence);
    Py_XDECREF(self->teacher);
    Py_XDECREF(self->other);
    Py_XDECREF(self->adapter);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"close", training_call_close, METH_NOARGS,
     "close()\n\nEnds the call; unless it had finished, it leaves no trace."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, training_call_dealloc},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, training_call_iternext},
    {Py_tp_methods, methods},
    {Py_tp_doc, "A training call, executed micro-batch by micro-batch."},
    {0, NULL},
};

PyType_Spec training_call_spec = {
    .name = "tinsmith._core.TrainingCall",
    .basicsize = sizeof(PyTrainingCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
