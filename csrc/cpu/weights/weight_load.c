/* cpu/weights/weight_load.c - copies a base weight from a checkpoint's row order to panels
 * (frozen.h, packed.h).
 *
 * A panel is written in order, from 32 rows read in parallel. Both types move in 32-bit lanes, a
 * float or two bf16, so the copy transposes squares of VL rows by VL lanes. f16 has no cheap
 * widening in a product, so such weights are kept as f32. Weights of 8 and 4 bits are quantized
 * from wide ones (quantize.c), or arrive as blocks, which repack.c reorders.
 *
 * The same pass checks that all numbers are finite: each lane sums 0 times its numbers, which
 * becomes NaN if one is not finite. Memory bound, except int4: one pass over the rows, one over the
 * panels. */
#include "weight_load.h"

#include <assert.h>
#include <stdatomic.h>

#include "../../device/finite.h"
#include "../runtime/transpose.h"
#include "packed.h"
#include "quantize.h"
#include "repack.h"

enum { ASKED = 4 * BLOCK }; /* prefetch distance, in numbers of a row */

typedef struct Load {
    frozen *to;
    const void *from; // (rows, cols)
    DType type;       // of `from`
    atomic_int bad;   // a number is not finite
} Load;

/* ---- rows ---- */

static inline void watch(vf *seen, vf x)
{
    *seen = v_fma(x, v_set(0.0f), *seen);
}

/* Stores what was seen. */
static inline void watched(Load *load, vf seen)
{
    int bad = 0;
    for (int i = 0; i < VL; i++) bad |= seen[i] != 0.0f;
    if (bad) atomic_store_explicit(&load->bad, 1, memory_order_relaxed);
}

static inline const unsigned char *number_at(const Load *load, size_t at)
{
    return (const unsigned char *)load->from + at * (load->type == DTYPE_F32 ? 4 : 2);
}

/* The n ≤ VL numbers from number `at` on, widened and zero-padded. */
static inline vf wide_at(const Load *load, size_t at, size_t n, vf *seen)
{
    const unsigned char *from = number_at(load, at);
    float part[VL] = {0};
    if (n < VL) from = memcpy(part, from, n * (load->type == DTYPE_F32 ? 4 : 2));
    vf v;
    if (load->type == DTYPE_BF16)
        v = v_load_bf16(from);
    else if (load->type == DTYPE_F16)
        v = v_load_half(from);
    else
        memcpy(&v, from, sizeof v);
    watch(seen, v);
    return v;
}

/* The n ≤ 2·VL numbers from number `at` on in bf16, two in a lane. */
static inline vf pairs_at(const Load *load, size_t at, size_t n, vf *seen)
{
    const void *from = number_at(load, at);
    uint16_t part[2 * VL] = {0};
    vf pairs;
    if (load->type == DTYPE_BF16) {
        if (n < 2 * VL) from = memcpy(part, from, n * 2);
        memcpy(&pairs, from, sizeof pairs);
        watch(seen, v_first((vu)pairs));
        watch(seen, v_second((vu)pairs));
        return pairs;
    }
    for (size_t i = 0; i < n; i += VL) {
        vf narrow = v_round_bf16(wide_at(load, at + i, n - i < VL ? n - i : VL, seen));
        watch(seen, narrow); /* the largest float32 overflow in bf16 */
        vh halves = __builtin_convertvector((vu)narrow >> 16, vh);
        memcpy(part + i, &halves, sizeof halves);
    }
    memcpy(&pairs, part, sizeof pairs);
    return pairs;
}

/* ---- wide types ---- */

static void load_panel(void *context, int64_t panel)
{
    Load *load = context;
    int halves = load->to->type == DTYPE_BF16; /* two in a lane */
    size_t cols = (size_t)load->to->cols, first = (size_t)panel * PANEL;
    size_t live = (size_t)load->to->rows - first, all = halves ? (cols + 1) / 2 : cols;
    size_t step = halves ? 2 * VL : VL; /* elements of a vector */
    float *to = (float *)load->to->data + first * all;
    vf seen = v_set(0.0f);
    for (size_t k = 0, lane = 0; k < cols; k += step, lane += VL) {
        size_t n = cols - k < step ? cols - k : step, width = all - lane < VL ? all - lane : VL;
        for (size_t x = 0; x < PANEL; x += VL) {
            vf v[VL];
#pragma GCC unroll 1
            for (size_t r = 0; r < VL; r++) {
                size_t at = (first + x + r) * cols + k;
                v[r] = x + r >= live ? v_set(0.0f)
                       : halves      ? pairs_at(load, at, n, &seen)
                                     : wide_at(load, at, n, &seen);
            }
            square_turn(v);
            for (size_t i = 0; i < width; i++) v_store(to + (lane + i) * PANEL + x, v[i]);
        }
    }
    watched(load, seen);
}

/* ---- types with blocks ---- */

