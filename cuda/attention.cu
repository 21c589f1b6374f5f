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
    SPLIT_TILES = ARRIVALS, /* grids with fewer blocks give chunks to blocks of their own */
    LAG = 8,                /* powers of 2 by which exponentials may exceed 1 */
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

/* The layout of a block: ROW_WARPS·COL_WARPS warps. COL_WARPS of them share 16·M rows: each
 * computes the scores of its part of a page's keys, and sums its part of the columns over all keys,
 * for which the exponentials pass through shared memory. */
template <int PAD, bool EXACT_, int ROW_WARPS_, int COL_WARPS_, int M_> struct Shape {
    enum {
        E_PAD = PAD,
        COL_WARPS = COL_WARPS_,
        M = M_,
        ROWS = 16 * M_ * ROW_WARPS_,
        THREADS = 32 * ROW_WARPS_ * COL_WARPS_,
        COLUMNS = PAD / COL_WARPS_,
        TILES = COLUMNS / 8,
        KEY_TILES = KV_PAGE / 8 / COL_WARPS_, /* of 8 keys, that a warp has of a page */
        /* A page is cut into so many parts for the sums of exponentials. Each is summed by itself,
         * so that narrow and wide blocks of one width add in the same order. */
        PARTS = PAD / 32,
        OWN = PARTS / COL_WARPS_, /* parts that a warp has */
        PAGE_BYTES = KV_PAGE * PAD * 2,
        P_BYTES = COL_WARPS_ == 1 ? 0 : ROWS * KV_PAGE * 2,
        /* The exponentials take the place of the keys where there is no other. */
        P_IN_KEYS = PAD == 256 && M_ == 2,
        SAVED = (TILES * 4 + 1) * M_ * THREADS, /* floats that a block puts aside between chunks */
        SAVED_AT = 2 * PAGE_BYTES,
        SHARED_AT = SAVED_AT + SAVED * 4, /* what warps of the same rows tell one another */
        TOLD_BYTES = COL_WARPS_ == 1 ? 0 : PARTS * ROWS * 4,
        P_AT = P_IN_KEYS ? 0 : SHARED_AT + TOLD_BYTES,
        BYTES = SHARED_AT + TOLD_BYTES + (P_IN_KEYS ? 0 : P_BYTES),
        RESIDENT = PAD == 256 ? 1 : 2, /* blocks that registers must leave room for */
    };
    static constexpr bool EXACT = EXACT_;
    static_assert(BYTES <= 99 << 10, "sm_86 and sm_89 have no more");
};

/* One thread's share of 16·M rows summed so far: for each of its rows the top, from which powers of
 * 2 are counted, and the sums of exponentials of the warp's parts of pages; its columns of Σ p·v.
 * At a chunk's end the first part becomes the whole sum. */
template <class S> struct Sums {
    float top[S::M][2], sum[S::M][2][S::OWN], acc[S::M][S::TILES][4];
};

/* The state that one thread has of its block. */
template <class S> struct Work {
    Shared<real> keys, values; /* a page of each */
    Shared<real> p;            /* exponentials, (ROWS, KV_PAGE) */
    Shared<float> saved;       /* each thread's acc, then top and sum of each warp's rows */
    Shared<float> told;        /* (PARTS, ROWS): what warps that share rows tell one another */
    Tile tile;
    int g, seen;           /* key-value head; keys that the tile's last row sees */
    int row, column, part; /* of rows, columns and pages, what is this warp's; its first part */
    int right, across;     /* where ldmatrix finds keys, and values */
    bool live;             /* this warp has rows */
    uint32_t q[S::M][S::E_PAD / 16][4];
};

__device__ static __forceinline__ int chunk_begin(int chunk)
{
    if (chunk < 8) return chunk * CHUNK_PAGES;
    return chunk < CHUNKS ? (chunk % 8 + 8) * CHUNK_PAGES << (chunk / 8 - 1) : 1 << 30;
}

/* ---- one page ---- */

/* E, known to the compiler where tiles have that width. */
template <class S> __device__ static __forceinline__ int width(const Attention &c)
{
    return S::EXACT ? (int)S::E_PAD : c.E;
}

template <class S>
__device__ static __forceinline__ void page_load(Shared<real> tile, const real *all,
                                                 const Attention &c, const Work<S> &w, int page)
{
    int E = width<S>(c);
    int64_t number = c.pages[w.tile.span.first + page];
    Rows rows = {all + (number * c.G + w.g) * KV_PAGE * E, E, {1, 0}, w.seen - page * KV_PAGE};
    tile_load<S::E_PAD, S::EXACT, KV_PAGE, S::THREADS>(tile, rows, 0, E);
    cp_async_commit();
}

