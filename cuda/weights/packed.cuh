/* cuda/weights/packed.cuh - base weights of 8 and 4 bits in device memory: the layout of a row, and
 * its codes.
 *
 *   w[n,k] = bf16(value(code)·scale(n, k/BLOCK) + offset(n, k/BLOCK))
 *
 * Rows are contiguous, so two adjacent weights of one width are one weight, as with bf16. A row is
 * split into groups of GROUP inputs; the last one may have fewer blocks. A group is
 *
 *   scales (8) of 16 bits, then offsets (8) likewise if the type has them
 *   codes of 8 or 4 bits, the lowest first
 *
 * so that 16 bytes have the scales of eight blocks, and every piece is 16-byte aligned. Scales are
 * f16, MXFP4's bf16. Scales past the last input are zeros.
 *
 * Codes have the order of tensor cores: of each 16 inputs, lane i of a quad multiplies 2i, 2i+1,
 * 2i+8 and 2i+9. So word i of each 16 bytes has those, for 16 inputs or (4 bits) for twice 16, and
 * one ldmatrix gives every lane of a warp its own codes. An 8-bit code has 128 added. A 4-bit code
 * is rotated: its highest bit, mostly a sign, comes last (lane_codes.cuh says why).
 *
 * A code is widened in f32, as on the CPU (cpu/weights/packed.h), and rounded to bf16: so a weight
 * here is the CPU's number in bf16. A table on the host has each weight's type by its address
 * (weight_load.cu). */
#ifndef TINSMITH_CUDA_WEIGHTS_PACKED_CUH
#define TINSMITH_CUDA_WEIGHTS_PACKED_CUH

#include "../runtime/kernel.cuh"
#include "frozen.cuh"

extern "C" {
#include "../../csrc/device/dtype.h"
}
#include "../../csrc/device/levels.h"

enum {
    BLOCK = FROZEN_BLOCK,
    GROUP = 8 * BLOCK, /* inputs whose scales are adjacent */
    EIGHT = 8,         /* inputs widened at once */
};

/* A weight of blocks. */
struct Packed {
    const unsigned char *data;
    int64_t row; /* row stride in bytes */
    DType type;
    int head; /* bytes before a group's codes */
    int bits; /* of a code */
    int unit; /* a code's value times this is an integer, not negative after adding `bias` */
    int bias;
    float levels[LEVELS]; /* in the order of codes here */
};

/* Bytes of a row of an array of that type. */
static inline int64_t packed_source_row(DType type, int cols)
{
    switch (type) {
    case DTYPE_F32: return (int64_t)cols * 4;
    case DTYPE_INT8: return (int64_t)cols / BLOCK * (2 + BLOCK);
    case DTYPE_Q4_0: return (int64_t)cols / BLOCK * (2 + BLOCK / 2);
    case DTYPE_Q4_1: return (int64_t)cols / BLOCK * (4 + BLOCK / 2);
    case DTYPE_MXFP4:
    case DTYPE_MXFP4_PAIRS: return (int64_t)cols / BLOCK * (1 + BLOCK / 2);
    default: return (int64_t)cols * 2;
    }
}

/* ---- in kernels ---- */

/* A finite f16 as f32. */
__device__ static __forceinline__ float f32_of_half(uint32_t half)
{
    return __uint_as_float((half & 0x8000) << 16 | (half & 0x7fff) << 13) * 0x1p112f;
}

/* The offset in a row of the head of input k's group, in bytes. */
__host__ __device__ static __forceinline__ int64_t group_at(int head, int bits, int k)
{
    return (int64_t)(k / GROUP) * (head + GROUP / 8 * bits);
}

/* A 4-bit code as stored here. */
__host__ __device__ static __forceinline__ uint32_t rotated_code(uint32_t code)
{
    return (code << 1 | code >> 3) & 15;
}

/* The input, of a block's 32, whose code is at index `place`. */
__device__ static __forceinline__ int input_of(int bits, int place)
{
    int word = 32 / bits, i = place % word, part = place % (4 * word) / word;
    return place / (4 * word) * (4 * word) + 2 * part + i % 2 + i / 2 * 8;
}

/* Eight weights of a block in bf16, two for each register: of inputs 2i and 2i+1, and of those 8,
 * 16 and 24 later. `codes` are the block's, `block` is its index in the group with that head. A
 * missing offset is −0, which changes no number. */
template <int BITS>
__device__ static __forceinline__ uint4 widen_eight(const Packed &p, const unsigned char *head,
                                                    int block, const unsigned char *codes, int i,
                                                    Shared<float> levels)
{
    const uint16_t *heads = reinterpret_cast<const uint16_t *>(head);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(codes) + i;
    uint32_t half = heads[block];
    float w[EIGHT], scale, offset = -0.0f;
    scale = p.type == DTYPE_MXFP4 ? __uint_as_float(half << 16) : f32_of_half(half);
    if constexpr (BITS == 8) {
        const uint32_t word[2] = {words[0], words[4]};
#pragma unroll
        for (int e = 0; e < EIGHT; e++) {
            uint32_t byte = word[e / 4] >> 8 * (e % 4) & 255; /* below, 2²³ + byte */
            w[e] = (__uint_as_float(0x4b000000u | byte) - (float)((1 << 23) + 128)) * scale;
        }
    } else {
        uint32_t word = words[0];
        if (p.head > 16) offset = f32_of_half(heads[8 + block]);
#pragma unroll
        for (int e = 0; e < EIGHT; e++) w[e] = fmaf(levels[word >> 4 * e & 15], scale, offset);
    }
    return make_uint4(pack(w[0], w[1]), pack(w[2], w[3]), pack(w[4], w[5]), pack(w[6], w[7]));
}

#endif
