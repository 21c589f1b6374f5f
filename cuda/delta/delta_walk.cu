/* cuda/delta/delta_walk.cu - the gated delta rule's gradients that pass from page to page:
 *
 *   du_j = Σ_{i≥j} D_ij·(k_j·q_i)·dy_i + D_Lj·dM′ᵀk_j − Σ_{i>j} D_ij·(k_j·k_i)·x_i,  x = β·du
 *   dM = e^{G_L}·dM′ + Σ_i e^{G_i}·(q_i·dy_iᵀ − k_i·x_iᵀ)
 *
 * in the names of delta_backward.cu. A block has UNIT columns of one value head of a span, whose dM
 * stays in shared memory, and walks the pages from the last. Within a page, rows are solved in
 * BLOCKs from the last: the terms of later rows are a product; inside a BLOCK, a lane has a column
 * and goes row by row.
 *
 * Roofline: 6·N·E + 2·KV_PAGE·E f32 flops per row and value head; compute bound. */
#include "delta_walk.cuh"

/* A block's shared memory; a page's rows are as in tile_fill. */
typedef struct Walk {
    Shared<float> dm;    /* (N, UNIT) */
    Shared<float> tile;  /* of k or q */
    Shared<float> pairs; /* of q, then of k */
    Shared<float> dy, x; /* x: first du without the terms of later rows' x */
    Shared<float> sums;
} Walk;

static size_t walk_bytes(int N)
{
    return (size_t)(N * UNIT + 3 * TILE + PAIRS + SUMS) * sizeof(float);
}

__device__ static __forceinline__ Walk walk_of(Shared<unsigned char> bytes, int N)
{
    int64_t tile = (int64_t)N * UNIT * 4, pairs = tile + TILE * 4, dy = pairs + PAIRS * 4;
    return {shared_part<float>(bytes, 0, N * UNIT),
            shared_part<float>(bytes, tile, TILE),
            shared_part<float>(bytes, pairs, PAIRS),
            shared_part<float>(bytes, dy, TILE),
            shared_part<float>(bytes, dy + TILE * 4, TILE),
            shared_part<float>(bytes, dy + 2 * TILE * 4, SUMS)};
}

/* x = du without the terms of later rows' x: the terms of dy and of dM′. */
__device__ static __forceinline__ void slopes_begin(const Walk &work, const DeltaBackward &c,
                                                    const Chunk &chunk, int g)
{
    Sums sums;
    clear(sums);
    if (!chunk.last)
        for (int n = 0; n < c.N; n += UNIT) {
            rows_fill(work.tile, c, chunk, c.k, g, n);
            __syncthreads();
            tile_product(sums, work.tile, work.dm + n * UNIT, UNIT);
            __syncthreads();
        }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        float scale = chunk.last ? 0.0f : decay_between(work.sums, KV_PAGE - 1, row);
        for (int e = 0; e < FOUR; e++) sums[i][e] *= scale;
        columns_sum(sums[i], work.pairs, work.dy, row, i * BLOCK, chunk.end);
        store<FOUR>(shared_range(work.x, row * TILE_ROW + column_of_thread(), FOUR), sums[i]);
    }
}

/* du and x of rows [16·b, 16·b + 16), from the last, one lane per column. */
__device__ static __forceinline__ void block_solve(const Walk &work, const DeltaBackward &c,
                                                   const Chunk &chunk, int local, int column, int b)
{
    int lane = threadIdx.x;
    float taken[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) taken[i] = 0.0f;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; i--) {
        int row = b * BLOCK + i;
        if (row >= chunk.end) continue;
        int64_t t = chunk_row(chunk, row);
        float du = work.x[row * TILE_ROW + lane] - taken[i];
        float x = c.beta[t * c.H + head_of_all(c, local)] * du;
        c.du[(t * c.heads + local) * c.E + column + lane] = du;
        work.x[row * TILE_ROW + lane] = x;
#pragma unroll
        for (int before = 0; before < i; before++)
            taken[before] =
                fmaf(work.pairs[row * PAIRS_ROW + b * BLOCK + before], x, taken[before]);
    }
}

