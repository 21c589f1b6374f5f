/* cuda/attention/attention_backward.cu - gradients of causal grouped-query attention over packed
 * sequences.
 *
 *   p = exp(q·kᵀ/√E − lse), 0 for keys that a query does not see
 *   ds = p·(dy·vᵀ − δ),  δ = Σ_e dy·y
 *   dv = pᵀ·dy,  dk = dsᵀ·q/√E,  dq = ds·k/√E;  dk and dv sum over the heads of their group
 *
 * Nothing is summed across blocks: in one kernel a block owns a tile of keys and walks the queries
 * and heads that see it, in another it owns a tile of queries and walks its keys. That computes p
 * and ds twice, but needs no atomics and no f32 copy of dq, and is batch-invariant: a sequence's
 * gradients do not depend on other sequences, bit for bit. p and ds go from the result of one mma
 * directly to the left operand of the next, in registers. So the first kernel uses their
 * transposes, with keys as rows. Walked tiles are double-buffered.
 *
 * If a head is too wide for one warp's registers, four warps share their rows: each sums a quarter
 * of the columns, computes p and ds for a quarter of the walked rows, and reads the others' from
 * shared memory, as fragments.
 *
 * Roofline: 14·E flops per query, head and visible key (10·E without the repetition); compute
 * bound. */
#include "attention.cuh"

enum { WALKED = 32, WALKED_TILES = WALKED / 8 }; /* rows of a walked tile */

typedef struct Backward {
    real *dq, *dk, *dv;
    const real *dy, *y, *q, *k, *v;
    const float *lse;
    float *delta; /* (T, H) */
    const Span *spans;
    int S, T, H, G, E, window;
    int64_t q_step, kv_step; /* row strides of dq, and of dk, dv and v */
    Group group;
    float scale; /* 1/√E */
} Backward;

/* A block. A warp sums its columns of the gradients of its rows. */
template <int PAD, bool EXACT_, int ROW_WARPS, int COL_WARPS_, int M_>
struct Shape : Layout<PAD, EXACT_, ROW_WARPS, COL_WARPS_, M_> {
    enum {
        OWNED = Layout<PAD, EXACT_, ROW_WARPS, COL_WARPS_, M_>::ROWS *
            PAD,                /* elements of a tile that stays */
        PASSING = WALKED * PAD, /* elements of a walked tile */
        FACTS_AT = (2 * OWNED + 4 * PASSING) * 2,
        SHARES = COL_WARPS_ == WALKED_TILES,
        PARTS = WALKED_TILES * 32, /* results of all warps of 16 rows */
        BYTES = FACTS_AT + (SHARES ? ROW_WARPS * PARTS * 8 : 2 * WALKED * 12),
    };
    static_assert(SHARES || COL_WARPS_ == 1, "a warp makes a tile of eight, or all");
    static_assert(BYTES <= 99 << 10, "sm_86 and sm_89 have no more");
};

/* The six tiles of a block: two that stay, and two pairs of walked ones. */
template <class S> struct Tiles {
    Shared<real> a, b, passing;
    __device__ Shared<real> walked(int pair, int which) const
    {
        return passing + (pair * 2 + which) * S::PASSING;
    }
};

template <class S> __device__ static __forceinline__ Tiles<S> tiles_of(Shared<unsigned char> bytes)
{
    return {shared_part<real>(bytes, 0, S::OWNED), shared_part<real>(bytes, S::OWNED * 2, S::OWNED),
            shared_part<real>(bytes, S::OWNED * 4, 4 * S::PASSING)};
}

/* ---- p and ds shared by warps ---- */

/* s = a·bᵀ of 16 rows of tile a and 8 rows of tile b. */
template <class S>
__device__ static __forceinline__ void part_scores(float (&s)[1][1][4], Shared<real> a, int left,
                                                   Shared<real> b, int right, int E)
{
    clear(s);
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k += 2) {
        if (!S::EXACT && k * 16 >= E) break;
        uint32_t fragments[1][2][4];
        fragment_load(fragments[0][0], a, left, k);
        fragment_load(fragments[0][1], a, left, k + 1);
        scores_steps(s, fragments, b, right, k, S::EXACT || (k + 1) * 16 < E);
    }
}

/* Stores a tile of eight columns as the left operand of the next mma. */
__device__ static __forceinline__ void part_put(Shared<uint2> parts, int part, const float (&s)[4])
{
    parts[part * 32 + threadIdx.x % 32] = make_uint2(pack(s[0], s[1]), pack(s[2], s[3]));
}

