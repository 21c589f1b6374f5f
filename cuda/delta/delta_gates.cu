/* cuda/delta/delta_gates.cu - how much of a row enters a gated delta network's state, and how much
 * of the state stays: one number each per row and value head.
 *
 *   beta = σ(b);  decay = −e^rate·softplus(a + bias)
 *   db = dbeta·β·(1 − β);  da = −ddecay·e^rate·σ(a + bias)
 *
 * Reads 4·T·H bytes and writes 8·T·H, backward the reverse and more; negligible. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256 };

__device__ static __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static __global__ void __launch_bounds__(THREADS)
    delta_gates_kernel(float *beta, float *decay, const real *b, const real *a, const float *rate,
                       const float *bias, int64_t n, int H, int step)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    int h = (int)(i % H);
    int64_t at = i / H * step + h;
    float x = f32(a[at]) + bias[h];
    beta[i] = sigmoid(f32(b[at]));
    decay[i] = -expf(rate[h]) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
}

static __global__ void __launch_bounds__(THREADS)
    delta_gates_backward_kernel(real *db, real *da, const float *dbeta, const float *ddecay,
                                const real *b, const real *a, const float *rate, const float *bias,
                                int64_t n, int H, int step)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    int h = (int)(i % H);
    int64_t at = i / H * step + h;
    float s = sigmoid(f32(b[at]));
    db[at] = to_real(dbeta[i] * (s * (1.0f - s)));
    da[at] = to_real(-ddecay[i] * expf(rate[h]) * sigmoid(f32(a[at]) + bias[h]));
}

void cuda_delta_gates(Device *dev, float *beta, float *decay, const real *b, const real *a,
                      const float *rate, const float *bias, int T, int H, int step)
{
    int64_t n = (int64_t)T * H;
    LAUNCH(cuda_of(dev), delta_gates_kernel, cuda_blocks(n, THREADS), THREADS, 0, beta, decay, b, a,
           rate, bias, n, H, step);
}

void cuda_delta_gates_backward(Device *dev, real *db, real *da, const float *dbeta,
                               const float *ddecay, const real *b, const real *a, const float *rate,
                               const float *bias, int T, int H, int step)
{
    int64_t n = (int64_t)T * H;
    LAUNCH(cuda_of(dev), delta_gates_backward_kernel, cuda_blocks(n, THREADS), THREADS, 0, db, da,
           dbeta, ddecay, b, a, rate, bias, n, H, step);
}
