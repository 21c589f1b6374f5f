/* cuda/delta/delta_backward.cuh - shared by the kernels of the gated delta rule's gradients: their
 * arguments, and loads of rows. delta_backward.cu has the formula. */
#ifndef TINSMITH_CUDA_DELTA_DELTA_BACKWARD_CUH
#define TINSMITH_CUDA_DELTA_DELTA_BACKWARD_CUH

#include "delta.cuh"

typedef struct DeltaBackward {
    real *dq, *dk, *dv;
    float *dbeta, *ddecay;
    const real *dy, *q, *k;
    const float *w, *pages, *beta, *decay, *scores;
    const Span *spans;
    int S, T, G, H, N, E;
    int g, heads;    /* this launch's first key head; its number of value heads */
    float *du;       /* (T, heads, E) */
    float *dpages;   /* (T/KV_PAGE, heads, N, E): dM′ of pages that have a successor */
    float *pairs;    /* (T, heads, 2, KV_PAGE): A and B */
    float *of_rows;  /* (T, heads, N/UNIT, 2): a row's two terms of dg */
    float *of_pages; /* (T/KV_PAGE, heads, N/UNIT): e^{G_L}·⟨M, dM′⟩ */
} DeltaBackward;

/* The index of this launch's value head `local` among all heads. */
__device__ static __forceinline__ int head_of_all(const DeltaBackward &c, int local)
{
    return c.g * (c.H / c.G) + local;
}

__device__ static __forceinline__ int64_t value_at(const DeltaBackward &c, int64_t t, int local)
{
    return (t * c.H + head_of_all(c, local)) * c.E;
}

/* The offset of the page's state in (page, head, N, E), with `heads` heads. */
__device__ static __forceinline__ int64_t page_at(const DeltaBackward &c, const Chunk &chunk,
                                                  int heads, int h)
{
    return (chunk_row(chunk, 0) / KV_PAGE * heads + h) * c.N * c.E;
}

/* Columns [n, n + UNIT) of the chunk's rows of k or q. */
__device__ static __forceinline__ void rows_fill(Shared<float> tile, const DeltaBackward &c,
                                                 const Chunk &chunk, const real *from, int g, int n)
{
    tile_fill(tile, KV_PAGE, [&](float (&v)[8], int row, int column) {
        if (chunk_has(chunk, row))
            load<8>(v, from + (chunk_row(chunk, row) * c.G + g) * c.N + n + column);
    });
}

/* For this thread's rows j, sum += Σ_i weight_ij·rows_i over i in [from, to); `rows` is a tile, and
 * pairs are read by column. */
__device__ static __forceinline__ void columns_sum(float (&sum)[FOUR], Shared<float> pairs,
                                                   Shared<float> rows, int j, int from, int to)
{
    int column = column_of_thread();
#pragma unroll 4
    for (int i = from; i < to; i++) {
        float v[FOUR], weight = pairs[i * PAIRS_ROW + j];
        load<FOUR>(v, shared_range(rows, i * TILE_ROW + column, FOUR));
        for (int e = 0; e < FOUR; e++) sum[e] = fmaf(weight, v[e], sum[e]);
    }
}

#endif
