/* binding/limits.c - the limits and the minimum of the memory of a tinsmith._core.Adapter's
 * training step. */
#include "limits.h"

#include "../train/memory_plan.h"
#include "arrays.h"
#include "status.h"
#include "turn.h"

PyObject *adapter_step_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((PyAdapter *)object)->trainer->limits.step_bytes);
}

PyObject *adapter_datum_bytes(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((PyAdapter *)object)->trainer->limits.datum_bytes);
}

static void limit(PyAdapter *self, size_t step_bytes, size_t datum_bytes)
{
    turn_take(self->model);
    trainer_limit(self->trainer, step_bytes, datum_bytes);
    turn_give(self->model);
}

int adapter_set_step_bytes(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    size_t bytes = value ? PyLong_AsSize_t(value) : 0;
    if (bytes == (size_t)-1 && PyErr_Occurred()) return -1;
    limit((PyAdapter *)object, bytes, 0);
    return 0;
}

PyObject *adapter_step_tokens(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(((PyAdapter *)object)->trainer->limits.step_tokens);
}

int adapter_set_step_tokens(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    int tokens;
    if (!value || !whole_from(value, &tokens)) return -1;
    if (tokens < 1 || self->trainer->busy) {
        PyErr_Format(PyExc_ValueError,
                     self->trainer->busy ? "a training call of this adapter is in flight"
                                         : "step_tokens must be at least 1, not %d",
                     tokens);
        return -1;
    }
    turn_take(self->model);
    self->trainer->limits.step_tokens = tokens;
    turn_give(self->model);
    return 0;
}

PyObject *adapter_limit(PyObject *object, PyObject *args)
{
    Py_ssize_t step_bytes, datum_bytes;
    if (!PyArg_ParseTuple(args, "nn:limit", &step_bytes, &datum_bytes)) return NULL;
    if (step_bytes < 0 || datum_bytes < 0)
        return PyErr_Format(PyExc_ValueError,
                            "step_bytes and datum_bytes must be 0 (the default) or more");
    limit((PyAdapter *)object, (size_t)step_bytes, (size_t)datum_bytes);
    Py_RETURN_NONE;
}

PyObject *adapter_step_least(PyObject *object, PyObject *argument)
{
    int tokens;
    size_t bytes;
    PyAdapter *self = (PyAdapter *)object;
    if (!whole_from(argument, &tokens)) return NULL;
    turn_take(self->model);
    Status status = plan_least(&bytes, self->trainer, tokens);
    turn_give(self->model);
    return status ? raise_status(status) : PyLong_FromSize_t(bytes);
}
