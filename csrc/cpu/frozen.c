/* cpu/frozen.c - copies a base weight from a checkpoint's row order to panels (cpu.h, packed.h).
 *
 * A panel is written in order, from 32 rows read side by side. Both types are moved in lanes of 32
 * bits, a float or two bf16, so the copy transposes squares of VL rows by VL lanes. f16 has no
 * cheap widening in a product, so such weights are kept as f32. Memory bound: one pass over the
 * rows, one over the panels. Weights of 8 and 4 bits are made of wide ones, which quantize.c does,
 * or come as blocks, which arrange.c puts in their places. */
#include <assert.h>

#include "packed.h"

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

/* The same of `n` bf16, widened. */
static inline vf bf16_of(const Load *load, size_t at, size_t n)
{
    uint16_t lanes[VL] = {0};
    memcpy(lanes, (const unsigned char *)load->from + at * 2, n * 2);
    return v_load_bf16(lanes);
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

/* ---- types with blocks ---- */

/* Block number `number` of a panel's rows, of wide numbers, as quantize.c takes it. */
static void block_gather(float *to, const Load *load, size_t first, size_t live, size_t number)
{
    size_t cols = (size_t)load->to->cols, k = number * BLOCK;
    size_t width = cols - k < BLOCK ? cols - k : BLOCK;
    float part[BLOCK * BLOCK] = {0};
    for (size_t r = 0; r < live; r++) {
        size_t at = (first + r) * cols + k;
        for (size_t i = 0; i < width; i += VL) {
            size_t n = width - i < VL ? width - i : VL;
            vf v = load->type == DTYPE_BF16 ? bf16_of(load, at + i, n) : lanes_of(load, at + i, n);
            v_store(part + r * BLOCK + i, v);
        }
    }
    CPU(transpose)(to, PANEL, part, BLOCK, BLOCK, BLOCK);
}

/* A panel's blocks: made of wide numbers, or put in another order. */
static void pack_panel(void *context, int64_t panel)
{
    const Load *load = context;
    frozen *w = load->to;
    size_t across = blocks_across(w), first = (size_t)panel * PANEL;
    size_t live = (size_t)w->rows - first < PANEL ? (size_t)w->rows - first : PANEL;
    TypeInfo info = dtype_info(load->type);
    size_t step = across * BLOCK / (size_t)(info.block ? info.block : 1) * info.block_bytes;
    for (size_t number = 0; number < across; number++) {
        if (dtype_packed(load->type)) {
            const unsigned char *rows = (const unsigned char *)load->from + first * step;
            CPU(block_arrange)(w, (int)panel, (int)number, rows, step, (int)live, load->type);
            continue;
        }
        float block[BLOCK * PANEL];
        block_gather(block, load, first, live, number);
        size_t inputs = (size_t)w->cols - number * BLOCK;
        Square s = square_at(w, w->type, (int)panel, (int)number);
        CPU(block_quantize)((unsigned char *)s.block, w->type, block,
                            inputs < BLOCK ? (int)inputs : BLOCK);
    }
}

void CPU(frozen_load)(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                      int cols)
{
    assert(dtype_loads(kept, type) && (!dtype_packed(type) || cols % dtype_info(type).block == 0));
    to->type = kept;
    to->rows = rows;
    to->cols = cols;
    Load load = {to, from, type};
    cpu_run(dev, (rows + PANEL - 1) / PANEL, dtype_packed(kept) ? pack_panel : load_panel, &load);
}
