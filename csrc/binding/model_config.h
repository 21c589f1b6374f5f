/* binding/model_config.h - a model's shape and the types of its matrices, from Python's dicts. */
#ifndef TINSMITH_BINDING_MODEL_CONFIG_H
#define TINSMITH_BINDING_MODEL_CONFIG_H

#include <Python.h>

#include "../model/model.h"

enum { PAIRS_MOST = 1 << 10 };

/* Reads the shape from a dict, which may have no other keys. Missing numbers are 0, which
 * model_open refuses if necessary. `axis` has room for PAIRS_MOST, and the caller frees the layers'
 * kinds. Returns -1 with an exception. */
int config_shape(PyObject *config, Shape *shape, LayerKinds **kinds, int32_t *axis);
/* Each matrix's type: from `packed` (a dict or NULL), else `weights`. NULL with an exception. */
DType *config_types(PyObject *packed, const char *weights, int layers);
/* The dict of a shape. */
PyObject *config_of(const Shape *shape);

#endif