/* Columns [16·k, 16·k+16) of all parts. */
__device__ static __forceinline__ void parts_fragment(uint32_t (&p)[4], Shared<uint2> parts, int k)
{
    uint2 first = parts[2 * k * 32 + threadIdx.x % 32],
          second = parts[(2 * k + 1) * 32 + threadIdx.x % 32];
    p[0] = first.x;
    p[1] = first.y;
    p[2] = second.x;
    p[3] = second.y;
}

/* ---- δ ---- */

enum { DELTA_THREADS = 256 };

/* One warp for each row of (T·H, E). */
static __global__ void delta_kernel(float *delta, const real *dy, const real *y, int64_t rows,
                                    int E)
{
    int64_t row = (int64_t)blockIdx.x * (DELTA_THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int e = threadIdx.x % 32 * 2; e < E; e += 64) {
        uint32_t a = *(const uint32_t *)(dy + row * E + e),
                 b = *(const uint32_t *)(y + row * E + e);
        sum = fmaf(low_of(a), low_of(b), sum);
        sum = fmaf(high_of(a), high_of(b), sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

/* ---- dk and dv: a tile of keys walks the queries ---- */

/* The other numbers of a packed row. */
typedef struct Fact {
    float lse, delta; /* lse in units of log 2 */
    int query;
} Fact;

/* lse is +∞ for missing rows: their p is 0. */
__device__ static __forceinline__ Fact fact_of(const Backward &c, Span span, int g, int row)
{
    int query = group_query(c.group, row);
    if (query >= span.rows) return {INFINITY, 0.0f, 1 << 30};
    int64_t at =
        (int64_t)(span.row + query) * c.H + g * c.group.size + (row - query * c.group.size);
    return {c.lse[at] * LOG2E, c.delta[at], query};
}

template <class S>
__device__ static __forceinline__ void queries_load(const Tiles<S> &tiles, const Backward &c,
                                                    Span span, int g, int first, int pair)
{
    int E = width<S>(c.E);
    Rows q = rows_of_group(c.q, span.row, span.rows, c.group, g, c.H, E);
    Rows dy = q;
    dy.base = c.dy + (q.base - c.q);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 0), q, first, E);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 1), dy, first, E);
    cp_async_commit();
}

/* Whether a query attends to a key, given their positions in the sequence: 0 <= query - key <
 * window, as one comparison. */
__device__ static __forceinline__ bool sees(int query, int key, int window)
{
    return (unsigned)(query - key) < (unsigned)window;
}

/* s = k·qᵀ and ds = v·dyᵀ of 16 keys and 8·TILES rows become pᵀ and dsᵀ. */
template <bool MASKED, int TILES>
__device__ static __forceinline__ void
scores_backward_transposed(float (&s)[TILES][4], float (&ds)[TILES][4], Shared<Fact> facts, int key,
                           int window, float scale)
{
#pragma unroll
    for (int j = 0; j < TILES; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            Fact fact = facts[j * 8 + threadIdx.x % 4 * 2 + e];
#pragma unroll
            for (int i = e; i < 4; i += 2) {
                float p = fast_exp2(fmaf(s[j][i], scale, -fact.lse));
                if (MASKED) p = sees(fact.query, key + i / 2 * 8, window) ? p : 0.0f;
                s[j][i] = p;
                ds[j][i] = p * (ds[j][i] - fact.delta);
            }
        }
    }
}

/* The state of a warp of keys: its 16 keys, its columns, and its ldmatrix indices. */
template <class S> struct KeyWarp {
    int first, column, left, right, across;
    int part; /* its tile of eight walked rows, if warps share them */
    Shared<uint2> p, ds;
    bool live;
    uint32_t k[S::E_PAD / 16][4]; /* the keys themselves, as left operands */
};

/* dst += transposed probabilities, or their gradients, times a tile of queries. */
template <class S>
__device__ static __forceinline__ void queries_sum(float (&sum)[1][S::TILES][4],
                                                   const float (&s)[WALKED_TILES][4],
                                                   Shared<real> queries, const KeyWarp<S> &w, int E)
{
#pragma unroll
    for (int k = 0; k < WALKED / 16; k++) {
        uint32_t fragment[1][4];
        fragment_of(fragment[0], s, k);
        accumulate_step<S::E_PAD, S::EXACT>(sum, fragment, queries, w.across, k, w.column, E);
    }
}

