/* cuda/optimizer/adamw.cu - the optimizer over flat vectors of an adapter.
 *
 *   square_sum  total += Σ g²                 reads n floats; memory bound
 *   accumulate  y += x                        reads 2·n, writes n; memory bound
 *   average     y += rate·(scale·x − y)       reads 2·n, writes n; memory bound
 *   adamw       torch.optim.AdamW's one step  reads 4·n, writes 3·n; memory bound
 *   adamw_norm  Σ w² after such a step        reads 4·n; memory bound
 *
 * AdamW rounds like torch: moments and weight in f32, fused where torch fuses, the step's
 * corrections in double and rounded once, on the host. The sum of squares is split into parts that
 * depend only on n; one block sums each part in double, and one block adds the parts in order: no
 * atomics, the same bits every time. A thread takes 4 floats, 16 bytes, if the vectors allow it. */
#include <math.h>

#include "../runtime/kernel.cuh"

enum { THREADS = 256, PART = 1 << 14, PARTS_MAX = 1024 };

/* Whether all vectors are 16-byte aligned. */
static int aligned(const void *a, const void *b, const void *c = nullptr, const void *d = nullptr,
                   const void *e = nullptr)
{
    return (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d | (uintptr_t)e) & 15) == 0;
}

static __global__ void __launch_bounds__(THREADS)
    square_sum_kernel(double *parts, const float *g, int64_t n, int64_t part)
{
    SHARED_ARRAY(double, sums, 32);
    int64_t from = blockIdx.x * part, to = from + part < n ? from + part : n;
    double sum = 0.0;
    for (int64_t i = from + threadIdx.x; i < to; i += THREADS) sum += (double)g[i] * (double)g[i];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(THREADS)
    parts_sum_kernel(double *total, const double *parts, int count)
{
    SHARED_ARRAY(double, sums, 32);
    double sum = 0.0;
    for (int i = (int)threadIdx.x; i < count; i += THREADS) sum += parts[i];
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) total[0] += sum;
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    accumulate_kernel(float *y, const float *x, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i + W <= n) {
        float a[W], b[W];
        load<W>(a, y + i);
        load<W>(b, x + i);
        for (int j = 0; j < W; j++) a[j] += b[j];
        store<W>(y + i, a);
    } else {
        for (; i < n; i++) y[i] += x[i];
    }
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    average_kernel(float *y, const float *x, int64_t n, float scale, float rate)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i + W <= n) {
        float a[W], b[W];
        load<W>(a, y + i);
        load<W>(b, x + i);
        for (int j = 0; j < W; j++) a[j] += rate * (scale * b[j] - a[j]);
        store<W>(y + i, a);
    } else {
        for (; i < n; i++) y[i] += rate * (scale * x[i] - y[i]);
    }
}

typedef struct Step {
    float scale, keep, one_beta1, beta2, one_beta2, root_correction2, eps, step_size;
} Step;

