/* device/device.c - finds a device by its name: the CPU, linked in, or a library beside this one.
 *
 * Every reason for not having a device is a sentence; nothing falls back. A library stays loaded:
 * the CUDA runtime does not survive being unloaded. */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../cpu/device.h"

/* Why setup.py did not build a library. */
#ifndef CUDA_ABSENT
#define CUDA_ABSENT "it is not part of this build"
#endif
#ifndef CUDA_EMULATED_ABSENT
#define CUDA_EMULATED_ABSENT "it is for tests: TINSMITH_EMULATE_CUDA=1 builds it"
#endif

typedef struct Library {
    const char *device, *file, *absent;
} Library;

static const Library libraries[] = {
    {"cuda", "libtinsmith_cuda.so", CUDA_ABSENT},
    {"cuda-emulated", "libtinsmith_cuda_emulated.so", CUDA_EMULATED_ABSENT},
};

/* The library's path: the folder of the shared object that this code is in. */
static Status library_path(char *path, size_t size, const Library *library)
{
    Status (*self)(Device **, const char *, int) = device_open;
    void *address;
    Dl_info info;
    memcpy(&address, &self, sizeof address);
    if (!dladdr(address, &info) || !info.dli_fname)
        return fail(STATUS_DEVICE, "%s: the folder of tinsmith's own library is not known",
                    library->device);
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash - info.dli_fname) : 1;
    int n = snprintf(path, size, "%.*s/%s", folder, slash ? info.dli_fname : ".", library->file);
    if (n < 0 || (size_t)n >= size)
        return fail(STATUS_DEVICE, "%s: the path of %s is too long", library->device,
                    library->file);
    return STATUS_OK;
}

static Status library_open(Device **dev, const Library *library, int threads)
{
    char path[4096];
    TRY(library_path(path, sizeof path, library));
    if (access(path, F_OK) != 0)
        return fail(STATUS_DEVICE, "%s: %s was not built: %s", library->device, library->file,
                    library->absent);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return fail(STATUS_DEVICE, "%s: %s can't be loaded: %s", library->device, library->file,
                    dlerror());
    void *symbol = dlsym(handle, "cuda_open");
    if (!symbol)
        return fail(STATUS_DEVICE, "%s: %s has no cuda_open: install tinsmith again",
                    library->device, library->file);
    DeviceOpen *open;
    memcpy(&open, &symbol, sizeof open);
    return open(dev, threads, DEVICE_ABI, fail);
}

Status device_open(Device **dev, const char *name, int threads)
{
    if (strcmp(name, "cpu") == 0) return cpu_open(dev, threads, 0);
    if (strcmp(name, "cpu-bf16") == 0) return cpu_open(dev, threads, 1);
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries; i++)
        if (strcmp(name, libraries[i].device) == 0)
            return library_open(dev, &libraries[i], threads);
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
