/* binding/status.h - a Status as an exception. */
#ifndef TINSMITH_BINDING_STATUS_H
#define TINSMITH_BINDING_STATUS_H

#include <Python.h>

#include "../device/status.h"

/* Sets the exception that the status names, with its sentence; returns NULL. */
PyObject *raise_status(Status status);

#endif
