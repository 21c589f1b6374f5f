/* cuda/attention.cu - causal grouped-query attention over pages of KV_PAGE keys.
 *
 *   y[t,h,:] = Σ_j softmax_j(q[t,h,:]·k[j,g,:]/√E)·v[j,g,:],  p−window < j ≤ p = position of t,
 *   g = h·G/H;  without a window, j ≤ p
 *
 * A block walks the pages for a tile of packed rows (attention.cuh) with a running maximum; the
 * scores never leave registers. The keys are cut into chunks whose borders depend on nothing but
 * the position of a key. Each chunk is summed from zero, and the chunks are joined in order. So
 * decoding may give chunks to different blocks, because few sequences would leave most of the card
 * idle. Every row is still the same, bit for bit, as in training, where one block does all of them.
 * A tile begins with the first page that one of its windows reaches. The keys of it that a row does
 * not see leave the row's sums as they were.
 *
 * While a page's scores are computed its values are on their way. While the values are summed, the
 * next page's keys are on their way.
 *
 * Roofline: 4·E flops a query, head and key. Training is compute bound (mma.sync reaches about half
 * of what Hopper's wgmma would); decoding reads 4·E bytes a key and key-value head, once for all
 * heads of the group; memory bound. */
#include "attention.cuh"

enum {
    CHUNK_PAGES = 4, /* pages of a chunk; up to 8 chunks, then 8 for each doubling of the keys */
    CHUNKS = 64,     /* the last begins at key 245,760, and has all that follow */
    KEY_TILES = KV_PAGE / 8,
    SPLIT_TILES = ARRIVALS, /* grids with fewer blocks give chunks to blocks of their own */
};

typedef struct Attention {
    real *y;
    float *lse;
    const real *q, *k_pages, *v_pages;
    const Span *spans;
    const int32_t *pages;
    float *parts; /* (T, H, CHUNKS, E + 2), where chunks have blocks of their own: sums, top, sum */
    unsigned *arrived; /* of each tile, the blocks that have left their chunks' sums in parts */
    int S, T, H, G, E, window;
    Group group;
    float scale; /* log2(e)/√E: exponentials are powers of 2 */
} Attention;

/* The layout of a block: ROW_WARPS warps own 16 rows each. COL_WARPS warps share the columns of the
 * same rows, and each of them computes their scores for itself. */
template <int PAD, bool EXACT_, int ROW_WARPS_, int COL_WARPS_> struct Shape {
    enum {
        E_PAD = PAD,
        ROW_WARPS = ROW_WARPS_,
        COL_WARPS = COL_WARPS_,
        ROWS = 16 * ROW_WARPS_,
        THREADS = 32 * ROW_WARPS_ * COL_WARPS_,
        COLUMNS = PAD / COL_WARPS_,
        TILES = COLUMNS / 8,
        KEYS_BYTES = KV_PAGE * PAD * 2,
        SAVED = (TILES * 4 + 1) * THREADS,  /* floats that a block puts aside between chunks */
        BYTES = 2 * KEYS_BYTES + SAVED * 4, /* 97 KB at most: sm_86 and sm_89 have 99 */
        RESIDENT = PAD == 64 ? 3
        : PAD == 128         ? 2
                             : 1, /* blocks that registers must leave room for */
    };
    static constexpr bool EXACT = EXACT_;
};

/* One thread's share of 16 rows summed so far: its two rows' largest score, in powers of 2, their
 * sums of exponentials, and its columns of Σ p·v. */
template <int TILES> struct Sums {
    float top[2], sum[2], acc[TILES][4];
};

/* The state that one thread has of its block. */
template <class S> struct Work {
    Shared<real> keys, values; /* a page of each */
    Shared<float> saved;       /* each thread's acc, then top and sum of each warp's rows */
    Tile tile;
    int g, seen; /* key-value head; keys that the tile's last row sees */
    int row, column;
    bool live; /* this warp has rows */
    uint32_t q[S::E_PAD / 16][4];
};

__device__ static __forceinline__ int chunk_begin(int chunk)
{
    if (chunk < 8) return chunk * CHUNK_PAGES;
    return chunk < CHUNKS ? (chunk % 8 + 8) * CHUNK_PAGES << (chunk / 8 - 1) : 1 << 30;
}

/* ---- one page ---- */

template <class S>
__device__ static __forceinline__ void page_load(Shared<real> tile, const real *all,
                                                 const Attention &c, const Work<S> &w, int page)
{
    int64_t number = c.pages[w.tile.span.first + page];
    Rows rows = {all + (number * c.G + w.g) * KV_PAGE * c.E, c.E, {1, 0}, w.seen - page * KV_PAGE};
    tile_load<S::E_PAD, S::EXACT, KV_PAGE, S::THREADS>(tile, rows, 0, c.E);
    cp_async_commit();
}

