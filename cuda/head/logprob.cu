/* cuda/head/logprob.cu - log-probabilities of rows of logits, and their gradient.
 *
 *   logprob           lse[t] = logΣ_v exp(logits[t,v]),  logp[i] = logits[t,ids[i]] − lse[t]
 *                     reads 4·T·V bytes; memory bound
 *   logprob_backward  dlogits[t,v] = Σ_i dlogp[i]·([ids[i] = first+v] − exp(logits[t,v] − lse[t]))
 *                     reads 4·T·V, writes 2·T·V bytes; memory bound
 *
 * A block holds a part of 8192 logits in registers (logits.cuh): eight loads of 16 bytes in flight
 * per thread, and each logit is read once, even with few rows. A second small kernel combines a
 * row's parts in a fixed order. */
#include "logits.cuh"
#include "lse.cuh"

enum {
    EACH = 32,             /* logits per thread */
    PART = THREADS * EACH, /* logits per block */
    ROW_WARPS = 4,         /* rows per block that combines parts */
};

/* ---- logprob ---- */

/* part[t,p] = (the largest logit of the part, Σ exp(logit − shift)) */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    lse_part_kernel(float2 *part, const float *logits, int V, int parts)
{
    SHARED_ARRAY(float, sums, 32);
    int64_t t = blockIdx.x / parts;
    int from = (int)(blockIdx.x % parts) * PART;
    float x[EACH], top = -INFINITY, sum = 0.0f;
    part_load<W>(x, logits + t * V + from, min(V - from, (int)PART), -INFINITY);
    for (int i = 0; i < EACH; i++) top = fmaxf(top, x[i]);
    top = block_max(top, sums);
    float shift = shift_of(top);
    for (int i = 0; i < EACH; i += 2) sum += expf(x[i] - shift) + expf(x[i + 1] - shift);
    sum = block_sum(sum, sums);
    if (threadIdx.x == 0) part[blockIdx.x] = make_float2(top, sum);
}

/* A warp per row: its lse from its parts, in double, and its targets. */
static __global__ void __launch_bounds__(ROW_WARPS * 32)
    lse_row_kernel(float *lse, float *logp, const float2 *part, const float *logits,
                   const int32_t *ids, const int32_t *start, int T, int V, int parts)
{
    int lane = threadIdx.x % 32;
    int64_t t = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (t >= T) return;
    part += t * parts;
    float top = -INFINITY;
    for (int p = lane; p < parts; p += 32) top = fmaxf(top, part[p].x);
    double shift = shift_of(warp_max(top)), total = 0.0;
    for (int p = lane; p < parts; p += 32) {
        float2 one = part[p];
        if (one.y != 0.0f) total += (double)one.y * exp((double)shift_of(one.x) - shift);
    }
    float2 own = lse_split(shift, log(warp_sum(total)));
    if (lane == 0) {
        lse[2 * t] = own.x;
        lse[2 * t + 1] = own.y;
    }
    for (int i = start[t] + lane; i < start[t + 1]; i += 32)
        logp[i] = logits[t * V + ids[i]] - own.x - own.y;
}

/* ---- logprob_backward ---- */

/* y[v] += dlogp of v's targets in order: the thread of an id's first target adds them all. */
__device__ static void part_targets(Shared<float> y, const float *dlogp, const int32_t *ids,
                                    int start, int stop, int from, int n)
{
    for (int i = start + (int)threadIdx.x; i < stop; i += THREADS) {
        int id = ids[i], before = start;
        if (id < from || id >= from + n) continue;
        while (before < i && ids[before] != id) before++;
        if (before < i) continue;
        float sum = y[id - from];
        for (int k = i; k < stop; k++)
            if (ids[k] == id) sum += dlogp[k];
        y[id - from] = sum;
    }
}