/* The scores of this warp's part of a page, −∞ where a row does not see the key. */
template <class S>
__device__ static __forceinline__ void page_scores(float (&s)[S::M][S::KEY_TILES][4],
                                                   const Attention &c, const Work<S> &w, int page)
{
    constexpr int EACH = S::KEY_TILES > 1 ? 1 : 2; /* steps of the product at once */
    clear(s);
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k += EACH) {
        if (!S::EXACT && k * 16 >= c.E) break;
        uint32_t q[S::M][EACH][4];
#pragma unroll
        for (int m = 0; m < S::M; m++)
            for (int i = 0; i < 4 * EACH; i++) q[m][i / 4][i % 4] = w.q[m][k + i / 4][i % 4];
        if constexpr (EACH == 2)
            scores_steps(s, q, w.keys, w.right, k, S::EXACT || k * 16 + 16 < c.E);
        else
            scores_step<S::E_PAD>(s, q, w.keys, w.right, k);
    }
    int seen_by_all = w.tile.span.pos + group_query(c.group, w.tile.first);
    if (page * KV_PAGE + KV_PAGE - 1 <= seen_by_all && page * KV_PAGE >= w.seen - c.window) return;
    int thread = opaque(threadIdx.x), own = thread % 32 / 4 + opaque(w.row);
    int first = page * KV_PAGE + w.part * (KV_PAGE / S::PARTS) + thread % 4 * 2;
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = w.tile.first + own + m * 16 + 8 * i;
            int seen = w.tile.span.pos + group_query(c.group, row) - first;
            int hidden = seen - c.window;
#pragma unroll
            for (int j = 0; j < S::KEY_TILES; j++)
                for (int e = 0; e < 2; e++)
                    if (j * 8 + e > seen || j * 8 + e <= hidden) s[m][j][2 * i + e] = -INFINITY;
        }
}

/* Each row's largest score of this warp's keys. */
template <class S>
__device__ static __forceinline__ void scores_highs(float (&high)[S::M][2],
                                                    const float (&s)[S::M][S::KEY_TILES][4])
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = fmaxf(s[m][0][2 * i], s[m][0][2 * i + 1]);
#pragma unroll
            for (int j = 1; j < S::KEY_TILES; j++)
                most = fmaxf(most, fmaxf(s[m][j][2 * i], s[m][j][2 * i + 1]));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            high[m][i] = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        }
}

/* Where a thread's upper row is among what warps of the same rows tell one another; its others are
 * 8 floats apart. Every four threads have a row. */
template <class S> __device__ static __forceinline__ Shared<float> told(const Work<S> &w, int part)
{
    return w.told + part * S::ROWS + w.row + threadIdx.x % 32 / 4;
}

template <class S>
__device__ static __forceinline__ void highs_tell(const Work<S> &w, const float (&high)[S::M][2])
{
    if (threadIdx.x % 4) return;
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++) told(w, w.part / S::OWN)[m * 16 + i * 8] = high[m][i];
}

template <class S>
__device__ static __forceinline__ void highs_hear(const Work<S> &w, float (&high)[S::M][2])
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int other = 0; other < S::COL_WARPS; other++)
                high[m][i] = fmaxf(high[m][i], told(w, other)[m * 16 + i * 8]);
}

/* Scores to exponentials. A row's top stays until a score is 2^LAG times above it, and then the
 * earlier sums shrink. Where no top of the warp's rows rises, which is nearly always, they are left
 * as they are: the same as times 1. So a page that a row does not see changes nothing. */
template <class S>
__device__ static __forceinline__ void soften(float (&s)[S::M][S::KEY_TILES][4], Sums<S> &sums,
                                              const float (&high)[S::M][2], float scale)
{
    bool rises = false;
    float shrink[S::M][2];
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most = high[m][i] * scale, top = sums.top[m][i];
            bool over = most > top + LAG;
            rises = rises || over;
            sums.top[m][i] = over ? most : top;
            float base = sums.top[m][i] == -INFINITY ? 0.0f : sums.top[m][i];
            shrink[m][i] = over ? fast_exp2(top - base) : 1.0f;
#pragma unroll
            for (int part = 0; part < S::OWN; part++) {
                float total = 0.0f;
#pragma unroll
                for (int n = 0; n < S::KEY_TILES / S::OWN; n++)
                    for (int e = 2 * i; e < 2 * i + 2; e++) {
                        float &one = s[m][part * (S::KEY_TILES / S::OWN) + n][e];
                        total += one = fast_exp2(fmaf(one, scale, -base));
                    }
                sums.sum[m][i][part] = fmaf(sums.sum[m][i][part], shrink[m][i], total);
            }
        }
    if (!__any_sync(~0u, rises)) return;
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int j = 0; j < S::TILES; j++)
            for (int e = 0; e < 4; e++) sums.acc[m][j][e] *= shrink[m][e / 2];
}

