/* py/optimizer.c - the methods of tinsmith._core.Adapter that step: one for each optimizer. */
#include "optimizer.h"

#include <math.h>
#include <string.h>

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

/* A step of an optimizer with its settings, in the order of its names. */
typedef Status Step(Adapter *adapter, const double *setting, Normalization by, StepReport *report);

static Status adamw_step(Adapter *adapter, const double *s, Normalization by, StepReport *report)
{
    return adapter_optim_step(adapter, &(AdamW){s[0], s[1], s[2], s[3], s[4], s[5]}, by, report);
}

static Status dimuon_step(Adapter *adapter, const double *s, Normalization by, StepReport *report)
{
    return adapter_dimuon_step(adapter, &(Dimuon){s[0], s[1], s[2], s[3], s[4]}, by, report);
}

/* `format` takes normalization, and a number for each of the other names. */
static PyObject *step_method(PyObject *object, PyObject *args, PyObject *kwargs, const char *format,
                             char **names, Step *step)
{
    double s[] = {NAN, NAN, NAN, NAN, NAN, NAN}; /* each must be given; a missing one is refused */
    const char *normalization = NULL;
    Normalization by;
    StepReport report;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &normalization, &s[0], &s[1],
                                     &s[2], &s[3], &s[4], &s[5]))
        return NULL;
    if (normalization_from(normalization, &by) < 0) return NULL;
    PyAdapter *self = (PyAdapter *)object;
    Status status = adapter_trainable(self->adapter);
    if (status) return raise_status(status);
    ON_TURN(self->model, status = step(self->adapter, s, by, &report));
    if (status) return raise_status(status);
    return Py_BuildValue("{s:d,s:d,s:d,s:d,s:d,s:d}", "grad_norm", report.grad_norm,
                         "grad_norm_clipped", report.clipped_norm, "weight_norm",
                         report.weight_norm, "loss", report.loss, "loss_tokens", report.tokens,
                         "loss_sequences", report.sequences);
}

PyObject *adapter_optim_step_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"normalization", "learning_rate", "beta1",          "beta2",
                            "eps",           "weight_decay",  "grad_clip_norm", NULL};
    return step_method(object, args, kwargs, "|$zdddddd:optim_step", names, adamw_step);
}

PyObject *adapter_dimuon_step_method(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"normalization",
                            "learning_rate",
                            "beta1",
                            "damping",
                            "rank_lr_correction_exponent",
                            "grad_clip_norm",
                            NULL};
    return step_method(object, args, kwargs, "|$zddddd:dimuon_step", names, dimuon_step);
}
