/* cuda/pointwise/layernorm.cu - each row without its mean, divided by its standard deviation.
 *
 *   y[t,:] = (x[t,:] − mean)·rstd·w + b,  rstd = 1/sqrt(mean((x[t,:] − mean)²) + eps)
 *
 * Reads T·D reals three times and writes T·D; memory bound: the second and third pass over a row
 * find it in L1. A row's mean comes first, then the squares of what is left. A short row gets a
 * warp, a long one a block. A lane adds every 32nd or 256th group of its row in order, then a
 * butterfly adds the lanes, so the sums depend only on the row and D. */
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
    layernorm_kernel(real *y, const real *x, const float *w, const float *b, int T, int D,
                     float eps)
{
    SHARED_ARRAY(float, sums, 32);
    const int threads = 32 * WARPS;
    int64_t t = (int64_t)blockIdx.x * (THREADS / threads) + threadIdx.x / threads;
    if (t >= T) return; /* exits as a whole warp or block */
    int first = (int)threadIdx.x % threads * W;
    x += t * D;
    y += t * D;
    float sum = 0.0f, squares = 0.0f, v[W], scale[W], shift[W];
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        for (int j = 0; j < W; j++) sum += v[j];
    }
    float mean = row_sum<WARPS>(sum, sums) / (float)D;
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        for (int j = 0; j < W; j++) squares = fmaf(v[j] - mean, v[j] - mean, squares);
    }
    float r = 1.0f / sqrtf(row_sum<WARPS>(squares, sums) / (float)D + eps);
    for (int i = first; i < D; i += threads * W) {
        load<W>(v, x + i);
        load<W>(scale, w + i);
        load<W>(shift, b + i);
        for (int j = 0; j < W; j++) v[j] = (v[j] - mean) * r * scale[j] + shift[j];
        store<W>(y + i, v);
    }
}

void cuda_layernorm(Device *dev, real *y, const real *x, const float *w, const float *b, int T,
                    int D, float eps)
{
    unsigned blocks = D <= SHORT ? cuda_blocks(T, THREADS / 32) : (unsigned)T;
    auto kernel = D <= SHORT ? (D % 8 ? layernorm_kernel<1, 1> : layernorm_kernel<8, 1>)
                             : (D % 8 ? layernorm_kernel<1, 8> : layernorm_kernel<8, 8>);
    LAUNCH(cuda_of(dev), kernel, blocks, THREADS, 0, y, x, w, b, T, D, eps);
}
