/* cuda/attention/attention.cu - grouped-query attention over pages of KV_PAGE keys.
 *
 *   y[t,h,:] = Σ_j softmax_j(q[t,h,:]·k[j,g,:]/√E)·v[j,g,:],  p−window < j ≤ p = position of t,
 *   g = h·G/H;  without a window, j ≤ p;  of whole spans, j ≤ the last row's position
 *
 * A block walks the pages for a tile of packed rows (attention.cuh) with a running maximum
 * (attention_page.cuh); scores stay in registers. The keys are split into chunks whose borders
 * depend only on a key's position. Each chunk is summed from zero, and the chunks are combined in
 * order. So decoding can give chunks to different blocks (few sequences would leave most of the
 * card idle), and every row still has the bits of training, where one block does all chunks. A tile
 * starts with the first page that any of its windows reaches. Keys that a row does not see leave
 * the row's sums unchanged.
 *
 * While a page's scores are computed, its values are in flight; while the values are summed, the
 * next page's keys are in flight.
 *
 * Roofline: 4·E flops per query, head and key. Training is compute bound (mma.sync reaches about
 * half of Hopper's wgmma); decoding reads 4·E bytes per key and key-value head, once for all heads
 * of the group: memory bound. */
#include "attention_page.cuh"

enum {
    CHUNK_PAGES = 4,        /* pages per chunk, up to 8 chunks; then 8 per doubling of the keys */
    CHUNKS = 64,            /* the last starts at key 245,760 and has all later keys */
    SPLIT_TILES = ARRIVALS, /* grids with fewer blocks give each chunk its own block */
};

__device__ static __forceinline__ int chunk_begin(int chunk)
{
    if (chunk < 8) return chunk * CHUNK_PAGES;
    return chunk < CHUNKS ? (chunk % 8 + 8) * CHUNK_PAGES << (chunk / 8 - 1) : 1 << 30;
}

/* ---- chunks ---- */

template <class S> __device__ static __forceinline__ void sums_clear(Sums<S> &sums)
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++) {
            sums.top[m][i] = -INFINITY;
            for (int part = 0; part < S::OWN; part++) sums.sum[m][i][part] = 0.0f;
        }
    clear(sums.acc);
}

/* The end of a chunk: every thread of a row gets its total, the parts' sums in order. */
template <class S>
__device__ static __forceinline__ void sums_close(Sums<S> &sums, const Work<S> &w)
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++)
            for (int part = 0; part < S::OWN; part++) {
                float &sum = sums.sum[m][i][part];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if (S::COL_WARPS > 1 && threadIdx.x % 4 == 0)
                    row_max_at(w, w.part + part)[m * 16 + i * 8] = sum;
            }
    if (S::COL_WARPS > 1) __syncthreads(); /* the next page's barriers precede the next write */
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++)
            for (int part = 0; part < S::PARTS; part++) {
                float one = S::COL_WARPS > 1 ? row_max_at(w, part)[m * 16 + i * 8]
                                             : sums.sum[m][i][part % S::OWN];
                sums.sum[m][i][0] = part ? sums.sum[m][i][0] + one : one;
            }
}

/* The saved top of a thread's upper row; its sum is 16·M floats later, its other rows at stride 8.
 * A warp has 32·M floats: its own copy of its rows' pairs. */
template <class S> __device__ static __forceinline__ Shared<float> saved_row(const Work<S> &w)
{
    return w.saved + S::TILES * 4 * S::M * S::THREADS + threadIdx.x / 32 * 32 * S::M +
           threadIdx.x % 32 / 4;
}

template <class S>
__device__ static __forceinline__ void sums_save(const Work<S> &w, const Sums<S> &sums)
{
    Shared<float> saved = w.saved + threadIdx.x, row = saved_row(w);
    __syncwarp(); /* all reads precede the overwrite */
#pragma unroll
    for (int m = 0; m < S::M; m++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (threadIdx.x % 4) continue;
            row[m * 16 + 8 * i] = sums.top[m][i];
            row[m * 16 + 8 * i + 16 * S::M] = sums.sum[m][i][0];
        }
#pragma unroll
        for (int j = 0; j < S::TILES; j++)
            for (int i = 0; i < 4; i++)
                saved[((m * S::TILES + j) * 4 + i) * S::THREADS] = sums.acc[m][j][i];
    }
    __syncwarp();
}