/* Rows [x, x + VL) of a full block: bf16, which moves in pairs. */
static inline void pairs_gather(float *to, const Load *load, size_t at, size_t x, vf *seen)
{
    size_t cols = (size_t)load->to->cols;
    for (size_t i = 0; i < BLOCK; i += 2 * VL) {
        vf v[VL];
#pragma GCC unroll 16
        for (size_t r = 0; r < VL; r++)
            memcpy(&v[r], number_at(load, at + r * cols + i), sizeof *v);
        square_turn(v);
#pragma GCC unroll 16
        for (size_t r = 0; r < VL; r++) {
            vf first = v_first((vu)v[r]), second = v_second((vu)v[r]);
            watch(seen, first);
            watch(seen, second);
            v_store(to + (i + 2 * r) * PANEL + x, first);
            v_store(to + (i + 2 * r + 1) * PANEL + x, second);
        }
    }
}

/* The same for other types. */
static inline void wide_gather(float *to, const Load *load, size_t at, size_t x, vf *seen)
{
    size_t cols = (size_t)load->to->cols;
    for (size_t i = 0; i < BLOCK; i += VL) {
        vf v[VL];
#pragma GCC unroll 16
        for (size_t r = 0; r < VL; r++) v[r] = wide_at(load, at + r * cols + i, VL, seen);
        square_turn(v);
#pragma GCC unroll 16
        for (size_t r = 0; r < VL; r++) v_store(to + (i + r) * PANEL + x, v[r]);
    }
}

/* Prefetches a line of each row ahead of number `k`. Done between the reads of two blocks: within
 * one, prefetches that wait for memory would delay the reads. */
static inline void rows_ask(const Load *load, size_t first, size_t k)
{
    size_t cols = (size_t)load->to->cols;
    for (size_t r = 0; r < PANEL; r++)
        __builtin_prefetch(number_at(load, (first + r) * cols + k + ASKED), 0, 2);
}

/* A full block's rows. */
static void rows_gather(float *to, const Load *load, size_t first, size_t k, vf *seen)
{
    size_t cols = (size_t)load->to->cols;
    for (size_t x = 0; x < PANEL; x += VL) {
        size_t at = (first + x) * cols + k;
        if (load->type == DTYPE_BF16)
            pairs_gather(to, load, at, x, seen);
        else
            wide_gather(to, load, at, x, seen);
    }
}

/* Block number `number` of a panel's rows of wide numbers, in quantize.c's layout. */
static void block_gather(float *to, const Load *load, size_t first, size_t live, size_t number,
                         vf *seen)
{
    size_t cols = (size_t)load->to->cols, k = number * BLOCK;
    size_t width = cols - k < BLOCK ? cols - k : BLOCK;
    if (live == PANEL && width == BLOCK) {
        rows_gather(to, load, first, k, seen);
        return;
    }
    float part[BLOCK * BLOCK] = {0};
    for (size_t r = 0; r < live; r++)
        for (size_t i = 0; i < width; i += VL) {
            size_t n = width - i < VL ? width - i : VL;
            v_store(part + r * BLOCK + i, wide_at(load, (first + r) * cols + k + i, n, seen));
        }
    CPU(transpose)(to, PANEL, part, BLOCK, BLOCK, BLOCK);
}

/* A panel's blocks, quantized from wide numbers. */
static void make_panel(void *context, int64_t panel)
{
    Load *load = context;
    frozen *w = load->to;
    size_t across = blocks_across(w), first = (size_t)panel * PANEL;
    size_t live = (size_t)w->rows - first < PANEL ? (size_t)w->rows - first : PANEL;
    Cells cells = CPU(cells_make)(w->type);
    vf seen = v_set(0.0f);
    for (size_t number = 0; number < across; number++) {
        float block[BLOCK * PANEL];
        block_gather(block, load, first, live, number, &seen);
        rows_ask(load, first, number * BLOCK);
        size_t inputs = (size_t)w->cols - number * BLOCK;
        Square s = square_at(w, w->type, (int)panel, (int)number);
        CPU(block_quantize)((unsigned char *)s.block, &cells, block,
                            inputs < BLOCK ? (int)inputs : BLOCK);
    }
    watched(load, seen);
}

/* A panel's blocks, reordered. */
static void arrange_panel(void *context, int64_t panel)
{
    Load *load = context;
    frozen *w = load->to;
    size_t across = blocks_across(w), first = (size_t)panel * PANEL;
    size_t live = (size_t)w->rows - first < PANEL ? (size_t)w->rows - first : PANEL;
    TypeInfo info = dtype_info(load->type);
    size_t count = (size_t)w->cols / (size_t)info.block, step = count * info.block_bytes;
    const unsigned char *rows = (const unsigned char *)load->from + first * step;
    if (!blocks_finite(rows, load->type, live * count, info.block_bytes))
        atomic_store_explicit(&load->bad, 1, memory_order_relaxed);
    for (size_t number = 0; number < across; number++)
        CPU(block_arrange)(w, (int)panel, (int)number, rows, step, (int)live, load->type);
}

int CPU(frozen_load)(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                     int cols)
{
    assert(dtype_loads(kept, type) && (!dtype_packed(type) || cols % dtype_info(type).block == 0));
    to->type = kept;
    to->rows = rows;
    to->cols = cols;
    Load load = {.to = to, .from = from, .type = type};
    cpu_run(dev, (rows + PANEL - 1) / PANEL,
            dtype_packed(type)   ? arrange_panel
            : dtype_packed(kept) ? make_panel
                                 : load_panel,
            &load);
    return !atomic_load(&load.bad);
}
