/* cpu/weights/repack.h - a file's blocks in a panel's layout. */
#ifndef TINSMITH_CPU_WEIGHTS_REPACK_H
#define TINSMITH_CPU_WEIGHTS_REPACK_H

#include "frozen.h"

/* Writes block number `number` of a panel from a file's blocks of type `from` (dtype.h): one per
 * row for `live` rows, the first at `rows`, at a stride of `step` bytes. */
void CPU(block_arrange)(frozen *to, int panel, int number, const unsigned char *rows, size_t step,
                        int live, DType from);

#endif
