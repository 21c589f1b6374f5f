/* cuda/head/lse.cuh - a row's logΣexp as the ops have it: two floats whose sum it is
 * (device/ops.inc).
 */
#ifndef TINSMITH_CUDA_HEAD_LSE_CUH
#define TINSMITH_CUDA_HEAD_LSE_CUH

#include "../runtime/kernel.cuh"

/* base + rest: the nearest float, and what it lacks where that could be seen. */
__device__ static __forceinline__ float2 lse_split(double base, double rest)
{
    float nearest = (float)(base + rest);
    bool whole = fabsf(nearest) < LSE_WHOLE || !isfinite(nearest);
    return make_float2(nearest, whole ? 0.0f : (float)(base - (double)nearest + rest));
}

/* Row t's. A caller's array need not lie at a multiple of 8 bytes. */
__device__ static __forceinline__ float2 lse_of(const float *lse, int64_t t)
{
    return make_float2(lse[2 * t], lse[2 * t + 1]);
}

#endif
