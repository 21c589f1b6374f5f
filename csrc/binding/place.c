/* binding/place.c - the places of a caller's tensors, and the engine's device for each.
 *
 * There is one device for each place in a process, opened at its first turn and never closed. Its
 * threads or stream belong to the process, and lent arrays may outlive any call. A thread that
 * holds the turn never waits for the GIL, so waiting for the turn can't deadlock. The wait releases
 * the GIL, because a turn may be long. In a forked child no thread has the turn; an unfinished call
 * of the parent leaves nothing on the CPU's device that harms a later one. */
#include "place.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../registry/registry.h"

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t forks_watched = PTHREAD_ONCE_INIT;
static const char *const ARRAY = "tinsmith.array";

enum { EMULATED = 1, NAME_BYTES = 32 };
static const char *const kinds[] = {"cuda", [EMULATED] = "cuda-emulated"};
static Device *engines[2][PLACES]; /* by kind of GPU and place; the CPU's is in row 0 */
static int kind_used;              /* the kind that serves arrays on a GPU */

static void child_begin(void)
{
    pthread_mutex_init(&turn, NULL);
}

static void forks_watch(void)
{
    pthread_atfork(NULL, NULL, child_begin);
}

Status turn_begin(Place place, Device **dev)
{
    pthread_once(&forks_watched, forks_watch);
    pthread_mutex_lock(&turn);
    char name[NAME_BYTES] = "cpu";
    int kind = place == PLACE_CPU ? 0 : kind_used;
    if (place != PLACE_CPU) snprintf(name, sizeof name, "%s:%d", kinds[kind], place - PLACE_CUDA);
    Status status = STATUS_OK;
    if (!engines[kind][place]) status = device_open(&engines[kind][place], name, 0);
    *dev = engines[kind][place];
    return status;
}

void turn_end(void)
{
    pthread_mutex_unlock(&turn);
}

PyObject *cuda_arrays_through(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    if (!PyArg_ParseTuple(args, "s:cuda_arrays_through", &name)) return NULL;
    for (int kind = 0; kind <= EMULATED; kind++)
        if (strcmp(name, kinds[kind]) == 0) {
            pthread_mutex_lock(&turn);
            kind_used = kind;
            turn_end();
            Py_RETURN_NONE;
        }
    PyErr_Format(PyExc_ValueError, "name must be cuda or cuda-emulated, not %s", name);
    return NULL;
}

/* ---- the engine's arrays ---- */

static void device_array_end(PyObject *capsule)
{
    DeviceArray *array = PyCapsule_GetPointer(capsule, ARRAY);
    if (array->memory) {
        Py_BEGIN_ALLOW_THREADS;
        pthread_mutex_lock(&turn);
        array->dev->release(array->dev, array->memory, array->bytes);
        turn_end();
        Py_END_ALLOW_THREADS;
    }
    free(array);
}

PyObject *device_array_new(Place place, Kind kind, int64_t length)
{
    DeviceArray *array = calloc(1, sizeof *array);
    if (!array) return PyErr_NoMemory();
    array->place = place;
    array->kind = kind;
    array->length = length;
    array->bytes = (size_t)length * kind_bytes(kind);
    PyObject *capsule = PyCapsule_New(array, ARRAY, device_array_end);
    if (!capsule) free(array);
    return capsule;
}

DeviceArray *device_array_of(PyObject *object)
{
    return PyCapsule_IsValid(object, ARRAY) ? PyCapsule_GetPointer(object, ARRAY) : NULL;
}

PyObject *array_device(PyObject *module, PyObject *object)
{
    (void)module;
    const DeviceArray *array = device_array_of(object);
    return PyLong_FromLong(array ? array->place - PLACE_CUDA : -1);
}

Status device_array_fill(Device *dev, DeviceArray *array)
{
    array->dev = dev;
    return dev->alloc(dev, &array->memory, array->bytes);
}
