/* cuda/delta/conv.cu - the causal depthwise convolution before the delta rule, and its silu.
 *
 *   s[t,c] = Σ_j w[c,j]·x[t−CONV+1+j, c];  y = s·σ(s);  dx[t,c] = Σ_j w[c,j]·ds[t+CONV−1−j, c]
 *
 * A block has up to ROWS rows of one span. A thread walks them with the last CONV inputs of its
 * channels in registers, so each input is read once, and CONV−1 per tile once more. All CONV terms
 * are always summed, in one order, so no result depends on where spans are cut. Inputs before the
 * span come from the sequence's ring, or are zeros before position 0. If a span has several tiles,
 * a second launch updates the ring, because the first one's blocks still read it.
 *
 * Roofline: forward reads and writes T·C reals, backward reads 2·T·C and writes T·C; memory
 * bound. */
#include "../attention/attention.cuh"
#include "../../csrc/device/delta_state.h"

enum { THREADS = 64, ROWS = 32 };

typedef struct Conv {
    real *y; /* also dx */
    float *start, *ring;
    const real *x, *dy;
    const float *w;
    const Span *spans;
    int S, C, x_step; /* x_step: also of dx */
    int64_t step;
} Conv;

/* The first of this thread's W channels; C or more: it has none. */
template <int W> __device__ static __forceinline__ int channel_of_thread()
{
    return (int)(blockIdx.y * THREADS + threadIdx.x) * W;
}

/* The input of row i of a span, which may be negative. */
template <int W>
__device__ static __forceinline__ void input(float (&x)[W], const Conv &c, const Span &span, int i,
                                             int channel)
{
    int pos = span.pos + i;
    if (i >= 0)
        load<W>(x, c.x + (int64_t)(span.row + i) * c.x_step + channel);
    else if (span.state >= 0 && pos >= 0)
        load<W>(x, c.ring + span.state * c.step + (int64_t)(pos % CONV) * c.C + channel);
    else
        for (int e = 0; e < W; e++) x[e] = 0.0f;
}

template <int W>
__device__ static __forceinline__ void weights(float (&w)[W][CONV], const Conv &c, int channel)
{
    for (int e = 0; e < W; e++) load<4>(w[e], c.w + (int64_t)(channel + e) * CONV);
}

/* The inputs of row i of a span before its own, at 1 to CONV − 1. */
template <int W>
__device__ static __forceinline__ void window_begin(float (&x)[CONV][W], const Conv &c,
                                                    const Span &span, int i, int channel)
{
#pragma unroll
    for (int j = 1; j < CONV; j++) input<W>(x[j], c, span, i - CONV + j, channel);
}

/* Moves the window on to row i, and returns its sums. */
template <int W>
__device__ static __forceinline__ void window_sum(float (&sum)[W], float (&x)[CONV][W],
                                                  const float (&w)[W][CONV], const Conv &c,
                                                  const Span &span, int i, int channel)
{
#pragma unroll
    for (int j = 1; j < CONV; j++)
        for (int e = 0; e < W; e++) x[j - 1][e] = x[j][e];
    input<W>(x[CONV - 1], c, span, i, channel);
#pragma unroll
    for (int e = 0; e < W; e++) {
        sum[e] = 0.0f;
        for (int j = 0; j < CONV; j++) sum[e] = fmaf(w[e][j], x[j][e], sum[e]);
    }
}

/* Updates the sequence's ring and its page's start at the end of a span. */
template <int W>
__device__ static __forceinline__ void leave(const Conv &c, const Span &span, int channel)
{
    float *start = c.start + span.state * c.step + channel;
    float *ring = c.ring + span.state * c.step + channel, x[W];
    int last = span.pos + span.rows - 1, page = last / KV_PAGE * KV_PAGE - span.pos;
    if (page >= 0)
        for (int j = 0; j < CONV - 1; j++) {
            input<W>(x, c, span, page - CONV + 1 + j, channel);
            store<W>(start + (int64_t)j * c.C, x);
        }
    for (int i = max(span.rows - CONV, 0); i < span.rows; i++) {
        input<W>(x, c, span, i, channel);
        store<W>(ring + (int64_t)((span.pos + i) % CONV) * c.C, x);
    }
}

