/* binding/place.h - the places of a caller's tensors, and the engine's device for each. */
#ifndef TINSMITH_BINDING_PLACE_H
#define TINSMITH_BINDING_PLACE_H

#include <Python.h>

#include "arrays.h"

/* The CPU; or PLACE_CUDA and the ordinal of a GPU. */
typedef int Place;
enum { PLACE_CPU, PLACE_CUDA, PLACES = PLACE_CUDA + 64 };

/* Takes the turn, without the GIL, and returns the device, which is opened at its first turn and
 * stays open. turn_end must follow in every case. */
Status turn_begin(Place place, Device **dev);
void turn_end(void);

/* An engine's array in GPU memory, inside the capsule that owns it: dropping the capsule frees the
 * memory. */
typedef struct DeviceArray {
    Device *dev;
    void *memory;
    size_t bytes;
    Place place;
    Kind kind; /* KIND_UINT16: the bits of bf16 */
    int64_t length;
} DeviceArray;

/* Without memory: device_array_fill allocates it in a turn. */
PyObject *device_array_new(Place place, Kind kind, int64_t length);
Status device_array_fill(Device *dev, DeviceArray *array);
/* NULL, without an exception, for anything else. */
DeviceArray *device_array_of(PyObject *object);

/* array_device(array): the ordinal of the GPU of an engine's array, or -1. */
PyObject *array_device(PyObject *module, PyObject *object);

/* cuda_arrays_through(name): sets the device that serves arrays on a GPU: "cuda", or
 * "cuda-emulated" for tests, whose GPU arrays are in host memory. */
PyObject *cuda_arrays_through(PyObject *module, PyObject *args);

#endif
