/* cuda/head/topk.cu - the K largest of each row of logits, best first.
 *
 *   topk_logprob  ids and logp = logit − lse, both (T,K)
 *                 reads 4·T·V bytes; memory bound up to K = 64, four times as much above
 *
 * Up to K = 64 a block holds a part of 8192 logits (logits.cuh) and returns its K best, and a
 * second kernel merges them; above, a block per row finds the K-th best digit by digit. The best
 * are found as Ranks (rank.cuh): one set, in whatever order. */
#include <assert.h>

#include "topk.cuh"
#include "logits.cuh"
#include "lse.cuh"
#include "rank.cuh"

enum {
    EACH = 32,                /* logits per thread */
    PART = THREADS * EACH,    /* logits per block */
    SHORT_K = 64,             /* up to this K a part returns its K best */
    SHORT_LIST = 4 * SHORT_K, /* the most candidates for a part's best */
    PLACE_BITS = 14,          /* bits of a place in a part, 1 to PART */
    MERGE_LIST = 2048,        /* candidates sorted at once */
    LONG_THREADS = 1024,
};

/* ---- sorting ---- */

/* The pair of places of comparator q in a stage of a sorting network. All comparators put the
 * larger first, so places past the end count as empty and are left out. */
__device__ static __forceinline__ void comparator(int q, int size, int stride, int64_t *a,
                                                  int64_t *b)
{
    int64_t base = (int64_t)(q / stride) * 2 * stride;
    *a = base + q % stride;
    *b = stride * 2 == size ? base + size - 1 - q % stride : *a + stride;
}

/* Sorts n ranks, the largest first. All threads must call it; ends with a barrier. */
__device__ static void list_sort(Shared<Rank> list, int n)
{
    int half = 1;
    while (2 * half < n) half *= 2;
    for (int size = 2; size <= 2 * half; size *= 2)
        for (int stride = size / 2; stride; stride /= 2) {
            for (int q = threadIdx.x; q < half; q += blockDim.x) {
                int64_t a, b;
                comparator(q, size, stride, &a, &b);
                if (b >= n) continue;
                Rank x = list[a], y = list[b];
                if (x >= y) continue;
                list[a] = y;
                list[b] = x;
            }
            __syncthreads();
        }
}

/* ---- topk_logprob up to SHORT_K ---- */

/* A key that at least SHORT_K keys of a full part reach (the smallest of 64 groups' largest), and
 * the largest key. For random logits it is about the 270th, so part_bar needs few steps. */
__device__ static void part_bounds(const uint32_t (&key)[EACH], uint32_t *low, uint32_t *high)
{
    SHARED_ARRAY(uint32_t, lows, THREADS / 32);
    SHARED_ARRAY(uint32_t, highs, THREADS / 32);
    uint32_t top = 0;
    for (int i = 0; i < EACH; i++) top = max(top, key[i]);
    for (int bit = 1; bit < 4; bit *= 2) top = max(top, __shfl_xor_sync(~0u, top, bit));
    uint32_t least = top;
    for (int bit = 4; bit < 32; bit *= 2) {
        top = max(top, __shfl_xor_sync(~0u, top, bit));
        least = min(least, __shfl_xor_sync(~0u, least, bit));
    }
    if (threadIdx.x % 32 == 0) {
        lows[threadIdx.x / 32] = least;
        highs[threadIdx.x / 32] = top;
    }
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) {
        top = max(top, highs[w]);
        least = min(least, lows[w]);
    }
    *low = least;
    *high = top;
}

/* A logit's place in the part, to break ties: a lower place is better. */
__device__ static __forceinline__ uint32_t place_of(int i)
{
    return PART - (quad_at(i / 4) + i % 4);
}

/* The bar (key and place in one number) that at least `need` and at most SHORT_LIST logits of the
 * part reach: bisected, first by keys, by places only among ties. */
