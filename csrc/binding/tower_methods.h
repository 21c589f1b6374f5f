/* binding/tower_methods.h - the vision tower of a tinsmith._core.Model. */
#ifndef TINSMITH_BINDING_TOWER_METHODS_H
#define TINSMITH_BINDING_TOWER_METHODS_H

#include "types.h"

PyObject *model_tower_open_method(PyObject *model, PyObject *args, PyObject *kwargs);
PyObject *model_tower_load_method(PyObject *model, PyObject *args);
PyObject *model_tower_seal_method(PyObject *model, PyObject *unused);
PyObject *model_tower_close_method(PyObject *model, PyObject *unused);
PyObject *model_tower_features_method(PyObject *model, PyObject *image);
PyObject *model_tower_slots(PyObject *model, void *unused);
PyObject *model_tower_bytes(PyObject *model, void *unused);
PyObject *model_features_drop_method(PyObject *model, PyObject *unused);
PyObject *model_features_bytes_number(PyObject *model, void *unused);
PyObject *model_tower_images(PyObject *model, void *unused);

#endif
