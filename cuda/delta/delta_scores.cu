/* cuda/delta/delta_scores.cu - the products of a page's rows: the weights of earlier rows in the
 * gated delta rule's forward and backward.
 *
 *   scores[t,g,0,j] = k_t·k_j,  scores[t,g,1,j] = q_t·k_j,  for rows j of t's page up to t itself
 *
 * A block has one chunk of a page and one key head, for all its value heads; a warp has 16 rows.
 * Keys of an open page come from the sequence's state, which is f32 and exact in bf16. An element's
 * sum does not depend on its place in mma's tile, so a row alone (decoding) gets the same bits as
 * among others.
 *
 * Roofline: 4·KV_PAGE·N flops per row and key head on tensor cores; reads 4·N bytes and writes
 * 8·KV_PAGE; memory bound. */
#include "delta_scores.cuh"
#include "../attention/attention.cuh"
#include "delta.cuh"

typedef struct Scores {
    float *scores;
    const float *open;
    const real *q, *k;
    const Span *spans;
    int S, G, N;
    int64_t step;
} Scores;

/* Loads the chunk's rows of k (with the open page's) or q into a tile. */
template <int N_PAD>
__device__ static __forceinline__ void rows_load(Shared<real> tile, const Scores &c,
                                                 const Chunk &chunk, int g, const real *from,
                                                 const float *open)
{
    int pieces = c.N / PIECE;
    for (int i = threadIdx.x; i < KV_PAGE * pieces; i += THREADS) {
        int row = i / pieces, p = i % pieces;
        real *to = shared_range(tile, tile_at<N_PAD>(row, p), PIECE);
        if (chunk_has(chunk, row)) {
            cp_async(to, from + (chunk_row(chunk, row) * c.G + g) * c.N + p * PIECE);
            continue;
        }
        float v[PIECE] = {};
        if (open && row < chunk.first)
            for (int e = 0; e < PIECE; e++) v[e] = open[(p * PIECE + e) * KV_PAGE + row];
        store<PIECE>(to, v);
    }
    cp_async_commit();
}

template <int N_PAD, bool EXACT>
static __global__ void __launch_bounds__(THREADS) delta_scores_kernel(Scores c)
{
    DYNAMIC_SHARED(bytes);
    Shared<real> keys = shared_part<real>(bytes, 0, KV_PAGE * N_PAD);
    Shared<real> queries = shared_part<real>(bytes, KV_PAGE * N_PAD * 2, KV_PAGE * N_PAD);
    Chunk chunk;
    if (!chunk_find(&chunk, c.spans, c.S, blockIdx.x)) return;
    int g = blockIdx.y, first = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    const float *open = nullptr;
    if (chunk.first) open = c.open + chunk.span.state * c.step + (int64_t)g * c.N * KV_PAGE;
    rows_load<N_PAD>(keys, c, chunk, g, c.k, open);
    rows_load<N_PAD>(queries, c, chunk, g, c.q, nullptr);
    cp_async_wait<0>();
    __syncthreads();
    if (first >= chunk.end || first + 16 <= chunk.first) return;
    for (int which = 0; which < 2; which++) {
        float s[1][KV_PAGE / 8][4];
        tile_scores<N_PAD, EXACT>(s, which ? queries : keys, left_at<N_PAD>(first), keys,
                                  right_at<N_PAD>(0), c.N);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = first + lane / 4 + 8 * i;
            if (!chunk_has(chunk, row)) continue;
            float *to =
                c.scores + ((chunk_row(chunk, row) * c.G + g) * 2 + which) * KV_PAGE + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < KV_PAGE / 8; j++)
                *(float2 *)(to + 8 * j) = make_float2(s[0][j][2 * i], s[0][j][2 * i + 1]);
        }
    }
}

void delta_scores(CudaDevice *cuda, float *scores, const float *open, const real *q, const real *k,
                  const Span *spans, int S, int T, int G, int N, int64_t step)
{
    Scores c = {scores, open, q, k, spans, S, G, N, step};
    int pad = N <= 64 ? 64 : N == 128 ? 128 : 256;
    auto kernel = pad == 64    ? delta_scores_kernel<64, false>
                  : pad == 128 ? delta_scores_kernel<128, true>
                               : delta_scores_kernel<256, false>;
    LAUNCH(cuda, kernel, dim3(chunk_slots(T, S), G), THREADS, (size_t)4 * KV_PAGE * pad, c);
}

bool delta_takes(CudaDevice *cuda, int N, int E)
{
    if (N % UNIT == 0 && E % UNIT == 0 && N <= DELTA_MOST && E <= DELTA_MOST) return true;
    cuda_fail(cuda, STATUS_INVALID,
              "heads of %d by %d: the delta rule takes multiples of %d up to %d", N, E, DELTA_UNIT,
              DELTA_MOST);
    return false;
}
