/* cuda/matmul.cu - every product of the CUDA device, and the only file that uses cuBLASLt.
 *
 *   c (M,N) = scale·a (M,K)·b (K,N) [+ bias] [+ c], a and b bf16, sums in f32, c bf16 or f32
 *
 * cuBLASLt is found at run time (cublaslt.cuh). For each weight it is asked once for an algorithm,
 * for PICK_ROWS rows, that neither splits k nor reduces between blocks. This one algorithm serves
 * every number of rows, which makes the product batch-invariant: a row's sums over k have the same
 * order for any neighbours. The last tile of rows is filled up inside the kernel, so nothing is
 * copied to pad it. Few rows (decoding) cost the time of a whole tile of rows, which is free as
 * long as reading the weight takes longer. Roofline: 2·M·N·K flops, compute bound from about 300
 * rows on; below, one pass over b, memory bound. */
#include "cuda.cuh"

#include "cublaslt.cuh"

/* ---- the one seam: cuBLASLt, or a host product ---- */

#ifdef CUDA_EMULATED

void matmul_open(CudaDevice *cuda)
{
    (void)cuda;
}

void matmul_close(CudaDevice *cuda)
{
    (void)cuda;
}

/* A (rows, cols) matrix in f32, turned when it is stored by columns. */
static std::vector<float> widen(const real *x, int rows, int cols, int64_t stride, bool by_column)
{
    std::vector<float> out((size_t)rows * cols);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            out[(size_t)i * cols + j] = f32(by_column ? x[j * stride + i] : x[i * stride + j]);
    return out;
}

static void product(const Gemm &g)
{
    std::vector<float> a = widen(g.a, g.M, g.K, g.a_stride, g.a_by_column);
    std::vector<float> b = widen(g.b, g.K, g.N, g.b_stride, g.b_by_column);
    std::vector<float> sum(g.N);
    for (int i = 0; i < g.M; i++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int k = 0; k < g.K; k++)
            for (int j = 0; j < g.N; j++) sum[j] += a[(size_t)i * g.K + k] * b[(size_t)k * g.N + j];
        for (int j = 0; j < g.N; j++) {
            int64_t at = (int64_t)i * g.N + j;
            float value = g.scale * sum[j] + (g.bias ? f32(g.bias[j]) : 0.0f);
            if (g.f32_out) {
                float *c = (float *)g.c + at;
                *c = g.accumulate ? *c + value : value;
            } else {
                real *c = (real *)g.c + at;
                *c = to_real(g.accumulate ? f32(*c) + value : value);
            }
        }
    }
}

static void gemm(CudaDevice *cuda, const Gemm &g)
{
    if (cuda->status || cuda->rehearsing) return;
    CUDA_CHECK(cuda, emulate::enqueue([g] { product(g); }));
}

#endif

/* A f32 vector as bf16. */
static const real *narrow(CudaDevice *cuda, real *to, const float *from, int64_t count)
{
    cuda_narrow(&cuda->base, to, from, count);
    return to;
}

/* ---- the ops ---- */

/* A matrix as it lies, or turned when it is stored by columns. */
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
    g.K = K;
    g.scale = 1.0f;
    return g;
}

void cuda_linear(Device *dev, real *y, const real *x, const frozen *w, const float *bias, int T,
                 int N, int D, int accumulate)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    Gemm g = gemm_of(y, as_is(x, D), weight_turned(w, D), T, N, D);
    if (bias) {
        real *scratch = (real *)cuda_scratch(cuda, (size_t)N * sizeof(real));
        if (!scratch) return;
        g.bias = narrow(cuda, scratch, bias, N);
    }
    g.accumulate = accumulate;
    gemm(cuda, g);
}

void cuda_linear_backward(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int accumulate)
{
    if (T == 0) return;
    Gemm g = gemm_of(dx, as_is(dy, N), weight(w, D), T, D, N);
    g.accumulate = accumulate;
    gemm(cuda_of(dev), g);
}

/* An f32 b is rounded to bf16 into scratch; a bf16 one is read where it lies. */
void cuda_matmul(Device *dev, float *c, const real *a, const void *b, int a_turned, int b_turned,
                 int b_bf16, int M, int N, int K, int accumulate)
{
    if (M == 0 || N == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    int64_t b_count = (int64_t)K * N;
    if (!b_bf16) {
        real *scratch = (real *)cuda_scratch(cuda, (size_t)b_count * sizeof(real));
        if (!scratch) return;
        b = narrow(cuda, scratch, (const float *)b, b_count);
    }
    Side left = {a, a_turned ? M : K, a_turned != 0};
    Side right = {(const real *)b, b_turned ? K : N, b_turned != 0};
    Gemm g = gemm_of(c, left, right, M, N, K);
    g.f32_out = true;
    g.accumulate = accumulate;
    gemm(cuda, g);
}

void cuda_head(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    if (T == 0) return;
    Gemm g = gemm_of(logits, as_is(x, D), weight_turned(w, D), T, V, D);
    g.f32_out = true;
    gemm(cuda_of(dev), g);
}
