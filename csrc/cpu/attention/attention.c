/* cpu/attention/attention.c - grouped-query attention over pages of KV_PAGE keys (attention.h).
 *
 *   y[t,h,:] = Σ_j softmax_j(q[t,h,:]·k[j,g,:]/√E)·v[j,g,:],  p−window < j ≤ p = position of t,
 *   g = h·G/H;  without a window, j ≤ p;  of whole spans, j ≤ the last row's position
 *
 * The walk takes pages in order with a running maximum, so a row does the same arithmetic whether
 * it is one of many in training or alone in decoding. It starts with the first page that any window
 * of its block reaches. In the set with bf16 pairs both products take pairs: queries and
 * probabilities are rounded; their sums and the softmax are f32. Roofline: 4·E flops per query,
 * head and key; compute bound in training and prefill. Decoding reads each key and value once per
 * group of heads: memory bound. So its rows, the heads of a group, have their own tiles, which take
 * four registers of a page's row at once and prefetch. */
#include "attention.h"

#include <assert.h>

#include "../product/gemm.h"

enum {
    QUERIES = 32,     /* query rows per block: its scores (8 KB) stay in L1 */
    PART_ROWS = 128,  /* of a whole span's piece */
    HEAD_MOST = 4096, /* the widest head */
    LAST_ROWS = 16,   /* of a page's last keys or values, and a tile's lanes of queries */
    PADDED = 32,      /* numbers that a whole span's heads are padded to for the matrix unit */
};

typedef struct Attention {
    const Device *dev;
    float *y, *lse;
    const float *q;
    const cached *k_pages, *v_pages;
    const Span *spans;
    const int32_t *pages;
    int S, H, G, E;
    int window; /* the most keys that a query sees, its own included */
    int whole;  /* a query sees all keys of its span */
    int parts;  /* pieces of a span's head */
    int tiles;  /* the products are whole tiles of the matrix unit */
    int width;  /* row stride of a block's sums: E, rounded up to whole tiles */
} Attention;

/* A thread's scratch: a block's sums (rows, width), and in sets with pairs its queries, and the
 * last keys' or values' lanes of a page. */
typedef struct AttentionScratch {
    _Alignas(64) float sums[QUERIES * HEAD_MOST], queries[QUERIES * HEAD_MOST / 2];
    _Alignas(64) float last[LAST_ROWS * HEAD_MOST];
} AttentionScratch;

_Static_assert(sizeof(AttentionScratch) <= POOL_SCRATCH, "a block's sums");

/* ---- a page times some queries ---- */

#if defined(__AVX512BF16__)

/* Queries as pairs, in the thread's scratch; of tiles, padded with zeros to whole ones. */
static const float *queries_of(AttentionScratch *own, const Attention *c, const float *q,
                               int64_t *q_row, int rows)
{
    int lanes = c->E / 2;
    if (c->tiles) lanes = (lanes + LAST_ROWS - 1) / LAST_ROWS * LAST_ROWS;
    if (lanes > c->E / 2) memset(own->queries, 0, (size_t)(rows * lanes) * sizeof(float));
    CPU(pairs_along)(own->queries, lanes, q, *q_row, rows, c->E);
    *q_row = lanes;
    return own->queries;
}

#if defined(__AMX_BF16__)
/* page_scores in whole tiles, the last one's keys padded with zeros. */
static void tile_scores(AttentionScratch *own, float *scores, const float *q, int64_t q_row,
                        const float *keys_of_page, int rows, int keys, int E)
{
    int whole = E / TILE_DEPTH * TILE, rest = E / 2 - whole, n = (keys + TILE - 1) / TILE * TILE;
    Pairs pairs = {q, q_row, 1, keys_of_page, KV_PAGE, whole, 0};
    if (whole) CPU(tiles_product)(scores, KV_PAGE, pairs, rows, n, 1.0f, 0);
    if (!rest) return;
    size_t live = (size_t)(rest * KV_PAGE), all = TILE * KV_PAGE;
    memcpy(own->last, keys_of_page + whole * KV_PAGE, live * sizeof(float));
    memset(own->last + live, 0, (all - live) * sizeof(float));
    pairs = (Pairs){q + whole, q_row, 1, own->last, KV_PAGE, TILE, 0};
    CPU(tiles_product)(scores, KV_PAGE, pairs, rows, n, 1.0f, whole > 0);
}