/* Combines the saved sums of earlier chunks with the next chunk's. If a row saw no key of the
 * earlier chunks, their factor is exactly 0, and this chunk's exactly 1. */
template <class S> __device__ static __forceinline__ void sums_join(Sums<S> &sums, const Work<S> &w)
{
    Shared<float> saved = w.saved + threadIdx.x, row = saved_row(w);
#pragma unroll
    for (int m = 0; m < S::M; m++) {
        float before[2], behind[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float earlier = row[m * 16 + 8 * i], top = fmaxf(earlier, sums.top[m][i]);
            float base = top == -INFINITY ? 0.0f : top;
            before[i] = fast_exp2(earlier - base);
            behind[i] = fast_exp2(sums.top[m][i] - base);
            sums.top[m][i] = top;
            sums.sum[m][i][0] = fmaf(sums.sum[m][i][0], behind[i],
                                     __fmul_rn(row[m * 16 + 8 * i + 16 * S::M], before[i]));
        }
#pragma unroll
        for (int j = 0; j < S::TILES; j++)
            for (int i = 0; i < 4; i++)
                sums.acc[m][j][i] = fmaf(
                    sums.acc[m][j][i], behind[i / 2],
                    __fmul_rn(saved[((m * S::TILES + j) * 4 + i) * S::THREADS], before[i / 2]));
    }
}

/* The row of (T,H) for row `own` of this thread's 2·M, or −1. */
template <class S>
__device__ static __forceinline__ int64_t row_index(const Attention &c, const Work<S> &w, int own)
{
    int row = opaque(w.row) + opaque(threadIdx.x) % 32 / 4 + 8 * own;
    if (row >= w.tile.count) return -1;
    int packed = w.tile.first + row, query = group_query(c.group, packed);
    return (int64_t)(w.tile.span.row + query) * c.H + w.g * c.group.size +
           (packed - query * c.group.size);
}

/* After all chunks: y = Σ p·v / Σ p, lse = log Σ p. */
template <class S>
__device__ static __forceinline__ void sums_finish(const Sums<S> &sums, const Attention &c,
                                                   const Work<S> &w)
{
#pragma unroll
    for (int own = 0; own < 2 * S::M; own++) {
        int m = own / 2, i = own % 2;
        int64_t row = row_index(c, w, own);
        if (row < 0) continue;
        float sum = sums.sum[m][i][0];
        row_store<S::EXACT, S::TILES>(c.y + row * c.E, sums.acc[m], i, 1.0f / sum, w.column, c.E);
        if (w.column == 0 && threadIdx.x % 4 == 0)
            c.lse[row] = fmaf(sums.top[m][i], LN2, logf(sum));
    }
}

/* The end of a chunk: combines it with the earlier chunks, then saves the sums or finishes the
 * rows. */
template <class S>
__device__ static __forceinline__ void chunk_close(Sums<S> &sums, const Attention &c,
                                                   const Work<S> &w, bool first, bool last)
{
    if (!first) sums_join(sums, w);
    if (last)
        sums_finish(sums, c, w);
    else
        sums_save(w, sums);
}

/* ---- chunks of several blocks ---- */

/* Writes a chunk's sums to c.parts, or reads them. */
template <class S, bool WRITE>
__device__ static __forceinline__ void part_move(Sums<S> &sums, const Attention &c,
                                                 const Work<S> &w, int chunk)
{
#pragma unroll
    for (int own = 0; own < 2 * S::M; own++) {
        int m = own / 2, i = own % 2;
        int64_t row = row_index(c, w, own);
        if (row < 0) continue;
        float *part = c.parts + (row * CHUNKS + chunk) * (c.E + 2);
#pragma unroll
        for (int j = 0; j < S::TILES; j++) {
            int e = w.column + j * 8 + threadIdx.x % 4 * 2;
            if (!S::EXACT && e >= c.E) continue;
            float2 *at = (float2 *)(part + e);
            if (WRITE) {
                *at = make_float2(sums.acc[m][j][2 * i], sums.acc[m][j][2 * i + 1]);
            } else {
                sums.acc[m][j][2 * i] = at->x;
                sums.acc[m][j][2 * i + 1] = at->y;
            }
        }
        if (!WRITE) {
            sums.top[m][i] = part[c.E];
            sums.sum[m][i][0] = part[c.E + 1];
        } else if (w.column == 0 && threadIdx.x % 4 == 0) {
            part[c.E] = sums.top[m][i];
            part[c.E + 1] = sums.sum[m][i][0];
        }
    }
}

