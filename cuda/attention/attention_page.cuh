/* cuda/attention/attention_page.cuh - the forward kernel's block, and its step for one page of
 * keys.
 *
 *   s = q·kᵀ,  p = 2^(scale·s − top),  acc += p·v,  sum += Σ p
 *
 * A warp has 32 rows in prefill (16 if more would spill), so that each fragment of keys and values
 * read from shared memory serves two products. If one warp can't hold its rows' columns, warps
 * share the rows: each computes the scores of some keys, and sums some columns over all keys. */
#ifndef TINSMITH_CUDA_ATTENTION_ATTENTION_PAGE_CUH
#define TINSMITH_CUDA_ATTENTION_ATTENTION_PAGE_CUH

#include "attention.cuh"

enum { LAG = 8 }; /* powers of 2 by which exponentials may exceed 1 */

typedef struct Attention {
    real *y;
    float *lse;
    const real *q, *k_pages, *v_pages;
    const Span *spans;
    const int32_t *pages;
    float *parts;      /* (T, H, CHUNKS, E + 2), if chunks have their own blocks: sums, top, sum */
    unsigned *arrived; /* per tile, the blocks that have written their chunks' sums to parts */
    int S, T, H, G, E, window;
    int step; /* positions from a query to the next: 1, or 0 if all see the whole span */
    Group group;
    float scale; /* log2(e)/√E: exponentials are powers of 2 */
} Attention;

/* The last key that a packed row sees. */
__device__ static __forceinline__ int last_seen(const Attention &c, const Tile &tile, int row)
{
    return tile.span.pos + group_query(c.group, row) * c.step;
}

/* A block. A warp computes the scores of its part of a page's keys, and sums its columns over all
 * keys; exponentials are shared through shared memory. */
template <int PAD, bool EXACT_, int ROW_WARPS, int COL_WARPS_, int M_>
struct Shape : Layout<PAD, EXACT_, ROW_WARPS, COL_WARPS_, M_> {
    typedef Layout<PAD, EXACT_, ROW_WARPS, COL_WARPS_, M_> Base;
    enum {
        KEY_TILES = KV_PAGE / 8 / COL_WARPS_, /* a warp's tiles of 8 keys in a page */
        /* A page's parts for the sums of exponentials. Each is summed separately, so that narrow
         * and wide blocks of one width add in the same order. */
        PARTS = PAD / 32,
        OWN = PARTS / COL_WARPS_, /* parts of a warp */
        PAGE_BYTES = KV_PAGE * PAD * 2,
        P_BYTES = COL_WARPS_ == 1 ? 0 : Base::ROWS * KV_PAGE * 2,
        /* The exponentials overwrite the keys if there is no other room. */
        P_IN_KEYS = PAD == 256 && M_ == 2,
        /* Floats that a block saves between chunks. */
        SAVED = (Base::TILES * 4 + 1) * M_ * Base::THREADS,
        SAVED_AT = 2 * PAGE_BYTES,
        SHARED_AT = SAVED_AT + SAVED * 4, /* maxima exchanged by warps of the same rows */
        TOLD_BYTES = COL_WARPS_ == 1 ? 0 : PARTS * Base::ROWS * 4,
        P_AT = P_IN_KEYS ? 0 : SHARED_AT + TOLD_BYTES,
        BYTES = SHARED_AT + TOLD_BYTES + (P_IN_KEYS ? 0 : P_BYTES),
    };
    static_assert(BYTES <= 99 << 10, "sm_86 and sm_89 have no more");
};

/* One thread's running sums of 16·M rows: per row the top (the running maximum) and the sums of
 * exponentials over the warp's parts of pages; its columns of Σ p·v. At a chunk's end the first
 * part becomes the total. */
template <class S> struct Sums {
    float top[S::M][2], sum[S::M][2][S::OWN], acc[S::M][S::TILES][4];
};

/* One thread's state. */
template <class S> struct Work {
    Shared<real> keys, values; /* a page of each */
    Shared<real> p;            /* exponentials, (ROWS, KV_PAGE) */
    Shared<float> saved;       /* each thread's acc, then each warp's rows' top and sum */
    Shared<float> row_max;     /* (PARTS, ROWS): maxima exchanged by warps of the same rows */
    Tile tile;
    int g, seen;           /* key-value head; keys seen by the tile's last row */
    int row, column, part; /* this warp's first row, column, and part of a page */
    int right, across;     /* ldmatrix indices of keys and values */
    bool live;             /* this warp has rows */
    uint32_t q[S::M][S::E_PAD / 16][4];
};

