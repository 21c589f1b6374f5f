/* cuda/pointwise/swiglu.cu - the gated unit of the feed-forward layer.
 *
 *   y = gate·σ(gate)·up
 *   dup = dy·gate·σ,  dgate = dy·up·σ·(1 + gate·(1 − σ)),  σ = σ(gate)
 *
 * and the same times a share per row, whose gradient is Σ dy·gate·σ·up. With a limit the unit is
 * gpt-oss's: gate·σ(1.702·gate)·(up + 1), gate clamped to at most the limit and up to ±limit.
 *
 * Forward reads 2·T·F and writes T·F reals; backward reads 3·T·F and writes 2·T·F; memory bound. A
 * thread has some elements of a row; in backward with shares a block has a row. A thread loads all
 * its elements before it stores any, so that gradients may overwrite their inputs. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256, ROW_THREADS = 128 };

#define SLOPE 1.702f /* in gpt-oss's sigmoid */

/* min(x, limit), but NaN stays NaN; fminf would return the limit. */
__device__ static __forceinline__ float upto(float x, float limit)
{
    return x > limit ? limit : x;
}

/* x clamped to ±limit; NaN stays NaN. */
__device__ static __forceinline__ float within(float x, float limit)
{
    return x < -limit ? -limit : upto(x, limit);
}

/* gate·σ·up, or gpt-oss's unit if LIMITED. */
template <bool LIMITED> __device__ static __forceinline__ float unit(float g, float u, float limit)
{
    if constexpr (LIMITED) {
        g = upto(g, limit);
        return g * fast_sigmoid(SLOPE * g) * (within(u, limit) + 1.0f);
    } else {
        return g * fast_sigmoid(g) * u;
    }
}

/* With d the gradient of share·unit: u becomes dup and g dgate; returns Σ d·unit. A clamped number
 * has no gradient. */
template <int W, bool LIMITED>
__device__ static __forceinline__ float gradients(float (&g)[W], float (&u)[W], const float (&d)[W],
                                                  float share, float limit)
{
    constexpr float slope = LIMITED ? SLOPE : 1.0f;
    float sum = 0.0f;
    for (int j = 0; j < W; j++) {
        float x = LIMITED ? upto(g[j], limit) : g[j];
        float factor = LIMITED ? within(u[j], limit) + 1.0f : u[j];
        float s = fast_sigmoid(slope * x), act = x * s, own = d[j] * share;
        bool over = LIMITED && g[j] > limit, outside = LIMITED && fabsf(u[j]) > limit;
        sum += d[j] * (act * factor);
        g[j] = over ? 0.0f : own * factor * (s * (1.0f + slope * x * (1.0f - s)));
        u[j] = outside ? 0.0f : own * act;
    }
    return sum;
}

/* A thread's W elements: their row, and their offsets in y and in gate. */
struct SwigluPiece {
    unsigned row;
    int64_t i, at;
};

template <int W> __device__ static __forceinline__ SwigluPiece piece_of(int F, int64_t step)
{
    unsigned piece = blockIdx.x * THREADS + threadIdx.x, pieces = (unsigned)(F / W);
    unsigned row = piece / pieces; /* 32 bits: a 64-bit division would take as long as the rest */
    return {row, (int64_t)piece * W, row * step + (int64_t)(piece % pieces) * W};
}

