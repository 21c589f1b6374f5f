/* cpu/weights/frozen.h - the layout of a frozen weight: panels of 32 outputs. */
#ifndef TINSMITH_CPU_WEIGHTS_FROZEN_H
#define TINSMITH_CPU_WEIGHTS_FROZEN_H

#include "../runtime/cpu.h"

/* The columns of a panel: the unit in which frozen weights and products are laid out. */
enum { PANEL = 32 };

/* A frozen (rows, cols) weight, in panels of 32 rows: in f32 element (n, k) is at [n / PANEL][k][n
 * % PANEL]: one row of a panel is 32 outputs of the same input. In bf16 it is at [n / PANEL][k /
 * 2][n % PANEL][k % 2]: a 32-bit lane holds two inputs of one output, the format of the processor's
 * bf16 dot product; a shift or a mask widens one to f32. Rows and an odd last column are
 * zero-padded. packed.h has the layout of types with blocks. */
struct frozen {
    DType type;
    int rows, cols;
    _Alignas(64) unsigned char data[];
};

/* The index of element (n, k) of a bf16 weight. */
static inline size_t frozen_bf16_at(const frozen *w, int n, int k)
{
    size_t pairs = ((size_t)w->cols + 1) / 2;
    return (((size_t)(n / PANEL) * pairs + (size_t)(k / 2)) * PANEL + (size_t)(n % PANEL)) * 2 +
           (size_t)(k % 2);
}

#endif
