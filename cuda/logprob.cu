/* cuda/logprob.cu - what is made of rows of logits: log-probabilities, their gradient, the K best.
 *
 *   logprob           lse[t] = logΣ_v exp(logits[t,v]),  logp[i] = logits[t,ids[i]] − lse[t]
 *                     reads 4·T·V bytes; memory bound
 *   logprob_backward  dlogits[t,v] = Σ_i dlogp[i]·([ids[i] = v] − exp(logits[t,v] − lse[t]))
 *                     reads 4·T·V, writes 2·T·V bytes; memory bound
 *   topk_logprob      the K largest of each row, best first
 *                     reads 4·T·V bytes; memory bound up to K = 64, four times as much above
 *
 * A row is cut into parts of 8192 logits, by V alone, and a block holds one part in registers:
 * eight loads of 16 bytes in flight a thread, and each logit is read once, however few rows there
 * are. A second small kernel puts the parts of a row together in a fixed order.
 *
 * In place, the gradient is bf16 in the memory of f32 logits: element e lands where element e/2
 * was. So blocks take their parts by ticket, in rising order, say when they have read theirs, and
 * write only once the parts that lie under their output have been read. Those have lower tickets:
 * their blocks are running or done, so nobody waits for a block that has not begun.
 *
 * A logit and its id make one number, Rank: larger for a larger logit, then for a lower id; NaN is
 * lowest. Ranks are all different, so the K best are one set, whatever order finds them. */
#include "cuda.cuh"

#include <assert.h>

typedef unsigned long long Rank;

enum {
    THREADS = 256,
    QUADS = 8,                /* loads of four logits that a thread has in flight */
    EACH = 4 * QUADS,         /* logits of a thread */
    PART = THREADS * EACH,    /* logits of a block */
    ROW_WARPS = 4,            /* rows of a block that joins parts */
    SHORT_K = 64,             /* up to here a part gives its K best */
    SHORT_LIST = 4 * SHORT_K, /* of which the best are at most so many candidates */
    PLACE_BITS = 14,          /* of a place in a part, 1 to PART */
    MERGE_LIST = 2048,        /* candidates sorted at once */
    LONG_THREADS = 1024,
    DIGIT_BITS = 11, /* of a Rank, decided by one pass over the row */
    DIGITS = 1 << DIGIT_BITS,
};

static int parts_of(int V)
{
    return V / PART + (V % PART != 0);
}

/* Four logits at a time need rows that begin at multiples of 16 bytes. */
static int quads_fit(const void *logits, int V)
{
    return V % 4 == 0 && (uintptr_t)logits % 16 == 0;
}

/* ---- a part in registers ---- */

/* Where a thread's quad j begins in its part. The same for both W, so that sums are, too. */
__device__ static __forceinline__ int quad_at(int j)
{
    return (j * THREADS + (int)threadIdx.x) * 4;
}

/* The n logits of a part, `rest` behind them. Plain loads: in place, they are written over later.
 */
template <int W>
__device__ static __forceinline__ void part_load(float (&x)[EACH], const float *from, int n,
                                                 float rest)
{
    for (int j = 0; j < QUADS; j++) {
        int at = quad_at(j);
        float quad[4] = {rest, rest, rest, rest};
        if constexpr (W == 4) {
            if (at < n) load<4>(quad, from + at);
        } else {
            for (int i = 0; i < 4; i++)
                if (at + i < n) quad[i] = from[at + i];
        }
        for (int i = 0; i < 4; i++) x[4 * j + i] = quad[i];
    }
}

/* What exponentials are taken against: 0 where the largest is infinite, so that no inf − inf makes
 * a NaN that was not in the row. */
__device__ static __forceinline__ float shift_of(float top)
{
    return isinf(top) ? 0.0f : top;
}

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

/* A warp a row: its lse from its parts, in double, and its targets. */
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
    float value = (float)(shift + log(warp_sum(total)));
    if (lane == 0) lse[t] = value;
    for (int i = start[t] + lane; i < start[t + 1]; i += 32)
        logp[i] = logits[t * V + ids[i]] - value;
}

/* ---- logprob_backward ---- */

/* y[v] += dlogp of v's targets in their order: the thread of an id's first target adds them all. */
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

/* Says that this block has read its part, and waits until those under its output have been read:
 * elements [first, first + n) of the output lie over elements [first/2, (first + n + 1)/2).
 *
 * Why no part is written before it has been read: a reader's loads come before the barrier that
 * every caller passes first, the barrier before thread 0's release; whoever acquires what that
 * released comes before the barrier at the end here, and that before this block's stores. Barriers,
 * releases and acquires are links of one chain (PTX's causality order), in which a load can't see a
 * store that comes after it. Why it ends: a block raises its flag before it waits, and waits for
 * lower tickets alone, whose blocks have begun. */
__device__ static void part_turn(unsigned *read, unsigned ticket, int64_t first, int n, int V,
                                 int parts)
{
    int64_t low = first / 2, high = (first + n - 1) / 2;
    unsigned from = (unsigned)(low / V * parts + low % V / PART);
    unsigned to = (unsigned)(high / V * parts + high % V / PART);
    if (threadIdx.x == 0) flag_raise(&read[ticket]);
    for (unsigned p = from + threadIdx.x; p <= to && p < ticket; p += THREADS) flag_wait(&read[p]);
    __syncthreads();
}

