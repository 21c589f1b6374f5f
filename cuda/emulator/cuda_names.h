/* cuda/emulator/cuda_names.h - CUDA's own names that kernels use, implemented by the emulator.
 *
 * Built-in variables, vector types, bf16, barriers, shuffles, votes, atomics, and intrinsics.
 * Functions that return a struct are always inlined: kernels write it to memory, and
 * tests/support/traffic.cpp would miss a write by the called function itself. */
#ifndef TINSMITH_CUDA_EMULATOR_CUDA_NAMES_H
#define TINSMITH_CUDA_EMULATOR_CUDA_NAMES_H

#define threadIdx (emulate::gpu.now->thread)
#define blockIdx (emulate::gpu.block_index)
#define blockDim (emulate::gpu.block)
#define gridDim (emulate::gpu.grid)
#define warpSize 32

#define __syncthreads() emulate::barrier(__LINE__)

/* ---- vector types ---- */

#define VECTOR(type, name)                                                        \
    struct alignas(2 * sizeof(type)) name##2                                      \
    {                                                                             \
        type x, y;                                                                \
    };                                                                            \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4         \
    {                                                                             \
        type x, y, z, w;                                                          \
    };                                                                            \
    static __forceinline__ name##2 make_##name##2(type x, type y)                 \
    {                                                                             \
        return {x, y};                                                            \
    }                                                                             \
    static __forceinline__ name##4 make_##name##4(type x, type y, type z, type w) \
    {                                                                             \
        return {x, y, z, w};                                                      \
    }
VECTOR(float, float)
VECTOR(double, double)
VECTOR(int, int)
VECTOR(unsigned, uint)
#undef VECTOR

/* ---- bf16 ---- */

struct __nv_bfloat16 {
    uint16_t bits;
};

static inline float __bfloat162float(__nv_bfloat16 h)
{
    uint32_t bits = (uint32_t)h.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Rounds to nearest even; NaN becomes 0x7fff, as on the GPU. */
static __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return {0x7fff};
    return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

static __forceinline__ __nv_bfloat16 __float2bfloat16(float value)
{
    return __float2bfloat16_rn(value);
}

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h)
{
    return h.bits;
}

static __forceinline__ __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits)
{
    return {bits};
}

/* ---- warps ---- */

static inline void __syncwarp(unsigned mask = ~0u)
{
    emulate::check_mask(mask);
    emulate::collective("__syncwarp", (int *)nullptr, [](int **) {});
}

template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32)
{
    int self = emulate::gpu.now->index % 32;
    return emulate::exchange("__shfl_sync", mask, value,
                             (self & ~(width - 1)) | (lane & (width - 1)));
}

template <class T> static inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32)
{
    int self = emulate::gpu.now->index % 32, from = self ^ bits;
    if (from / width > self / width) from = self;
    return emulate::exchange("__shfl_xor_sync", mask, value, from);
}

template <class T> static inline T __shfl_down_sync(unsigned mask, T value, int by, int width = 32)
{
    int self = emulate::gpu.now->index % 32, from = self + by;
    return emulate::exchange("__shfl_down_sync", mask, value,
                             from / width > self / width ? self : from);
}

template <class T> static inline T __shfl_up_sync(unsigned mask, T value, int by, int width = 32)
{
    int self = emulate::gpu.now->index % 32, from = self - by;
    return emulate::exchange("__shfl_up_sync", mask, value, by > self % width ? self : from);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return emulate::ballot("__ballot_sync", mask, predicate != 0);
}

static inline int __any_sync(unsigned mask, int predicate)
{
    return emulate::ballot("__any_sync", mask, predicate != 0) != 0;
}

static inline int __all_sync(unsigned mask, int predicate)
{
    return emulate::ballot("__all_sync", mask, predicate != 0) == ~0u;
}

/* The lanes with the same value. */
template <class T> static inline unsigned __match_any_sync(unsigned mask, T value)
{
    unsigned same = 0;
    for (int lane = 0; lane < 32; lane++)
        same |= (unsigned)(__shfl_sync(mask, value, lane) == value) << lane;
    return same;
}

/* The block's votes, each with its own barrier; two more barriers make sure that the count is read
 * before it is reused. */
static inline int syncthreads_count(int predicate, int line)
{
    static int count;
    if (emulate::gpu.now->index == 0) count = 0;
    emulate::barrier(line);
    count += predicate != 0;
    emulate::barrier(line);
    int result = count;
    emulate::barrier(line);
    return result;
}
#define __syncthreads_count(predicate) syncthreads_count(predicate, __LINE__)
#define __syncthreads_or(predicate) (syncthreads_count(predicate, __LINE__) != 0)
#define __syncthreads_and(predicate) (syncthreads_count(!(predicate), __LINE__) == 0)

/* ---- atomics: fibers switch only where they wait, so these are plain ---- */

#define ATOMIC(name, result)                                        \
    template <class T, class U> static inline T name(T *at, U with) \
    {                                                               \
        T old = *at, value = (T)with;                               \
        *at = result;                                               \
        return old;                                                 \
    }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicSub, old - value)
ATOMIC(atomicExch, value)
ATOMIC(atomicMax, old > value ? old : value)
ATOMIC(atomicMin, old < value ? old : value)
ATOMIC(atomicOr, old | value)
ATOMIC(atomicAnd, old &value)
#undef ATOMIC

template <class T> static inline T atomicCAS(T *at, T expected, T value)
{
    T old = *at;
    if (old == expected) *at = value;
    return old;
}

static inline void __threadfence(void)
{
}

/* ---- intrinsics ---- */

template <class To, class From> static __forceinline__ To bits_as(From value)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To out;
    memcpy(&out, &value, sizeof out);
    return out;
}

#define __float_as_uint(x) bits_as<unsigned>((float)(x))
#define __float_as_int(x) bits_as<int>((float)(x))
#define __uint_as_float(x) bits_as<float>((unsigned)(x))
#define __int_as_float(x) bits_as<float>((int)(x))
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __frcp_rn(x) (1.0f / (float)(x))
#define __fsqrt_rn(x) sqrtf(x)
#define __fdiv_rn(x, y) ((float)(x) / (float)(y))
#define __fmul_rn(x, y) ((float)(x) * (float)(y))
#define __fadd_rn(x, y) ((float)(x) + (float)(y))
#define __fsub_rn(x, y) ((float)(x) - (float)(y))
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define rsqrtf(x) (1.0f / sqrtf(x))
#define __popc(x) __builtin_popcount(x)
#define __popcll(x) __builtin_popcountll(x)
#define __ffs(x) __builtin_ffs(x)
#define __clz(x) ((x) ? __builtin_clz(x) : 32)
#define __umulhi(x, y) ((unsigned)((uint64_t)(unsigned)(x) * (unsigned)(y) >> 32))
#define __ldg(p) (*(p))

using std::max;
using std::min;

#include "cuda_runtime.h"

#endif
