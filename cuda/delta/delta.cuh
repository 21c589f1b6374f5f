/* cuda/delta/delta.cuh - shared code of the gated delta rule's kernels: chunks of pages, tiles in
 * shared memory, and products of tiles.
 *
 * Every sequence is split at multiples of KV_PAGE, like attention's pages. A chunk is the rows of
 * one span in one page: rows [first, end) of the page; those before `first` are in the sequence's
 * open page (delta_state.h). A block's THREADS threads are a grid of 16 rows by 8 columns: each has
 * rows 16·i + its own of a page's 64, and four columns of UNIT.
 *
 * A tile is (rows, UNIT) floats in shared memory with row stride TILE_ROW, so that rows read
 * together by a warp are in different banks. A page's pairs are (KV_PAGE, KV_PAGE) floats with row
 * stride PAIRS_ROW: one row per row i, one column per row j of the page. */
#ifndef TINSMITH_CUDA_DELTA_DELTA_CUH
#define TINSMITH_CUDA_DELTA_DELTA_CUH

#include "../runtime/kernel.cuh"
#include "../../csrc/device/delta_state.h"

enum {
    THREADS = 128,
    UNIT = DELTA_UNIT, /* columns of a block; also the numbers of N per partial sum */
    BLOCK = 16,        /* rows of a page per partial sum over rows */
    BLOCKS = KV_PAGE / BLOCK,
    FOUR = 4,
    TILE_ROW = UNIT + 4,
    TILE = KV_PAGE * TILE_ROW, /* floats of a tile of a page's rows */
    PAIRS_ROW = KV_PAGE + 4,
    PAIRS = KV_PAGE * PAIRS_ROW,
    SUMS = 2 * KV_PAGE, /* floats of a page's decays: see decay_sums */
};

typedef float Sums[BLOCKS][FOUR]; /* a thread's share of a page's rows: [i][e] */

/* Rows [first, end) of a page. */
typedef struct Chunk {
    Span span;
    int page, first, end;
    bool last; /* of its span */
} Chunk;

__device__ static __forceinline__ Chunk chunk_of(Span span, int page)
{
    int end = span.pos + span.rows - page * KV_PAGE;
    return {span, page, max(span.pos - page * KV_PAGE, 0), min(end, (int)KV_PAGE), end <= KV_PAGE};
}

/* The row of the batch for row i of the chunk's page. */
__device__ static __forceinline__ int64_t chunk_row(const Chunk &chunk, int i)
{
    return chunk.span.row - chunk.span.pos + chunk.page * KV_PAGE + i;
}

__device__ static __forceinline__ bool chunk_has(const Chunk &chunk, int i)
{
    return i >= chunk.first && i < chunk.end;
}

/* Finds the chunk of the grid's slot `slot`: span s owns the slots from row/KV_PAGE + 2·s on, as in
 * tile_find (attention.cuh). A surplus slot has no chunk. */
__device__ static __forceinline__ bool chunk_find(Chunk *chunk, const Span *spans, int S, int slot)
{
    int low = 0, high = S;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (spans[middle].row / KV_PAGE + 2 * middle <= slot)
            low = middle;
        else
            high = middle;
    }
    Span span = spans[low];
    int page = span.pos / KV_PAGE + slot - (span.row / KV_PAGE + 2 * low);
    if (page * KV_PAGE >= span.pos + span.rows) return false;
    *chunk = chunk_of(span, page);
    return true;
}

static inline unsigned chunk_slots(int T, int S)
{
    return (unsigned)(T / KV_PAGE + 2 * S);
}

/* Offsets in `open` of a sequence's state, by key head or value head. */
__device__ static __forceinline__ int64_t open_u(int G, int N, int E, int h)
{
    return (int64_t)G * N * KV_PAGE + (int64_t)h * KV_PAGE * E;
}

__device__ static __forceinline__ int64_t open_sums(int G, int H, int N, int E, int h)
{
    return open_u(G, N, E, H) + h * SUMS;
}

/* Fills a tile of `rows` rows: get(v, row, column) returns eight floats. */
template <class F>
__device__ static __forceinline__ void tile_fill(Shared<float> tile, int rows, F get)
{
    for (int i = threadIdx.x; i < rows * (UNIT / 8); i += THREADS) {
        int row = i / (UNIT / 8), column = i % (UNIT / 8) * 8;
        float v[8] = {};
        get(v, row, column);
        store<8>(shared_range(tile, row * TILE_ROW + column, 8), v);
    }
}