/* turn[0] is the next ticket, turn[1 + p] whether part p has been read. `logits` may be `dlogits`:
 * nothing here may be read through the cache of constants. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    logprob_backward_kernel(real *dlogits, unsigned *turn, const float *logits, const float *lse,
                            const float *dlogp, const int32_t *ids, const int32_t *start, int V,
                            int parts)
{
    SHARED_ARRAY(unsigned, taken, 1);
    SHARED_ARRAY(float, y, PART);
    if (threadIdx.x == 0) taken[0] = atomicAdd(turn, 1u);
    __syncthreads();
    unsigned ticket = taken[0];
    int64_t t = ticket / parts;
    int from = (int)(ticket % parts) * PART, n = min(V - from, (int)PART);
    int first = start[t], stop = start[t + 1];
    double sum = 0.0;
    for (int i = first; i < stop; i++) sum += (double)dlogp[i];
    float weight = -(float)sum, shift = lse[t];
    if (sum == 0.0) { /* no targets, or weights of 0, as all prompts have: whatever the logits */
        for (int i = threadIdx.x; i < PART; i += THREADS) y[i] = 0.0f;
    } else {
        float x[EACH];
        part_load<W>(x, logits + t * V + from, n, 0.0f);
        for (int j = 0; j < QUADS; j++) {
            float quad[4];
            for (int i = 0; i < 4; i++) quad[i] = weight * expf(x[4 * j + i] - shift);
            store<4>(shared_range(y, quad_at(j), 4), quad);
        }
    }
    __syncthreads();
    part_targets(y, dlogp, ids, first, stop, from, n);
    part_turn(turn + 1, ticket, t * V + from, n, V, parts);
    real *to = dlogits + t * V + from;
    for (int i = threadIdx.x * W; i < n; i += THREADS * W) {
        if constexpr (W == 4)
            *reinterpret_cast<uint2 *>(to + i) =
                make_uint2(pack(y[i], y[i + 1]), pack(y[i + 2], y[i + 3]));
        else
            to[i] = to_real(y[i]);
    }
}

/* ---- ranks ---- */

/* A logit's bits as a number that grows with it; −0 equals 0, and NaN is 1. */
__device__ static __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    uint32_t key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    return x == x ? key : 1;
}

__device__ static __forceinline__ float key_logit(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ static __forceinline__ Rank rank_of(uint32_t key, uint32_t id)
{
    return (Rank)key << 32 | ~id;
}

/* The logit and the id are swapped back out of a Rank; an empty place, 0, must not come here. */
__device__ static __forceinline__ void rank_split(Rank rank, int32_t *id, float *logit)
{
    *id = (int32_t)~(uint32_t)rank;
    *logit = key_logit((uint32_t)(rank >> 32));
}

/* The pair of places that comparator q of a stage compares: a sorting network whose comparators all
 * put the larger first, so that places behind the end can be taken as empty and left out. */
__device__ static __forceinline__ void comparator(int q, int size, int stride, int64_t *a,
                                                  int64_t *b)
{
    int64_t base = (int64_t)(q / stride) * 2 * stride;
    *a = base + q % stride;
    *b = stride * 2 == size ? base + size - 1 - q % stride : *a + stride;
}

/* Sorts n ranks, the largest first. All threads must come; ends with a barrier. */
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

/* A number that at least SHORT_K keys of a full part reach, and the largest key: the least of the
 * largest of 64 groups of threads. It is about the 270th of random logits, so that few steps are
 * left to part_bar. */
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

/* How a logit's place in the part breaks ties: a lower one is better. */
__device__ static __forceinline__ uint32_t place_of(int i)
{
    return PART - (quad_at(i / 4) + i % 4);
}

/* The bar, key and place in one number, that at least `need` logits of the part reach and at most
 * SHORT_LIST: bisected, first by keys alone, by places only among ties. */
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

/* best[t,p,:] = the K best ranks of the part, 0 where it has fewer logits */
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
            list[atomicAdd(&listed[0], 1)] = rank_of(key[i], from + quad_at(i / 4) + i % 4);
    __syncthreads();
    int count = listed[0];
    list_sort(list, count);
    for (int k = threadIdx.x; k < K; k += THREADS)
        best[(int64_t)blockIdx.x * K + k] = k < count ? list[k] : 0;
}

/* A block a row: the K best of all its parts' best. */
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
    for (int k = threadIdx.x; k < K; k += THREADS) {
        int32_t id;
        float logit;
        rank_split(list[k], &id, &logit);
        ids[t * K + k] = id;
        logp[t * K + k] = logit - lse[t];
    }
}

/* ---- topk_logprob of more ---- */

/* Warp 0: the digit, from the largest down, at which the counts of `bucket` reach `need`; pick is
 * the digit, what is still needed of its ranks, and whether that is all of them. */
