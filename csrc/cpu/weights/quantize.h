/* cpu/weights/quantize.h - int8 and int4 from wide weights. */
#ifndef TINSMITH_CPU_WEIGHTS_QUANTIZE_H
#define TINSMITH_CPU_WEIGHTS_QUANTIZE_H

#include "../runtime/cpu.h"

/* A quantized type (dtype.h) with its tables. Per cell of numbers: the cell's bound or BOUNDLESS,
 * the levels on both sides, and the lower one's code. And the scales tried. */
enum { CELLS = 32, TRIED = 4, BOUNDLESS = INT16_MAX };
typedef struct Cells {
    DType type;
    int16_t bound[CELLS];
    int8_t low[CELLS], high[CELLS], code[CELLS];
    int16_t tried[TRIED];
} Cells;

Cells CPU(cells_make)(DType type);

/* Quantizes one block: 32 inputs of 32 outputs, from[k·PANEL + output]; inputs from `live` on are
 * missing and zero. */
void CPU(block_quantize)(unsigned char *to, const Cells *cells, const float *from, int live);

#endif