template <class S>
__device__ static __forceinline__ void page_load(Shared<real> tile, const real *all,
                                                 const Attention &c, const Work<S> &w, int page)
{
    int E = width<S>(c.E);
    int64_t number = c.pages[w.tile.span.first + page];
    Rows rows = {all + (number * c.G + w.g) * KV_PAGE * E, E, {1, 0}, w.seen - page * KV_PAGE};
    tile_load<S::E_PAD, S::EXACT, KV_PAGE, S::THREADS>(tile, rows, 0, E);
    cp_async_commit();
}

/* The scores of this warp's part of a page; −∞ if a row does not see the key. */
template <class S>
__device__ static __forceinline__ void page_scores(float (&s)[S::M][S::KEY_TILES][4],
                                                   const Attention &c, const Work<S> &w, int page)
{
    constexpr int EACH = S::KEY_TILES > 1 ? 1 : 2; /* steps per product */
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
    int seen_by_all = last_seen(c, w.tile, w.tile.first);
    if (page * KV_PAGE + KV_PAGE - 1 <= seen_by_all && page * KV_PAGE >= w.seen - c.window) return;
    int thread = opaque(threadIdx.x), own = thread % 32 / 4 + opaque(w.row);
    int first = page * KV_PAGE + w.part * (KV_PAGE / S::PARTS) + thread % 4 * 2;
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = w.tile.first + own + m * 16 + 8 * i;
            int seen = last_seen(c, w.tile, row) - first;
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

/* A thread's upper row among the exchanged maxima; its other rows are at stride 8. Four threads
 * share a row. */
template <class S>
__device__ static __forceinline__ Shared<float> row_max_at(const Work<S> &w, int part)
{
    return w.row_max + part * S::ROWS + w.row + threadIdx.x % 32 / 4;
}

template <class S>
__device__ static __forceinline__ void row_max_write(const Work<S> &w, const float (&high)[S::M][2])
{
    if (threadIdx.x % 4) return;
#pragma unroll
    for (int m = 0; m < S::M; m++)
        for (int i = 0; i < 2; i++) row_max_at(w, w.part / S::OWN)[m * 16 + i * 8] = high[m][i];
}

template <class S>
__device__ static __forceinline__ void row_max_reduce(const Work<S> &w, float (&high)[S::M][2])
{
#pragma unroll
    for (int m = 0; m < S::M; m++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int other = 0; other < S::COL_WARPS; other++)
                high[m][i] = fmaxf(high[m][i], row_max_at(w, other)[m * 16 + i * 8]);
}

/* Scores to exponentials. A row's top stays until a score exceeds it by a factor of 2^LAG; then the
 * earlier sums are rescaled. If no top of the warp's rows rises, which is nearly always, they are
 * left alone: the same as times 1. So a page that a row does not see changes nothing. */
template <class S>
__device__ static __forceinline__ void softmax_page(float (&s)[S::M][S::KEY_TILES][4],
                                                    Sums<S> &sums, const float (&high)[S::M][2],
                                                    float scale)
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

/* Writes exponentials for warps of the same rows, as bf16: a tile of KV_PAGE columns. */
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

/* Adds a page, whose keys are in flight. `next` is the page whose keys are copied next, or −1. */
template <class S>
__device__ static __forceinline__ void page_add(Sums<S> &sums, const Attention &c, const Work<S> &w,
                                                int page, int next)
{
    constexpr bool TOGETHER = S::COL_WARPS > 1;
    enum { STEPS = KV_PAGE / 16 };
    cp_async_wait<0>();
    __syncthreads(); /* the keys have arrived, and all have read the last page's values */
    page_load(w.values, c.v_pages, c, w, page);
    float s[S::M][S::KEY_TILES][4], high[S::M][2];
    if (w.live) {
        page_scores(s, c, w, page);
        scores_highs<S>(high, s);
        if (TOGETHER) row_max_write(w, high);
    }
    if (TOGETHER) __syncthreads(); /* all maxima are written, and all keys are read */
    if (w.live) {
        if (TOGETHER) row_max_reduce(w, high);
        softmax_page(s, sums, high, c.scale);
        if (TOGETHER) exponentials_tell(w, s);
    }
    cp_async_wait<0>();
    __syncthreads(); /* values and exponentials have arrived, and all have read the keys */
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

#endif
