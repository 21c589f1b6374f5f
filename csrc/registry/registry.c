/* registry/registry.c - finds a device by its name: the CPU, linked in, or a library in the same
 * folder. The tests set the path of the emulated GPU's library.
 *
 * Every failure to open a device is a sentence; there is no fallback. A library stays loaded: the
 * CUDA runtime does not survive being unloaded. */
#define _GNU_SOURCE
#include "registry.h"

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

static char emulated[PATH_BYTES]; /* the emulated GPU's library; "": not built */
static DeviceLibraries libraries = {NULL, "", NULL};

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

/* A GPU: its library's path, and the card's ordinal. */
typedef struct Gpu {
    const char *name; /* of its kind of device */
    char path[PATH_BYTES];
    int ordinal;
} Gpu;

enum { NO_GPU = -1, ORDINALS = 1000 };

/* The ordinal after the kind of device in a name: 0 for "cuda", 1 for "cuda:1". NO_GPU: another
 * name. */
static int ordinal_of(const char *name, const char *kind)
{
    size_t length = strlen(kind);
    if (strncmp(name, kind, length) != 0) return NO_GPU;
    const char *digit = name + length;
    if (!*digit) return 0;
    if (*digit++ != ':' || !*digit) return NO_GPU;
    int ordinal = 0;
    for (; *digit; digit++) {
        if (*digit < '0' || *digit > '9' || ordinal >= ORDINALS) return NO_GPU;
        ordinal = 10 * ordinal + *digit - '0';
    }
    return ordinal;
}

static Status gpu_find(Gpu *gpu, const char *name)
{
    *gpu = (Gpu){.name = "cuda", .ordinal = ordinal_of(name, "cuda")};
    if (gpu->ordinal != NO_GPU) return cuda_path(gpu->path);
    *gpu = (Gpu){.name = "cuda-emulated", .ordinal = ordinal_of(name, "cuda-emulated")};
    if (gpu->ordinal == NO_GPU)
        return fail(STATUS_DEVICE,
                    "there is no device '%s': it is cpu, cpu-bf16, cpu-int16, cuda (or cuda:1 and "
                    "so on for "
                    "another card) or cuda-emulated",
                    name);
    if (!emulated[0])
        return fail(STATUS_DEVICE, "cuda-emulated: it is for tests, which build it themselves");
    memcpy(gpu->path, emulated, sizeof emulated);
    return STATUS_OK;
}

/* A function of a GPU's library. */
static Status gpu_symbol(const Gpu *gpu, const char *symbol, void **function)
{
    void *handle = dlopen(gpu->path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        return fail(STATUS_DEVICE, "%s: %s can't be loaded: %s", gpu->name, gpu->path, dlerror());
    *function = dlsym(handle, symbol);
    if (*function) return STATUS_OK;
    return fail(STATUS_DEVICE, "%s: %s has no %s: install tinsmith again", gpu->name, gpu->path,
                symbol);
}

Status device_open(Device **dev, const char *name, int threads)
{
    for (CpuInputs inputs = 0; inputs < CPU_KINDS; inputs++)
        if (strcmp(name, cpu_names[inputs]) == 0) return cpu_open(dev, threads, inputs);
    Gpu gpu;
    void *symbol;
    DeviceOpen *open;
    TRY(gpu_find(&gpu, name));
    TRY(gpu_symbol(&gpu, "cuda_open", &symbol));
    memcpy(&open, &symbol, sizeof open);
    return open(dev, gpu.ordinal, DEVICE_ABI, fail, &libraries);
}

Status device_card(DeviceCard *card, const char *name)
{
    Gpu gpu;
    void *symbol;
    DeviceCardOf *card_of;
    TRY(gpu_find(&gpu, name));
    TRY(gpu_symbol(&gpu, "cuda_card", &symbol));
    memcpy(&card_of, &symbol, sizeof card_of);
    return card_of(card, gpu.ordinal, DEVICE_ABI, fail);
}

Status device_libraries(const char *cublaslt, const char *packages, const char *log)
{
    char *named = cublaslt ? strdup(cublaslt) : NULL, *folders = strdup(packages);
    char *file = log ? strdup(log) : NULL;
    if (!folders || (cublaslt && !named) || (log && !file))
        return fail(STATUS_MEMORY, "no memory for the paths of libraries");
    /* The older strings are not freed: an open device may still read them. */
    libraries = (DeviceLibraries){named, folders, file};
    return STATUS_OK;
}

unsigned device_abi(void)
{
    return DEVICE_ABI;
}

void *device_op(Device *dev, const char *name)
{
#define OP(op, args)                                  \
    if (strcmp(name, #op) == 0) {                     \
        void *function;                               \
        memcpy(&function, &dev->op, sizeof function); \
        return function;                              \
    }
#include "../device/ops.inc"
#undef OP
    return NULL;
}
