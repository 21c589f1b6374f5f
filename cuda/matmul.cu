/* cuda/matmul.cu - every product of the CUDA device, and the only file that knows cuBLASLt.
 *
 *   c (M,N) = scale·a (M,K)·b (K,N) [+ bias] [+ c], a and b bf16, sums in f32, c bf16 or f32
 *
 * cuBLASLt is found at run time (cublaslt.cuh). For each weight it is asked once for an algorithm,
 * for PICK_ROWS rows, that neither splits k nor reduces between blocks, and this one serves every
 * number of rows: a row is summed in the same order of k whatever its neighbours are. The last tile
 * of rows is filled up inside the kernel, so nothing is copied to pad it; few rows (decoding) cost
 * what a whole tile of rows costs, which is free as long as reading the weight takes longer.
 * Roofline: 2·M·N·K flops, compute bound from about 300 rows on; below, one pass over b, memory
 * bound.
 *
 * LoRA's matrices are f32 and are rounded to bf16 into scratch, once a call; their gradients are
 * summed over all rows in one product and added in f32. */
#include "cuda.cuh"

#include "cublaslt.cuh"

enum { THREADS = 256 };

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
    emulate::enqueue([g] { product(g); });
}

#endif

/* ---- f32 to bf16 ---- */

template <int W>
static __global__ void __launch_bounds__(THREADS)
    narrow_kernel(real *to_a, const float *a, int64_t a_count, real *to_b, const float *b,
                  int64_t b_count)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    const float *from = blockIdx.y ? b : a;
    real *to = blockIdx.y ? to_b : to_a;
    int64_t count = blockIdx.y ? b_count : a_count;
    if (i + W <= count) {
        float v[W];
        load<W>(v, from + i);
        store<W>(to + i, v);
    } else {
        for (; i < count; i++) to[i] = to_real(from[i]);
    }
}

/* Two f32 vectors as bf16 in scratch, of which b may be NULL; the second begins at a multiple of
 * 256 bytes. Returns NULL after a failure. */
static real *narrow(CudaDevice *cuda, const float *a, int64_t a_count, const float *b,
                    int64_t b_count, real **to_b)
{
    int64_t second = (a_count + 127) / 128 * 128;
    real *to_a = (real *)cuda_scratch(cuda, (size_t)(second + b_count) * sizeof(real));
    if (!to_a) return nullptr;
    *to_b = to_a + second;
    int W = (((uintptr_t)a | (uintptr_t)b) & 15) == 0 ? 8 : 1;
    int64_t longest = a_count > b_count ? a_count : b_count;
    dim3 grid(cuda_blocks(longest, THREADS * W), b ? 2 : 1);
    auto kernel = W == 8 ? narrow_kernel<8> : narrow_kernel<1>;
    LAUNCH(cuda, kernel, grid, THREADS, 0, to_a, a, a_count, *to_b, b, b_count);
    return to_a;
}

/* ---- the ops ---- */

void cuda_linear(Device *dev, real *y, const real *x, const frozen *w, const float *bias, int T,
                 int N, int D, int accumulate)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    Gemm g = {};
    real *none;
    if (bias && !(g.bias = narrow(cuda, bias, N, nullptr, 0, &none))) return;
    g.c = y;
    g.a = x;
    g.a_stride = D;
    g.b = frozen_data(w);
    g.b_stride = frozen_stride(D);
    g.b_by_column = true;
    g.M = T;
    g.N = N;
    g.K = D;
    g.scale = 1.0f;
    g.accumulate = accumulate;
    gemm(cuda, g);
}

void cuda_linear_backward(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int accumulate)
{
    if (T == 0) return;
    Gemm g = {};
    g.c = dx;
    g.a = dy;
    g.a_stride = N;
    g.b = frozen_data(w);
    g.b_stride = frozen_stride(D);
    g.M = T;
    g.N = D;
    g.K = N;
    g.scale = 1.0f;
    g.accumulate = accumulate;
    gemm(cuda_of(dev), g);
}

/* s = x·a;  y += scale·s·b, y in bf16 or f32 */
static void lora(CudaDevice *cuda, void *y, bool f32_out, real *s, const real *x, const float *a,
                 const float *b, int T, int N, int D, int R, float scale)
{
    if (T == 0) return;
    real *b16, *a16 = narrow(cuda, a, (int64_t)D * R, b, (int64_t)R * N, &b16);
    if (!a16) return;
    Gemm down = {};
    down.c = s;
    down.a = x;
    down.a_stride = D;
    down.b = a16;
    down.b_stride = R;
    down.M = T;
    down.N = R;
    down.K = D;
    down.scale = 1.0f;
    gemm(cuda, down);
    Gemm up = {};
    up.c = y;
    up.f32_out = f32_out;
    up.a = s;
    up.a_stride = R;
    up.b = b16;
    up.b_stride = N;
    up.M = T;
    up.N = N;
    up.K = R;
    up.scale = scale;
    up.accumulate = true;
    gemm(cuda, up);
}

void cuda_lora(Device *dev, real *y, real *s, const real *x, const float *a, const float *b, int T,
               int N, int D, int R, float scale)
{
    lora(cuda_of(dev), y, false, s, x, a, b, T, N, D, R, scale);
}

/* c (M,N) in f32 += scale·aᵀ·b, summed over T rows of a (T,M) and b (T,N) */
static void gradient(CudaDevice *cuda, float *c, const real *a, const real *b, int T, int M, int N,
                     float scale)
{
    Gemm g = {};
    g.c = c;
    g.f32_out = true;
    g.a = a;
    g.a_stride = M;
    g.a_by_column = true;
    g.b = b;
    g.b_stride = N;
    g.M = M;
    g.N = N;
    g.K = T;
    g.scale = scale;
    g.accumulate = true;
    gemm(cuda, g);
}

void cuda_lora_backward(Device *dev, real *dx, float *da, float *db, real *ds, const real *dy,
                        const real *x, const real *s, const float *a, const float *b, int T, int N,
                        int D, int R, float scale)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    real *b16, *a16 = narrow(cuda, a, (int64_t)D * R, b, (int64_t)R * N, &b16);
    if (!a16) return;
    Gemm down = {};
    down.c = ds;
    down.a = dy;
    down.a_stride = N;
    down.b = b16;
    down.b_stride = N;
    down.b_by_column = true;
    down.M = T;
    down.N = R;
    down.K = N;
    down.scale = scale;
    gemm(cuda, down);
    gradient(cuda, db, s, dy, T, R, N, scale);
    gradient(cuda, da, x, ds, T, D, R, 1.0f);
    if (!dx) return;
    Gemm up = {};
    up.c = dx;
    up.a = ds;
    up.a_stride = R;
    up.b = a16;
    up.b_stride = R;
    up.b_by_column = true;
    up.M = T;
    up.N = D;
    up.K = R;
    up.scale = 1.0f;
    up.accumulate = true;
    gemm(cuda, up);
}

void cuda_head(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    if (T == 0) return;
    Gemm g = {};
    g.c = logits;
    g.f32_out = true;
    g.a = x;
    g.a_stride = D;
    g.b = frozen_data(w);
    g.b_stride = frozen_stride(D);
    g.b_by_column = true;
    g.M = T;
    g.N = V;
    g.K = D;
    g.scale = 1.0f;
    gemm(cuda_of(dev), g);
}

void cuda_head_lora(Device *dev, float *logits, real *s, const real *x, const float *a,
                    const float *b, int T, int V, int D, int R, float scale)
{
    lora(cuda_of(dev), logits, true, s, x, a, b, T, V, D, R, scale);
}
