/* device/finite.h - whether all numbers of an array or of a file's blocks are finite: no NaN, no
 * infinity.
 *
 * A NaN or infinity has an exponent of all ones. A stretch is tested as a whole, which the compiler
 * vectorizes; only one with a hit is searched. In blocks, the scales are tested, and the codes of
 * types that have codes for NaN. Memory bound. */
#ifndef TINSMITH_DEVICE_FINITE_H
#define TINSMITH_DEVICE_FINITE_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "device.h"

#define FIRST_BAD(bits, from, count, ones)                                        \
    for (int64_t at = 0; at < (count); at += 4096) {                              \
        const bits *stretch = (const bits *)(from) + at;                          \
        int64_t n = (count) - at < 4096 ? (count) - at : 4096;                    \
        bits found = 0;                                                           \
        for (int64_t i = 0; i < n; i++) found |= (stretch[i] & (ones)) == (ones); \
        if (!found) continue;                                                     \
        for (int64_t i = 0; i < n; i++)                                           \
            if ((stretch[i] & (ones)) == (ones)) return at + i;                   \
    }

/* The index of the first number that is not finite; -1: all are. */
static inline int64_t first_bad(const void *numbers, DType type, int64_t count)
{
    switch (type) {
    case DTYPE_F32: FIRST_BAD(uint32_t, numbers, count, 0x7f800000u) break;
    case DTYPE_BF16: FIRST_BAD(uint16_t, numbers, count, 0x7f80u) break;
    case DTYPE_F16: FIRST_BAD(uint16_t, numbers, count, 0x7c00u) break;
    default: break; /* blocks are not numbers */
    }
    return -1;
}

#undef FIRST_BAD

static inline int half_finite(const unsigned char *at)
{
    return (at[1] & 0x7c) != 0x7c;
}

static inline int float_finite(const unsigned char *at)
{
    return (at[3] & 0x7f) != 0x7f || !(at[2] & 0x80);
}

/* A block of MXFP4: its power of 2, then 16 bytes of two codes. No code times the power may reach
 * 2^128. A power of 255 is a NaN. */
static inline int power_finite(const unsigned char *at)
{
    int beyond = at[0] == 255 ? 0 : at[0] == 254 ? 4 : at[0] == 253 ? 6 : 8; /* 2, 4 or none */
    for (int i = 0; beyond < 8 && i < 16; i++)
        if ((at[1 + i] & 7) >= beyond || (at[1 + i] >> 4 & 7) >= beyond) return 0;
    return 1;
}

/* A block of FP8: its scale, then 32 codes, whose values go up to 448. */
static inline int bytes_finite(const unsigned char *at)
{
    float scale;
    int found = 0;
    memcpy(&scale, at, sizeof scale);
    for (int i = 0; i < 32; i++) found |= (at[4 + i] & 127) == 127;
    return !found && scale >= -FLT_MAX / 448 && scale <= FLT_MAX / 448;
}

/* Whether all numbers of `count` contiguous blocks, each of `bytes`, are finite. */
static inline int blocks_finite(const void *blocks, DType type, size_t count, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)blocks, *end = at + count * bytes;
    int finite = 1;
    for (; finite && at < end; at += bytes) {
        switch (type) {
        case DTYPE_INT8:
        case DTYPE_Q4_0: finite = half_finite(at); break;
        case DTYPE_Q4_1:
        case DTYPE_Q4_K:
        case DTYPE_Q5_K: finite = half_finite(at) && half_finite(at + 2); break;
        case DTYPE_Q6_K: finite = half_finite(at + bytes - 2); break;
        case DTYPE_MXFP4:
        case DTYPE_MXFP4_PAIRS: finite = power_finite(at); break;
        case DTYPE_FP8: finite = bytes_finite(at); break;
        case DTYPE_NF4: finite = float_finite(at); break;
        default: break;
        }
    }
    return finite;
}

#endif
