/* cpu/weights/weight_load.h - a frozen weight from an array. */
#ifndef TINSMITH_CPU_WEIGHTS_WEIGHT_LOAD_H
#define TINSMITH_CPU_WEIGHTS_WEIGHT_LOAD_H

#include "frozen.h"

/* The device's frozen_load. */
int CPU(frozen_load)(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                     int cols);

#endif
