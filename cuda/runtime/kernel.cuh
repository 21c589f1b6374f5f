/* cuda/runtime/kernel.cuh - helpers of kernels: numbers, accesses of 16 bytes, and sums of a warp
 * or block. */
#ifndef TINSMITH_CUDA_RUNTIME_KERNEL_CUH
#define TINSMITH_CUDA_RUNTIME_KERNEL_CUH

#include "launch.cuh"

__device__ static __forceinline__ float f32(real x)
{
    return __bfloat162float(x.value);
}

/* Rounds to nearest even. */
__device__ static __forceinline__ real to_real(float x)
{
    return real{__float2bfloat16_rn(x)};
}

__device__ static __forceinline__ uint32_t real_bits(real x)
{
    return __bfloat16_as_ushort(x.value);
}

/* Two reals in one register, `low` at the lower address: the form of mma's operands. */
__device__ static __forceinline__ uint32_t pack(float low, float high)
{
    return real_bits(to_real(low)) | real_bits(to_real(high)) << 16;
}

/* Loads W elements: 8 reals or 4 floats are one access of 16 bytes and need that alignment; W = 1
 * always fits. W is a kernel's template argument, chosen by the row's width. */
template <int W> __device__ static __forceinline__ void load(float (&out)[W], const real *p)
{
    static_assert(W == 1 || W == 8, "one element or 16 bytes");
    if constexpr (W == 1) {
        out[0] = f32(*p);
    } else {
        uint4 bits = *reinterpret_cast<const uint4 *>(p);
        const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int i = 0; i < W; i++) out[i] = i % 2 ? high_of(pair[i / 2]) : low_of(pair[i / 2]);
    }
}

template <int W> __device__ static __forceinline__ void store(real *p, const float (&in)[W])
{
    static_assert(W == 1 || W == 8, "one element or 16 bytes");
    if constexpr (W == 1) {
        *p = to_real(in[0]);
    } else {
        *reinterpret_cast<uint4 *>(p) = make_uint4(pack(in[0], in[1]), pack(in[2], in[3]),
                                                   pack(in[4], in[5]), pack(in[6], in[7]));
    }
}

template <int W> __device__ static __forceinline__ void load(float (&out)[W], const float *p)
{
    static_assert(W == 1 || W % 4 == 0, "one element or multiples of 16 bytes");
    if constexpr (W == 1) {
        out[0] = *p;
    } else {
        for (int i = 0; i < W; i += 4) {
            float4 v = *reinterpret_cast<const float4 *>(p + i);
            out[i] = v.x;
            out[i + 1] = v.y;
            out[i + 2] = v.z;
            out[i + 3] = v.w;
        }
    }
}

template <int W> __device__ static __forceinline__ void store(float *p, const float (&in)[W])
{
    static_assert(W == 1 || W % 4 == 0, "one element or multiples of 16 bytes");
    if constexpr (W == 1) {
        *p = in[0];
    } else {
        for (int i = 0; i < W; i += 4)
            *reinterpret_cast<float4 *>(p + i) =
                make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
    }
}

/* e^x, as exact as fast_exp2. */
__device__ static __forceinline__ float fast_exp(float x)
{
    return fast_exp2(x * 1.4426950408889634f);
}

/* 1 / (1 + e^-x), as exact as fast_exp. */
__device__ static __forceinline__ float fast_sigmoid(float x)
{
    return 1.0f / (1.0f + fast_exp(-x));
}

/* ---- warps and blocks: every lane sums in the same order, to the same bits ---- */

template <class T> __device__ static __forceinline__ T warp_sum(T x)
{
    for (int bit = 16; bit; bit >>= 1) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

__device__ static __forceinline__ float warp_max(float x)
{
    for (int bit = 16; bit; bit >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    return x;
}

/* The block's sum in every thread. `sums` is a SHARED_ARRAY of 32; all threads must call it. */
template <class T> __device__ static inline T block_sum(T x, Shared<T> sums)
{
    int warps = (int)(blockDim.x / 32);
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    T total = sums[0];
    for (int i = 1; i < warps; i++) total += sums[i];
    return total;
}

__device__ static inline float block_max(float x, Shared<float> sums)
{
    int warps = (int)(blockDim.x / 32);
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float top = sums[0];
    for (int i = 1; i < warps; i++) top = fmaxf(top, sums[i]);
    return top;
}

#endif