/* Whether all of a tile of queries see all of a warp's keys; `first` is its first packed row. */
template <class S>
__device__ static __forceinline__ bool all_see(const Backward &c, const KeyWarp<S> &w, int first)
{
    int query = group_query(c.group, first), last = group_query(c.group, first + WALKED - 1);
    return query >= w.first + 15 && last - w.first < c.window;
}

/* Adds one tile of queries, from packed row `first` on, to dk and dv of this warp's 16 keys. */
template <class S>
__device__ static __forceinline__ void
queries_add(float (&dk)[1][S::TILES][4], float (&dv)[1][S::TILES][4], const Tiles<S> &tiles,
            int pair, Shared<Fact> facts, const Backward &c, const KeyWarp<S> &w, int first)
{
    float s[1][WALKED_TILES][4], ds[1][WALKED_TILES][4];
    Shared<real> q = tiles.walked(pair, 0), dy = tiles.walked(pair, 1);
    clear(s);
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k++) {
        if (!S::EXACT && k * 16 >= c.E) break;
        uint32_t key[1][1][4];
#pragma unroll
        for (int i = 0; i < 4; i++) key[0][0][i] = w.k[k][i];
        scores_step<S::E_PAD>(s, key, q, w.right, k);
    }
    tile_scores<S::E_PAD, S::EXACT>(ds, tiles.b, w.left, dy, w.right, c.E);
    int key = w.first + threadIdx.x % 32 / 4;
    if (all_see(c, w, first))
        scores_backward_transposed<false>(s[0], ds[0], facts, key, c.window, c.scale * LOG2E);
    else
        scores_backward_transposed<true>(s[0], ds[0], facts, key, c.window, c.scale * LOG2E);
    queries_sum(dv, s[0], dy, w, c.E);
    queries_sum(dk, ds[0], q, w, c.E);
}

/* This warp's part of pᵀ and dsᵀ of such a tile, for warps with the same keys. */
template <class S>
__device__ static __forceinline__ void queries_part(const Tiles<S> &tiles, int pair,
                                                    Shared<Fact> facts, const Backward &c,
                                                    const KeyWarp<S> &w, int first)
{
    float s[1][1][4], ds[1][1][4];
    clear(s);
#pragma unroll
    for (int k = 0; k < S::E_PAD / 16; k += 2) {
        if (!S::EXACT && k * 16 >= c.E) break;
        uint32_t key[1][2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) key[0][i / 4][i % 4] = w.k[k + i / 4][i % 4];
        scores_steps(s, key, tiles.walked(pair, 0), w.right, k, S::EXACT || (k + 1) * 16 < c.E);
    }
    part_scores<S>(ds, tiles.b, w.left, tiles.walked(pair, 1), w.right, c.E);
    int key = w.first + threadIdx.x % 32 / 4;
    Shared<Fact> own = facts + w.part * 8;
    if (all_see(c, w, first))
        scores_backward_transposed<false>(s[0], ds[0], own, key, c.window, c.scale * LOG2E);
    else
        scores_backward_transposed<true>(s[0], ds[0], own, key, c.window, c.scale * LOG2E);
    part_put(w.p, w.part, s[0][0]);
    part_put(w.ds, w.part, ds[0][0]);
}

