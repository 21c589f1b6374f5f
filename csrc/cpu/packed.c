/* cpu/packed.c - widens blocks of 8- and 4-bit weights (packed.h).
 *
 * Roofline: 576 to 1,088 bytes in, 4 KB out to L1; two to four instructions for VL weights. */
#include "packed.h"

const float CPU(levels)[DTYPES][LEVELS] = {
    /* Lloyd's levels for Gaussian weights whose scale is quantize.c's choice, in sixteenths. */
    [DTYPE_INT4] = {-127 / 16.0f, -101 / 16.0f, -79 / 16.0f, -62 / 16.0f, -47 / 16.0f, -33 / 16.0f,
                    -21 / 16.0f, -9 / 16.0f, 2 / 16.0f, 13 / 16.0f, 24 / 16.0f, 36 / 16.0f,
                    49 / 16.0f, 64 / 16.0f, 83 / 16.0f, 108 / 16.0f},
    [DTYPE_Q4_0] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7},
    [DTYPE_Q4_1] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    [DTYPE_MXFP4] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6},
};

/* Outputs [x, x + VL); a loop is made for each kind. */
static inline __attribute__((always_inline)) void widen_lanes(float *to, const unsigned char *block,
                                                              DType exact, const DType kind, int x)
{
    Blocks b = blocks_of(kind);
    vf scale = block_scale(block, kind, x), offset = block_offset(block, kind, x);
    if (kind == DTYPE_INT8) {
        for (int k = 0; k < BLOCK; k++)
            v_store(to + k * PANEL + x, block_bytes(block + b.codes, k, x) * scale);
        return;
    }
    Lookup table = v_table(CPU(levels)[exact]);
    for (int word = 0; word < BLOCK / NIBBLES; word++) {
        vu u = block_words(block + b.codes, word, x);
#pragma GCC unroll 8
        for (int i = 0; i < NIBBLES; i++) {
            vf value = v_lookup(table, u >> (4 * i));
            v_store(to + (word * NIBBLES + i) * PANEL + x, block_value(value, scale, offset, kind));
        }
    }
}

void CPU(block_widen)(float *to, const frozen *w, int panel, int block)
{
    const unsigned char *from = block_at(w, panel, block);
    DType exact = w->type;
#define WIDEN(type) \
    for (int x = 0; x < PANEL; x += VL) widen_lanes(to, from, exact, type, x)
    switch (block_kind(exact)) {
    case DTYPE_INT8: WIDEN(DTYPE_INT8); return;
    case DTYPE_Q4_1: WIDEN(DTYPE_Q4_1); return;
    case DTYPE_MXFP4: WIDEN(DTYPE_MXFP4); return;
    default: WIDEN(DTYPE_INT4);
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
    (void)to, (void)w, (void)panel, (void)block; /* no product has pairs */
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
    uint32_t bits = (uint32_t)(at[1] << 8 | at[0]) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The scalar twin of widen_lanes: one output's inputs. */
void CPU(row_widen)(float *to, const frozen *w, int row)
{
    Blocks b = blocks_of(w->type);
    int x = row % PANEL;
    for (int k0 = 0; k0 < w->cols; k0 += BLOCK) {
        const unsigned char *block = block_at(w, row / PANEL, k0 / BLOCK);
        const unsigned char *codes = block + b.codes, *at = block + 2 * x;
        float scale = w->type == DTYPE_MXFP4 ? float_of_bf16(at) : float_of_half(at);
        float offset = w->type == DTYPE_Q4_1 ? float_of_half(at + 2 * PANEL) : 0.0f;
        int live = w->cols - k0 < BLOCK ? w->cols - k0 : BLOCK;
        for (int k = 0; k < live; k++) {
            int byte = codes[4 * (k / NIBBLES * PANEL + x) + k % NIBBLES / 2];
            float value = w->type == DTYPE_INT8
                              ? (float)(int8_t)codes[k * PANEL + x]
                              : CPU(levels)[w->type][byte >> 4 * (k % 2) & (LEVELS - 1)];
            to[k0 + k] = w->type == DTYPE_Q4_1 ? value * scale + offset : value * scale;
        }
    }
}