/* Scores to exponentials against the running maximum, by which the earlier sums shrink: by exactly
 * 1 where the maximum stays, so that a page which a row does not see changes nothing. */
template <int TILES>
__device__ static __forceinline__ void soften(float (&s)[KEY_TILES][4], Sums<TILES> &sums,
                                              float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float high = -INFINITY, total = 0.0f;
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++) high = fmaxf(high, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        float top = fmaxf(sums.top[i], high * scale), base = top == -INFINITY ? 0.0f : top;
        float shrink = fast_exp2(sums.top[i] - base);
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++)
            for (int e = 2 * i; e < 2 * i + 2; e++)
                total += s[j][e] = fast_exp2(fmaf(s[j][e], scale, -base));
        sums.top[i] = top;
        sums.sum[i] = fmaf(sums.sum[i], shrink, total);
#pragma unroll
        for (int j = 0; j < TILES; j++)
            for (int e = 2 * i; e < 2 * i + 2; e++) sums.acc[j][e] *= shrink;
    }
}

/* The scores of a page's keys, −∞ where a row does not see the key. */
template <class S>
__device__ static __forceinline__ void page_scores(float (&s)[KEY_TILES][4], const Attention &c,
                                                   const Work<S> &w, int page)
{
#pragma unroll
    for (int j = 0; j < KEY_TILES; j++)
        for (int i = 0; i < 4; i++) s[j][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k++) {
        if (!S::EXACT && k * 16 >= c.E) break;
        scores_step<S::E_PAD, KEY_TILES>(s, w.q[k], w.keys, k);
    }
    int first = page * KV_PAGE + threadIdx.x % 4 * 2, row = w.tile.first + w.row;
    int seen_by_all = w.tile.span.pos + group_query(c.group, w.tile.first);
    if (page * KV_PAGE + KV_PAGE - 1 <= seen_by_all && page * KV_PAGE >= w.seen - c.window) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int query = group_query(c.group, row + threadIdx.x % 32 / 4 + 8 * i);
        int seen = w.tile.span.pos + query - first, hidden = seen - c.window;
#pragma unroll
        for (int j = 0; j < KEY_TILES; j++)
            for (int e = 0; e < 2; e++)
                if (j * 8 + e > seen || j * 8 + e <= hidden) s[j][2 * i + e] = -INFINITY;
    }
}

/* Adds a page, whose keys are on their way. `next` is the page whose keys are copied next, or
 * −1. */
template <class S>
__device__ static __forceinline__ void page_add(Sums<S::TILES> &sums, const Attention &c,
                                                const Work<S> &w, int page, int next)
{
    cp_async_wait<0>();
    __syncthreads(); /* the keys are here, and all have read the last page's values */
    page_load(w.values, c.v_pages, c, w, page);
    uint32_t p[KEY_TILES / 2][4];
    if (w.live) {
        float s[KEY_TILES][4];
        page_scores(s, c, w, page);
        soften(s, sums, c.scale);
        fragments_of<KEY_TILES>(p, s);
    }
    cp_async_wait<0>();
    __syncthreads(); /* the values are here, and all have read the keys */
    if (next >= 0) page_load(w.keys, c.k_pages, c, w, next);
    if (w.live)
        tile_accumulate<S::E_PAD, S::EXACT, KEY_TILES / 2>(sums.acc, p, w.values, w.column, c.E);
}

/* ---- chunks ---- */

template <int TILES> __device__ static __forceinline__ void sums_clear(Sums<TILES> &sums)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums.top[i] = -INFINITY;
        sums.sum[i] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < TILES; j++)
        for (int i = 0; i < 4; i++) sums.acc[j][i] = 0.0f;
}

/* The end of a chunk: every thread of a row gets its whole sum. */
template <int TILES> __device__ static __forceinline__ void sums_close(Sums<TILES> &sums)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sums.sum[i] += __shfl_xor_sync(~0u, sums.sum[i], 1);
        sums.sum[i] += __shfl_xor_sync(~0u, sums.sum[i], 2);
    }
}

/* Where top and, 16 floats behind it, sum of a thread's upper row are saved; the lower row's are 8
 * floats on. A warp has 32 floats: its own copy of its 16 rows' pairs. */
template <class S> __device__ static __forceinline__ Shared<float> saved_row(const Work<S> &w)
{
    return w.saved + S::TILES * 4 * S::THREADS + threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4;
}