/* Their offset in up, whose row stride may differ. */
__device__ static __forceinline__ int64_t up_at(const SwigluPiece &p, int64_t gate_step,
                                                int64_t up_step)
{
    return p.at + p.row * (up_step - gate_step);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_kernel(real *y, const real *gate, const real *up, int T, int F, int64_t gate_step,
                  int64_t up_step)
{
    SwigluPiece p = piece_of<W>(F, gate_step);
    if (p.row >= (unsigned)T) return;
    float g[W], u[W];
    load<W>(g, gate + p.at);
    load<W>(u, up + up_at(p, gate_step, up_step));
    for (int j = 0; j < W; j++) u[j] = g[j] * fast_sigmoid(g[j]) * u[j];
    store<W>(y + p.i, u);
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(real *dgate, real *dup, const real *dy, const real *gate, const real *up,
                           int T, int F, int64_t gate_step, int64_t up_step)
{
    SwigluPiece p = piece_of<W>(F, gate_step);
    if (p.row >= (unsigned)T) return;
    int64_t at = up_at(p, gate_step, up_step);
    float d[W], g[W], u[W];
    load<W>(d, dy + p.i);
    load<W>(g, gate + p.at);
    load<W>(u, up + at);
    gradients<W, false>(g, u, d, 1.0f, 0.0f);
    store<W>(dgate + p.at, g);
    store<W>(dup + at, u);
}

/* Elements per thread: 16 bytes if all rows are 16-byte aligned. Several strides are passed or'ed
 * together. */
static int width_of(int F, int step)
{
    return F % 8 || step % 8 ? 1 : 8;
}

void cuda_swiglu(Device *dev, real *y, const real *gate, const real *up, int T, int F,
                 int gate_step, int up_step)
{
    int64_t n = (int64_t)T * F;
    int W = width_of(F, gate_step | up_step);
    auto kernel = W == 8 ? swiglu_kernel<8> : swiglu_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, gate, up, T, F,
           (int64_t)gate_step, (int64_t)up_step);
}

void cuda_swiglu_backward(Device *dev, real *dgate, real *dup, const real *dy, const real *gate,
                          const real *up, int T, int F, int gate_step, int up_step)
{
    int64_t n = (int64_t)T * F;
    int W = width_of(F, gate_step | up_step);
    auto kernel = W == 8 ? swiglu_backward_kernel<8> : swiglu_backward_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, dgate, dup, dy, gate, up,
           T, F, (int64_t)gate_step, (int64_t)up_step);
}

/* ---- with a share per row ---- */

template <int W, bool LIMITED>
static __global__ void __launch_bounds__(THREADS)
    swiglu_share_kernel(real *y, const real *gate, const real *up, const float *share,
                        const int32_t *pair, int P, int F, int64_t step, float limit)
{
    SwigluPiece p = piece_of<W>(F, step);
    if (p.row >= (unsigned)P) return;
    float g[W], u[W], own = share[pair ? pair[p.row] : p.row];
    load<W>(g, gate + p.at);
    load<W>(u, up + p.at);
    for (int j = 0; j < W; j++) u[j] = own * unit<LIMITED>(g[j], u[j], limit);
    store<W>(y + p.i, u);
}

template <int W, bool LIMITED>
static __global__ void __launch_bounds__(ROW_THREADS)
    swiglu_share_backward_kernel(real *dgate, real *dup, float *dshare, const real *dy,
                                 const real *gate, const real *up, const float *share,
                                 const int32_t *pair, int F, int64_t step, float limit)
{
    SHARED_ARRAY(float, sums, 32);
    int64_t row = blockIdx.x, number = pair ? pair[row] : row;
    float own = share[number], sum = 0.0f;
    for (int i = threadIdx.x * W; i < F; i += ROW_THREADS * W) {
        float d[W], g[W], u[W];
        int64_t at = row * step + i;
        load<W>(d, dy + row * F + i);
        load<W>(g, gate + at);
        load<W>(u, up + at);
        sum += gradients<W, LIMITED>(g, u, d, own, limit);
        store<W>(dgate + at, g);
        store<W>(dup + at, u);
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) dshare[number] = sum;
}

void cuda_swiglu_share(Device *dev, real *y, const real *gate, const real *up, const float *share,
                       const int32_t *pair, int P, int F, int step, float limit)
{
    int W = width_of(F, step);
    auto plain = W == 8 ? swiglu_share_kernel<8, false> : swiglu_share_kernel<1, false>;
    auto limited = W == 8 ? swiglu_share_kernel<8, true> : swiglu_share_kernel<1, true>;
    auto kernel = limit == 0.0f ? plain : limited;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)P * F, THREADS * W), THREADS, 0, y, gate, up,
           share, pair, P, F, (int64_t)step, limit);
}

void cuda_swiglu_share_backward(Device *dev, real *dgate, real *dup, float *dshare, const real *dy,
                                const real *gate, const real *up, const float *share,
                                const int32_t *pair, int P, int F, int step, float limit)
{
    bool one = width_of(F, step) == 1;
    auto plain =
        one ? swiglu_share_backward_kernel<1, false> : swiglu_share_backward_kernel<8, false>;
    auto limited =
        one ? swiglu_share_backward_kernel<1, true> : swiglu_share_backward_kernel<8, true>;
    auto kernel = limit == 0.0f ? plain : limited;
    LAUNCH(cuda_of(dev), kernel, P, ROW_THREADS, 0, dgate, dup, dshare, dy, gate, up, share, pair,
           F, (int64_t)step, limit);
}
