/* cuda/pointwise/route.cu - chooses a row's experts and shares, sorts pairs by expert, and adds
 * results back to rows.
 *
 *   route       the K largest logits; shares e^l / Σ e^l, over those K (norm) or over all X
 *   group       pairs (row, expert) by expert: a stable counting sort
 *   unite       y[t,:] = Σ_k x[place[t·K+k],:]
 *   share_bias  y[t,:] += Σ_k share[t,k]·bias[chosen[t,k],:];  dshare[t,k] += dy[t,:]·bias[…]
 *
 * A warp routes a row: its lanes hold the logits, and each of K rounds takes the best that is left.
 * A NaN among the logits makes the row's shares NaN, whichever experts are chosen. group is one
 * block, because P keys are few compared with the products that follow. Each warp counts the
 * experts of a stretch of pairs and later scatters it, 32 pairs at a time: no atomics, and no
 * dependence on the order of warps. It is latency bound: two passes over 4·P bytes. unite reads P·D
 * and writes T·D reals; share_bias reads and writes T·D, with biases that stay in the cache; memory
 * bound. A warp takes a pair of share_bias_backward. */
#include "../head/rank.cuh"
#include "../product/fragments.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    GROUP_WARPS = 32,
    GROUP_COUNTS = 1 << 14, /* of all warps: 64 KiB */
    GROUP_PAIRS = 64,       /* the least per warp */
};

/* ---- route ---- */

/* Logit number e of a row is in lane e % 32, at e / 32. */
template <int EACH>
__device__ static __forceinline__ void row_load(float (&x)[EACH], const real *row, int X)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = i * 32 + threadIdx.x % 32;
        x[i] = e < X ? f32(row[e]) : -INFINITY;
    }
}

/* The best of a warp's logits below `bar`; 0: none. */
template <int EACH>
__device__ static __forceinline__ Rank best_below(const float (&x)[EACH], int X, Rank bar)
{
    Rank best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int e = i * 32 + threadIdx.x % 32;
        Rank rank = rank_of(x[i], e);
        if (e < X && rank < bar) best = max(best, rank);
    }
    for (int bit = 16; bit; bit >>= 1) best = max(best, __shfl_xor_sync(~0u, best, bit));
    return best;
}

template <int EACH>
static __global__ void __launch_bounds__(THREADS)
    route_kernel(int32_t *chosen, float *share, const real *logits, int T, int X, int K, int norm)
{
    int lane = threadIdx.x % 32;
    int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (t >= T) return;
    float x[EACH], own = -INFINITY, sum = 0.0f;
    row_load<EACH>(x, logits + t * X, X);
    Rank best = ~(Rank)0;
    for (int k = 0; k < K; k++) {
        best = best_below<EACH>(x, X, best);
        if (lane == 0) chosen[t * K + k] = rank_id(best);
        if (lane == k) own = rank_logit(best);
    }
    bool none = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) none |= x[i] != x[i];
    float top = __any_sync(~0u, none) ? NAN : __shfl_sync(~0u, own, 0), e = expf(own - top);
    if (norm) {
        sum = e;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) sum += expf(x[i] - top);
    }
    sum = warp_sum(sum);
    if (lane < K) share[t * K + lane] = e / sum;
}

/* With s the shares and d their gradients, Σ over the chosen: a chosen logit's gradient is s·(d − Σ
 * s·d). Another expert's, whose share would be p, is −p·Σ s·d, or 0 if the others don't matter. */
static __global__ void __launch_bounds__(THREADS)
    route_backward_kernel(real *dlogits, const float *dshare, const int32_t *chosen,
                          const float *share, const real *logits, int T, int X, int K, int norm)
{
    int lane = threadIdx.x % 32, e = 0;
    int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (t >= T) return;
    float s = 0.0f, d = 0.0f;
    if (lane < K) {
        e = chosen[t * K + lane];
        s = share[t * K + lane];
        d = dshare[t * K + lane];
    }
    logits += t * X;
    dlogits += t * X;
    float mean = warp_sum(s * d), first = __shfl_sync(~0u, s, 0);
    float top = f32(logits[__shfl_sync(~0u, e, 0)]);
    for (int i = lane; i < X; i += 32)
        dlogits[i] = to_real(norm ? 0.0f : -mean * first * expf(f32(logits[i]) - top));
    __syncwarp();
    if (lane < K) dlogits[e] = to_real(s * (d - mean));
}

