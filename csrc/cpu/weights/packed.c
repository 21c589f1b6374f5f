/* cpu/weights/packed.c - widens blocks of 8- to 4-bit weights (packed.h).
 *
 * Roofline: 576 to 1,152 bytes in, 4 KB out to L1; two to six instructions for VL weights. */
#include <assert.h>

#include "packed.h"

const float CPU(levels)[DTYPES][LEVELS] = {
    [DTYPE_INT4] = {LEVELS_INT4},
    [DTYPE_Q4_0] = {LEVELS_Q4_0},
    [DTYPE_Q4_1] = {LEVELS_WHOLE},
    [DTYPE_MXFP4] = {LEVELS_MXFP4},
    [DTYPE_NF4] = {LEVELS_NF4},
    [DTYPE_Q4_K] = {LEVELS_WHOLE},
    [DTYPE_Q5_K] = {LEVELS_WHOLE},
    [DTYPE_Q6_K] = {-32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20, -19, -18, -17},
};

const float CPU(higher)[HIGHER + 1][LEVELS] = {
    {0},
    {0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16},
    {0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48},
};

/* Outputs [x, x + VL); each kind has its own loop. */
static inline __attribute__((always_inline)) void widen_lanes(float *to, Square s, DType exact,
                                                              const DType kind, int x)
{
    const float unit = code_unit(kind);
    vf scale = square_scale(s, kind, 0, x) * unit, offset = square_offset(s, kind, x);
    if (has_bytes(kind)) {
        for (int k = 0; k < BLOCK; k++)
            v_store(to + k * PANEL + x, byte_value(s, kind, k, x) * scale);
        return;
    }
    Values values = values_of(exact, kind);
    for (int k = 0; k < BLOCK; k += NIBBLES) {
        vu low = low_word(s, kind, k, x), higher = higher_word(s, kind, k, x);
        if (k == scale_span(kind)) scale = square_scale(s, kind, k, x) * unit;
        higher >>= k * higher_bits(kind) % 32;
#pragma GCC unroll 8
        for (int i = 0; i < NIBBLES; i++) {
            vf value = code_value(values, low, higher, i, kind);
            v_store(to + (k + i) * PANEL + x, weight_of(value, scale, offset, kind));
        }
    }
}

void CPU(block_widen)(float *to, const frozen *w, int panel, int block)
{
    DType exact = w->type, kind = block_kind(exact);
    Square s = square_at(w, kind, panel, block);
#define WIDEN(type)                                                             \
    case type:                                                                  \
        for (int x = 0; x < PANEL; x += VL) widen_lanes(to, s, exact, type, x); \
        return
    switch (kind) {
        EACH_KIND(WIDEN);
    default: assert(!"a type has blocks");
    }
#undef WIDEN
}

void CPU(block_widen_pairs)(float *to, const frozen *w, int panel, int block)
{
#if defined(__AVX512BF16__)
    _Alignas(64) float wide[BLOCK * PANEL];
    CPU(block_widen)(wide, w, panel, block);
    for (int k = 0; k < BLOCK; k += 2, to += PANEL)
        for (int x = 0; x < PANEL; x += VL) {
            const float *at = wide + k * PANEL + x;
            v_store(to + x, (vf)v_join_pairs(v_load(at), v_load(at + PANEL)));
        }
#else
    (void)to, (void)w, (void)panel, (void)block; /* no product uses pairs */
#endif
}

static float float_of_half(const unsigned char *half)
{
    unsigned char lanes[2 * VL] = {half[0], half[1]};
    float wide[VL];
    v_store(wide, v_load_half(lanes));
    return wide[0];
}

static float float_of_bf16(const unsigned char *at)
{
    return f_bf16((uint16_t)(at[1] << 8 | at[0]));
}

/* One number of v_load_e4m3. */
static float float_of_e4m3(unsigned char code)
{
    unsigned char lanes[VL] = {code};
    float wide[VL];
    v_store(wide, v_load_e4m3(lanes));
    return wide[0];
}

/* The scale and offset of input k of a block, as in square_scale and square_offset. */
static float scale_of(Square s, DType type, int k, int x)
{
    if (has_groups(type))
        return float_of_half(s.group + 2 * x) *
               (float)(int8_t)s.block[k / scale_span(type) * PANEL + x];
    if (type == DTYPE_FP8) return ((const float *)s.block)[x] * E4M3_SCALE;
    if (type == DTYPE_NF4) return ((const float *)s.block)[x];
    return type == DTYPE_MXFP4 ? float_of_bf16(s.block + 2 * x) : float_of_half(s.block + 2 * x);
}

static float offset_of(Square s, DType type, int x)
{
    if (!has_offset(type)) return 0.0f;
    if (!has_groups(type)) return float_of_half(s.block + 2 * (PANEL + x));
    return -(float_of_half(s.group + 2 * (PANEL + x)) * (float)(int8_t)s.block[PANEL + x]);
}

/* The value of input k's code. */
static float value_of(Square s, DType type, int k, int x)
{
    Blocks b = blocks_of(type);
    const unsigned char *codes = s.block + b.codes, *higher = s.block + b.higher;
    if (type == DTYPE_INT8) return (float)(int8_t)codes[k * PANEL + x];
    if (type == DTYPE_FP8) return float_of_e4m3(codes[k * PANEL + x]);
    int byte = codes[4 * (k / NIBBLES * PANEL + x) + k % NIBBLES / 2];
    float value = CPU(levels)[type][byte >> 4 * (k % 2) & (LEVELS - 1)];
    int bits = higher_bits(type), at = k * bits;
    if (!bits) return value;
    byte = higher[4 * (at / 32 * PANEL + x) + at % 32 / 8];
    return value + CPU(higher)[bits][byte >> at % 8 & (LEVELS - 1)];
}

/* The scalar twin of widen_lanes: one output's inputs. */
void CPU(row_widen)(float *to, const frozen *w, int row)
{
    int x = row % PANEL;
    for (int k0 = 0; k0 < w->cols; k0 += BLOCK) {
        Square s = square_at(w, w->type, row / PANEL, k0 / BLOCK);
        float scale = scale_of(s, w->type, 0, x), offset = offset_of(s, w->type, x);
        int live = w->cols - k0 < BLOCK ? w->cols - k0 : BLOCK;
        for (int k = 0; k < live; k++) {
            if (k == scale_span(w->type)) scale = scale_of(s, w->type, k, x);
            float value = value_of(s, w->type, k, x);
            to[k0 + k] = has_offset(w->type) ? value * scale + offset : value * scale;
        }
    }
}
