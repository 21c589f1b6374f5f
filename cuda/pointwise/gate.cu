/* cuda/pointwise/gate.cu - gates: rows split into halves and joined again, the product with a
 * sigmoid, a sigmoid alone, and attention's sink.
 *
 *   halve    a[t,:], b[t,:] = the halves of x[t,:];  join  its reverse
 *   gate     y = x·σ(g);  dx = dy·σ,  dg = dy·x·σ·(1 − σ),  σ = σ(g)
 *   sigmoid  y = σ(x);  dx = dy·y·(1 − y)
 *   sink     y ← y·σ(lse − sink);  lse ← log(e^lse + e^sink)
 *
 * halve and join read and write 2·T·E reals; gate reads 2·T·D and writes T·D, its backward reads
 * 3·T·D and writes 2·T·D; memory bound. sigmoid has one number per row, so one per thread. In sink
 * a warp takes a row, because all of the row needs the lse that it replaces: 2·T·H·E reals read and
 * written. A thread moves 16 bytes if rows allow it, and loads all its elements before it stores
 * any, so that dx may be dy's memory. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256 };

/* Copies pieces between whole rows (T,2E) and their halves: from x with TO_HALVES, else to x. */
template <int W, bool TO_HALVES>
static __global__ void __launch_bounds__(THREADS)
    halves_kernel(real *x, real *a, real *b, int64_t pieces, int per_half)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= pieces) return;
    int64_t row = i / (2 * per_half), at = i - row * 2 * per_half;
    real *half =
        at < per_half ? a + (row * per_half + at) * W : b + (row * per_half + at - per_half) * W;
    real *to = TO_HALVES ? half : x + i * W;
    const real *from = TO_HALVES ? x + i * W : half;
    if constexpr (W == 8)
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
    else
        *to = *from;
}

template <bool TO_HALVES>
static void halves_move(Device *dev, real *x, real *a, real *b, int T, int E)
{
    int W = E % 8 ? 1 : 8, per_half = E / W;
    int64_t pieces = (int64_t)T * 2 * per_half;
    auto kernel = W == 8 ? halves_kernel<8, TO_HALVES> : halves_kernel<1, TO_HALVES>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(pieces, THREADS), THREADS, 0, x, a, b, pieces,
           per_half);
}

void cuda_halve(Device *dev, real *a, real *b, const real *x, int T, int E)
{
    halves_move<true>(dev, const_cast<real *>(x), a, b, T, E);
}

void cuda_join(Device *dev, real *x, const real *a, const real *b, int T, int E)
{
    halves_move<false>(dev, x, const_cast<real *>(a), const_cast<real *>(b), T, E);
}

/* ---- the product with a sigmoid ---- */

template <int W>
static __global__ void __launch_bounds__(THREADS)
    gate_kernel(real *y, const real *x, const real *gate, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float v[W], g[W];
    load<W>(v, x + i);
    load<W>(g, gate + i);
    for (int j = 0; j < W; j++) v[j] *= fast_sigmoid(g[j]);
    store<W>(y + i, v);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    gate_backward_kernel(real *dx, real *dgate, const real *dy, const real *x, const real *gate,
                         int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i >= n) return;
    float d[W], v[W], g[W];
    load<W>(d, dy + i);
    load<W>(v, x + i);
    load<W>(g, gate + i);
    for (int j = 0; j < W; j++) {
        float s = fast_sigmoid(g[j]), of_x = d[j] * s;
        g[j] = of_x * v[j] * (1.0f - s);
        d[j] = of_x;
    }
    store<W>(dx + i, d);
    store<W>(dgate + i, g);
}

void cuda_gate(Device *dev, real *y, const real *x, const real *gate, int T, int D)
{
    int64_t n = (int64_t)T * D;
    int W = n % 8 ? 1 : 8;
    auto kernel = W == 8 ? gate_kernel<8> : gate_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, x, gate, n);
}

void cuda_gate_backward(Device *dev, real *dx, real *dgate, const real *dy, const real *x,
                        const real *gate, int T, int D)
{
    int64_t n = (int64_t)T * D;
    int W = n % 8 ? 1 : 8;
    auto kernel = W == 8 ? gate_backward_kernel<8> : gate_backward_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, dx, dgate, dy, x, gate,
           n);
}

/* ---- a sigmoid alone ---- */

static __global__ void __launch_bounds__(THREADS) sigmoid_kernel(float *y, const real *x, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) y[i] = fast_sigmoid(f32(x[i]));
}

static __global__ void __launch_bounds__(THREADS)
    sigmoid_backward_kernel(real *dx, const float *dy, const float *y, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) dx[i] = to_real(dy[i] * (y[i] * (1.0f - y[i])));
}

void cuda_sigmoid(Device *dev, float *y, const real *x, int64_t n)
{
    LAUNCH(cuda_of(dev), sigmoid_kernel, cuda_blocks(n, THREADS), THREADS, 0, y, x, n);
}

void cuda_sigmoid_backward(Device *dev, real *dx, const float *dy, const float *y, int64_t n)
{
    LAUNCH(cuda_of(dev), sigmoid_backward_kernel, cuda_blocks(n, THREADS), THREADS, 0, dx, dy, y,
           n);
}

/* ---- a sink per head ---- */

static __global__ void __launch_bounds__(THREADS)
    sink_kernel(real *y, float *lse, const float *sinks, int64_t rows, int H, int E)
{
    int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float own = lse[row], sink = sinks[row % H], kept = fast_sigmoid(own - sink);
    y += row * E;
    for (int i = threadIdx.x % 32; i < E; i += 32) y[i] = to_real(kept * f32(y[i]));
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        lse[row] = fmaxf(own, sink) + log1pf(expf(fminf(own, sink) - fmaxf(own, sink)));
}

void cuda_sink(Device *dev, real *y, float *lse, const float *sinks, int T, int H, int E)
{
    int64_t rows = (int64_t)T * H;
    LAUNCH(cuda_of(dev), sink_kernel, cuda_blocks(rows, THREADS / 32), THREADS, 0, y, lse, sinks,
           rows, H, E);
}
