/* binding/place.h - the places where a caller's tensors lie, and the engine's device for each. */
#ifndef TINSMITH_BINDING_PLACE_H
#define TINSMITH_BINDING_PLACE_H

#include <Python.h>

#include "arrays.h"

/* The CPU; or PLACE_CUDA and the ordinal of a GPU. */
typedef int Place;
enum { PLACE_CPU, PLACE_CUDA, PLACES = PLACE_CUDA + 64 };

/* Takes the turn, without the GIL, and the device, which is opened at its first turn and stays
 * open. turn_end gives the turn back in every case. */
Status turn_begin(Place place, Device **dev);
void turn_end(void);

/* An array of the engine's in a GPU's memory, inside the capsule that owns it: dropping the capsule
 * frees the memory. */
typedef struct DeviceArray {
    Device *dev;
    void *memory;
    size_t bytes;
    Place place;
    Kind kind; /* KIND_UINT16: the bits of bf16 */
    int64_t length;
} DeviceArray;

/* Without memory yet: device_array_fill, in a turn, gets it. */
PyObject *device_array_new(Place place, Kind kind, int64_t length);
Status device_array_fill(Device *dev, DeviceArray *array);
/* NULL, without an exception, for anything else. */
DeviceArray *device_array_of(PyObject *object);

/* array_device(array): the ordinal of the GPU that an array of the engine's is on, or -1. */
PyObject *array_device(PyObject *module, PyObject *object);

/* cuda_arrays_through(name): the device that serves arrays on a GPU: "cuda", or "cuda-emulated" for
 * tests, whose arrays of that kind are in host memory. */
PyObject *cuda_arrays_through(PyObject *module, PyObject *args);

#endif
