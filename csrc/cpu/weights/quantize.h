/* cpu/weights/quantize.h - int8 and int4 out of wide weights. */
#ifndef TINSMITH_CPU_WEIGHTS_QUANTIZE_H
#define TINSMITH_CPU_WEIGHTS_QUANTIZE_H

#include "../runtime/cpu.h"

/* A type that is made (dtype.h). Of levels, by cell of the numbers to be quantised: the cell's
 * bound, or BOUNDLESS, the levels on both sides, and the lower one's code. And the scales that are
 * tried. */
enum { CELLS = 32, TRIED = 4, BOUNDLESS = INT16_MAX };
typedef struct Cells {
    DType type;
    int16_t bound[CELLS];
    int8_t low[CELLS], high[CELLS], code[CELLS];
    int16_t tried[TRIED];
} Cells;

Cells CPU(cells_make)(DType type);

/* One block of the type, of 32 inputs of 32 outputs, from[k·PANEL +
 * output]; those from `live` on do not exist and are zeros. */
void CPU(block_quantize)(unsigned char *to, const Cells *cells, const float *from, int live);

#endif