/* page_values in whole tiles, the last one's values padded with zeros. The columns from E on, up to
 * a whole tile, are sums of what lies behind a row, and not read. */
static void tile_values(AttentionScratch *own, const float *p, const float *values, int rows,
                        int keys, int E, int width)
{
    int whole = keys / TILE_DEPTH * TILE;
    Pairs pairs = {p, KV_PAGE, 1, values, E, whole, 0};
    if (whole) CPU(tiles_product)(own->sums, width, pairs, rows, width, 1.0f, 1);
    if (keys % TILE_DEPTH == 0) return;
    const float *from = values + (int64_t)whole * E;
    for (int i = 0; i < TILE; i++)
        for (int e = 0; e < E; e += VL) {
            int live = keys - 2 * (whole + i);
            vu pair = live > 0 ? v_load_pairs(from + i * E + e) : (vu){0};
            if (live == 1) pair &= 0xffffu;
            v_store(own->last + i * E + e, (vf)pair);
        }
    pairs = (Pairs){p + whole, KV_PAGE, 1, own->last, E, TILE, 0};
    CPU(tiles_product)(own->sums, width, pairs, rows, width, 1.0f, 1);
}
#endif

/* scores (rows, KV_PAGE) = q·kᵀ, for `keys` keys. */
static void page_scores(AttentionScratch *own, const Attention *c, float *scores, const float *q,
                        int64_t q_row, const float *keys_of_page, int rows, int keys)
{
#if defined(__AMX_BF16__)
    if (c->tiles) {
        tile_scores(own, scores, q, q_row, keys_of_page, rows, keys, c->E);
        return;
    }
#endif
    (void)own;
    Pairs pairs = {q, q_row, 1, keys_of_page, KV_PAGE, c->E / 2, 0};
    CPU(pairs_product)(scores, KV_PAGE, pairs, rows, keys, 1.0f, 0);
}

/* sums += p·v over `keys` keys; p is rounded in place. The value after an odd last one, another
 * sequence's or none, is ignored. */
static void page_values(AttentionScratch *own, const Attention *c, float *p, const float *values,
                        int rows, int keys)
{
    int E = c->E;
#if defined(__AMX_BF16__)
    if (c->tiles) {
        CPU(pairs_along)(p, KV_PAGE, p, KV_PAGE, rows, KV_PAGE);
        tile_values(own, p, values, rows, keys, E, c->width);
        return;
    }
#endif
    CPU(pairs_along)(p, KV_PAGE, p, KV_PAGE, rows, keys);
    Pairs pairs = {p, KV_PAGE, 1, values, E, (keys + 1) / 2, keys % 2};
    CPU(pairs_product)(own->sums, E, pairs, rows, E, 1.0f, 1);
}

#else

enum {
    FEW = VL == 16 ? 4 : 2, /* rows whose sums for four registers of a page stay in registers */
    AHEAD = 1 << 10,        /* prefetch distance, in floats of a page */
};

static const float *queries_of(AttentionScratch *own, const Attention *c, const float *q,
                               int64_t *q_row, int rows)
{
    (void)own, (void)c, (void)q_row, (void)rows;
    return q;
}

