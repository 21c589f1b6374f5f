/* cuda/optimizer/gram.cu - Gram matrices of LoRA's factors, and products of factors with small
 * matrices, in double.
 *
 *   gram  c (R,R) += xᵀ·x of x (n,R)          n·R² multiply-adds; latency bound
 *   mix   y = before − x·k of x, y (n,R)      n·R² multiply-adds; compute bound
 *
 * and the same for transposed x (R,n). Both are for Dimuon (model/optimizers/dimuon.c): a Gram
 * matrix has the squares of singular values, so in f32 the small ones would be lost. A block has
 * SIDE × SIDE elements of the result, one per thread, and uses shared memory: gram takes DEEP rows
 * of x at a time, so that each thread has several loads in flight. One thread sums an element, in
 * order: the same bits every time. There are few blocks, because R is small; splitting n would need
 * sums of parts. */
#include "../runtime/kernel.cuh"

enum { SIDE = 16, DEEP = 64, THREADS = SIDE * SIDE };

/* x's element (t, r), for x (n,R) or, when turned, (R,n); 0 past its end. */
__device__ static __forceinline__ float number(const float *x, int64_t t, int r, int64_t n, int R,
                                               int turned)
{
    if (t >= n || r >= R) return 0.0f;
    return turned ? x[r * n + t] : x[t * R + r];
}

static __global__ void __launch_bounds__(THREADS)
    gram_kernel(double *c, const float *x, int64_t n, int R, int turned)
{
    SHARED_ARRAY(float, rows, DEEP *(SIDE + 1));
    SHARED_ARRAY(float, cols, DEEP *(SIDE + 1));
    int i = (int)blockIdx.y * SIDE, j = (int)blockIdx.x * SIDE, thread = (int)threadIdx.x;
    int row = thread / SIDE, col = thread % SIDE;
    double sum = 0.0;
    for (int64_t from = 0; from < n; from += DEEP) {
        for (int at = thread; at < DEEP * SIDE; at += THREADS) {
            /* Neighbouring threads read neighbouring numbers. */
            int t = turned ? at % DEEP : at / SIDE, r = turned ? at / DEEP : at % SIDE;
            rows[t * (SIDE + 1) + r] = number(x, from + t, i + r, n, R, turned);
            cols[t * (SIDE + 1) + r] = number(x, from + t, j + r, n, R, turned);
        }
        __syncthreads();
        for (int t = 0; t < DEEP; t++)
            sum += (double)rows[t * (SIDE + 1) + row] * (double)cols[t * (SIDE + 1) + col];
        __syncthreads();
    }
    if (i + row < R && j + col < R) c[(int64_t)(i + row) * R + j + col] += sum;
}

/* Element (t, r) of y: before − Σ x (t,·)·k (·,r). Turned: before − Σ k (r,·)·x (·,t). */
static __global__ void __launch_bounds__(THREADS)
    mix_kernel(float *y, const float *before, const float *x, const double *k, int64_t n, int R,
               int turned)
{
    SHARED_ARRAY(float, factor, SIDE *(SIDE + 1));
    SHARED_ARRAY(double, small, SIDE *(SIDE + 1));
    int high = (int)threadIdx.x / SIDE, low = (int)threadIdx.x % SIDE;
    int64_t first = (int64_t)blockIdx.x * SIDE;
    int to = (int)blockIdx.y * SIDE;
    int64_t t = first + (turned ? low : high);
    int r = to + (turned ? high : low);
    double sum = 0.0;
    for (int from = 0; from < R; from += SIDE) {
        int64_t at = first + (turned ? low : high);
        int own = from + (turned ? high : low), up = turned ? to + high : from + high;
        int along = turned ? from + low : to + low;
        factor[high * (SIDE + 1) + low] = number(x, at, own, n, R, turned);
        small[high * (SIDE + 1) + low] = up < R && along < R ? k[(int64_t)up * R + along] : 0.0;
        __syncthreads();
        for (int e = 0; e < SIDE; e++) {
            float one = turned ? factor[e * (SIDE + 1) + low] : factor[high * (SIDE + 1) + e];
            double other = turned ? small[high * (SIDE + 1) + e] : small[e * (SIDE + 1) + low];
            sum += (double)one * other;
        }
        __syncthreads();
    }
    if (t >= n || r >= R) return;
    int64_t at = turned ? r * n + t : t * R + r;
    y[at] = (float)((double)before[at] - sum);
}

/* ---- the ops ---- */

void cuda_gram(Device *dev, double *c, const float *x, int64_t n, int R, int turned)
{
    unsigned side = cuda_blocks(R, SIDE);
    LAUNCH(cuda_of(dev), gram_kernel, dim3(side, side), THREADS, 0, c, x, n, R, turned);
}

void cuda_mix(Device *dev, float *y, const float *before, const float *x, const double *k,
              int64_t n, int R, int turned)
{
    dim3 grid(cuda_blocks(n, SIDE), cuda_blocks(R, SIDE));
    LAUNCH(cuda_of(dev), mix_kernel, grid, THREADS, 0, y, before, x, k, n, R, turned);
}
