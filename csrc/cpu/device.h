/* cpu/device.h - how device.c gets the CPU device; everything else about it stays in this folder.
 */
#ifndef TINSMITH_CPU_DEVICE_H
#define TINSMITH_CPU_DEVICE_H

#include "../device.h"

/* Opens the CPU with the widest instruction set it has. threads = 0: one for each core it may use.
 */
Status cpu_open(Device **dev, int threads);

#endif
