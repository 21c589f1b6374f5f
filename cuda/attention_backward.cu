/* cuda/attention_backward.cu - gradients of causal grouped-query attention over packed sequences.
 *
 *   p = exp(q·kᵀ/√E − lse), 0 for keys that a query does not see
 *   ds = p·(dy·vᵀ − δ),  δ = Σ_e dy·y
 *   dv = pᵀ·dy,  dk = dsᵀ·q/√E,  dq = ds·k/√E;  dk and dv sum over the heads of their group
 *
 * Nothing is summed across blocks: one kernel owns a tile of keys and walks the queries and heads
 * that see it, another owns a tile of queries and walks its keys. That computes p and ds twice, but
 * needs no atomics and no f32 copy of dq. It is also batch-invariant: a sequence's gradients do not
 * depend on its neighbours, bit for bit. p and ds go from the result of one mma straight to the
 * left operand of the next, in registers. So the first kernel works on their transposes, with keys
 * as rows. The tiles that a kernel walks over are double-buffered.
 *
 * Roofline: 14·E flops a query, head and key that it sees (10·E without the repetition); compute
 * bound. */
#include "attention.cuh"

enum { WALKED = 32, WALKED_TILES = WALKED / 8 }; /* rows of a tile that is walked over */

typedef struct Backward {
    real *dq, *dk, *dv;
    const real *dy, *y, *q, *k, *v;
    const float *lse;
    float *delta; /* (T, H) */
    const Span *spans;
    int S, T, H, G, E, window;
    int64_t q_step, kv_step; /* of dq's rows, and of dk's, dv's and v's */
    Group group;
    float scale; /* 1/√E */
} Backward;

/* A block of ROW_WARPS·COL_WARPS warps: each owns 16 rows, and of their gradients the columns that
 * it does not share with the other COL_WARPS − 1 of the same rows. */
template <int PAD, bool EXACT_, int ROW_WARPS_, int COL_WARPS_> struct Shape {
    enum {
        E_PAD = PAD,
        COL_WARPS = COL_WARPS_,
        ROWS = 16 * ROW_WARPS_,
        THREADS = 32 * ROW_WARPS_ * COL_WARPS_,
        COLUMNS = PAD / COL_WARPS_,
        TILES = COLUMNS / 8,
        OWNED = ROWS * PAD,     /* elements of a tile that stays */
        PASSING = WALKED * PAD, /* elements of a tile that is walked over */
        FACTS_AT = (2 * OWNED + 4 * PASSING) * 2,
        BYTES = FACTS_AT + 2 * WALKED * 12, /* 97 KB at most: sm_86 and sm_89 have 99 */
        RESIDENT = PAD == 256 ? 1 : 3, /* blocks of queries that registers must leave room for */
    };
    static constexpr bool EXACT = EXACT_;
};

/* The six tiles of a block: two that stay, and two pairs that come and go. */
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

/* The numbers of a packed row besides its elements. */
typedef struct Fact {
    float lse, delta; /* lse in units of log 2 */
    int query;
} Fact;

/* +∞ for rows that do not exist: their p is 0. */
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
    Rows q = rows_of_group(c.q, span.row, span.rows, c.group, g, c.H, c.E);
    Rows dy = q;
    dy.base = c.dy + (q.base - c.q);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 0), q, first, c.E);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 1), dy, first, c.E);
    cp_async_commit();
}

/* Whether a query attends to a key, both by their numbers in a sequence: 0 <= query - key < window,
 * as one comparison. */
__device__ static __forceinline__ bool sees(int query, int key, int window)
{
    return (unsigned)(query - key) < (unsigned)window;
}

/* s = k·qᵀ and ds = v·dyᵀ of 16 keys and WALKED rows become pᵀ and dsᵀ. */
__device__ static __forceinline__ void soften_transposed(float (&s)[WALKED_TILES][4],
                                                         float (&ds)[WALKED_TILES][4],
                                                         Shared<Fact> facts, int key, int window,
                                                         float scale)
{
#pragma unroll
    for (int j = 0; j < WALKED_TILES; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            Fact fact = facts[j * 8 + threadIdx.x % 4 * 2 + e];
#pragma unroll
            for (int i = e; i < 4; i += 2) {
                float p = fast_exp2(fmaf(s[j][i], scale, -fact.lse));
                p = sees(fact.query, key + i / 2 * 8, window) ? p : 0.0f;
                s[j][i] = p;
                ds[j][i] = p * (ds[j][i] - fact.delta);
            }
        }
    }
}

