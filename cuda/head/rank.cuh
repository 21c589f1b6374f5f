/* cuda/head/rank.cuh - a logit and its id as one number, to find the K best and a draw's cuts.
 *
 * A Rank is larger for a larger logit, then for a lower id; NaN is lowest. Ranks are distinct, so
 * the best of a row are one set, in whatever order they are found. A cut is decided digit by digit,
 * the logit's 32 bits first. A pass counts ranks, or sums their masses, in a bucket per digit, and
 * digit_pick finds the digit at which they suffice. */
#ifndef TINSMITH_CUDA_HEAD_RANK_CUH
#define TINSMITH_CUDA_HEAD_RANK_CUH

#include "../runtime/kernel.cuh"

typedef unsigned long long Rank; /* a logit's key, then ~id: see rank_of */

enum {
    DIGIT_BITS = 11,
    DIGITS = 1 << DIGIT_BITS,
    BUCKETS_EACH = DIGITS / 32, /* per lane; one more between lanes avoids bank conflicts */
    BUCKETS = DIGITS + 32,
};

/* A logit's bits as an integer of the same order; −0 equals 0, and NaN is 1. */
__device__ static __forceinline__ uint32_t key_of(float x)
{
    uint32_t bits = __float_as_uint(x + 0.0f);
    uint32_t key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    return x == x ? key : 1;
}

__device__ static __forceinline__ Rank key_rank(uint32_t key, int id)
{
    return (Rank)key << 32 | ~(uint32_t)id;
}

/* Never 0, which marks an empty place. */
__device__ static __forceinline__ Rank rank_of(float x, int id)
{
    return key_rank(key_of(x), id);
}

__device__ static __forceinline__ int rank_id(Rank rank)
{
    return (int)~(uint32_t)rank;
}

__device__ static __forceinline__ float rank_logit(Rank rank)
{
    uint32_t key = (uint32_t)(rank >> 32);
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ static __forceinline__ int bucket_at(int digit)
{
    return digit + digit / BUCKETS_EACH;
}

/* Warp 0: sets `pick` to the digit, from the largest down, at which `bucket` reaches `need`, and to
 * the rest of `need` for its ranks. */
template <class N> __device__ static void digit_pick(Shared<N> pick, Shared<N> bucket, N need)
{
    int lane = threadIdx.x, digit = DIGITS - 1 - lane * BUCKETS_EACH;
    N sum = 0;
    for (int i = 0; i < BUCKETS_EACH; i++) sum += bucket[bucket_at(digit - i)];
    N reached = sum;
    for (int by = 1; by < 32; by *= 2) {
        N other = __shfl_up_sync(~0u, reached, by);
        if (lane >= by) reached += other;
    }
    unsigned enough = __ballot_sync(~0u, reached >= need);
    if (lane != (enough ? __ffs(enough) - 1 : 31)) return;
    need -= min(need, reached - sum);
    for (; digit > 0 && bucket[bucket_at(digit)] < need; digit--) need -= bucket[bucket_at(digit)];
    pick[0] = digit;
    pick[1] = need;
}

#endif
