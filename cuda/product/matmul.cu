/* cuda/product/matmul.cu - products with one bf16 matrix, and the only file that uses cuBLASLt.
 * gemm_quantized.cu has those with a weight of 8 or 4 bits.
 *
 *   c (M,N) = a (M,K)·b (K,N) [+ bias] [+ plus], a and b bf16, sums in f32, c bf16 or f32
 *
 * cuBLASLt is found at run time (cublaslt.cuh). For each shape of a weight one algorithm is picked,
 * for PICK_ROWS rows, that neither splits k nor reduces between blocks. This reference can serve
 * every number of rows, which makes the product batch-invariant: a row's sums over k have the same
 * order with any other rows. Each bucket of rows can have a faster algorithm with the reference's
 * bits (buckets.cuh). The kernel pads the last tile of rows itself, so nothing is copied. Without a
 * reference (odd widths and addresses, empty sums) or without cuBLASLt, our own kernel computes the
 * product (gemm.cu). Roofline: 2·M·N·K flops, compute bound from about 300 rows on; below, one pass
 * over b, memory bound. */
#include "matmul.cuh"

#include "buckets.cuh"
#include "cublaslt.cuh"
#include "gemm_quantized.cuh"
#include "../weights/weight_load.cuh"

/* c = a·b by cuBLASLt, or if it can't, by our own kernel. */
static void gemm(CudaDevice *cuda, const Gemm &g)
{
    if (cuda->status) return;
    bool ours = !cuda->matmul->handle || g.K == 0 || (g.a_by_column && g.b_by_column);
    if (cuda->rehearsing) {
        if (!ours) lt_want(cuda, g);
        return;
    }
    if (ours || !lt_product(cuda, g)) own_product(cuda, g);
}

/* A f32 vector as bf16. */
static const real *narrow(CudaDevice *cuda, real *to, const float *from, int64_t count)
{
    cuda_narrow(&cuda->base, to, from, count);
    return to;
}

/* ---- the ops ---- */

/* A matrix, stored by rows or by columns. */
struct Side {
    const real *at;
    int64_t stride;
    bool by_column;
};

static Side as_is(const real *a, int64_t width)
{
    return {a, width, false};
}

/* wᵀ of a weight (N,D), and w itself. */
static Side weight_turned(const frozen *w, int D)
{
    return {frozen_data(w), frozen_stride(D), true};
}

static Side weight(const frozen *w, int D)
{
    return {frozen_data(w), frozen_stride(D), false};
}

/* c (M,N) = a·b in bf16; other options are set afterwards. */
static Gemm gemm_of(void *c, Side a, Side b, int M, int N, int K)
{
    Gemm g = {};
    g.c = c;
    g.a = a.at;
    g.a_stride = a.stride;
    g.a_by_column = a.by_column;
    g.b = b.at;
    g.b_stride = b.stride;
    g.b_by_column = b.by_column;
    g.M = M;
    g.N = N;
    g.c_stride = N;
    g.K = K;
    return g;
}

void cuda_linear(Device *dev, real *y, const real *x, const frozen *w, const float *bias,
                 const real *plus, int T, int N, int D, int step)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    PackedCall call = packed_call(y, step, x, D, T, N, D);
    if (packed_find(cuda, w, D, &call.w)) {
        call.plus = plus;
        call.bias = bias;
        call.narrow_bias = true;
        return packed_product(cuda, call);
    }
    Gemm g = gemm_of(y, as_is(x, D), weight_turned(w, D), T, N, D);
    g.bias = bias;
    if (bias && cuda->matmul->handle) {
        real *scratch = (real *)cuda_scratch(cuda, (size_t)N * sizeof(real));
        if (cuda->status) return;
        g.narrow_bias = cuda->rehearsing ? (const real *)bias : narrow(cuda, scratch, bias, N);
    }
    g.c_stride = step;
    g.plus = plus;
    gemm(cuda, g);
}

void cuda_linear_backward(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int step, int accumulate)
{
    if (T == 0) return;
    PackedCall call = packed_call(dx, D, dy, step, T, D, N);
    if (packed_find(cuda_of(dev), w, D, &call.w)) {
        call.plus = accumulate ? dx : nullptr;
        call.across = true;
        return packed_product(cuda_of(dev), call);
    }
    Gemm g = gemm_of(dx, as_is(dy, step), weight(w, D), T, D, N);
    if (accumulate) g.plus = g.c;
    gemm(cuda_of(dev), g);
}

/* An f32 b is rounded to bf16 into scratch; a bf16 one is read in place. */
void cuda_matmul(Device *dev, float *c, const real *a, const void *b, int a_turned, int b_turned,
                 int b_bf16, int M, int N, int K, int accumulate)
{
    if (M == 0 || N == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    int64_t b_count = (int64_t)K * N;
    if (!b_bf16) {
        real *scratch = (real *)cuda_scratch(cuda, (size_t)b_count * sizeof(real));
        if (cuda->status) return;
        b = narrow(cuda, scratch, (const float *)b, b_count);
    }
    Side left = {a, a_turned ? M : K, a_turned != 0};
    Side right = {(const real *)b, b_turned ? K : N, b_turned != 0};
    Gemm g = gemm_of(c, left, right, M, N, K);
    g.f32_out = true;
    if (accumulate) g.plus = g.c;
    gemm(cuda, g);
}

void cuda_head(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    if (T == 0) return;
    PackedCall call = packed_call(logits, V, x, D, T, V, D);
    if (packed_find(cuda_of(dev), w, D, &call.w)) {
        call.f32_out = true;
        return packed_product(cuda_of(dev), call);
    }
    Gemm g = gemm_of(logits, as_is(x, D), weight_turned(w, D), T, V, D);
    g.f32_out = true;
    gemm(cuda_of(dev), g);
}
