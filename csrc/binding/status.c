/* binding/status.c - the one place where a Status becomes an exception. */
#include "status.h"

PyObject *raise_status(Status status)
{
    PyObject *builtins = PyEval_GetBuiltins(); /* borrowed */
    PyObject *type = PyDict_GetItemString(builtins, status_exception(status));
    PyErr_SetString(type ? type : PyExc_RuntimeError, status_text());
    return NULL;
}