/* Adds such a tile from all parts. */
template <class S>
__device__ static __forceinline__ void parts_add(float (&dk)[1][S::TILES][4],
                                                 float (&dv)[1][S::TILES][4], const Tiles<S> &tiles,
                                                 int pair, int E, const KeyWarp<S> &w)
{
#pragma unroll
    for (int k = 0; k < WALKED / 16; k++) {
        uint32_t p[1][4], ds[1][4];
        parts_fragment(p[0], w.p, k);
        parts_fragment(ds[0], w.ds, k);
        accumulate_step<S::E_PAD, S::EXACT>(dv, p, tiles.walked(pair, 1), w.across, k, w.column, E);
        accumulate_step<S::E_PAD, S::EXACT>(dk, ds, tiles.walked(pair, 0), w.across, k, w.column,
                                            E);
    }
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::RESIDENT) keys_backward_kernel(Backward c)
{
    DYNAMIC_SHARED(bytes);
    Tiles<S> tiles = tiles_of<S>(bytes);
    Shared<Fact> facts = shared_part<Fact>(bytes, S::FACTS_AT, 2 * WALKED);
    Tile tile;
    if (!tile_find<S::ROWS>(&tile, c.spans, c.S, {1, 0}, blockIdx.x, false)) return;
    Span span = tile.span;
    int g = blockIdx.y, warp = threadIdx.x / 32, E = width<S>(c.E);
    int rows = min(span.rows, tile.first + tile.count - 1 + c.window) * c.group.size;
    int row = warp / S::COL_WARPS * 16;
    Rows k = rows_of_head(c.k, span.row, span.rows, g, c.G, E);
    Rows v = {c.v + span.row * c.kv_step + g * E, c.kv_step, k.group, k.count};
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.a, k, tile.first, E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.b, v, tile.first, E);
    int first = tile.first * c.group.size, pair = 0;
    queries_load(tiles, c, span, g, first, pair);
    if (threadIdx.x < WALKED) facts[threadIdx.x] = fact_of(c, span, g, first + threadIdx.x);

    KeyWarp<S> w;
    w.first = tile.first + row;
    w.column = warp % S::COL_WARPS * S::COLUMNS;
    w.left = left_at<S::E_PAD>(row);
    w.part = warp % S::COL_WARPS;
    w.right = S::SHARES ? right_at_8<S::E_PAD>(w.part * 8) : right_at<S::E_PAD>(0);
    w.across = across_at<S::E_PAD>(w.column);
    w.live = row < tile.count;
    if constexpr (S::SHARES) { /* in the memory of keys, which are in registers by then */
        w.p = shared_part<uint2>(bytes, row / 16 * S::PARTS * 16, S::PARTS);
        w.ds = shared_part<uint2>(bytes, row / 16 * S::PARTS * 16 + S::PARTS * 8, S::PARTS);
    }
    float dk[1][S::TILES][4], dv[1][S::TILES][4];
    clear(dk);
    clear(dv);
    for (bool begins = true; first < rows; first += WALKED, pair ^= 1, begins = false) {
        Fact fact;
        bool more = first + WALKED < rows, brings = more && threadIdx.x < WALKED;
        cp_async_wait<0>();
        __syncthreads(); /* this pair has arrived, and all have read the other one */
        if (begins)
#pragma unroll
            for (int k = 0; k < S::E_PAD / 16; k++)
                if (S::EXACT || k * 16 < c.E) fragment_load(w.k[k], tiles.a, w.left, k);
        if (more) queries_load(tiles, c, span, g, first + WALKED, pair ^ 1);
        if (brings) fact = fact_of(c, span, g, first + WALKED + threadIdx.x);
        if constexpr (S::SHARES) {
            if (begins) __syncthreads(); /* all have loaded their keys */
            if (w.live) queries_part<S>(tiles, pair, facts + pair * WALKED, c, w, first);
            __syncthreads();
            if (w.live) parts_add<S>(dk, dv, tiles, pair, c.E, w);
        } else if (w.live) {
            queries_add<S>(dk, dv, tiles, pair, facts + pair * WALKED, c, w, first);
        }
        if (brings) facts[(pair ^ 1) * WALKED + threadIdx.x] = fact;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int key = opaque(w.first) + opaque(threadIdx.x) % 32 / 4 + 8 * i;
        if (key >= span.rows) continue;
        int64_t at = (span.row + key) * c.kv_step + g * c.E;
        row_store<S::EXACT, S::TILES>(c.dk + at, dk[0], i, c.scale, w.column, c.E);
        row_store<S::EXACT, S::TILES>(c.dv + at, dv[0], i, 1.0f, w.column, c.E);
    }
}

/* ---- dq: a tile of queries walks the keys ---- */

template <class S>
__device__ static __forceinline__ void keys_load(const Tiles<S> &tiles, const Backward &c,
                                                 Span span, int g, int first, int pair)
{
    int E = width<S>(c.E);
    Rows k = rows_of_head(c.k, span.row, span.rows, g, c.G, E);
    Rows v = {c.v + span.row * c.kv_step + g * E, c.kv_step, k.group, k.count};
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 0), k, first, E);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 1), v, first, E);
    cp_async_commit();
}

/* The state of a warp of queries: its first row, its columns, and its ldmatrix indices. */
struct QueryWarp {
    int row, column, left, right, across;
    int part; /* its tile of eight walked keys, if warps share them */
    Shared<uint2> ds;
};

/* s = q·kᵀ and ds = dy·vᵀ become p·(ds − δ), for keys from `first` on. */
template <bool MASKED, int M, int TILES>
__device__ static __forceinline__ void
scores_backward(const float (&s)[M][TILES][4], float (&ds)[M][TILES][4], const Fact (&facts)[M][2],
                int first, int window, float scale)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Fact &fact = facts[m][i / 2];
                float p = fast_exp2(fmaf(s[m][j][i], scale, -fact.lse));
                int key = first + j * 8 + threadIdx.x % 4 * 2 + i % 2;
                bool seen = !MASKED || sees(fact.query, key, window);
                ds[m][j][i] = seen ? p * (ds[m][j][i] - fact.delta) : 0.0f;
            }
}

