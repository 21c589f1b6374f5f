/* cuda/pointwise/gelu.cu - the Gaussian error linear unit, in both of its forms.
 *
 *   tanh   y = x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2 = x·σ(2·√(2/π)·(x + 0.044715·x³))
 *   exact  y = x·(1 + erf(x/√2))/2
 *
 * Reads and writes n reals; memory bound. A thread moves 16 bytes if n allows it, and loads all its
 * elements before it stores any, so y may be x's memory. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256 };

/* 2·√(2/π), and 0.044715 times that; 1/√2. */
#define LINEAR 1.5957691216f
#define CUBIC 0.07135481627f
#define ROOT_HALF 0.7071067812f

template <bool EXACT> __device__ static __forceinline__ float unit(float x)
{
    if constexpr (EXACT)
        return 0.5f * x * (1.0f + erff(x * ROOT_HALF));
    else
        return x * fast_sigmoid(x * fmaf(x * x, CUBIC, LINEAR));
}

template <int W, bool EXACT>
static __global__ void __launch_bounds__(THREADS) gelu_kernel(real *y, const real *x, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float v[W];
    load<W>(v, x + i);
    for (int j = 0; j < W; j++) v[j] = unit<EXACT>(v[j]);
    store<W>(y + i, v);
}

void cuda_gelu(Device *dev, real *y, const real *x, int64_t n, int exact)
{
    int W = n % 8 ? 1 : 8;
    auto narrow = exact ? gelu_kernel<1, true> : gelu_kernel<1, false>;
    auto wide = exact ? gelu_kernel<8, true> : gelu_kernel<8, false>;
    auto kernel = W == 8 ? wide : narrow;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, x, n);
}
