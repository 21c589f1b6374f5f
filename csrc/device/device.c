/* device/device.c - finds a device by its name: the CPU, linked in, or a library beside this one.
 * The library of the emulated GPU is in the place that the tests give.
 *
 * Every reason for not having a device is a sentence; there is no fallback. A library stays loaded:
 * the CUDA runtime does not survive being unloaded. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../cpu/device.h"

/* Why setup.py did not build the CUDA device. */
#ifndef CUDA_ABSENT
#define CUDA_ABSENT "it is not part of this build"
#endif

enum { PATH_BYTES = 4096 };

static char emulated[PATH_BYTES]; /* the emulated GPU's library; "": it was not built */

Status device_emulated(const char *path)
{
    int n = snprintf(emulated, sizeof emulated, "%s", path);
    if (n >= 0 && n < PATH_BYTES) return STATUS_OK;
    emulated[0] = 0;
    return fail(STATUS_DEVICE, "cuda-emulated: its library's path is too long");
}

/* The CUDA device's path: in the folder of the shared object that contains this code. */
static Status cuda_path(char path[PATH_BYTES])
{
    Status (*self)(Device **, const char *, int) = device_open;
    void *address;
    Dl_info info;
    memcpy(&address, &self, sizeof address);
    if (!dladdr(address, &info) || !info.dli_fname)
        return fail(STATUS_DEVICE, "cuda: the folder of tinsmith's own library is not known");
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash - info.dli_fname) : 1;
    int n = snprintf(path, PATH_BYTES, "%.*s/libtinsmith_cuda.so", folder,
                     slash ? info.dli_fname : ".");
    if (n < 0 || n >= PATH_BYTES)
        return fail(STATUS_DEVICE, "cuda: the path of libtinsmith_cuda.so is too long");
    if (access(path, F_OK) != 0)
        return fail(STATUS_DEVICE, "cuda: libtinsmith_cuda.so was not built: %s", CUDA_ABSENT);
    return STATUS_OK;
}

static Status library_open(Device **dev, const char *name, const char *path, int threads)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) return fail(STATUS_DEVICE, "%s: %s can't be loaded: %s", name, path, dlerror());
    void *symbol = dlsym(handle, "cuda_open");
    if (!symbol)
        return fail(STATUS_DEVICE, "%s: %s has no cuda_open: install tinsmith again", name, path);
    DeviceOpen *open;
    memcpy(&open, &symbol, sizeof open);
    return open(dev, threads, DEVICE_ABI, fail);
}

static Status cuda_open(Device **dev, int threads)
{
    char path[PATH_BYTES];
    TRY(cuda_path(path));
    return library_open(dev, "cuda", path, threads);
}

static Status emulated_open(Device **dev, int threads)
{
    if (!emulated[0])
        return fail(STATUS_DEVICE, "cuda-emulated: it is for tests, which build it themselves");
    return library_open(dev, "cuda-emulated", emulated, threads);
}

Status device_open(Device **dev, const char *name, int threads)
{
    if (strcmp(name, "cpu") == 0) return cpu_open(dev, threads, 0);
    if (strcmp(name, "cpu-bf16") == 0) return cpu_open(dev, threads, 1);
    if (strcmp(name, "cuda") == 0) return cuda_open(dev, threads);
    if (strcmp(name, "cuda-emulated") == 0) return emulated_open(dev, threads);
    return fail(STATUS_DEVICE,
                "there is no device '%s': it is cpu, cpu-bf16, cuda or cuda-emulated", name);
}

void *device_op(Device *dev, const char *name)
{
#define OP(op, args)                                  \
    if (strcmp(name, #op) == 0) {                     \
        void *function;                               \
        memcpy(&function, &dev->op, sizeof function); \
        return function;                              \
    }
#include "ops.inc"
#undef OP
    return NULL;
}