void cuda_route(Device *dev, int32_t *chosen, float *share, const real *logits, int T, int X, int K,
                int norm)
{
    auto kernel = X <= 64    ? route_kernel<2>
                  : X <= 128 ? route_kernel<4>
                  : X <= 256 ? route_kernel<8>
                  : X <= 512 ? route_kernel<16>
                             : route_kernel<EXPERTS_MOST / 32>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(T, WARPS), THREADS, 0, chosen, share, logits, T, X, K,
           norm);
}

void cuda_route_backward(Device *dev, real *dlogits, const float *dshare, const int32_t *chosen,
                         const float *share, const real *logits, int T, int X, int K, int norm)
{
    LAUNCH(cuda_of(dev), route_backward_kernel, cuda_blocks(T, WARPS), THREADS, 0, dlogits, dshare,
           chosen, share, logits, T, X, K, norm);
}

/* ---- pairs by expert ---- */

/* counts (warps, X), each warp's counts, become the sums over earlier warps; first (X) is the start
 * of each expert's pairs. Ends with a barrier. */
__device__ static __forceinline__ void counts_add(Shared<int> counts, Shared<int> first,
                                                  int32_t *bounds, int X)
{
    int warps = (int)(blockDim.x / 32), lane = threadIdx.x % 32;
    for (int e = threadIdx.x; e < X; e += blockDim.x) {
        int all = 0;
        for (int w = 0; w < warps; w++) {
            int own = counts[w * X + e];
            counts[w * X + e] = all;
            all += own;
        }
        first[e] = all;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int part = (X + 31) / 32, from = min(lane * part, X), to = min(from + part, X), all = 0;
        for (int e = from; e < to; e++) all += first[e];
        int at = all;
        for (int by = 1; by < 32; by *= 2) {
            int other = __shfl_up_sync(~0u, at, by);
            if (lane >= by) at += other;
        }
        at -= all;
        for (int e = from; e < to; e++) {
            int own = first[e];
            first[e] = bounds[2 * e] = at;
            bounds[2 * e + 1] = at += own;
        }
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(GROUP_WARPS * 32)
    group_kernel(int32_t *pair, int32_t *row, int32_t *place, int32_t *bounds,
                 const int32_t *chosen, int P, int K, int X, int stretch)
{
    DYNAMIC_SHARED(bytes);
    int warps = (int)(blockDim.x / 32), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Shared<int> counts = shared_part<int>(bytes, 0, warps * X);
    Shared<int> first = shared_part<int>(bytes, (int64_t)warps * X * sizeof(int), X);
    int from = warp * stretch, to = min(from + stretch, P);
    for (int i = threadIdx.x; i < warps * X; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = from + lane; i < to; i += 32) atomicAdd(&counts[warp * X + chosen[i]], 1);
    __syncthreads();
    counts_add(counts, first, bounds, X);
    for (int i = from + lane; i - lane < to; i += 32) {
        int e = i < to ? chosen[i] : -1; /* lanes past the end match no other lane */
        unsigned peers = __match_any_sync(~0u, e);
        int before = __popc(peers & ((1u << lane) - 1)), at = 0;
        if (i < to) at = first[e] + counts[warp * X + e] + before;
        __syncwarp();
        if (i < to) {
            if (before == 0) counts[warp * X + e] += __popc(peers);
            pair[at] = i;
            row[at] = i / K;
            place[i] = at;
        }
        __syncwarp();
    }
}

/* Per lane: the first of [from, to) whose row is at least `least`. */
__device__ static __forceinline__ int first_of(const int32_t *row, int from, int to, int least)
{
    while (from < to) {
        int middle = from + (to - from) / 2;
        if (row[middle] < least)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

static __global__ void __launch_bounds__(THREADS)
    group_part_kernel(int32_t *part, const int32_t *bounds, const int32_t *row, int X, int first,
                      int count)
{
    int e = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (e >= X) return;
    int begin = first_of(row, bounds[2 * e], bounds[2 * e + 1], first);
    part[2 * e] = begin;
    part[2 * e + 1] = first_of(row, begin, bounds[2 * e + 1], first + count);
}

void cuda_group(Device *dev, int32_t *pair, int32_t *row, int32_t *place, int32_t *bounds,
                const int32_t *chosen, int T, int K, int X)
{
    int P = T * K, warps = (P + GROUP_PAIRS - 1) / GROUP_PAIRS, most = GROUP_COUNTS / X;
    if (most > GROUP_WARPS) most = GROUP_WARPS;
    warps = warps < 1 ? 1 : warps > most ? most : warps;
    int stretch = (P + warps - 1) / warps;
    size_t bytes = (size_t)(warps + 1) * (size_t)X * sizeof(int);
    LAUNCH(cuda_of(dev), group_kernel, 1, warps * 32, bytes, pair, row, place, bounds, chosen, P, K,
           X, stretch);
}

void cuda_group_part(Device *dev, int32_t *part, const int32_t *bounds, const int32_t *row, int X,
                     int first, int count)
{
    LAUNCH(cuda_of(dev), group_part_kernel, cuda_blocks(X, THREADS), THREADS, 0, part, bounds, row,
           X, first, count);
}

/* ---- back to rows ---- */

template <int W>
static __global__ void __launch_bounds__(THREADS)
    unite_kernel(real *y, const real *x, const int32_t *place, const real *plus, int T, int K,
                 int D)
{
    int per_row = D / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * per_row) return;
    int64_t t = i / per_row, at = i % per_row * W;
    float sum[W], v[W];
    place += t * K;
    load<W>(sum, x + (int64_t)place[0] * D + at);
#pragma unroll 4
    for (int k = 1; k < K; k++) {
        load<W>(v, x + (int64_t)place[k] * D + at);
        for (int j = 0; j < W; j++) sum[j] += v[j];
    }
    y += t * D + at;
    if (plus) {
        load<W>(v, plus + t * D + at);
        for (int j = 0; j < W; j++) sum[j] += v[j];
    }
    store<W>(y, sum);
}

void cuda_unite(Device *dev, real *y, const real *x, const int32_t *place, const real *plus, int T,
                int K, int D)
{
    bool aligned = D % PIECE == 0 && ((uintptr_t)y | (uintptr_t)x | (uintptr_t)plus) % 16 == 0;
    int W = aligned ? PIECE : 1;
    auto kernel = aligned ? unite_kernel<PIECE> : unite_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * (D / W), THREADS), THREADS, 0, y, x,
           place, plus, T, K, D);
}

/* ---- a bias per expert ---- */

template <int W>
static __global__ void __launch_bounds__(THREADS)
    share_bias_kernel(real *y, const float *share, const int32_t *chosen, const float *bias, int T,
                      int K, int D)
{
    int per_row = D / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * per_row) return;
    int64_t t = i / per_row, at = i % per_row * W;
    float sum[W], v[W];
    y += t * D + at;
    load<W>(sum, y);
    for (int64_t k = t * K; k < (t + 1) * K; k++) {
        load<W>(v, bias + (int64_t)chosen[k] * D + at);
        for (int j = 0; j < W; j++) sum[j] += share[k] * v[j];
    }
    store<W>(y, sum);
}

