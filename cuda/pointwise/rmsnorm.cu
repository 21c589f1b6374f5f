/* cuda/pointwise/rmsnorm.cu - each row divided by its root mean square.
 *
 *   y[t,:] = x[t,:]·rstd[t]·w,  rstd[t] = 1/sqrt(mean(x[t,:]²) + eps)
 *   dx[t,:] = rstd·(g − x̂·mean(g·x̂)) + plus[t,:],  g = dy·w,  x̂ = x·rstd
 *
 * Forward reads T·D and writes T·D reals; backward reads 3·T·D and writes T·D; memory bound: the
 * second pass over a row finds it in L1. A short row (one head's, in the q and k norms) gets a
 * warp, a long one a block. A lane adds every 32nd or 256th group of its row in order, then a
 * butterfly adds the lanes, so the sum depends only on the row and D. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256, SHORT = 1024 /* rows up to this width get one warp */ };

/* The sum over a row's threads: WARPS warps share a row. */
template <int WARPS> __device__ static __forceinline__ float row_sum(float x, Shared<float> sums)
{
    if constexpr (WARPS == 1)
        return warp_sum(x);
    else
        return block_sum(x, sums);
}

template <int W, int WARPS>
static __global__ void __launch_bounds__(THREADS)
    rmsnorm_kernel(real *y, float *rstd, const real *x, const float *w, int T, int D, float eps)
{
    SHARED_ARRAY(float, sums, 32);
    const int threads = 32 * WARPS;
    int64_t t = (int64_t)blockIdx.x * (THREADS / threads) + threadIdx.x / threads;
    if (t >= T) return; /* exits as a whole warp or block */
    int first = (int)threadIdx.x % threads * W;
    x += t * D;
    y += t * D;
    float sum = 0.0f, v[W], scale[W];
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        for (int j = 0; j < W; j++) sum = fmaf(v[j], v[j], sum);
    }
    float r = 1.0f / sqrtf(row_sum<WARPS>(sum, sums) / (float)D + eps);
    if (first == 0) rstd[t] = r;
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        load<W>(scale, w + i);
        for (int j = 0; j < W; j++) v[j] = v[j] * r * scale[j];
        store<W>(y + i, v);
    }
}

template <int W, int WARPS>
static __global__ void __launch_bounds__(THREADS)
    rmsnorm_backward_kernel(real *dx, const real *dy, const real *x, const float *w,
                            const float *rstd, const real *plus, int T, int D)
{
    SHARED_ARRAY(float, sums, 32);
    const int threads = 32 * WARPS;
    int64_t t = (int64_t)blockIdx.x * (THREADS / threads) + threadIdx.x / threads;
    if (t >= T) return; /* exits as a whole warp or block */
    int first = (int)threadIdx.x % threads * W;
    x += t * D;
    dy += t * D;
    dx += t * D;
    if (plus) plus += t * D;
    float sum = 0.0f, v[W], g[W], scale[W], out[W], r = rstd[t];
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        load<W>(g, dy + i);
        load<W>(scale, w + i);
        for (int j = 0; j < W; j++) sum = fmaf(g[j] * scale[j], v[j], sum);
    }
    float mean = row_sum<WARPS>(sum, sums) * r / (float)D;
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        load<W>(g, dy + i);
        load<W>(scale, w + i);
        for (int j = 0; j < W; j++) out[j] = 0.0f;
        if (plus) load<W>(out, plus + i);
        for (int j = 0; j < W; j++) out[j] += r * (g[j] * scale[j] - v[j] * r * mean);
        store<W>(dx + i, out);
    }
}

void cuda_rmsnorm(Device *dev, real *y, float *rstd, const real *x, const float *w, int T, int D,
                  float eps)
{
    CudaDevice *cuda = cuda_of(dev);
    unsigned blocks = D <= SHORT ? cuda_blocks(T, THREADS / 32) : (unsigned)T;
    auto kernel = D <= SHORT ? (D % 8 ? rmsnorm_kernel<1, 1> : rmsnorm_kernel<8, 1>)
                             : (D % 8 ? rmsnorm_kernel<1, 8> : rmsnorm_kernel<8, 8>);
    LAUNCH(cuda, kernel, blocks, THREADS, 0, y, rstd, x, w, T, D, eps);
}

void cuda_rmsnorm_backward(Device *dev, real *dx, const real *dy, const real *x, const float *w,
                           const float *rstd, const real *plus, int T, int D)
{
    CudaDevice *cuda = cuda_of(dev);
    unsigned blocks = D <= SHORT ? cuda_blocks(T, THREADS / 32) : (unsigned)T;
    auto kernel = D <= SHORT
                      ? (D % 8 ? rmsnorm_backward_kernel<1, 1> : rmsnorm_backward_kernel<8, 1>)
                      : (D % 8 ? rmsnorm_backward_kernel<1, 8> : rmsnorm_backward_kernel<8, 8>);
    LAUNCH(cuda, kernel, blocks, THREADS, 0, dx, dy, x, w, rstd, plus, T, D);
}