/* Exponentials for the warps of the same rows, as bf16: a tile of KV_PAGE columns. */
template <class S>
__device__ static __forceinline__ void exponentials_tell(const Work<S> &w,
                                                         const float (&s)[S::M][S::KEY_TILES][4])
{
    int lane = threadIdx.x % 32, row = w.row + lane / 4;
    int first = w.part * (KV_PAGE / S::PARTS / PIECE);
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < S::KEY_TILES; j++) {
                int at = tile_at<KV_PAGE>(row + m * 16 + i * 8, first + j) + lane % 4 * 2;
                *(uint32_t *)shared_range(w.p, at, 2) = pack(s[m][j][2 * i], s[m][j][2 * i + 1]);
            }
}

/* The exponentials of 16 keys as left operands of the product with their values. */
template <class S>
__device__ static __forceinline__ void page_fragments(uint32_t (&p)[S::M][4],
                                                      const float (&s)[S::M][S::KEY_TILES][4],
                                                      const Work<S> &w, int k)
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
        if constexpr (S::COL_WARPS > 1)
            fragment_load(p[m], w.p, left_at<KV_PAGE>(w.row + m * 16), k);
        else
            fragment_of(p[m], s[m], k);
}

/* Adds a page, whose keys are on their way. `next` is the page whose keys are copied next, or
 * −1. */
template <class S>
__device__ static __forceinline__ void page_add(Sums<S> &sums, const Attention &c, const Work<S> &w,
                                                int page, int next)
{
    constexpr bool TOGETHER = S::COL_WARPS > 1;
    enum { STEPS = KV_PAGE / 16 };
    cp_async_wait<0>();
    __syncthreads(); /* the keys are here, and all have read the last page's values */
    page_load(w.values, c.v_pages, c, w, page);
    float s[S::M][S::KEY_TILES][4], high[S::M][2];
    if (w.live) {
        page_scores(s, c, w, page);
        scores_highs<S>(high, s);
        if (TOGETHER) highs_tell(w, high);
    }
    if (TOGETHER) __syncthreads(); /* all highs are told, and all have read the keys */
    if (w.live) {
        if (TOGETHER) highs_hear(w, high);
        soften(s, sums, high, c.scale);
        if (TOGETHER) exponentials_tell(w, s);
    }
    cp_async_wait<0>();
    __syncthreads(); /* values and exponentials are here, and all have read the keys */
    uint32_t p[STEPS][S::M][4];
    if (S::P_IN_KEYS || !TOGETHER)
        for (int k = 0; k < STEPS; k++) page_fragments<S>(p[k], s, w, k);
    if (S::P_IN_KEYS) __syncthreads(); /* all have read the exponentials */
    if (next >= 0) page_load(w.keys, c.k_pages, c, w, next);
    if (!w.live) return;
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        if (!S::P_IN_KEYS && TOGETHER) page_fragments<S>(p[k], s, w, k);
        accumulate_step<S::E_PAD, S::EXACT>(sums.acc, p[k], w.values, w.across, k, w.column, c.E);
    }
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

/* The end of a chunk: every thread of a row gets its whole sum, the parts' in order. */
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
                    told(w, w.part + part)[m * 16 + i * 8] = sum;
            }
    if (S::COL_WARPS > 1)
        __syncthreads(); /* the next page's barriers come before it is told anew */
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++)
            for (int part = 0; part < S::PARTS; part++) {
                float one = S::COL_WARPS > 1 ? told(w, part)[m * 16 + i * 8]
                                             : sums.sum[m][i][part % S::OWN];
                sums.sum[m][i][0] = part ? sums.sum[m][i][0] + one : one;
            }
}

/* Where top and, 16·M floats behind it, sum of a thread's upper row are saved; its others are 8
 * floats apart. A warp has 32·M floats: its own copy of its rows' pairs. */