__device__ static __forceinline__ void slopes_solve(const Walk &work, const DeltaBackward &c,
                                                    const Chunk &chunk, int local, int column)
{
    for (int b = (chunk.end - 1) / BLOCK; b >= 0; b--) {
        int row = b * BLOCK + row_of_thread();
        float sum[FOUR] = {};
        columns_sum(sum, work.pairs, work.x, row, b * BLOCK + BLOCK, chunk.end);
        for (int e = 0; e < FOUR; e++) work.x[row * TILE_ROW + column_of_thread() + e] -= sum[e];
        __syncthreads();
        if (threadIdx.x < UNIT) block_solve(work, c, chunk, local, column, b);
        __syncthreads();
    }
}

/* dm += Σ_i from_i·rows_iᵀ for UNIT of N, from n on; `from` is in the tile. */
__device__ static __forceinline__ void outer_add(const Walk &work, Shared<float> rows, int n,
                                                 int end, float scale)
{
    int column = column_of_thread();
    float sum[2][FOUR];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = (n + i * BLOCK + row_of_thread()) * UNIT + column;
        for (int e = 0; e < FOUR; e++) sum[i][e] = scale * work.dm[at + e];
    }
#pragma unroll 4
    for (int j = 0; j < end; j++) {
        float v[FOUR];
        load<FOUR>(v, shared_range(rows, j * TILE_ROW + column, FOUR));
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float from = work.tile[j * TILE_ROW + i * BLOCK + row_of_thread()];
            for (int e = 0; e < FOUR; e++) sum[i][e] = fmaf(from, v[e], sum[i][e]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        store<FOUR>(shared_range(work.dm, (n + i * BLOCK + row_of_thread()) * UNIT + column, FOUR),
                    sum[i]);
}

/* dM at the page's beginning, from that at its end. */
__device__ static __forceinline__ void slope_retreat(const Walk &work, const DeltaBackward &c,
                                                     const Chunk &chunk, int g)
{
    for (int i = threadIdx.x; i < chunk.end * UNIT; i += THREADS) {
        int row = i / UNIT, at = row * TILE_ROW + i % UNIT;
        float scale = decay_whole(work.sums, row);
        work.dy[at] *= scale;
        work.x[at] *= -scale;
    }
    float whole = decay_whole(work.sums, chunk.end - 1);
    for (int n = 0; n < c.N; n += UNIT) {
        __syncthreads();
        rows_fill(work.tile, c, chunk, c.q, g, n);
        __syncthreads();
        outer_add(work, work.dy, n, chunk.end, whole);
        __syncthreads();
        rows_fill(work.tile, c, chunk, c.k, g, n);
        __syncthreads();
        outer_add(work, work.x, n, chunk.end, 1.0f);
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, 3) delta_walk_kernel(DeltaBackward c)
{
    DYNAMIC_SHARED(bytes);
    Walk work = walk_of(bytes, c.N);
    Span span = c.spans[blockIdx.x];
    int local = blockIdx.y, g = c.g + local / (c.H / c.G), column = blockIdx.z * UNIT;
    for (int i = threadIdx.x; i < c.N * UNIT; i += THREADS) work.dm[i] = 0.0f;
    for (int page = (span.rows - 1) / KV_PAGE; page >= 0; page--) {
        Chunk chunk = chunk_of(span, page);
        decay_sums(work.sums, nullptr, c.decay, chunk, c.H, head_of_all(c, local));
        pairs_fill(work.pairs, c.scores, work.sums, chunk, c.G, g, 1);
        tile_fill(work.dy, KV_PAGE, [&](float (&v)[8], int row, int e) {
            if (row < chunk.end)
                load<8>(v, c.dy + value_at(c, chunk_row(chunk, row), local) + column + e);
        });
        __syncthreads();
        slopes_begin(work, c, chunk, g);
        __syncthreads();
        pairs_fill(work.pairs, c.scores, work.sums, chunk, c.G, g, 0);
        __syncthreads();
        slopes_solve(work, c, chunk, local, column);
        if (page == 0) return;
        slope_retreat(work, c, chunk, g);
        float *to = c.dpages + page_at(c, chunk_of(span, page - 1), c.heads, local) + column;
        for (int i = threadIdx.x; i < c.N * UNIT; i += THREADS)
            to[(int64_t)(i / UNIT) * c.E + i % UNIT] = work.dm[i];
    }
}

void delta_walk(CudaDevice *cuda, const DeltaBackward &c)
{
    dim3 grid((unsigned)c.S, (unsigned)c.heads, (unsigned)(c.E / UNIT));
    LAUNCH(cuda, delta_walk_kernel, grid, THREADS, walk_bytes(c.N), c);
}