/* Adds one tile of queries to dk and dv of this warp's 16 keys. */
template <class S>
__device__ static __forceinline__ void
queries_add(float (&dk)[S::TILES][4], float (&dv)[S::TILES][4], const Tiles<S> &tiles, int pair,
            Shared<Fact> facts, const Backward &c, int row, int column, int key)
{
    float s[WALKED_TILES][4], ds[WALKED_TILES][4];
    uint32_t fragments[WALKED / 16][4];
    tile_scores<S::E_PAD, S::EXACT>(s, tiles.a, row, tiles.walked(pair, 0), c.E);
    tile_scores<S::E_PAD, S::EXACT>(ds, tiles.b, row, tiles.walked(pair, 1), c.E);
    soften_transposed(s, ds, facts, key, c.window, c.scale * LOG2E);
    fragments_of<WALKED_TILES>(fragments, s);
    tile_accumulate<S::E_PAD, S::EXACT>(dv, fragments, tiles.walked(pair, 1), column, c.E);
    fragments_of<WALKED_TILES>(fragments, ds);
    tile_accumulate<S::E_PAD, S::EXACT>(dk, fragments, tiles.walked(pair, 0), column, c.E);
}

template <int TILES> __device__ static __forceinline__ void clear(float (&sum)[TILES][4])
{
#pragma unroll
    for (int j = 0; j < TILES; j++)
        for (int i = 0; i < 4; i++) sum[j][i] = 0.0f;
}

template <class S>
static __global__ void __launch_bounds__(S::THREADS) keys_backward_kernel(Backward c)
{
    DYNAMIC_SHARED(bytes);
    Tiles<S> tiles = tiles_of<S>(bytes);
    Shared<Fact> facts = shared_part<Fact>(bytes, S::FACTS_AT, 2 * WALKED);
    Tile tile;
    if (!tile_find<S::ROWS>(&tile, c.spans, c.S, {1, 0}, blockIdx.x, false)) return;
    Span span = tile.span;
    int g = blockIdx.y, warp = threadIdx.x / 32;
    int rows = min(span.rows, tile.first + tile.count - 1 + c.window) * c.group.size;
    int row = warp / S::COL_WARPS * 16, column = warp % S::COL_WARPS * S::COLUMNS;
    int key = tile.first + row + threadIdx.x % 32 / 4;
    Rows k = rows_of_head(c.k, span.row, span.rows, g, c.G, c.E);
    Rows v = {c.v + span.row * c.kv_step + g * c.E, c.kv_step, k.group, k.count};
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.a, k, tile.first, c.E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.b, v, tile.first, c.E);
    int first = tile.first * c.group.size, pair = 0;
    queries_load(tiles, c, span, g, first, pair);
    if (threadIdx.x < WALKED) facts[threadIdx.x] = fact_of(c, span, g, first + threadIdx.x);

    float dk[S::TILES][4], dv[S::TILES][4];
    clear(dk);
    clear(dv);
    for (; first < rows; first += WALKED, pair ^= 1) {
        Fact fact;
        bool more = first + WALKED < rows, brings = more && threadIdx.x < WALKED;
        cp_async_wait<0>();
        __syncthreads(); /* this pair is here, and all have read the other one */
        if (more) queries_load(tiles, c, span, g, first + WALKED, pair ^ 1);
        if (brings) fact = fact_of(c, span, g, first + WALKED + threadIdx.x);
        if (row < tile.count)
            queries_add<S>(dk, dv, tiles, pair, facts + pair * WALKED, c, row, column, key);
        if (brings) facts[(pair ^ 1) * WALKED + threadIdx.x] = fact;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (key + 8 * i >= span.rows) continue;
        int64_t at = (span.row + key + 8 * i) * c.kv_step + g * c.E;
        row_store<S::EXACT, S::TILES>(c.dk + at, dk, i, c.scale, column, c.E);
        row_store<S::EXACT, S::TILES>(c.dv + at, dv, i, 1.0f, column, c.E);
    }
}

/* ---- dq: a tile of queries walks the keys ---- */

template <class S>
__device__ static __forceinline__ void keys_load(const Tiles<S> &tiles, const Backward &c,
                                                 Span span, int g, int first, int pair)
{
    Rows k = rows_of_head(c.k, span.row, span.rows, g, c.G, c.E);
    Rows v = {c.v + span.row * c.kv_step + g * c.E, c.kv_step, k.group, k.count};
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 0), k, first, c.E);
    tile_load<S::E_PAD, S::EXACT, WALKED, S::THREADS>(tiles.walked(pair, 1), v, first, c.E);
    cp_async_commit();
}

