/* binding/optimizer_methods.c - optim_step of tinsmith._core.Adapter: one keyword per setting in
 * the table of the adapter's optimizer; and what it remembers of a step that grew too much. */
#include "optimizer_methods.h"

#include <math.h>
#include <string.h>

#include "../model/optimizers/optimizer.h"
#include "status.h"
#include "turn.h"

#define NORMALIZATION "normalization"

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

/* A required number from the keywords. */
static int setting_from(PyObject *kwargs, const char *optimizer, const char *name, double *value)
{
    PyObject *given = kwargs ? PyDict_GetItemString(kwargs, name) : NULL;
    if (!given) {
        PyErr_Format(PyExc_ValueError, "%s needs a %s", optimizer, name);
        return -1;
    }
    *value = PyFloat_AsDouble(given);
    return PyErr_Occurred() ? -1 : 0;
}

/* A ValueError for the first keyword that is no setting of the optimizer. */
static int unknown_refuse(PyObject *kwargs, const char *optimizer, const Setting *settings)
{
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(kwargs, &at, &key, &value)) {
        int known = PyUnicode_CompareWithASCIIString(key, NORMALIZATION) == 0;
        for (const Setting *one = settings; one->name; one++)
            known |= PyUnicode_CompareWithASCIIString(key, one->name) == 0;
        if (known) continue;
        PyErr_Format(PyExc_ValueError, "%s has no %U", optimizer, key);
        return -1;
    }
    return 0;
}

/* The value of each setting, in the order of the table, and the normalization. */
static int settings_from(const Adapter *adapter, PyObject *args, PyObject *kwargs, double *value,
                         Normalization *by)
{
    const char *optimizer = optimizer_name(adapter->optimizer), *name = NULL;
    const Setting *settings = optimizer_settings(adapter->optimizer);
    if (PyTuple_Size(args)) {
        PyErr_SetString(PyExc_TypeError, "optim_step takes its settings by their names");
        return -1;
    }
    if (kwargs && unknown_refuse(kwargs, optimizer, settings) < 0) return -1;
    for (const Setting *one = settings; one->name; one++)
        if (setting_from(kwargs, optimizer, one->name, value++) < 0) return -1;
    PyObject *given = PyDict_GetItemString(kwargs, NORMALIZATION);
    if (given && given != Py_None && !(name = PyUnicode_AsUTF8AndSize(given, NULL))) return -1;
    return normalization_from(name, by);
}

PyObject *adapter_optim_step_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    double value[SETTINGS];
    Normalization by;
    StepReport report;
    PyAdapter *self = (PyAdapter *)object;
    if (settings_from(self->adapter, args, kwargs, value, &by) < 0) return NULL;
    Status status = adapter_trainable(self->adapter);
    if (status) return raise_status(status);
    ON_TURN(self->model, status = adapter_optim_step(self->adapter, value, by, &report));
    if (status) return raise_status(status);
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d,s:s}", "grad_norm", report.grad_norm,
                         "grad_norm_clipped", report.clipped_norm, "weight_norm",
                         report.weight_norm, "loss", report.loss, "loss_tokens", report.tokens,
                         "loss_sequences", report.sequences, "warning", report.warning);
}

PyObject *adapter_growth(PyObject *object, void *unused)
{
    (void)unused;
    const Growth *growth = &((PyAdapter *)object)->adapter->growth;
    return Py_BuildValue("(idd)", growth->step, growth->before, growth->after);
}

int adapter_set_growth(PyObject *object, PyObject *value, void *unused)
{
    (void)unused;
    Growth growth;
    if (!value || !PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "growth must be a tuple (step, before, after)");
        return -1;
    }
    if (!PyArg_ParseTuple(value, "idd:growth", &growth.step, &growth.before, &growth.after))
        return -1;
    if (growth.step < 0 || !isfinite(growth.before) || !isfinite(growth.after)) {
        PyErr_SetString(PyExc_ValueError, "growth must be finite, and its step 0 or more");
        return -1;
    }
    PyAdapter *self = (PyAdapter *)object;
    turn_take(self->model);
    self->adapter->growth = growth;
    turn_give(self->model);
    return 0;
}