__device__ static Rank part_bar(const uint32_t (&key)[EACH], int need)
{
    SHARED_ARRAY(int, reached, 3);
    uint32_t least, most;
    part_bounds(key, &least, &most);
    Rank low = (Rank)max(least, 1u) << PLACE_BITS, high = ((Rank)most + 1) << PLACE_BITS, bar = low;
    if (threadIdx.x < 3) reached[threadIdx.x] = 0;
    __syncthreads();
    for (int step = 0;; step++) {
        uint32_t bar_key = (uint32_t)(bar >> PLACE_BITS), place = bar & ((1 << PLACE_BITS) - 1);
        int count = 0;
        for (int i = 0; i < EACH; i++) count += key[i] >= bar_key;
        if (place) {
            for (int i = 0; i < EACH; i++) count -= key[i] == bar_key && place_of(i) < place;
        }
        count = warp_sum(count);
        if (threadIdx.x % 32 == 0) atomicAdd(&reached[step % 3], count);
        if (threadIdx.x == 0) reached[(step + 1) % 3] = 0;
        __syncthreads();
        count = reached[step % 3];
        if (count >= need) {
            low = bar;
            if (count <= SHORT_LIST) return bar;
        } else {
            high = bar;
        }
        bar = low + (high - low) / 2;
        if (high - low > (Rank)1 << PLACE_BITS) bar = bar >> PLACE_BITS << PLACE_BITS;
    }
}

/* best[t,p,:] = the K best ranks of the part, 0 if it has fewer logits */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    topk_part_kernel(Rank *best, const float *logits, int V, int parts, int K)
{
    SHARED_ARRAY(Rank, list, SHORT_LIST);
    SHARED_ARRAY(int, listed, 1);
    int64_t t = blockIdx.x / parts;
    int from = (int)(blockIdx.x % parts) * PART, n = min(V - from, (int)PART);
    uint32_t key[EACH];
    {
        float x[EACH];
        part_load<W>(x, logits + t * V + from, n, 0.0f);
        for (int i = 0; i < EACH; i++) key[i] = quad_at(i / 4) + i % 4 < n ? key_of(x[i]) : 0;
    }
    if (threadIdx.x == 0) listed[0] = 0;
    Rank bar = part_bar(key, min(K, n));
    uint32_t bar_key = (uint32_t)(bar >> PLACE_BITS), place = bar & ((1 << PLACE_BITS) - 1);
    for (int i = 0; i < EACH; i++)
        if (key[i] > bar_key || (key[i] == bar_key && place_of(i) >= place))
            list[atomicAdd(&listed[0], 1)] = key_rank(key[i], from + quad_at(i / 4) + i % 4);
    __syncthreads();
    int count = listed[0];
    list_sort(list, count);
    for (int k = threadIdx.x; k < K; k += THREADS)
        best[(int64_t)blockIdx.x * K + k] = k < count ? list[k] : 0;
}

/* A block per row: the K best of all its parts' best. */
static __global__ void __launch_bounds__(THREADS)
    topk_row_kernel(int32_t *ids, float *logp, const Rank *best, const float *lse, int parts, int K)
{
    SHARED_ARRAY(Rank, list, MERGE_LIST);
    int64_t t = blockIdx.x, total = (int64_t)parts * K, done = 0;
    int kept = 0;
    best += t * total;
    do {
        int n = kept + (int)min(total - done, (int64_t)MERGE_LIST - kept);
        for (int i = kept + (int)threadIdx.x; i < n; i += THREADS) list[i] = best[done + i - kept];
        __syncthreads();
        list_sort(list, n);
        done += n - kept;
        kept = min(n, K);
    } while (done < total);
    float2 own = lse ? lse_of(lse, t) : make_float2(0.0f, 0.0f);
    for (int k = threadIdx.x; k < K; k += THREADS) {
        ids[t * K + k] = rank_id(list[k]);
        logp[t * K + k] = rank_logit(list[k]) - own.x - own.y;
    }
}

/* ---- topk_logprob for more ---- */

/* The rank of the row's K-th best, or a smaller one with no other rank in between: decided digit by
 * digit, the logit's 32 bits first, the id's only if ties straddle the K-th. */
