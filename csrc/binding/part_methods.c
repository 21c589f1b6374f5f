/* binding/part_methods.c - methods of tinsmith._core.Adapter: the parts of a call's gradient, which
 * several processes may compute. */
#include "part_methods.h"

#include "../model/gradient_parts.h"
#include "../model/stages.h"
#include "../train/step.h"
#include "arrays.h"
#include "status.h"
#include "turn.h"

static int lengths_check(const Borrowed *lengths)
{
    const int32_t *length = lengths->data;
    for (int64_t i = 0; i < lengths->length; i++) {
        if (length[i] >= 1) continue;
        PyErr_Format(PyExc_ValueError, "datum %lld has %d tokens", (long long)i, length[i]);
        return -1;
    }
    return 0;
}

PyObject *adapter_parts(PyObject *object, PyObject *argument)
{
    PyAdapter *self = (PyAdapter *)object;
    Borrowed lengths;
    int first[GRADIENT_PARTS + 1] = {0};
    if (borrow_copy(argument, KIND_INT32, "lengths", &lengths) < 0) return NULL;
    PyObject *list = lengths_check(&lengths) < 0 ? NULL : PyList_New(0);
    if (list)
        parts_cut(first, lengths.data, (int)lengths.length, self->trainer->limits.step_tokens);
    for (int part = 0; list && part < GRADIENT_PARTS; part++) {
        PyObject *row = Py_BuildValue("(ii)", first[part], first[part + 1]);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    Py_DECREF(lengths.owner);
    return list;
}

PyObject *adapter_take_part(PyObject *object, PyObject *argument)
{
    PyAdapter *self = (PyAdapter *)object;
    Adapter *adapter = self->adapter;
    PartSum sum = {0};
    Status status;
    int node;
    if (!whole_from(argument, &node)) return NULL;
    ON_TURN(self->model, status = parts_take(adapter, node, &sum));
    if (status) return raise_status(status);
    int summed = flat_exists(&sum.vector);
    PyObject *vector =
        summed ? array_new(KIND_FLOAT32, adapter->size, -1, NULL) : Py_NewRef(Py_None);
    if (summed) {
        const Model *model = adapter->model;
        float *values = vector ? array_data(vector) : NULL;
        ON_TURN(
            self->model, if (values) vector_download(model, &adapter->bytes, values, &sum.vector);
            vector_give(adapter->model, &adapter->bytes, &sum.vector); status = model_sync(model));
    }
    if (status) {
        Py_XDECREF(vector);
        return raise_status(status);
    }
    return vector ? Py_BuildValue("(Nddd)", vector, sum.loss, sum.tokens, sum.sequences) : NULL;
}

static Status sum_put(Adapter *adapter, int node, PartSum sum, const float *values)
{
    Model *model = adapter->model;
    if (values) TRY(vector_take(model, &adapter->bytes, &sum.vector));
    if (values) vector_upload(model, &adapter->bytes, &sum.vector, values);
    Status status = parts_put(adapter, node, sum), last = model_sync(model);
    if (status) vector_give(model, &adapter->bytes, &sum.vector);
    return status ? status : last;
}

PyObject *adapter_put_part(PyObject *object, PyObject *args)
{
    PyAdapter *self = (PyAdapter *)object;
    PyObject *vector;
    Borrowed from = {0};
    PartSum sum = {0};
    Status status;
    int node;
    if (!PyArg_ParseTuple(args, "O&Oddd:put_part", whole_from, &node, &vector, &sum.loss,
                          &sum.tokens, &sum.sequences))
        return NULL;
    if (vector != Py_None && borrow(vector, KIND_FLOAT32, "vector", &from) < 0) return NULL;
    if (from.owner && from.length != self->adapter->size) {
        PyErr_Format(PyExc_ValueError, "vector has %lld numbers, the adapter %lld",
                     (long long)from.length, (long long)self->adapter->size);
        Py_DECREF(from.owner);
        return NULL;
    }
    ON_TURN(self->model, status = sum_put(self->adapter, node, sum, from.data));
    Py_XDECREF(from.owner);
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}

PyObject *adapter_end_parts(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    double loss = 0.0;
    Status status;
    ON_TURN(self->model, status = gradients_gather(self->adapter, &loss));
    return status ? raise_status(status) : PyFloat_FromDouble(loss);
}

PyObject *adapter_drop_parts(PyObject *object, PyObject *unused)
{
    (void)unused;
    PyAdapter *self = (PyAdapter *)object;
    Status status;
    ON_TURN(self->model, parts_drop(self->adapter));
    if (status) return raise_status(status);
    Py_RETURN_NONE;
}