/* Adds keys [first, first + WALKED) to dq of this warp's rows, described by `facts`. `all`: all
 * rows of the tile see all of them. */
template <class S>
__device__ static __forceinline__ void
keys_add(float (&dq)[S::M][S::TILES][4], const Tiles<S> &tiles, int pair,
         const Fact (&facts)[S::M][2], const Backward &c, const QueryWarp &w, int first, bool all)
{
    float s[S::M][WALKED_TILES][4], ds[S::M][WALKED_TILES][4];
    Shared<real> k = tiles.walked(pair, 0), v = tiles.walked(pair, 1);
    tile_scores<S::E_PAD, S::EXACT>(s, tiles.a, w.left, k, w.right, c.E);
    tile_scores<S::E_PAD, S::EXACT>(ds, tiles.b, w.left, v, w.right, c.E);
    if (all)
        scores_backward<false>(s, ds, facts, first, c.window, c.scale * LOG2E);
    else
        scores_backward<true>(s, ds, facts, first, c.window, c.scale * LOG2E);
#pragma unroll
    for (int step = 0; step < WALKED / 16; step++) {
        uint32_t fragments[S::M][4];
#pragma unroll
        for (int m = 0; m < S::M; m++) fragment_of(fragments[m], ds[m], step);
        accumulate_step<S::E_PAD, S::EXACT>(dq, fragments, k, w.across, step, w.column, c.E);
    }
}

/* This warp's part of ds of such keys, for warps with the same rows. */
template <class S>
__device__ static __forceinline__ void keys_part(const Tiles<S> &tiles, int pair,
                                                 const Fact (&facts)[1][2], const Backward &c,
                                                 const QueryWarp &w, int first, bool all)
{
    float s[1][1][4], ds[1][1][4];
    part_scores<S>(s, tiles.a, w.left, tiles.walked(pair, 0), w.right, c.E);
    part_scores<S>(ds, tiles.b, w.left, tiles.walked(pair, 1), w.right, c.E);
    if (all)
        scores_backward<false>(s, ds, facts, first + w.part * 8, c.window, c.scale * LOG2E);
    else
        scores_backward<true>(s, ds, facts, first + w.part * 8, c.window, c.scale * LOG2E);
    part_put(w.ds, w.part, ds[0][0]);
}

/* Adds such keys from all parts. */
template <class S>
__device__ static __forceinline__ void parts_add(float (&dq)[1][S::TILES][4], Shared<real> k, int E,
                                                 const QueryWarp &w)
{
#pragma unroll
    for (int step = 0; step < WALKED / 16; step++) {
        uint32_t fragment[1][4];
        parts_fragment(fragment[0], w.ds, step);
        accumulate_step<S::E_PAD, S::EXACT>(dq, fragment, k, w.across, step, w.column, E);
    }
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS, S::RESIDENT)
    queries_backward_kernel(Backward c)
{
    DYNAMIC_SHARED(bytes);
    Tiles<S> tiles = tiles_of<S>(bytes);
    Tile tile;
    if (!tile_find<S::ROWS>(&tile, c.spans, c.S, c.group, blockIdx.x, true)) return;
    Span span = tile.span;
    int g = blockIdx.y, warp = threadIdx.x / 32, E = width<S>(c.E), pair = 0;
    int seen_by_all = group_query(c.group, tile.first);
    int last = group_query(c.group, tile.first + tile.count - 1);
    int first = max(seen_by_all + 1 - c.window, 0) / WALKED * WALKED;
    Rows q = rows_of_group(c.q, span.row, span.rows, c.group, g, c.H, E), dy = q;
    dy.base = c.dy + (q.base - c.q);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.a, q, tile.first, E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.b, dy, tile.first, E);
    keys_load(tiles, c, span, g, first, pair);
    QueryWarp w;
    w.row = warp / S::COL_WARPS * 16 * S::M;
    w.column = warp % S::COL_WARPS * S::COLUMNS;
    w.left = left_at<S::E_PAD>(w.row);
    w.part = warp % S::COL_WARPS;
    w.right = S::SHARES ? right_at_8<S::E_PAD>(w.part * 8) : right_at<S::E_PAD>(0);
    w.across = across_at<S::E_PAD>(w.column);
    if constexpr (S::SHARES)
        w.ds = shared_part<uint2>(bytes, S::FACTS_AT + w.row / 16 * S::PARTS * 8, S::PARTS);
    Fact facts[S::M][2];
