/* device.c - finds a device by its name. */
#include "device.h"

#include <string.h>

#include "cpu/device.h"

Status device_open(Device **dev, const char *name, int threads)
{
    if (strcmp(name, "cpu") == 0) return cpu_open(dev, threads);
    return fail(STATUS_DEVICE, "device '%s' is not built into this tinsmith; it has: cpu", name);
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
