/* cuda/product/lane_codes.cuh - codes of 8 and 4 bits widened to bf16 in a lane's registers, as
 * operands of mma.
 *
 * A lane has the codes of one column of the weight: in a block 2i, 2i+1, 2i+8, 2i+9, and those 16
 * later. The result has the bits of widen_eight (packed.cuh), with fewer instructions.
 *
 * 4-bit codes become bytes: value·unit + bias. One instruction looks four of them up in a table of
 * eight bytes; if a code's fourth bit is set, it returns the entry's highest bit in all bits. So
 * there are two tables, one per value of that bit: one returns the byte, and the other returns 0 if
 * the highest bits of its entries are 0. Their xor is the byte. For that, both codes of an entry's
 * index must have the same highest bit: so the sign of int4's levels is not a code's fourth bit
 * (`rotated_code`).
 *
 * A byte u put into the mantissa of M is the f32 M + u/unit. Times the scale, minus (M +
 * bias/unit)·scale, it is the weight, rounded once: M is so close to u that this second product has
 * at most 24 bits, and is exact. MXFP4's scales are powers of two, so bf16 products are exact: two
 * weights at once. With an offset, M is subtracted first. */
#ifndef TINSMITH_CUDA_PRODUCT_LANE_CODES_CUH
#define TINSMITH_CUDA_PRODUCT_LANE_CODES_CUH

#include <assert.h>
#include <string.h>

#include "../weights/packed.cuh"

/* How a type's codes become numbers. */
enum CodeKind { BYTES, NIBBLES, SHIFTED, POWERS }; /* int8; int4, Q4_0; Q4_1; MXFP4 */

template <int KIND> static constexpr int BITS_OF = KIND == BYTES ? 8 : 4;
template <int KIND> static constexpr int HEADS_OF = KIND == SHIFTED ? 2 : 1; /* 16-byte heads */

struct Lookup {
    uint32_t below[2], above[2]; /* for codes below 8, and for the others */
    uint32_t magic;              /* M's bits, with room for a byte */
    float zero;                  /* M + bias / unit */
    uint32_t half, least;        /* POWERS: 1/unit and −(128 + bias)/unit, each twice in bf16 */
};

static inline uint32_t twice_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits >> 16 | (bits & 0xffff0000u);
}

static inline Lookup lookup_of(const Packed &w)
{
    Lookup found = {};
    float m = (float)(1 << 15) / (float)w.unit, share = 1.0f / (float)w.unit;
    memcpy(&found.magic, &m, 4);
    found.zero = m + (float)w.bias * share;
    found.half = twice_bf16(share);
    found.least = twice_bf16(-(float)(128 + w.bias) * share);
    for (int i = 0; i < LEVELS / 2 && w.bits == 4; i++) {
        uint32_t low = (uint32_t)(int)(w.levels[i] * (float)w.unit + (float)w.bias);
        uint32_t high = (uint32_t)(int)(w.levels[i + 8] * (float)w.unit + (float)w.bias);
        assert(low >> 7 == high >> 7);
        found.below[i / 4] |= low << 8 * (i % 4);
        found.above[i / 4] |= (high ^ (low >> 7) * 255) << 8 * (i % 4);
    }
    return found;
}

/* The bytes of the four codes in the lower half of `word`; `other` has each fourth bit inverted. */
__device__ static __forceinline__ uint32_t bytes_of_codes(const Lookup &p, uint32_t word,
                                                          uint32_t other)
{
    return bytes_of(p.below[0], p.below[1], word) ^ bytes_of(p.above[0], p.above[1], other);
}

/* The f32 M + u/unit of byte I. */
template <int I> __device__ static __forceinline__ float beside(uint32_t bytes, uint32_t magic)
{
    return __uint_as_float(bytes_of(bytes, magic, 0x7604 | I << 4));
}

/* Two weights in bf16, from bytes I and I + 1. */
template <int KIND, int I>
__device__ static __forceinline__ uint32_t widen_two(const Lookup &p, uint32_t bytes, float scale,
                                                     float offset, uint32_t power)
{
    if constexpr (KIND == POWERS) { /* bf16's 128 + u, its value, the weight */
        uint32_t two = bytes_of(bytes, 0x43434343u, I ? 0x4342 : 0x4140);
        return fma_pair(fma_pair(two, p.half, p.least), power, 0x80008000u);
    } else {
        float low = beside<I>(bytes, p.magic), high = beside<I + 1>(bytes, p.magic);
        if constexpr (KIND == SHIFTED) {
            low -= p.zero;
            high -= p.zero;
        }
        return pack(fmaf(low, scale, offset), fmaf(high, scale, offset));
    }
}

/* The four operands of two mma, from a lane's codes in a block and the block's head, one half of a
 * register. With 4 bits the codes are `first`. */
template <int KIND, bool IS_HIGH>
__device__ static __forceinline__ void widen_block(uint32_t (&to)[4], const Lookup &p,
                                                   uint32_t first, uint32_t second, uint32_t scales,
                                                   uint32_t offsets)
{
    uint32_t power = KIND == POWERS ? bytes_of(scales, 0, IS_HIGH ? 0x3232 : 0x1010) : 0;
    float scale = KIND == POWERS ? 0.0f : f32_of_f16<IS_HIGH>(scales);
    float offset = KIND == SHIFTED ? f32_of_f16<IS_HIGH>(offsets) : -p.zero * scale;
    if constexpr (KIND != BYTES) {
        uint32_t other = first ^ 0x88888888u;
        second = bytes_of_codes(p, first >> 16, other >> 16);
        first = bytes_of_codes(p, first, other);
    }
    to[0] = widen_two<KIND, 0>(p, first, scale, offset, power);
    to[1] = widen_two<KIND, 2>(p, first, scale, offset, power);
    to[2] = widen_two<KIND, 0>(p, second, scale, offset, power);
    to[3] = widen_two<KIND, 2>(p, second, scale, offset, power);
}

#endif