/* turn[0] is the next ticket, turn[1 + p] whether part p has been read. `logits` may be `dlogits`,
 * so nothing here may be read through the read-only cache. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    logprob_backward_kernel(real *dlogits, unsigned *turn, const float *logits, const float *lse,
                            const float *dlogp, const int32_t *ids, const int32_t *start, int V,
                            int first, int parts)
{
    SHARED_ARRAY(unsigned, taken, 1);
    SHARED_ARRAY(float, y, PART);
    if (threadIdx.x == 0) taken[0] = atomicAdd(turn, 1u);
    __syncthreads();
    unsigned ticket = taken[0];
    int64_t t = ticket / parts;
    int from = (int)(ticket % parts) * PART, n = min(V - from, (int)PART);
    int begin = start[t], stop = start[t + 1];
    double sum = 0.0;
    for (int i = begin; i < stop; i++) sum += (double)dlogp[i];
    float weight = -(float)sum;
    float2 own = lse_of(lse, t);
    if (sum == 0.0) { /* no targets, or weights of 0, as in prompts: zeros whatever the logits */
        for (int i = threadIdx.x; i < PART; i += THREADS) y[i] = 0.0f;
    } else {
        float x[EACH];
        part_load<W>(x, logits + t * V + from, n, 0.0f);
        for (int j = 0; j < EACH / 4; j++) {
            float quad[4];
            for (int i = 0; i < 4; i++) quad[i] = weight * expf(x[4 * j + i] - own.x - own.y);
            store<4>(shared_range(y, quad_at(j), 4), quad);
        }
    }
    __syncthreads();
    part_targets(y, dlogp, ids, begin, stop, first + from, n);
    part_turn(turn + 1, ticket, t * V + from, n, V, PART);
    real *to = dlogits + t * V + from;
    for (int i = threadIdx.x * W; i < n; i += THREADS * W) {
        if constexpr (W == 4)
            *reinterpret_cast<uint2 *>(to + i) =
                make_uint2(pack(y[i], y[i + 1]), pack(y[i + 2], y[i + 3]));
        else
            to[i] = to_real(y[i]);
    }
}

/* ---- the ops ---- */

void cuda_logprob(Device *dev, float *lse, float *logp, const float *logits, const int32_t *ids,
                  const int32_t *start, int T, int V)
{
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0) return;
    int parts = parts_of(V, PART);
    float2 *part = (float2 *)cuda_scratch(cuda, (size_t)T * parts * sizeof *part);
    if (!part) return;
    if (quads_fit(logits, V))
        LAUNCH(cuda, lse_part_kernel<4>, T * parts, THREADS, 0, part, logits, V, parts);
    else
        LAUNCH(cuda, lse_part_kernel<1>, T * parts, THREADS, 0, part, logits, V, parts);
    LAUNCH(cuda, lse_row_kernel, cuda_blocks(T, ROW_WARPS), ROW_WARPS * 32, 0, lse, logp, part,
           logits, ids, start, T, V, parts);
}

void cuda_logprob_backward(Device *dev, real *dlogits, const float *logits, const float *lse,
                           const float *dlogp, const int32_t *ids, const int32_t *start, int T,
                           int V, int first)
{
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0) return;
    int parts = parts_of(V, PART);
    size_t bytes = ((size_t)T * parts + 1) * sizeof(unsigned);
    unsigned *turn = (unsigned *)cuda_scratch(cuda, bytes);
    if (!turn || CUDA_CHECK(cuda, cudaMemsetAsync(turn, 0, bytes, cuda->stream))) return;
    if (quads_fit(logits, V) && (uintptr_t)dlogits % 8 == 0)
        LAUNCH(cuda, logprob_backward_kernel<4>, T * parts, THREADS, 0, dlogits, turn, logits, lse,
               dlogp, ids, start, V, first, parts);
    else
        LAUNCH(cuda, logprob_backward_kernel<1>, T * parts, THREADS, 0, dlogits, turn, logits, lse,
               dlogp, ids, start, V, first, parts);
}