template <class S> __device__ static __forceinline__ Shared<float> saved_row(const Work<S> &w)
{
    return w.saved + S::TILES * 4 * S::M * S::THREADS + threadIdx.x / 32 * 32 * S::M +
           threadIdx.x % 32 / 4;
}

template <class S>
__device__ static __forceinline__ void sums_save(const Work<S> &w, const Sums<S> &sums)
{
    Shared<float> saved = w.saved + threadIdx.x, row = saved_row(w);
    __syncwarp(); /* all have read what is overwritten */
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

/* Joins the saved sums, of the chunks before, with the sums of the chunk behind them. Where a row
 * saw nothing of the chunks before, they count for exactly 0, and this chunk for exactly 1. */
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

/* Which row of (T,H) is number `own` of this thread's 2·M, or −1. */
template <class S>
__device__ static __forceinline__ int64_t row_index(const Attention &c, const Work<S> &w, int own)
{
    int row = opaque(w.row) + threadIdx.x % 32 / 4 + 8 * own;
    if (row >= w.tile.count) return -1;
    int packed = w.tile.first + row, query = group_query(c.group, packed);
    return (int64_t)(w.tile.span.row + query) * c.H + w.g * c.group.size +
           (packed - query * c.group.size);
}

/* All chunks are in: y = Σ p·v / Σ p, lse = log Σ p. */
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

/* The end of a chunk: joins the chunks before, and is saved, or finishes the rows. */
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

/* ---- chunks that blocks share ---- */

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

/* The end of a block's share of chunks [first, chunks), which all are in c.parts when the last
 * block of the tile arrives: it joins them. */
template <class S>
__device__ static __forceinline__ void parts_join(Sums<S> &sums, const Attention &c,
                                                  const Work<S> &w, int first, int chunks)
{
    if (!is_last(c, w, min((unsigned)(chunks - first), gridDim.z))) return;
    sums_clear(sums); /* rows that do not exist stay zero */
    for (int chunk = first; chunk < chunks; chunk++) {
        part_move<S, false>(sums, c, w, chunk);
        chunk_close(sums, c, w, chunk == first, chunk + 1 == chunks);
    }
}

/* ---- the kernel ---- */

/* Fills in a thread's state. Q passes through the room of saved sums on its way to registers. */
template <class S>
__device__ static __forceinline__ void work_begin(Work<S> &w, const Attention &c,
                                                  Shared<unsigned char> bytes)
{
    w.keys = shared_part<real>(bytes, 0, KV_PAGE * S::E_PAD);
    w.values = shared_part<real>(bytes, S::PAGE_BYTES, KV_PAGE * S::E_PAD);
    w.saved = shared_part<float>(bytes, S::SAVED_AT, S::SAVED);
    w.told = shared_part<float>(bytes, S::SHARED_AT, S::TOLD_BYTES / 4);
    w.p = shared_part<real>(bytes, S::P_AT, S::P_BYTES / 2);
    int warp = threadIdx.x / 32, own = warp % S::COL_WARPS, E = width<S>(c);
    w.g = blockIdx.y;
    w.row = warp / S::COL_WARPS * 16 * S::M;
    w.column = own * S::COLUMNS;
    w.part = own * S::OWN;
    int keys = own * S::KEY_TILES * 8;
    w.right = S::KEY_TILES > 1 ? right_at<S::E_PAD>(keys) : right_at_8<S::E_PAD>(keys);
    w.across = across_at<S::E_PAD>(w.column);
    w.live = w.row < w.tile.count;
    int last = w.tile.first + w.tile.count - 1;
    w.seen = w.tile.span.pos + group_query(c.group, last) + 1;
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
    int last = w.tile.span.pos + group_query(c.group, w.tile.first + w.tile.count - 1);
    int before = w.tile.span.pos + group_query(c.group, w.tile.first) + 1 - c.window;
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

/* Narrow tiles where every span has one query, wide ones where any has more. */
template <int E_PAD, bool EXACT> static void attention_launch(CudaDevice *cuda, Attention c)
{
    enum {
        APART = E_PAD == 64 ? 4
        : E_PAD == 128      ? 2
                            : 1,
        TOGETHER = E_PAD == 256 ? 8 : 4 / APART
    };
    typedef Shape<E_PAD, EXACT, 1, E_PAD == 64 ? 2 : 4, 1> Narrow;
    typedef Shape<E_PAD, EXACT, APART, TOGETHER, 2> Wide;
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
