/* registry/registry.h - the devices by name. */
#ifndef TINSMITH_REGISTRY_REGISTRY_H
#define TINSMITH_REGISTRY_REGISTRY_H

#include "../device/device.h"

/* Opens "cpu", "cpu-bf16", "cpu-int16", "cuda" or "cuda-emulated", or says why it can't. ":" and a
 * card's ordinal may follow a GPU's name. threads = 0: one per core that this process may use. */
TINSMITH_EXPORT Status device_open(Device **dev, const char *name, int threads);

/* The properties of the GPU of that name. */
TINSMITH_EXPORT Status device_card(DeviceCard *card, const char *name);

/* Sets the DeviceLibraries of devices opened from now on; the strings are copied. */
TINSMITH_EXPORT Status device_libraries(const char *cublaslt, const char *packages,
                                        const char *log);

/* DEVICE_ABI of this build. */
TINSMITH_EXPORT unsigned device_abi(void);

/* Sets the path of the emulated GPU's library, which the tests build, so that "cuda-emulated" can
 * be opened. */
TINSMITH_EXPORT Status device_emulated(const char *path);

/* The function of a row of ops.inc, or NULL. Tests call any op of any device through it. */
TINSMITH_EXPORT void *device_op(Device *dev, const char *name);

#endif