template <class S>
__device__ static __forceinline__ void sums_save(const Work<S> &w, const Sums<S::TILES> &sums)
{
    Shared<float> saved = w.saved + threadIdx.x, row = saved_row(w);
    __syncwarp(); /* all have read what is overwritten */
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x % 4) continue;
        row[8 * i] = sums.top[i];
        row[8 * i + 16] = sums.sum[i];
    }
#pragma unroll
    for (int j = 0; j < S::TILES; j++)
        for (int i = 0; i < 4; i++) saved[(j * 4 + i) * S::THREADS] = sums.acc[j][i];
    __syncwarp();
}

/* Joins the saved sums, of the chunks before, with the sums of the chunk behind them. Where a row
 * saw nothing of the chunks before, they count for exactly 0, and this chunk for exactly 1. */
template <class S>
__device__ static __forceinline__ void sums_join(Sums<S::TILES> &sums, const Work<S> &w)
{
    Shared<float> saved = w.saved + threadIdx.x, row = saved_row(w);
    float before[2], behind[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = fmaxf(row[8 * i], sums.top[i]);
        float base = top == -INFINITY ? 0.0f : top;
        before[i] = fast_exp2(row[8 * i] - base);
        behind[i] = fast_exp2(sums.top[i] - base);
        sums.top[i] = top;
        sums.sum[i] = fmaf(sums.sum[i], behind[i], __fmul_rn(row[8 * i + 16], before[i]));
    }
#pragma unroll
    for (int j = 0; j < S::TILES; j++)
        for (int i = 0; i < 4; i++)
            sums.acc[j][i] = fmaf(sums.acc[j][i], behind[i / 2],
                                  __fmul_rn(saved[(j * 4 + i) * S::THREADS], before[i / 2]));
}

/* Which row of (T,H) this thread's upper (0) or lower (1) row is, or −1. */
template <class S>
__device__ static __forceinline__ int64_t row_index(const Attention &c, const Work<S> &w, int half)
{
    int row = w.row + threadIdx.x % 32 / 4 + 8 * half;
    if (row >= w.tile.count) return -1;
    int packed = w.tile.first + row, query = group_query(c.group, packed);
    return (int64_t)(w.tile.span.row + query) * c.H + w.g * c.group.size +
           (packed - query * c.group.size);
}

/* All chunks are in: y = Σ p·v / Σ p, lse = log Σ p. */
template <class S>
__device__ static __forceinline__ void sums_finish(const Sums<S::TILES> &sums, const Attention &c,
                                                   const Work<S> &w)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t row = row_index(c, w, i);
        if (row < 0) continue;
        row_store<S::EXACT, S::TILES>(c.y + row * c.E, sums.acc, i, 1.0f / sums.sum[i], w.column,
                                      c.E);
        if (w.column == 0 && threadIdx.x % 4 == 0)
            c.lse[row] = fmaf(sums.top[i], LN2, logf(sums.sum[i]));
    }
}

/* The end of a chunk: joins the chunks before, and is saved, or finishes the rows. */
template <class S>
__device__ static __forceinline__ void chunk_close(Sums<S::TILES> &sums, const Attention &c,
                                                   const Work<S> &w, bool first, bool last)
{
    if (!first) sums_join(sums, w);
    if (last)
        sums_finish(sums, c, w);
    else
        sums_save(w, sums);
}

/* ---- chunks that blocks share ---- */

/* Writes a chunk's sums to c.parts, or reads them. */
template <class S, bool WRITE>
__device__ static __forceinline__ void part_move(Sums<S::TILES> &sums, const Attention &c,
                                                 const Work<S> &w, int chunk)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64_t row = row_index(c, w, i);
        if (row < 0) continue;
        float *part = c.parts + (row * CHUNKS + chunk) * (c.E + 2);
#pragma unroll
        for (int j = 0; j < S::TILES; j++) {
            int e = w.column + j * 8 + threadIdx.x % 4 * 2;
            if (!S::EXACT && e >= c.E) continue;
            float2 *at = (float2 *)(part + e);
            if (WRITE) {
                *at = make_float2(sums.acc[j][2 * i], sums.acc[j][2 * i + 1]);
            } else {
                sums.acc[j][2 * i] = at->x;
                sums.acc[j][2 * i + 1] = at->y;
            }
        }
        if (!WRITE) {
            sums.top[i] = part[c.E];
            sums.sum[i] = part[c.E + 1];
        } else if (w.column == 0 && threadIdx.x % 4 == 0) {
            part[c.E] = sums.top[i];
            part[c.E + 1] = sums.sum[i];
        }
    }
}

/* Whether this block is the last of its tile's, so that all their parts can be read. */
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
    __syncthreads(); /* saved is about to get its own use again */
    return last;
}