/* Whether this block is its tile's last to arrive: all parts can then be read. */
template <class S>
__device__ static __forceinline__ bool is_last(const Attention &c, const Work<S> &w,
                                               unsigned blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned *count = &c.arrived[blockIdx.y * gridDim.x + blockIdx.x];
        __threadfence(); /* after the barrier: it covers the writes of all threads */
        unsigned before = atomicAdd(count, 1u);
        __threadfence();
        w.saved[0] = before + 1 == blocks;
        if (before + 1 == blocks) *count = 0;
    }
    __syncthreads();
    bool last = w.saved[0] != 0.0f;
    __syncthreads(); /* saved is about to be reused */
    return last;
}

/* The end of a block's share of chunks. The tile's last block combines [first, chunks), which are
 * then all in c.parts. */
template <class S>
__device__ static __forceinline__ void parts_join(Sums<S> &sums, const Attention &c,
                                                  const Work<S> &w, int first, int chunks)
{
    if (!is_last(c, w, min((unsigned)(chunks - first), gridDim.z))) return;
    sums_clear(sums); /* missing rows stay zero */
    for (int chunk = first; chunk < chunks; chunk++) {
        part_move<S, false>(sums, c, w, chunk);
        chunk_close(sums, c, w, chunk == first, chunk + 1 == chunks);
    }
}

/* ---- the kernel ---- */

/* Fills in a thread's state. Q goes to registers through the memory of saved sums. */
template <class S>
__device__ static __forceinline__ void work_begin(Work<S> &w, const Attention &c,
                                                  Shared<unsigned char> bytes)
{
    w.keys = shared_part<real>(bytes, 0, KV_PAGE * S::E_PAD);
    w.values = shared_part<real>(bytes, S::PAGE_BYTES, KV_PAGE * S::E_PAD);
    w.saved = shared_part<float>(bytes, S::SAVED_AT, S::SAVED);
    w.row_max = shared_part<float>(bytes, S::SHARED_AT, S::TOLD_BYTES / 4);
    w.p = shared_part<real>(bytes, S::P_AT, S::P_BYTES / 2);
    int warp = threadIdx.x / 32, own = warp % S::COL_WARPS, E = width<S>(c.E);
    w.g = blockIdx.y;
    w.row = warp / S::COL_WARPS * 16 * S::M;
    w.column = own * S::COLUMNS;
    w.part = own * S::OWN;
    int keys = own * S::KEY_TILES * 8;
    w.right = S::KEY_TILES > 1 ? right_at<S::E_PAD>(keys) : right_at_8<S::E_PAD>(keys);
    w.across = across_at<S::E_PAD>(w.column);
    w.live = w.row < w.tile.count;
    w.seen = last_seen(c, w.tile, w.tile.first + w.tile.count - 1) + 1;
    Shared<real> tile = shared_part<real>(bytes, S::SAVED_AT, S::ROWS * S::E_PAD);
    Rows rows = rows_of_group(c.q, w.tile.span.row, w.tile.span.rows, c.group, w.g, c.H, E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tile, rows, w.tile.first, E);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    int left = left_at<S::E_PAD>(w.row);
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int k = 0; k < S::E_PAD / 16; k++)
            if (S::EXACT || k * 16 < c.E)
                fragment_load(w.q[m][k], tile, left + m * 16 * S::E_PAD, k);
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::RESIDENT) attention_kernel(Attention c)
{
    DYNAMIC_SHARED(bytes);
    Work<S> w;
    if (!tile_find<S::ROWS>(&w.tile, c.spans, c.S, c.group, blockIdx.x, true)) return;
    if (c.step == 0) w.tile.span.pos += w.tile.span.rows - 1; /* all rows are as its last one */
    int last = last_seen(c, w.tile, w.tile.first + w.tile.count - 1);
    int before = last_seen(c, w.tile, w.tile.first) + 1 - c.window;
    int begin = max(before, 0) / KV_PAGE, pages = last / KV_PAGE + 1, first = 0;
    while (chunk_begin(first + 1) <= begin) first++;
    int chunks = first + 1;
    while (chunk_begin(chunks) < pages) chunks++;
    if ((int)blockIdx.z >= chunks - first) return;
    bool split = S::M == 1 && gridDim.z > 1 && chunks - first > 1;
    int by = split ? gridDim.z : 1, chunk = first + (split ? blockIdx.z : 0);
    int page = max(chunk_begin(chunk), begin);
    work_begin(w, c, bytes);
    Sums<S> sums;
    page_load(w.keys, c.k_pages, c, w, page);
    for (; chunk < chunks; chunk += by) {
        sums_clear(sums);
        int end = min(chunk_begin(chunk + 1), pages), then = chunk_begin(chunk + by);
        if (chunk + by >= chunks) then = -1;
        for (; page < end; page++) page_add(sums, c, w, page, page + 1 < end ? page + 1 : then);
        sums_close(sums, w);
        if (split)
            part_move<S, true>(sums, c, w, chunk);
        else
            chunk_close(sums, c, w, chunk == first, chunk + 1 == chunks);
        page = then;
    }
    if (split) parts_join(sums, c, w, first, chunks);
}

