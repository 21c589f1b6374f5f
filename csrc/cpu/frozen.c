/* cpu/frozen.c - copies a base weight from a checkpoint's row order to panels (cpu.h).
 *
 * A panel is written in order, from 32 rows read side by side. Both types are moved in lanes of 32
 * bits, a float or two bf16, so the copy transposes squares of VL rows by VL lanes. f16 has no
 * cheap widening in a product, so such weights are kept as f32. Memory bound: one pass over the
 * rows, one over the panels. */
#include "cpu.h"
#include "simd.h"

typedef struct Load {
    frozen *to;
    const void *from; // (rows, cols)
    DType type;       // of `from`
} Load;

/* The lanes of `n` elements, from number `at` on; those behind them are zeros. */
static inline vf lanes_of(const Load *load, size_t at, size_t n)
{
    size_t bytes = load->type == DTYPE_F32 ? 4 : 2;
    const unsigned char *from = (const unsigned char *)load->from + at * bytes;
    float lanes[VL] = {0};
    if (load->type == DTYPE_F16) {
        if (n == VL) return v_load_half(from);
        memcpy(lanes, from, n * bytes);
        return v_load_half(lanes);
    }
    if (n * bytes == sizeof lanes) return v_load((const float *)from);
    memcpy(lanes, from, n * bytes);
    return v_load(lanes);
}

static void load_panel(void *context, int64_t panel)
{
    const Load *load = context;
    int halves = load->type == DTYPE_BF16; /* two in a lane */
    size_t cols = (size_t)load->to->cols, first = (size_t)panel * PANEL;
    size_t live = (size_t)load->to->rows - first, all = halves ? (cols + 1) / 2 : cols;
    size_t step = halves ? 2 * VL : VL; /* elements of a vector */
    float *to = (float *)load->to->data + first * all;
    for (size_t k = 0, lane = 0; k < cols; k += step, lane += VL) {
        size_t n = cols - k < step ? cols - k : step, width = all - lane < VL ? all - lane : VL;
        for (size_t x = 0; x < PANEL; x += VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (size_t r = 0; r < VL; r++)
                v[r] = x + r < live ? lanes_of(load, (first + x + r) * cols + k, n) : v_set(0.0f);
            square_turn(v);
            for (size_t i = 0; i < width; i++) v_store(to + (lane + i) * PANEL + x, v[i]);
        }
    }
}

void CPU(frozen_load)(Device *dev, frozen *to, const void *from, DType type, int rows, int cols)
{
    to->type = type == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
    to->rows = rows;
    to->cols = cols;
    Load load = {to, from, type};
    cpu_run(dev, (rows + PANEL - 1) / PANEL, load_panel, &load);
}