__device__ static void digit_pick(Shared<int> pick, Shared<int> bucket, int need)
{
    enum { OWN = DIGITS / 32 }; /* buckets of a lane; one more between lanes keeps banks apart */
    int lane = threadIdx.x, high = DIGITS - 1 - lane * OWN, sum = 0;
    for (int i = 0; i < OWN; i++) sum += bucket[(high - i) + (high - i) / OWN];
    int reached = sum;
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(~0u, reached, by);
        if (lane >= by) reached += other;
    }
    unsigned enough = __ballot_sync(~0u, reached >= need);
    if (!enough || lane != __ffs(enough) - 1) return;
    need -= reached - sum;
    int digit = high, here = bucket[digit + digit / OWN];
    while (here < need) {
        need -= here;
        digit--;
        here = bucket[digit + digit / OWN];
    }
    pick[0] = digit;
    pick[1] = need;
    pick[2] = here == need;
}

/* The rank of the row's K-th best, or a smaller one that no other rank lies above: decided digit by
 * digit, the logit's 32 bits first; the id's only when ties straddle the K-th. */
__device__ static Rank row_cut(const float *x, int V, int K)
{
    SHARED_ARRAY(int, bucket, DIGITS + 32);
    SHARED_ARRAY(int, pick, 3);
    Rank prefix = 0, decided = 0;
    int need = K, all = 0;
    for (int shift = 64 - DIGIT_BITS; !all && ~decided;) {
        uint32_t digits = (uint32_t)((~decided >> shift) & (DIGITS - 1));
        for (int i = threadIdx.x; i < DIGITS + 32; i += LONG_THREADS) bucket[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < V; i += LONG_THREADS) {
            Rank rank = rank_of(key_of(x[i]), i);
            uint32_t digit = (uint32_t)(rank >> shift) & digits;
            if ((rank & decided) == prefix) atomicAdd(&bucket[digit + digit / (DIGITS / 32)], 1);
        }
        __syncthreads();
        if (threadIdx.x < 32) digit_pick(pick, bucket, need);
        __syncthreads();
        prefix |= (Rank)pick[0] << shift;
        decided |= (Rank)digits << shift;
        need = pick[1];
        all = pick[2];
        shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
    }
    return prefix;
}

/* Sorts a row of the answer where it lies, the best first. */
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
                Rank x = rank_of(key_of(logits[a]), ids[a]), y = rank_of(key_of(logits[b]), ids[b]);
                if (x >= y) continue;
                rank_split(y, &ids[a], &logits[a]);
                rank_split(x, &ids[b], &logits[b]);
            }
            __syncthreads();
        }
}

/* A block a row; its place in the answer is all the memory that it needs. */
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
        if (rank_of(key_of(logits[i]), i) >= cut) {
            int at = atomicAdd(&listed[0], 1);
            ids[at] = i;
            logp[at] = logits[i];
        }
    __syncthreads();
    row_sort(ids, logp, K);
    for (int k = threadIdx.x; k < K; k += LONG_THREADS) logp[k] -= lse[t];
}

/* ---- the ops ---- */

void cuda_logprob(Device *dev, float *lse, float *logp, const float *logits, const int32_t *ids,
                  const int32_t *start, int T, int V)
{
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0) return;
    int parts = parts_of(V);
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
                           int V)
{
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0) return;
    int parts = parts_of(V);
    size_t bytes = ((size_t)T * parts + 1) * sizeof(unsigned);
    unsigned *turn = (unsigned *)cuda_scratch(cuda, bytes);
    if (!turn || CUDA_CHECK(cuda, cudaMemsetAsync(turn, 0, bytes, cuda->stream))) return;
    if (quads_fit(logits, V) && (uintptr_t)dlogits % 8 == 0)
        LAUNCH(cuda, logprob_backward_kernel<4>, T * parts, THREADS, 0, dlogits, turn, logits, lse,
               dlogp, ids, start, V, parts);
    else
        LAUNCH(cuda, logprob_backward_kernel<1>, T * parts, THREADS, 0, dlogits, turn, logits, lse,
               dlogp, ids, start, V, parts);
}

void cuda_topk_logprob(Device *dev, int32_t *ids, float *logp, const float *logits,
                       const float *lse, int T, int V, int K)
{
    CudaDevice *cuda = cuda_of(dev);
    assert(K >= 0 && K <= V);
    if (T == 0 || K == 0) return;
    if (K > SHORT_K) {
        LAUNCH(cuda, topk_long_kernel, T, LONG_THREADS, 0, ids, logp, logits, lse, V, K);
        return;
    }
    int parts = parts_of(V);
    Rank *best = (Rank *)cuda_scratch(cuda, (size_t)T * parts * K * sizeof *best);
    if (!best) return;
    if (quads_fit(logits, V))
        LAUNCH(cuda, topk_part_kernel<4>, T * parts, THREADS, 0, best, logits, V, parts, K);
    else
        LAUNCH(cuda, topk_part_kernel<1>, T * parts, THREADS, 0, best, logits, V, parts, K);
    LAUNCH(cuda, topk_row_kernel, T, THREADS, 0, ids, logp, best, lse, parts, K);
}
