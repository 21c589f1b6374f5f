/* cuda/head/logits.cuh - shared code of the kernels over rows of logits.
 *
 * A row is split into parts that depend only on V. A block of THREADS holds one part in registers:
 * EACH logits per thread, in quads of four (one load of 16 bytes), all in flight at once.
 *
 * In place, a bf16 gradient overwrites f32 logits: element e is written where element e/2 was. So
 * blocks take their parts by ticket, in rising order, and raise a flag after reading theirs. A
 * block writes only after the parts under its output have been read. Those have lower tickets:
 * their blocks are running or done, so no block waits for one that has not started. */
#ifndef TINSMITH_CUDA_HEAD_LOGITS_CUH
#define TINSMITH_CUDA_HEAD_LOGITS_CUH

#include "../runtime/kernel.cuh"

enum { THREADS = 256 };

/* Parts of `part` logits that cover a row. */
static inline int parts_of(int V, int part)
{
    return V / part + (V % part != 0);
}

/* Loads of four logits need 16-byte aligned rows. */
static inline int quads_fit(const void *logits, int V)
{
    return V % 4 == 0 && (uintptr_t)logits % 16 == 0;
}

/* The start of a thread's quad j in its part. The same for both W, so sums are the same too. */
__device__ static __forceinline__ int quad_at(int j)
{
    return (j * THREADS + (int)threadIdx.x) * 4;
}

/* Four logits of a part of n, from place `at` on, padded with `rest`. Plain loads: in place, they
 * are overwritten later. */
template <int W>
__device__ static __forceinline__ void quad_load(float (&quad)[4], const float *from, int at, int n,
                                                 float rest)
{
    for (int i = 0; i < 4; i++) quad[i] = rest;
    if constexpr (W == 4) {
        if (at < n) load<4>(quad, from + at);
    } else {
        for (int i = 0; i < 4; i++)
            if (at + i < n) quad[i] = from[at + i];
    }
}

template <int W, int EACH>
__device__ static __forceinline__ void part_load(float (&x)[EACH], const float *from, int n,
                                                 float rest)
{
    for (int j = 0; j < EACH / 4; j++) {
        float quad[4];
        quad_load<W>(quad, from, quad_at(j), n, rest);
        for (int i = 0; i < 4; i++) x[4 * j + i] = quad[i];
    }
}

/* The shift of a row's exponentials: 0 if the largest logit is infinite, so that inf − inf makes no
 * NaN that was not in the row. */
__device__ static __forceinline__ float shift_of(float top)
{
    return isinf(top) ? 0.0f : top;
}

/* ---- in place ---- */

/* Marks this block's part as read, and waits until the parts under its output have been read:
 * elements [first, first + n) of the output overwrite elements [first/2, (first + n + 1)/2).
 *
 * No part is written before it has been read: a reader's loads precede the barrier that every
 * caller passes first, and that barrier precedes thread 0's release. The acquire of the released
 * flag precedes the barrier at the end here, and that barrier precedes this block's stores.
 * Barriers, releases and acquires form one chain (PTX's causality order), in which a load can't see
 * a later store. It can't deadlock: a block raises its flag before it waits, and waits only for
 * lower tickets, whose blocks have started. */
__device__ static __forceinline__ void part_turn(unsigned *read, unsigned ticket, int64_t first,
                                                 int n, int V, int part)
{
    int64_t low = first / 2, high = (first + n - 1) / 2;
    int64_t parts = V / part + (V % part != 0);
    unsigned from = (unsigned)(low / V * parts + low % V / part);
    unsigned to = (unsigned)(high / V * parts + high % V / part);
    if (threadIdx.x == 0) flag_raise(&read[ticket]);
    for (unsigned p = from + threadIdx.x; p <= to && p < ticket; p += THREADS) flag_wait(&read[p]);
    __syncthreads();
}

#endif
