/* cpu/packed.h - base weights of 8 and 4 bits: how their blocks lie in a panel, and what a code is.
 *
 *   w[n,k] = value(code)·scale(n, k/BLOCK) + offset(n, k/BLOCK)
 *
 * A panel is cut into blocks of BLOCK inputs, one behind the other, so that one stream reads all of
 * it. A block is
 *
 *   scales (PANEL) of 16 bits, then offsets (PANEL) likewise where the type has them
 *   codes: 8 bits as [k][output]; 4 bits as words [k / 8][output], whose nibble i is that of
 *   k % 8 = i. So a vector of words has eight inputs of as many outputs as it has lanes.
 *
 * A code of 4 bits is a number in a table, which is as fast for any table: one shuffle. Widening
 * gives the same float everywhere: values have few bits, so that value·scale is exact, and there
 * is at most one rounding. Weights are widened in registers or in L1 and multiplied as f32 weights
 * are, in the same order, so a product has the bits of one with the widened weight. (On cpu-bf16,
 * which rounds both sides of a product, the bits of the widened weight in bf16.)
 *
 * Error of one weight, as a share of their standard deviation, for Gaussian ones: int8 0.54 %; int4
 * 7.33 % in 4.5 bits. Other codes in blocks of 32, each with an f16 scale: NF4 7.61, integers 8.09,
 * both with the best scale of 34; as llama.cpp makes them q4_0 8.59, and q4_1, in 5 bits, 7.82; NF4
 * in blocks of 64, as bitsandbytes has it, 9.19; MXFP4 11.16. (SmolLM2's embedding, of which the
 * package has 8 bits: int4 8.1 %, q4_0 10.0, q4_1 8.4, MXFP4 11.8.) */
#ifndef TINSMITH_CPU_PACKED_H
#define TINSMITH_CPU_PACKED_H

#include "../device/dtype.h"
#include "cpu.h"
#include "simd.h"

enum {
    BLOCK = FROZEN_BLOCK,
    NIBBLES = 8, /* of a word */
    LEVELS = 16, /* of a 4-bit code */
};

_Static_assert((int)BLOCK == (int)PANEL, "a block of a panel is square");

/* The values of each 4-bit type's codes, and of int8 none (packed.c). */
extern const float CPU(levels)[DTYPES][LEVELS];

/* The type whose kernels do for this one too: q4_0 is int4 with other levels. */
static inline DType block_kind(DType type)
{
    return type == DTYPE_Q4_0 ? DTYPE_INT4 : type;
}

/* Where a type's codes begin in a block, and where the next block does. */
typedef struct Blocks {
    size_t codes, bytes;
} Blocks;

static inline Blocks blocks_of(DType type)
{
    size_t codes = 2 * PANEL * (type == DTYPE_Q4_1 ? 2 : 1);
    return (Blocks){codes, codes + (type == DTYPE_INT8 ? BLOCK : BLOCK / 2) * PANEL};
}

/* Blocks of one panel. */
static inline size_t blocks_across(const frozen *w)
{
    return ((size_t)w->cols + BLOCK - 1) / BLOCK;
}

/* Block number `block` of panel number `panel`. */
static inline const unsigned char *block_at(const frozen *w, int panel, int block)
{
    size_t number = (size_t)panel * blocks_across(w) + (size_t)block;
    return w->data + number * blocks_of(w->type).bytes;
}

/* ---- a block's vectors: outputs [x, x + VL) ---- */

static inline vf block_scale(const unsigned char *block, DType type, int x)
{
    const unsigned char *at = block + 2 * x;
    return type == DTYPE_MXFP4 ? v_load_bf16(at) : v_load_half(at);
}

static inline vf block_offset(const unsigned char *block, DType type, int x)
{
    return type == DTYPE_Q4_1 ? v_load_half(block + 2 * (PANEL + x)) : v_set(0.0f);
}

/* Inputs [8·word, 8·word + 8) of 4-bit codes. */
static inline vu block_words(const unsigned char *codes, int word, int x)
{
    vu u;
    memcpy(&u, codes + 4 * (word * PANEL + x), sizeof u);
    return u;
}

/* Input k of 8-bit codes. */
static inline vf block_bytes(const unsigned char *codes, int k, int x)
{
    return v_load_bytes(codes + k * PANEL + x);
}

/* A weight of its code's value. */
static inline vf block_value(vf value, vf scale, vf offset, DType type)
{
    return type == DTYPE_Q4_1 ? v_fma(value, scale, offset) : value * scale;
}

/* ---- packed.c ---- */

/* One block, widened and k-major, as a panel in f32 is: to[k·PANEL + output]. */
void CPU(block_widen)(float *to, const frozen *w, int panel, int block);
/* The same in bf16 pairs, as a panel in bf16 is. */
void CPU(block_widen_pairs)(float *to, const frozen *w, int panel, int block);
/* Row `row` of the weight, its `cols` numbers. */
void CPU(row_widen)(float *to, const frozen *w, int row);

/* ---- quantize.c ---- */

/* One block of the type, which is made (dtype.h), of 32 inputs of 32 outputs, from[k·PANEL +
 * output]; those from `live` on do not exist and are zeros. */
void CPU(block_quantize)(unsigned char *to, DType type, const float *from, int live);

#endif
