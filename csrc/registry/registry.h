/* registry/registry.h - the devices by name. */
#ifndef TINSMITH_REGISTRY_REGISTRY_H
#define TINSMITH_REGISTRY_REGISTRY_H

#include "../device/device.h"

/* Opens "cpu", "cpu-bf16", "cpu-int16", "cuda" or "cuda-emulated", or says why the device can't be
 * had. A GPU's name may be followed by ":" and the ordinal of the card. threads = 0: one for each
 * core this process may use. */
TINSMITH_EXPORT Status device_open(Device **dev, const char *name, int threads);

/* What the GPU of that name is. */
TINSMITH_EXPORT Status device_card(DeviceCard *card, const char *name);

/* Gives what devices that are opened from now on find; the strings are copied. */
TINSMITH_EXPORT Status device_libraries(const char *cublaslt, const char *packages,
                                        const char *log);

/* DEVICE_ABI of this build. */
TINSMITH_EXPORT unsigned device_abi(void);

/* Gives the path of the emulated GPU's library, which the tests build: "cuda-emulated" can be
 * opened from now on. */
TINSMITH_EXPORT Status device_emulated(const char *path);

/* The function behind a row of ops.inc, or NULL: how the tests call any op of any device. */
TINSMITH_EXPORT void *device_op(Device *dev, const char *name);

#endif