/* c (rows, vectors·VL) = a·b, or c += a·b, over k: the sums of CPU(product), bit for bit. */
static inline __attribute__((always_inline)) void page_tile(float *c, int64_t c_row, const float *a,
                                                            int64_t a_row, const float *b, int ldb,
                                                            int k, int add, const int rows,
                                                            const int vectors)
{
    vf acc[FEW][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = v_set(0.0f);
    for (int i = 0; i < k; i++, b += ldb) {
        vf part[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (v * VL % 16 == 0) __builtin_prefetch(b + AHEAD + v * VL);
            part[v] = v_load(b + v * VL);
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vf x = v_set(a[r * a_row + i]);
            acc[r][0] = v_fma(x, part[0], acc[r][0]);
            if (vectors > 1) acc[r][1] = v_fma(x, part[1], acc[r][1]);
            if (vectors > 2) acc[r][2] = v_fma(x, part[2], acc[r][2]);
            if (vectors > 2) acc[r][3] = v_fma(x, part[3], acc[r][3]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *to = c + r * c_row + v * VL;
            v_store(to, add ? acc[r][v] + v_load(to) : acc[r][v]);
        }
}

static inline __attribute__((always_inline)) void page_rows(float *c, int64_t c_row, const float *a,
                                                            int64_t a_row, const float *b, int ldb,
                                                            int n, int k, int add, const int rows)
{
    int j = 0;
    for (; j + 4 * VL <= n; j += 4 * VL)
        page_tile(c + j, c_row, a, a_row, b + j, ldb, k, add, rows, 4);
    for (; j + 2 * VL <= n; j += 2 * VL)
        page_tile(c + j, c_row, a, a_row, b + j, ldb, k, add, rows, 2);
    for (; j < n; j += VL) page_tile(c + j, c_row, a, a_row, b + j, ldb, k, add, rows, 1);
}

/* c (rows,n) = a·b, or c += a·b; b (k,n) is a page. */
static void page_product(float *c, int64_t c_row, const float *a, int64_t a_row, const float *b,
                         int ldb, int rows, int n, int k, int add)
{
    if (rows > FEW || n % VL) {
        CPU(product)(c, c_row, a, a_row, 1, b, ldb, rows, n, k, 1.0f, add);
        return;
    }
    switch (rows) {
    case 1: page_rows(c, c_row, a, a_row, b, ldb, n, k, add, 1); return;
    case 2: page_rows(c, c_row, a, a_row, b, ldb, n, k, add, 2); return;
    case 3: page_rows(c, c_row, a, a_row, b, ldb, n, k, add, FEW < 3 ? FEW : 3); return;
    case 4: page_rows(c, c_row, a, a_row, b, ldb, n, k, add, FEW); return;
    }
}

/* scores (rows, KV_PAGE) = q·kᵀ, for `keys` keys. */
static void page_scores(AttentionScratch *own, const Attention *c, float *scores, const float *q,
                        int64_t q_row, const float *keys_of_page, int rows, int keys)
{
    int scored = (keys + 2 * VL - 1) / (2 * VL) * (2 * VL); /* whole tiles of a product */
    (void)own;
    page_product(scores, KV_PAGE, q, q_row, keys_of_page, KV_PAGE, rows, scored, c->E, 0);
}

/* sums += p·v over `keys` keys. */
static void page_values(AttentionScratch *own, const Attention *c, float *p, const float *values,
                        int rows, int keys)
{
    page_product(own->sums, c->E, p, KV_PAGE, values, c->E, rows, c->E, keys, 1);
}

#endif

/* ---- the walk over the pages ---- */

/* A block's running softmax: each row's maximum and sum of exponentials, and of a page the lanes of
 * that sum. */
typedef struct Softmax {
    float top[QUERIES], sum[QUERIES];
    _Alignas(64) float lanes[QUERIES * VL];
} Softmax;

/* to = by·from, which may be the same numbers. */
static inline void row_scale(float *to, const float *from, float by, int n)
{
    for (int e = 0; e < n; e += VL) v_store_upto(to + e, v_load_upto(from + e, n - e) * by, n - e);
}

/* The running maximum takes in a row of scores, of which keys [hidden, live) are visible; returns
 * the factor that rescales earlier sums. */
static inline float row_rise(float *score, int hidden, int live, float scale, float *top)
{
    vf tallest = v_set(-INFINITY);
    for (int j = 0; j < hidden; j++) score[j] = -INFINITY;
    for (int j = live; j < KV_PAGE; j++) score[j] = -INFINITY;
    for (int j = 0; j < KV_PAGE; j += VL) tallest = v_max(v_load(score + j), tallest);
    float highest = v_top(tallest) * scale, before = *top;
    if (!(highest > before)) return 1.0f;
    *top = highest;
    return f_exp(before - highest);
}

/* Turns a row of scores into exponentials relative to its maximum; returns the lanes of their
 * sum. */
static inline vf row_soften(float *score, float scale, float top)
{
    vf total = v_set(0.0f);
    for (int j = 0; j < KV_PAGE; j += VL) {
        vf p = v_exp(v_load(score + j) * scale - top);
        v_store(score + j, p);
        total += p;
    }
    return total;
}

/* Turns a page's scores into probabilities relative to the running maxima. Row i sees keys up to
 * `live` + i·step of the page, and `window` of them at most. A loop for each step, not for each
 * row, lets a processor overlap the rows' sums over lanes. */
static void page_soften(const Attention *c, AttentionScratch *own, Softmax *m, float *scores,
                        int rows, int live, int step, float scale)
{
    for (int i = 0; i < rows; i++, live += step) {
        float *score = scores + i * KV_PAGE, *sums = own->sums + (int64_t)i * c->width;
        int hidden = live - c->window;
        if (live <= 0 || hidden >= KV_PAGE) continue; /* the row does not see this page */
        float shrink = row_rise(score, hidden, live < KV_PAGE ? live : KV_PAGE, scale, m->top + i);
        if (shrink == 1.0f) continue;
        m->sum[i] *= shrink;
        row_scale(sums, sums, shrink, c->E);
    }
    live -= rows * step;
    for (int i = 0; i < rows; i++, live += step) {
        vf total = v_set(0.0f);
        if (live <= 0 || live - c->window >= KV_PAGE) /* exact zeros */
            memset(scores + i * KV_PAGE, 0, sizeof(float) * KV_PAGE);
        else
            total = row_soften(scores + i * KV_PAGE, scale, m->top[i]);
        v_store(m->lanes + i * VL, total);
    }
    for (int i = 0; i < rows; i++) m->sum[i] += v_sum(v_load(m->lanes + i * VL));
}

/* `rows` ≤ QUERIES queries of a span whose pages begin at `at` in the list; row i reads q +
 * i·q_row, writes y + i·q_row and lse + i·lse_row, and sees the last `window` keys up to position
 * pos + i·pos_step. */
static void attend(const Attention *c, int at, int g, int rows, int pos, int pos_step,
                   const float *q, float *y, int64_t q_row, float *lse, int64_t lse_row)
{
    int E = c->E, width = c->width, last = pos + (rows - 1) * pos_step;
    int before = pos + 1 - c->window;
    AttentionScratch *own = cpu_scratch(c->dev);
    int64_t queries_row = q_row;
    const float *queries = queries_of(own, c, q, &queries_row, rows);
    float scale = 1.0f / sqrtf((float)E);
    Softmax m;
    _Alignas(64) float scores[QUERIES * KV_PAGE];
    for (int i = 0; i < rows; i++) {
        m.top[i] = -INFINITY;
        m.sum[i] = 0.0f;
    }
    memset(own->sums, 0, (size_t)rows * (size_t)width * sizeof(float));
    for (int first = before > 0 ? before / KV_PAGE * KV_PAGE : 0; first <= last; first += KV_PAGE) {
        int page = c->pages[at + first / KV_PAGE];
        int keys = last - first + 1 < KV_PAGE ? last - first + 1 : KV_PAGE;
        page_scores(own, c, scores, queries, queries_row,
                    page_lanes_of(c->k_pages, page, g, c->G, E), rows, keys);
        page_soften(c, own, &m, scores, rows, pos - first + 1, pos_step, scale);
        page_values(own, c, scores, page_lanes_of(c->v_pages, page, g, c->G, E), rows, keys);
    }
    for (int i = 0; i < rows; i++) {
        row_scale(y + i * q_row, own->sums + (int64_t)i * width, 1.0f / m.sum[i], E);
        lse[i * lse_row] = m.top[i] + logf(m.sum[i]);
    }
}

/* One key-value head of one span, or a part of a whole one: rows are its heads in decoding, else
 * blocks of positions. */
static void attention_piece(void *context, int64_t piece)
{
    const Attention *c = context;
    int64_t head = piece / c->parts, row = (int64_t)c->H * c->E;
    Span span = c->spans[head / c->G];
    int g = (int)(head % c->G), group = c->H / c->G, last = span.pos + span.rows - 1;
    int from = (int)(piece % c->parts) * PART_ROWS, to = span.rows;
    if (from >= to) return; /* a shorter span than the longest */
    if (c->parts > 1 && to > from + PART_ROWS) to = from + PART_ROWS;
    unit_begin();
    if (span.rows == 1) {
        for (int h = 0; h < group; h += QUERIES) {
            int rows = group - h < QUERIES ? group - h : QUERIES;
            int64_t at = ((int64_t)span.row * c->H + g * group + h) * c->E;
            attend(c, span.first, g, rows, span.pos, 0, c->q + at, c->y + at, c->E,
                   c->lse + (int64_t)span.row * c->H + g * group + h, 1);
        }
        to = 0;
    }
    for (int i = from; i < to; i += QUERIES) {
        int rows = to - i < QUERIES ? to - i : QUERIES;
        for (int h = g * group; h < (g + 1) * group; h++) {
            int64_t at = ((int64_t)(span.row + i) * c->H + h) * c->E;
            attend(c, span.first, g, rows, c->whole ? last : span.pos + i, !c->whole, c->q + at,
                   c->y + at, row, c->lse + (int64_t)(span.row + i) * c->H + h, c->H);
        }
    }
    unit_end();
}

/* Pieces of a span's head. A whole span is an image's patches, thousands of rows and one span at a
 * time: its heads alone would leave threads idle. */
static int parts_of(const Span *spans, int S, int whole)
{
    int most = 1;
    for (int s = 0; s < S; s++) most = spans[s].rows > most ? spans[s].rows : most;
    return whole ? (most + PART_ROWS - 1) / PART_ROWS : 1;
}

void CPU(attention)(Device *dev, real *y, float *lse, const real *q, const cached *k_pages,
                    const cached *v_pages, const Span *spans, const int32_t *pages, int S, int T,
                    int H, int G, int E, int window, int whole)
{
    (void)T;
    assert(!whole || !window);
    if (!head_takes(dev, E, HEAD_MOST)) return;
    Attention c = {.dev = dev,
                   .y = f32(y),
                   .lse = lse,
                   .q = f32c(q),
                   .k_pages = k_pages,
                   .v_pages = v_pages,
                   .spans = spans,
                   .pages = pages,
                   .S = S,
                   .H = H,
                   .G = G,
                   .E = E,
                   .window = window_of(window),
                   .whole = whole,
                   .width = E,
                   .parts = parts_of(spans, S, whole)};
    c.tiles = in_tiles(whole ? (E + PADDED - 1) / PADDED * PADDED : E);
    if (c.tiles) c.width = (E + LAST_ROWS - 1) / LAST_ROWS * LAST_ROWS;
    cpu_run_uneven(dev, ATTENTION_NS * pairs_of(spans, S, c.window) * H * E,
                   (int64_t)S * G * c.parts, attention_piece, &c);
}