static __global__ void __launch_bounds__(THREADS)
    share_bias_backward_kernel(float *dshare, const real *dy, const int32_t *chosen,
                               const float *bias, int64_t P, int K, int D)
{
    int64_t p = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (p >= P) return;
    float sum = 0.0f;
    dy += p / K * D;
    bias += (int64_t)chosen[p] * D;
    for (int i = threadIdx.x % 32; i < D; i += 32) sum += f32(dy[i]) * bias[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) dshare[p] += sum;
}

void cuda_share_bias(Device *dev, real *y, const float *share, const int32_t *chosen,
                     const float *bias, int T, int K, int D)
{
    bool aligned = D % PIECE == 0 && ((uintptr_t)y | (uintptr_t)bias) % 16 == 0;
    int W = aligned ? PIECE : 1;
    auto kernel = aligned ? share_bias_kernel<PIECE> : share_bias_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * (D / W), THREADS), THREADS, 0, y, share,
           chosen, bias, T, K, D);
}

void cuda_share_bias_backward(Device *dev, float *dshare, const real *dy, const int32_t *chosen,
                              const float *bias, int T, int K, int D)
{
    int64_t P = (int64_t)T * K;
    LAUNCH(cuda_of(dev), share_bias_backward_kernel, cuda_blocks(P, WARPS), THREADS, 0, dshare, dy,
           chosen, bias, P, K, D);
}
