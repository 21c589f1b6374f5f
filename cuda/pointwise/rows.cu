/* cuda/pointwise/rows.cu - rows looked up, blended, gathered, scattered and added, and numbers
 * between f32 and bf16.
 *
 *   embed   y[t,:] = w[ids[t],:]
 *   gather  y[i,:] = x[rows[i],:]
 *   scatter y[rows[i],:] = x[i,:]
 *   blend   y[t,:] += Σ_k weights[t,k]·table[ids[t,k],:]
 *   add     y[i] += x[i]
 *   widen, narrow  y[i] = x[i] from bf16 and to it: 6·n bytes
 *
 * The first three read T·D and write T·D reals, blend reads K·T·D floats besides; all are memory
 * bound. A thread moves 16 bytes, or one element if the rows are not 16-byte aligned. Bits that are
 * only moved are copied, so a NaN keeps its payload. */
#include "../product/gemm_quantized.cuh"
#include "../weights/weight_load.cuh"

enum { THREADS = 256 };

/* Row y_rows[t] of y becomes row x_rows[t] of x, whose row stride is x_stride; NULL: row t. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    move_kernel(real *y, const real *x, const int32_t *y_rows, const int32_t *x_rows, int T, int D,
                int64_t x_stride)
{
    int per_row = D / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * per_row) return;
    int64_t t = i / per_row, at = i % per_row * W;
    int64_t to = (y_rows ? y_rows[t] : t) * D + at;
    int64_t from = (x_rows ? x_rows[t] : t) * x_stride + at;
    if constexpr (W == 8)
        *reinterpret_cast<uint4 *>(y + to) = *reinterpret_cast<const uint4 *>(x + from);
    else
        y[to] = x[from];
}

static void rows_move(Device *dev, real *y, const real *x, const int32_t *y_rows,
                      const int32_t *x_rows, int T, int D, int64_t x_stride)
{
    if (D % 8 == 0)
        LAUNCH(cuda_of(dev), move_kernel<8>, cuda_blocks((int64_t)T * (D / 8), THREADS), THREADS, 0,
               y, x, y_rows, x_rows, T, D, x_stride);
    else
        LAUNCH(cuda_of(dev), move_kernel<1>, cuda_blocks((int64_t)T * D, THREADS), THREADS, 0, y, x,
               y_rows, x_rows, T, D, x_stride);
}

void cuda_embed(Device *dev, real *y, const int32_t *ids, const frozen *w, int T, int V, int D)
{
    (void)V;
    Packed packed;
    if (packed_find(cuda_of(dev), w, D, &packed))
        return packed_embed(cuda_of(dev), y, ids, packed, T, D);
    rows_move(dev, y, frozen_data(w), nullptr, ids, T, D, frozen_stride(D));
}

void cuda_gather(Device *dev, real *y, const real *x, const int32_t *rows, int T, int D)
{
    rows_move(dev, y, x, nullptr, rows, T, D, D);
}

void cuda_scatter(Device *dev, real *y, const real *x, const int32_t *rows, int T, int D)
{
    rows_move(dev, y, x, rows, nullptr, T, D, D);
}

/* ---- blended and added ---- */

/* Elements per thread: more than one if both arrays are 16-byte aligned. */
static int width_of(const void *y, const void *x)
{
    return (((uintptr_t)x | (uintptr_t)y) & 15) == 0 ? 8 : 1;
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    blend_kernel(real *y, const float *table, const int32_t *ids, const float *weights, int T,
                 int K, int D)
{
    int per_row = D / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * per_row) return;
    int64_t t = i / per_row, at = i % per_row * W;
    float sum[W], v[W];
    for (int j = 0; j < W; j++) sum[j] = 0.0f;
    for (int64_t k = t * K; k < (t + 1) * K; k++) {
        load<W>(v, table + (int64_t)ids[k] * D + at);
        for (int j = 0; j < W; j++) sum[j] = fmaf(weights[k], v[j], sum[j]);
    }
    y += t * D + at;
    load<W>(v, y);
    for (int j = 0; j < W; j++) v[j] += sum[j];
    store<W>(y, v);
}

void cuda_blend(Device *dev, real *y, const float *table, const int32_t *ids, const float *weights,
                int T, int K, int D)
{
    int W = D % 8 ? 1 : width_of(y, table);
    auto kernel = W == 8 ? blend_kernel<8> : blend_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * (D / W), THREADS), THREADS, 0, y, table,
           ids, weights, T, K, D);
}

template <int W>
static __global__ void __launch_bounds__(THREADS) add_kernel(real *y, const real *x, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    float sum[W], v[W];
    if (i + W <= n) {
        load<W>(sum, y + i);
        load<W>(v, x + i);
        for (int j = 0; j < W; j++) sum[j] += v[j];
        store<W>(y + i, sum);
    } else {
        for (; i < n; i++) y[i] = to_real(f32(y[i]) + f32(x[i]));
    }
}

void cuda_add(Device *dev, real *y, const real *x, int64_t n)
{
    int W = width_of(y, x);
    auto kernel = W == 8 ? add_kernel<8> : add_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, x, n);
}

/* ---- f32 and bf16 ---- */

template <int W, class To, class From>
__device__ static __forceinline__ void convert(To *to, const From *from, int64_t count)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    float one[1], all[W];
    if (i + W <= count) {
        load<W>(all, from + i);
        store<W>(to + i, all);
    } else {
        for (; i < count; i++) {
            load<1>(one, from + i);
            store<1>(to + i, one);
        }
    }
}

template <int W>
static __global__ void __launch_bounds__(THREADS) widen_kernel(float *y, const real *x, int64_t n)
{
    convert<W>(y, x, n);
}

template <int W>
static __global__ void __launch_bounds__(THREADS) narrow_kernel(real *y, const float *x, int64_t n)
{
    convert<W>(y, x, n);
}

void cuda_widen(Device *dev, float *y, const void *x, int64_t n)
{
    int W = width_of(y, x);
    auto kernel = W == 8 ? widen_kernel<8> : widen_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, (const real *)x, n);
}

void cuda_narrow(Device *dev, void *y, const float *x, int64_t n)
{
    int W = width_of(y, x);
    auto kernel = W == 8 ? narrow_kernel<8> : narrow_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, (real *)y, x, n);
}