#pragma unroll
    for (int own = 0; own < 2 * S::M; own++)
        facts[own / 2][own % 2] =
            fact_of(c, span, g, tile.first + w.row + threadIdx.x % 32 / 4 + 8 * own);

    float dq[S::M][S::TILES][4];
    clear(dq);
    for (; first <= last; first += WALKED, pair ^= 1) {
        bool all = first + WALKED - 1 <= seen_by_all && last - first < c.window;
        cp_async_wait<0>();
        __syncthreads(); /* this pair has arrived, and all have read the other one */
        if (first + WALKED <= last) keys_load(tiles, c, span, g, first + WALKED, pair ^ 1);
        if constexpr (S::SHARES) {
            if (w.row < tile.count) keys_part<S>(tiles, pair, facts, c, w, first, all);
            __syncthreads();
            if (w.row < tile.count) parts_add<S>(dq, tiles.walked(pair, 0), c.E, w);
        } else if (w.row < tile.count) {
            keys_add<S>(dq, tiles, pair, facts, c, w, first, all);
        }
    }
#pragma unroll
    for (int own = 0; own < 2 * S::M; own++) {
        int packed = tile.first + opaque(w.row) + opaque(threadIdx.x) % 32 / 4 + 8 * own;
        if (packed >= span.rows * c.group.size) continue;
        const real *from = c.dq + span.row * c.q_step + g * c.group.size * E;
        real *to = (real *)rows_at({from, c.q_step, c.group, 0}, packed, E);
        row_store<S::EXACT, S::TILES>(to, dq[own / 2], own % 2, c.scale, w.column, c.E);
    }
}

template <int E_PAD, bool EXACT> static void backward_launch(CudaDevice *cuda, Backward c)
{
    enum { APART = E_PAD == 256 ? 2 : 4, TOGETHER = E_PAD == 256 ? 4 : 1 };
    typedef Shape<E_PAD, EXACT, APART, TOGETHER, 1> Keys;
    enum { M = E_PAD == 64 || (E_PAD == 128 && EXACT) ? 2 : 1 }; /* more would spill */
    typedef Shape<E_PAD, EXACT, APART, TOGETHER, M> Queries;
    dim3 keys(tile_slots(c.T, c.S, 1, Keys::ROWS), c.G);
    dim3 queries(tile_slots(c.T, c.S, c.group.size, Queries::ROWS), c.G);
    LAUNCH(cuda, keys_backward_kernel<Keys>, keys, Keys::THREADS, Keys::BYTES, c);
    LAUNCH(cuda, queries_backward_kernel<Queries>, queries, Queries::THREADS, Queries::BYTES, c);
}

void cuda_attention_backward(Device *dev, real *dq, real *dk, real *dv, const real *dy,
                             const real *y, const float *lse, const real *q, const real *k,
                             const real *v, const Span *spans, int S, int T, int H, int G, int E,
                             int window, int q_step, int kv_step)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    if (E > 256 || E % 2) {
        cuda_fail(cuda, STATUS_INVALID, "head width %d: attention takes even ones up to 256", E);
        return;
    }
    int64_t rows = (int64_t)T * H;
    float *delta = (float *)cuda_scratch(cuda, (size_t)rows * sizeof *delta);
    LAUNCH(cuda, delta_kernel, cuda_blocks(rows, DELTA_THREADS / 32), DELTA_THREADS, 0, delta, dy,
           y, rows, E);
    Backward c = {dq,
                  dk,
                  dv,
                  dy,
                  y,
                  q,
                  k,
                  v,
                  lse,
                  delta,
                  spans,
                  S,
                  T,
                  H,
                  G,
                  E,
                  window_of(window),
                  q_step,
                  kv_step,
                  group_of(H / G),
                  1.0f / sqrtf((float)E)};
    if (E == 64)
        backward_launch<64, true>(cuda, c);
    else if (E == 128)
        backward_launch<128, true>(cuda, c);
    else if (E == 256)
        backward_launch<256, true>(cuda, c);
    else if (E < 64)
        backward_launch<64, false>(cuda, c);
    else if (E < 128)
        backward_launch<128, false>(cuda, c);
    else
        backward_launch<256, false>(cuda, c);
}