/* Narrow tiles if every span has one query, else wide ones. */
template <int E_PAD, bool EXACT> static void attention_launch(CudaDevice *cuda, Attention c)
{
    enum {
        APART = 256 / E_PAD, /* warps with their own rows */
        TOGETHER = E_PAD == 256 ? 8 : 4 / APART,
        M = EXACT || E_PAD != 256 ? 2 : 1, /* more would spill */
    };
    typedef Shape<E_PAD, EXACT, 1, E_PAD == 64 ? 2 : 4, 1> Narrow;
    typedef Shape<E_PAD, EXACT, APART, TOGETHER, M> Wide;
    static_assert((int)Narrow::PARTS == (int)Wide::PARTS, "the same order of sums");
    if (c.T > c.S) {
        dim3 grid(tile_slots(c.T, c.S, c.group.size, Wide::ROWS), c.G);
        LAUNCH(cuda, attention_kernel<Wide>, grid, Wide::THREADS, Wide::BYTES, c);
        return;
    }
    dim3 grid(tile_slots(c.T, c.S, c.group.size, Narrow::ROWS), c.G);
    if (grid.x * grid.y < SPLIT_TILES) {
        unsigned blocks = 4 * (unsigned)cuda->processors;
        grid.z = min(max(blocks / (grid.x * grid.y), 1u), (unsigned)CHUNKS);
        size_t row_bytes = (size_t)CHUNKS * (size_t)(c.E + 2) * sizeof(float);
        c.parts = (float *)cuda_scratch(cuda, (size_t)c.T * (size_t)c.H * row_bytes);
    }
    LAUNCH(cuda, attention_kernel<Narrow>, grid, Narrow::THREADS, Narrow::BYTES, c);
}

void cuda_attention(Device *dev, real *y, float *lse, const real *q, const cached *k_pages,
                    const cached *v_pages, const Span *spans, const int32_t *pages, int S, int T,
                    int H, int G, int E, int window, int whole)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    if (E > 256 || E % 2) {
        cuda_fail(cuda, STATUS_INVALID, "head width %d: attention takes even ones up to 256", E);
        return;
    }
    Attention c = {y,
                   lse,
                   q,
                   k_pages,
                   v_pages,
                   spans,
                   pages,
                   NULL,
                   cuda->arrived,
                   S,
                   T,
                   H,
                   G,
                   E,
                   window_of(window),
                   whole ? 0 : 1,
                   group_of(H / G),
                   LOG2E / sqrtf((float)E)};
    if (E == 64)
        attention_launch<64, true>(cuda, c);
    else if (E == 128)
        attention_launch<128, true>(cuda, c);
    else if (E == 256)
        attention_launch<256, true>(cuda, c);
    else if (E < 64)
        attention_launch<64, false>(cuda, c);
    else if (E < 128)
        attention_launch<128, false>(cuda, c);
    else
        attention_launch<256, false>(cuda, c);
}
