/* cuda/swiglu.cu - the gated unit of the feed-forward layer.
 *
 *   y = gate·σ(gate)·up
 *   dup = dy·gate·σ,  dgate = dy·up·σ·(1 + gate·(1 − σ)),  σ = σ(gate)
 *
 * Forward reads 2·T·F and writes T·F reals; backward reads 3·T·F and writes 2·T·F; memory bound.
 * Both work on elements, not rows. A thread loads all of its elements before it stores any, so that
 * gradients may overwrite their inputs. */
#include "cuda.cuh"

enum { THREADS = 256 };

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_kernel(real *y, const real *gate, const real *up, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float g[W], u[W];
    load<W>(g, gate + i);
    load<W>(u, up + i);
    for (int j = 0; j < W; j++) u[j] = g[j] * fast_sigmoid(g[j]) * u[j];
    store<W>(y + i, u);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(real *dgate, real *dup, const real *dy, const real *gate, const real *up,
                           int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float d[W], g[W], u[W];
    load<W>(d, dy + i);
    load<W>(g, gate + i);
    load<W>(u, up + i);
    for (int j = 0; j < W; j++) {
        float s = fast_sigmoid(g[j]), of_up = d[j] * (g[j] * s);
        g[j] = d[j] * u[j] * (s * (1.0f + g[j] * (1.0f - s)));
        u[j] = of_up;
    }
    store<W>(dgate + i, g);
    store<W>(dup + i, u);
}

void cuda_swiglu(Device *dev, real *y, const real *gate, const real *up, int T, int F)
{
    int64_t n = (int64_t)T * F;
    int W = n % 8 ? 1 : 8;
    auto kernel = W == 8 ? swiglu_kernel<8> : swiglu_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, gate, up, n);
}

void cuda_swiglu_backward(Device *dev, real *dgate, real *dup, const real *dy, const real *gate,
                          const real *up, int T, int F)
{
    int64_t n = (int64_t)T * F;
    int W = n % 8 ? 1 : 8;
    auto kernel = W == 8 ? swiglu_backward_kernel<8> : swiglu_backward_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, dgate, dup, dy, gate, up,
           n);
}