/* Writes this block's share of chunks [first, chunks), one at a time, to c.parts. The last block
 * that arrives joins all. */
template <class S>
__device__ static __forceinline__ void chunks_split(const Attention &c, const Work<S> &w, int first,
                                                    int chunks, int page, int pages)
{
    Sums<S::TILES> sums;
    unsigned blocks = min((unsigned)(chunks - first), gridDim.z);
    for (int chunk = first + blockIdx.z; chunk < chunks; chunk += gridDim.z) {
        int begin = max(chunk_begin(chunk), page), end = min(chunk_begin(chunk + 1), pages);
        sums_clear(sums);
        page_load(w.keys, c.k_pages, c, w, begin);
        for (int page = begin; page < end; page++)
            page_add(sums, c, w, page, page + 1 < end ? page + 1 : -1);
        sums_close(sums);
        part_move<S, true>(sums, c, w, chunk);
        __syncthreads(); /* the values' tile is free again */
    }
    if (!is_last(c, w, blocks)) return;
    sums_clear(sums); /* rows that do not exist stay zero */
    for (int chunk = first; chunk < chunks; chunk++) {
        part_move<S, false>(sums, c, w, chunk);
        chunk_close(sums, c, w, chunk == first, chunk + 1 == chunks);
    }
}

/* ---- the kernel ---- */

/* Fills in a thread's state. Q passes through the values' tile on its way to registers. */
template <class S>
__device__ static __forceinline__ void work_begin(Work<S> &w, const Attention &c,
                                                  Shared<unsigned char> bytes)
{
    w.keys = shared_part<real>(bytes, 0, KV_PAGE * S::E_PAD);
    w.values = shared_part<real>(bytes, S::KEYS_BYTES, KV_PAGE * S::E_PAD);
    w.saved = shared_part<float>(bytes, 2 * S::KEYS_BYTES, S::SAVED);
    int warp = threadIdx.x / 32;
    w.g = blockIdx.y;
    w.row = warp / S::COL_WARPS * 16;
    w.column = warp % S::COL_WARPS * S::COLUMNS;
    w.live = w.row < w.tile.count && (S::EXACT || w.column < c.E);
    int last = w.tile.first + w.tile.count - 1;
    w.seen = w.tile.span.pos + group_query(c.group, last) + 1;
    Rows rows = rows_of_group(c.q, w.tile.span.row, w.tile.span.rows, c.group, w.g, c.H, c.E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(w.values, rows, w.tile.first, c.E);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k++)
        if (S::EXACT || k * 16 < c.E) fragment_load<S::E_PAD>(w.q[k], w.values, w.row, k);
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::RESIDENT) attention_kernel(Attention c)
{
    DYNAMIC_SHARED(bytes);
    Work<S> w;
    if (!tile_find<S::ROWS>(&w.tile, c.spans, c.S, c.group, blockIdx.x, true)) return;
    int last = w.tile.span.pos + group_query(c.group, w.tile.first + w.tile.count - 1);
    int before = w.tile.span.pos + group_query(c.group, w.tile.first) + 1 - c.window;
    int page = max(before, 0) / KV_PAGE, pages = last / KV_PAGE + 1, first = 0;
    while (chunk_begin(first + 1) <= page) first++;
    int chunks = first + 1;
    while (chunk_begin(chunks) < pages) chunks++;
    if ((int)blockIdx.z >= chunks - first) return;
    work_begin(w, c, bytes);
    if (gridDim.z > 1 && chunks - first > 1) {
        chunks_split(c, w, first, chunks, page, pages);
        return;
    }
    Sums<S::TILES> sums;
    page_load(w.keys, c.k_pages, c, w, page);
    for (int chunk = first; chunk < chunks; chunk++) {
        sums_clear(sums);
        for (int end = min(chunk_begin(chunk + 1), pages); page < end; page++)
            page_add(sums, c, w, page, page + 1 < pages ? page + 1 : -1);
        sums_close(sums);
        chunk_close(sums, c, w, chunk == first, chunk + 1 == chunks);
    }
}

/* Narrow tiles where every span has one query, wide ones where any has more. */
template <int E_PAD, bool EXACT> static void attention_launch(CudaDevice *cuda, Attention c)
{
    typedef Shape<E_PAD, EXACT, 1, E_PAD == 64 ? 2 : 4> Narrow;
    typedef Shape<E_PAD, EXACT, E_PAD == 256 ? 2 : 4, E_PAD == 256 ? 4 : 1> Wide;
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

void cuda_attention(Device *dev, real *y, float *lse, const real *q, const real *k_pages,
                    const real *v_pages, const Span *spans, const int32_t *pages, int S, int T,
                    int H, int G, int E, int window)
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