template <int W> static __global__ void __launch_bounds__(THREADS) conv_kernel(Conv c)
{
    int channel = channel_of_thread<W>();
    Tile tile;
    if (channel >= c.C || !tile_find<ROWS>(&tile, c.spans, c.S, {1, 0}, blockIdx.x, false)) return;
    float x[CONV][W], w[W][CONV], sum[W];
    weights<W>(w, c, channel);
    window_begin<W>(x, c, tile.span, tile.first, channel);
    for (int i = tile.first; i < tile.first + tile.count; i++) {
        window_sum<W>(sum, x, w, c, tile.span, i, channel);
        for (int e = 0; e < W; e++) sum[e] = sum[e] / (1.0f + fast_exp(-sum[e]));
        store<W>(c.y + (int64_t)(tile.span.row + i) * c.C + channel, sum);
    }
    if (tile.span.state >= 0 && tile.count == tile.span.rows) leave<W>(c, tile.span, channel);
}

/* The same for spans of several tiles, which conv_kernel leaves out. */
template <int W> static __global__ void __launch_bounds__(THREADS) conv_leave_kernel(Conv c)
{
    int channel = channel_of_thread<W>();
    Span span = c.spans[blockIdx.x];
    if (channel < c.C && span.state >= 0 && span.rows > ROWS) leave<W>(c, span, channel);
}

/* Row i's gradient follows those of the sums up to row i + CONV − 1. */
template <int W> static __global__ void __launch_bounds__(THREADS) conv_backward_kernel(Conv c)
{
    int channel = channel_of_thread<W>();
    Tile tile;
    if (channel >= c.C || !tile_find<ROWS>(&tile, c.spans, c.S, {1, 0}, blockIdx.x, false)) return;
    float x[CONV][W], w[W][CONV], slope[CONV][W] = {}, sum[W] = {}, dy[W] = {};
    weights<W>(w, c, channel);
    window_begin<W>(x, c, tile.span, tile.first, channel);
    for (int i = tile.first; i < tile.first + tile.count + CONV - 1; i++) {
        bool inside = i < tile.span.rows;
        if (inside) {
            window_sum<W>(sum, x, w, c, tile.span, i, channel);
            load<W>(dy, c.dy + (int64_t)(tile.span.row + i) * c.C + channel);
        }
#pragma unroll
        for (int e = 0; e < W; e++) {
            for (int j = CONV - 1; j > 0; j--) slope[j][e] = slope[j - 1][e];
            float s = inside ? fast_sigmoid(sum[e]) : 0.0f;
            slope[0][e] = inside ? dy[e] * (s * (1.0f + sum[e] * (1.0f - s))) : 0.0f;
        }
        if (i < tile.first + CONV - 1) continue;
        float dx[W];
#pragma unroll
        for (int e = 0; e < W; e++) {
            dx[e] = 0.0f;
            for (int j = 0; j < CONV; j++) dx[e] = fmaf(w[e][j], slope[j][e], dx[e]);
        }
        store<W>(c.y + (int64_t)(tile.span.row + i - CONV + 1) * c.x_step + channel, dx);
    }
}

void cuda_conv(Device *dev, real *y, float *start, float *ring, const real *x, const float *w,
               const Span *spans, int S, int T, int C, int x_step, int64_t step)
{
    CudaDevice *cuda = cuda_of(dev);
    Conv c = {y, start, ring, x, nullptr, w, spans, S, C, x_step, step};
    int W = C % 8 || x_step % 8 || step % 4 ? 1 : 8;
    unsigned channels = cuda_blocks(C, THREADS * W);
    auto kernel = W == 8 ? conv_kernel<8> : conv_kernel<1>;
    if (T) LAUNCH(cuda, kernel, dim3(tile_slots(T, S, 1, ROWS), channels), THREADS, 0, c);
    auto leave_kernel = W == 8 ? conv_leave_kernel<8> : conv_leave_kernel<1>;
    if (T > ROWS && ring) LAUNCH(cuda, leave_kernel, dim3(S, channels), THREADS, 0, c);
}

void cuda_conv_backward(Device *dev, real *dx, const real *dy, const real *x, const float *w,
                        const Span *spans, int S, int T, int C, int x_step)
{
    Conv c = {dx, nullptr, nullptr, x, dy, w, spans, S, C, x_step, 0};
    int W = C % 8 || x_step % 8 ? 1 : 8;
    dim3 grid(T ? tile_slots(T, S, 1, ROWS) : 0, cuda_blocks(C, THREADS * W));
    auto kernel = W == 8 ? conv_backward_kernel<8> : conv_backward_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, grid, THREADS, 0, c);
}
