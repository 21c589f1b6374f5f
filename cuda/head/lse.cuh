/* cuda/head/lse.cuh - a row's logΣexp in the ops' form: the sum of two floats (device/ops.inc). */
#ifndef TINSMITH_CUDA_HEAD_LSE_CUH
#define TINSMITH_CUDA_HEAD_LSE_CUH

#include "../runtime/kernel.cuh"

/* base + rest as the nearest float and its rounding error (0 below LSE_WHOLE). */
__device__ static __forceinline__ float2 lse_split(double base, double rest)
{
    float nearest = (float)(base + rest);
    bool whole = fabsf(nearest) < LSE_WHOLE || !isfinite(nearest);
    return make_float2(nearest, whole ? 0.0f : (float)(base - (double)nearest + rest));
}

/* Row t's. A caller's array need not be 8-byte aligned. */
__device__ static __forceinline__ float2 lse_of(const float *lse, int64_t t)
{
    return make_float2(lse[2 * t], lse[2 * t + 1]);
}

#endif