__device__ static Rank row_cut(const float *x, int V, int K)
{
    SHARED_ARRAY(int, bucket, BUCKETS);
    SHARED_ARRAY(int, pick, 2);
    Rank prefix = 0, decided = 0;
    int need = K, all = 0;
    for (int shift = 64 - DIGIT_BITS; !all && ~decided;) {
        uint32_t digits = (uint32_t)((~decided >> shift) & (DIGITS - 1));
        for (int i = threadIdx.x; i < BUCKETS; i += LONG_THREADS) bucket[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < V; i += LONG_THREADS) {
            Rank rank = rank_of(x[i], i);
            int digit = (int)((rank >> shift) & digits);
            if ((rank & decided) == prefix) atomicAdd(&bucket[bucket_at(digit)], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) digit_pick<int>(pick, bucket, need);
        __syncthreads();
        prefix |= (Rank)pick[0] << shift;
        decided |= (Rank)digits << shift;
        need = pick[1];
        all = bucket[bucket_at(pick[0])] == need;
        __syncthreads();
        shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
    }
    return prefix;
}

/* Sorts a row of the result in place, best first. */
__device__ static void row_sort(int32_t *ids, float *logits, int n)
{
    int half = 1;
    while (2 * half < n) half *= 2;
    for (int64_t size = 2; size <= 2 * (int64_t)half; size *= 2)
        for (int stride = (int)(size / 2); stride; stride /= 2) {
            for (int q = threadIdx.x; q < half; q += LONG_THREADS) {
                int64_t a, b;
                comparator(q, (int)size, stride, &a, &b);
                if (b >= n) continue;
                Rank x = rank_of(logits[a], ids[a]), y = rank_of(logits[b], ids[b]);
                if (x >= y) continue;
                ids[a] = rank_id(y);
                logits[a] = rank_logit(y);
                ids[b] = rank_id(x);
                logits[b] = rank_logit(x);
            }
            __syncthreads();
        }
}

/* A block per row; it needs no memory besides its place in the result. */
static __global__ void __launch_bounds__(LONG_THREADS)
    topk_long_kernel(int32_t *ids, float *logp, const float *logits, const float *lse, int V, int K)
{
    SHARED_ARRAY(int, listed, 1);
    int64_t t = blockIdx.x;
    logits += t * V;
    ids += t * K;
    logp += t * K;
    if (threadIdx.x == 0) listed[0] = 0;
    Rank cut = row_cut(logits, V, K);
    for (int i = threadIdx.x; i < V; i += LONG_THREADS)
        if (rank_of(logits[i], i) >= cut) {
            int at = atomicAdd(&listed[0], 1);
            ids[at] = i;
            logp[at] = logits[i];
        }
    __syncthreads();
    row_sort(ids, logp, K);
    float2 own = lse ? lse_of(lse, t) : make_float2(0.0f, 0.0f);
    for (int k = threadIdx.x; k < K; k += LONG_THREADS) logp[k] = logp[k] - own.x - own.y;
}

/* ---- the ops ---- */

size_t topk_bytes(int T, int V, int K)
{
    return K > SHORT_K ? 0 : (size_t)T * parts_of(V, PART) * K * sizeof(Rank);
}

void topk_rows(CudaDevice *cuda, int32_t *ids, float *logp, const float *logits, const float *lse,
               void *work, int T, int V, int K)
{
    if (K > SHORT_K) {
        LAUNCH(cuda, topk_long_kernel, T, LONG_THREADS, 0, ids, logp, logits, lse, V, K);
        return;
    }
    int parts = parts_of(V, PART);
    Rank *best = (Rank *)work;
    if (quads_fit(logits, V))
        LAUNCH(cuda, topk_part_kernel<4>, T * parts, THREADS, 0, best, logits, V, parts, K);
    else
        LAUNCH(cuda, topk_part_kernel<1>, T * parts, THREADS, 0, best, logits, V, parts, K);
    LAUNCH(cuda, topk_row_kernel, T, THREADS, 0, ids, logp, best, lse, parts, K);
}

void cuda_topk_logprob(Device *dev, int32_t *ids, float *logp, const float *logits,
                       const float *lse, int T, int V, int K)
{
    CudaDevice *cuda = cuda_of(dev);
    assert(K >= 0 && K <= V);
    if (T == 0 || K == 0) return;
    size_t bytes = topk_bytes(T, V, K);
    void *work = bytes ? cuda_scratch(cuda, bytes) : NULL;
    if (work || !bytes) topk_rows(cuda, ids, logp, logits, lse, work, T, V, K);
}