/* Adds keys [first, first + WALKED) to dq of this warp's 16 rows, which `facts` describe. */
template <class S, bool WINDOWED>
__device__ static __forceinline__ void keys_add(float (&dq)[S::TILES][4], const Tiles<S> &tiles,
                                                int pair, const Fact (&facts)[2], const Backward &c,
                                                int row, int column, int first)
{
    float s[WALKED_TILES][4], ds[WALKED_TILES][4];
    uint32_t fragments[WALKED / 16][4];
    tile_scores<S::E_PAD, S::EXACT>(s, tiles.a, row, tiles.walked(pair, 0), c.E);
    tile_scores<S::E_PAD, S::EXACT>(ds, tiles.b, row, tiles.walked(pair, 1), c.E);
#pragma unroll
    for (int j = 0; j < WALKED_TILES; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Fact &fact = facts[i / 2];
            float p = fast_exp2(fmaf(s[j][i], c.scale * LOG2E, -fact.lse));
            int key = first + j * 8 + threadIdx.x % 4 * 2 + i % 2;
            bool seen = WINDOWED ? sees(fact.query, key, c.window) : key <= fact.query;
            ds[j][i] = seen ? p * (ds[j][i] - fact.delta) : 0.0f;
        }
    fragments_of<WALKED_TILES>(fragments, ds);
    tile_accumulate<S::E_PAD, S::EXACT>(dq, fragments, tiles.walked(pair, 0), column, c.E);
}

/* What a window takes in registers would spill where three blocks share them. */
template <class S, bool WINDOWED>
static __global__ void __launch_bounds__(S::THREADS, WINDOWED ? 1 : S::RESIDENT)
    queries_backward_kernel(Backward c)
{
    DYNAMIC_SHARED(bytes);
    Tiles<S> tiles = tiles_of<S>(bytes);
    Tile tile;
    if (!tile_find<S::ROWS>(&tile, c.spans, c.S, c.group, blockIdx.x, true)) return;
    Span span = tile.span;
    int g = blockIdx.y, warp = threadIdx.x / 32;
    int row = warp / S::COL_WARPS * 16, column = warp % S::COL_WARPS * S::COLUMNS;
    int keys = group_query(c.group, tile.first + tile.count - 1) + 1, pair = 0;
    int before = group_query(c.group, tile.first) + 1 - c.window;
    int first = WINDOWED ? max(before, 0) / WALKED * WALKED : 0;
    Rows q = rows_of_group(c.q, span.row, span.rows, c.group, g, c.H, c.E), dy = q;
    dy.base = c.dy + (q.base - c.q);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.a, q, tile.first, c.E);
    tile_load<S::E_PAD, S::EXACT, S::ROWS, S::THREADS>(tiles.b, dy, tile.first, c.E);
    keys_load(tiles, c, span, g, first, pair);
    Fact facts[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        facts[i] = fact_of(c, span, g, tile.first + row + threadIdx.x % 32 / 4 + 8 * i);

    float dq[S::TILES][4];
    clear(dq);
    for (; first < keys; first += WALKED, pair ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); /* this pair is here, and all have read the other one */
        if (first + WALKED < keys) keys_load(tiles, c, span, g, first + WALKED, pair ^ 1);
        if (row < tile.count) keys_add<S, WINDOWED>(dq, tiles, pair, facts, c, row, column, first);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int packed = tile.first + row + threadIdx.x % 32 / 4 + 8 * i;
        if (packed >= span.rows * c.group.size) continue;
        const real *own = c.dq + span.row * c.q_step + g * c.group.size * c.E;
        real *to = (real *)rows_at({own, c.q_step, c.group, 0}, packed, c.E);
        row_store<S::EXACT, S::TILES>(to, dq, i, c.scale, column, c.E);
    }
}

template <int E_PAD, bool EXACT> static void backward_launch(CudaDevice *cuda, Backward c)
{
    typedef Shape<E_PAD, EXACT, E_PAD == 256 ? 2 : 4, E_PAD == 256 ? 4 : 1> Block;
    dim3 keys(tile_slots(c.T, c.S, 1, Block::ROWS), c.G);
    dim3 queries(tile_slots(c.T, c.S, c.group.size, Block::ROWS), c.G);
    LAUNCH(cuda, keys_backward_kernel<Block>, keys, Block::THREADS, Block::BYTES, c);
    auto queries_kernel = c.window == ALL ? queries_backward_kernel<Block, false>
                                          : queries_backward_kernel<Block, true>;
    LAUNCH(cuda, queries_kernel, queries, Block::THREADS, Block::BYTES, c);
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