__device__ static __forceinline__ int row_of_thread()
{
    return (int)threadIdx.x / 8;
}

__device__ static __forceinline__ int column_of_thread()
{
    return (int)threadIdx.x % 8 * FOUR;
}

__device__ static __forceinline__ void clear(Sums &sums)
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++)
        for (int e = 0; e < FOUR; e++) sums[i][e] = 0.0f;
}

/* sums += a·b: a is a tile of a page's rows, b (UNIT, UNIT) with row stride b_row. A sum goes in
 * the order of a's columns. */
__device__ static __forceinline__ void tile_product(Sums &sums, Shared<float> a, Shared<float> b,
                                                    int b_row)
{
    int row = row_of_thread(), column = column_of_thread();
#pragma unroll 4
    for (int k = 0; k < UNIT; k += FOUR) {
        float left[BLOCKS][FOUR];
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            load<FOUR>(left[i], shared_range(a, (i * BLOCK + row) * TILE_ROW + k, FOUR));
#pragma unroll
        for (int kk = 0; kk < FOUR; kk++) {
            float right[FOUR];
            load<FOUR>(right, shared_range(b, (k + kk) * b_row + column, FOUR));
#pragma unroll
            for (int i = 0; i < BLOCKS; i++)
                for (int e = 0; e < FOUR; e++) sums[i][e] = fmaf(left[i][kk], right[e], sums[i][e]);
        }
    }
}

/* A page's sums of decays G: each the nearest f32 and, KV_PAGE later, its rounding error. A large
 * decay early in a page must not cost the digits of small ones after it. Computes sums[i] and
 * sums[KV_PAGE + i] from the row before. */
template <class P>
__device__ static __forceinline__ void decay_add(float &sum, float &lack, P sums, int i,
                                                 float decay)
{
    float before = i ? sums[i - 1] : 0.0f;
    sum = before + decay;
    float added = sum - before;
    lack = (i ? sums[KV_PAGE + i - 1] : 0.0f) + ((before - (sum - added)) + (decay - added));
}

/* The sums of a chunk's rows, in order, after those of earlier rows from `before`. All threads must
 * call it; the sums are visible when it returns. */
__device__ static __forceinline__ void decay_sums(Shared<float> sums, const float *before,
                                                  const float *decay, const Chunk &chunk, int H,
                                                  int h)
{
    int i = threadIdx.x % KV_PAGE, part = threadIdx.x / KV_PAGE * KV_PAGE;
    if (i < chunk.first)
        sums[part + i] = before[part + i];
    else if (i < chunk.end && part == 0)
        sums[i] = decay[chunk_row(chunk, i) * H + h];
    __syncthreads();
    for (i = chunk.first; threadIdx.x == 0 && i < chunk.end; i++) {
        float sum, lack;
        decay_add(sum, lack, sums, i, sums[i]);
        sums[i] = sum;
        sums[KV_PAGE + i] = lack;
    }
    __syncthreads();
}

/* e^(G_i − G_j), and e^(G_i). */
template <class P> __device__ static __forceinline__ float decay_between(P sums, int i, int j)
{
    return expf((sums[i] - sums[j]) + (sums[KV_PAGE + i] - sums[KV_PAGE + j]));
}

template <class P> __device__ static __forceinline__ float decay_whole(P sums, int i)
{
    return expf(sums[i] + sums[KV_PAGE + i]);
}

/* e^(G_i − G_j) times the products of row i with the page's keys j, as pairs; 0 if j > i − own.
 * `which`: 0 of k, 1 of q. */
__device__ static __forceinline__ void pairs_fill(Shared<float> pairs, const float *scores,
                                                  Shared<float> sums, const Chunk &chunk, int G,
                                                  int g, int which)
{
    for (int at = threadIdx.x; at < KV_PAGE * KV_PAGE; at += THREADS) {
        int i = at / KV_PAGE, j = at % KV_PAGE;
        float weight = 0.0f;
        if (chunk_has(chunk, i) && j < i + which)
            weight = decay_between(sums, i, j) *
                     scores[((chunk_row(chunk, i) * G + g) * 2 + which) * KV_PAGE + j];
        pairs[i * PAIRS_ROW + j] = weight;
    }
}

#endif