__device__ static __forceinline__ void adamw_one(float *w, float *m, float *v, float before,
                                                 float g, Step a)
{
    float gradient = a.scale * g;
    *m = __fmaf_rn(a.one_beta1, gradient - *m, *m);
    *v = __fmaf_rn(a.one_beta2 * gradient, gradient, *v * a.beta2);
    float denominator = sqrtf(*v) / a.root_correction2 + a.eps;
    if (*m == 0.0f) denominator = 1.0f; /* 0/0 with eps 0; no other result changes */
    *w = before * a.keep - a.step_size * *m / denominator;
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    adamw_kernel(float *w, float *m, float *v, const float *before, const float *g, int64_t n,
                 Step a)
{
    int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * W;
    if (i + W <= n) {
        float wi[W], mi[W], vi[W], gi[W];
        load<W>(wi, before + i);
        load<W>(mi, m + i);
        load<W>(vi, v + i);
        load<W>(gi, g + i);
        for (int j = 0; j < W; j++) adamw_one(&wi[j], &mi[j], &vi[j], wi[j], gi[j], a);
        store<W>(w + i, wi);
        store<W>(m + i, mi);
        store<W>(v + i, vi);
    } else {
        for (; i < n; i++) adamw_one(&w[i], &m[i], &v[i], before[i], g[i], a);
    }
}

/* Each block adds the squares of its part's weights after the step, like square_sum_kernel. */
static __global__ void __launch_bounds__(THREADS)
    adamw_norm_kernel(double *parts, const float *m, const float *v, const float *before,
                      const float *g, int64_t n, int64_t part, Step a)
{
    SHARED_ARRAY(double, sums, 32);
    int64_t from = blockIdx.x * part, to = from + part < n ? from + part : n;
    double sum = 0.0;
    for (int64_t i = from + threadIdx.x; i < to; i += THREADS) {
        float wi, mi = m[i], vi = v[i];
        adamw_one(&wi, &mi, &vi, before[i], g[i], a);
        wi += 0.0f * mi + 0.0f * vi; /* a NaN if one of them is not finite */
        sum += (double)wi * (double)wi;
    }
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

/* The length of a sum's parts for n numbers, and their count. */
static int64_t part_of(int64_t n, unsigned *count)
{
    int64_t part = PART;
    while (part * PARTS_MAX < n) part *= 2;
    *count = cuda_blocks(n, part);
    return part;
}

void cuda_square_sum(Device *dev, double *total, const float *g, int64_t n)
{
    CudaDevice *cuda = cuda_of(dev);
    unsigned count;
    int64_t part = part_of(n, &count);
    double *parts = (double *)cuda_scratch(cuda, PARTS_MAX * sizeof(double));
    if (!parts || !count) return;
    LAUNCH(cuda, square_sum_kernel, count, THREADS, 0, parts, g, n, part);
    LAUNCH(cuda, parts_sum_kernel, 1, THREADS, 0, total, parts, (int)count);
}

void cuda_accumulate(Device *dev, float *y, const float *x, int64_t n)
{
    int W = aligned(y, x) ? 4 : 1;
    auto kernel = W == 4 ? accumulate_kernel<4> : accumulate_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, x, n);
}

void cuda_average(Device *dev, float *y, const float *x, int64_t n, float scale, float rate)
{
    int W = aligned(y, x) ? 4 : 1;
    auto kernel = W == 4 ? average_kernel<4> : average_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, y, x, n, scale, rate);
}

static Step step_of(int step, float scale, double lr, double beta1, double beta2, double eps,
                    double weight_decay)
{
    Step a;
    a.scale = scale;
    a.keep = (float)(1.0 - lr * weight_decay);
    a.one_beta1 = (float)(1.0 - beta1);
    a.beta2 = (float)beta2;
    a.one_beta2 = (float)(1.0 - beta2);
    a.root_correction2 = (float)sqrt(1.0 - pow(beta2, step));
    a.eps = (float)eps;
    a.step_size = (float)(lr / (1.0 - pow(beta1, step)));
    return a;
}

void cuda_adamw(Device *dev, float *w, float *m, float *v, const float *before, const float *g,
                int64_t n, int step, float scale, double lr, double beta1, double beta2, double eps,
                double weight_decay)
{
    Step a = step_of(step, scale, lr, beta1, beta2, eps, weight_decay);
    int W = aligned(w, m, v, before, g) ? 4 : 1;
    auto kernel = W == 4 ? adamw_kernel<4> : adamw_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(n, THREADS * W), THREADS, 0, w, m, v, before, g, n, a);
}

void cuda_adamw_norm(Device *dev, double *total, const float *m, const float *v,
                     const float *before, const float *g, int64_t n, int step, float scale,
                     double lr, double beta1, double beta2, double eps, double weight_decay)
{
    CudaDevice *cuda = cuda_of(dev);
    Step a = step_of(step, scale, lr, beta1, beta2, eps, weight_decay);
    unsigned count;
    int64_t part = part_of(n, &count);
    double *parts = (double *)cuda_scratch(cuda, PARTS_MAX * sizeof(double));
    if (!parts || !count) return;
    LAUNCH(cuda, adamw_norm_kernel, count, THREADS, 0, parts, m, v, before, g, n, part, a);
    LAUNCH(cuda, parts_sum_kernel, 1, THREADS, 0, total, parts, (int)count);
}
