/* cpu/weights/repack.h - a file's blocks in the order of a panel. */
#ifndef TINSMITH_CPU_WEIGHTS_REPACK_H
#define TINSMITH_CPU_WEIGHTS_REPACK_H

#include "frozen.h"

/* One block of a file's, type `from` (dtype.h), of `live` rows that lie `step` bytes apart, the
 * first at `rows`, which is that of the whole weight's block number `number` across. */
void CPU(block_arrange)(frozen *to, int panel, int number, const unsigned char *rows, size_t step,
                        int live, DType from);

#endif
