/* cpu/product/gemv_backward.c - a few rows times a frozen weight in backward, as in an expert's.
 *
 *   c (m,n) = scale·a (m,k)·w [+ plus],  m ≤ BACK_ROWS, w (k,n) in panels of 32 k (PANELS_T)
 *
 * A panel has k along its lanes. Transposing it first, like gemm_tiled.c, does not pay off for a
 * few rows. So a is transposed once, and rows are the lanes: a tile is some columns of c by one to
 * three vectors of rows. Each step of k broadcasts one element of the weight per column, in place
 * if it is f32; bf16 is first widened into L1, without a shuffle (pairs are regrouped along k, with
 * one). Tiles are transposed when they are written. Multiplication is commutative, so sums have
 * gemm.c's bits: blocks of DEPTH, each from zero in the order of k, then scale and plus.
 *
 * Roofline: n·k weights, 2·m·n·k flops, m counted in whole vectors. Compute bound. */
#include "gemv_backward.h"

#include <assert.h>

#include "gemm_tiled.h"

enum {
    SUMS = VL == 16 ? 28 : 12,    /* registers that hold sums */
    HEIGHT_1 = VL == 16 ? 16 : 8, /* columns of a tile with one vector of rows */
    HEIGHT_2 = SUMS / 2,          /* two */
    HEIGHT_3 = SUMS / 6 * 2,      /* three; even, as a bf16 lane holds two */
    LANES_MOST = BACK_ROWS + VL,  /* of rows, in two or three vectors */
    FULL_ROWS = 12, /* cost as much as an empty lane: transposing bf16 costs half of f32's */
    WAITING = HEIGHT_2 * LANES_MOST,
    PACKED_LANES = POOL_SCRATCH / 4 - VL, /* of transposed rows */
};

_Static_assert(WAITING >= HEIGHT_1 * VL && HEIGHT_2 >= HEIGHT_3, "a tile's sums");
_Static_assert(PACKED_LANES / LANES_MOST >= DEPTH, "a block of all rows is packed");
_Static_assert(HEIGHT_1 % 2 == 0 && HEIGHT_2 % 2 == 0, "tiles of whole lanes");

/* The content of the operands' 32-bit lanes. */
typedef enum GemvBackwardForm {
    FLOATS, /* both: a float */
    WIDEN,  /* a: a float; the weight: two columns of bf16, widened */
    PAIRS,  /* both: two k of bf16 */
} GemvBackwardForm;

#if defined(__AVX512BF16__)
#define HALVES PAIRS /* the form of a bf16 weight */
#else
#define HALVES WIDEN
#endif

typedef struct Back {
    const Product *p;
    GemvBackwardForm form;
    int vectors, height; /* of a tile: vectors of rows, and columns */
    int lanes;           /* of all rows, a multiple of the tile's */
    int columns;         /* of a job */
    const float *packed; /* [k, or pair of k][lanes], of [k0, k0 + depth) */
    int k0, depth;
} Back;

/* Lanes of `k` elements of a row. */
static int row_lanes(GemvBackwardForm form, int k)
{
    return form == PAIRS ? (k + 1) / 2 : k;
}

/* The stride between panels, in lanes. */
static int64_t panel_step(const Back *s)
{
    const frozen *w = s->p->b;
    return (s->form == FLOATS ? (int64_t)w->cols : ((int64_t)w->cols + 1) / 2) * PANEL;
}

/* The weight at row k, a multiple of PANEL, and column n, which is even. */
static const float *weight_at(const Back *s, int k, int n)
{
    const frozen *w = s->p->b;
    return (const float *)w->data + k / PANEL * panel_step(s) +
           (int64_t)(s->form == FLOATS ? n : n / 2) * PANEL;
}

/* ---- rows to lanes ---- */

static void pack(float *to, const Back *s)
{
    const Product *p = s->p;
    int whole = (p->m + VL - 1) / VL * VL, lanes = row_lanes(s->form, s->depth);
    CPU(tile_pack)(to, s->lanes, p->a + s->k0, p->a_row, p->m, s->depth, s->form == PAIRS);
    for (int k = 0; k < lanes && whole < s->lanes; k++) /* one vector at most */
        v_store(to + (int64_t)k * s->lanes + whole, v_set(0.0f));
}

/* Transposes a tile's columns [n0, n0 + live) of plus, or of c so far, to sums [column][lanes], or
 * back to c. */
static void tile_turn(const Back *s, float *sums, int n0, int live, int back)
{
    const Product *p = s->p;
    for (int r0 = 0; r0 < p->m; r0 += VL)
        for (int j0 = 0; j0 < live; j0 += VL) {
            int64_t first = r0 * p->ldc + n0 + j0;
            const float *from = (s->k0 ? p->c : p->plus) + first;
            float *at = sums + (int64_t)j0 * s->lanes + r0;
            int rows = p->m - r0, columns = live - j0;
            vf v[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                v[i] = v_set(0.0f);
                if (i < (back ? columns : rows))
                    v[i] =
                        back ? v_load(at + i * s->lanes) : v_load_upto(from + i * p->ldc, columns);
            }
            square_turn(v);
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                if (back && i < rows) v_store_upto(p->c + first + i * p->ldc, v[i], columns);
                if (!back && i < columns) v_store(at + i * s->lanes, v[i]);
            }
        }
}

/* ---- the weight ---- */

#if defined(__AVX512BF16__)
#define ALONG_K(l) ((l) / 8 * 8 + (l) % 4 * 2 + (l) / 4 % 2)

/* Four k of two columns: pairs of columns become pairs of k. */
static inline vf pairs_along_k(vu pairs)
{
    const __m512i order = _mm512_set_epi16(
        ALONG_K(31), ALONG_K(30), ALONG_K(29), ALONG_K(28), ALONG_K(27), ALONG_K(26), ALONG_K(25),
        ALONG_K(24), ALONG_K(23), ALONG_K(22), ALONG_K(21), ALONG_K(20), ALONG_K(19), ALONG_K(18),
        ALONG_K(17), ALONG_K(16), ALONG_K(15), ALONG_K(14), ALONG_K(13), ALONG_K(12), ALONG_K(11),
        ALONG_K(10), ALONG_K(9), ALONG_K(8), ALONG_K(7), ALONG_K(6), ALONG_K(5), ALONG_K(4),
        ALONG_K(3), ALONG_K(2), ALONG_K(1), ALONG_K(0));
    return (vf)_mm512_permutexvar_epi16(order, (__m512i)pairs);
}
#endif

/* `rows` lanes' rows of each panel, of which `live` exist, in the order in which backward_rows
 * reads them: [panel][column][32 k], or [panel][column / 2][k / 4][column % 2][k / 2 % 2] of pairs.
 */
static inline __attribute__((always_inline)) void bring_rows(float *to, const float *from,
                                                             int64_t step, int panels, int rows,
                                                             int live, const GemvBackwardForm form)
{
    for (int i = 0; i < panels; i++, from += step)
        for (int r = 0; r < rows; r++, to += form == WIDEN ? 2 * PANEL : PANEL)
#pragma GCC unroll 8
            for (int x = 0; x < PANEL; x += VL) {
                vu lanes = r < live ? v_load_pairs(from + r * PANEL + x) : (vu){0};
                if (form == FLOATS) v_store(to + x, (vf)lanes);
                if (form == WIDEN) {
                    v_store(to + x, v_first(lanes));
                    v_store(to + PANEL + x, v_second(lanes));
                }
#if defined(__AVX512BF16__)
                if (form == PAIRS) v_store(to + x, pairs_along_k(lanes));
#endif
            }
}

/* Brings `depth` k, from k on, of the tile's columns [n0, n0 + live). */
static void bring(float *to, const Back *s, int k, int depth, int n0, int live)
{
    const float *from = weight_at(s, k, n0);
    int64_t step = panel_step(s);
    int panels = (depth + PANEL - 1) / PANEL, height = s->height;
    if (s->form == FLOATS)
        bring_rows(to, from, step, panels, height, live, FLOATS);
    else
        bring_rows(to, from, step, panels, height / 2, (live + 1) / 2, HALVES);
}

/* ---- the register tile ---- */

/* The inputs of a tile's block of k. */
typedef struct Block {
    const float *w, *b;
    int64_t w_panel, b_step; /* strides between panels, and between steps of k */
    int k;                   /* lanes */
    const float *ask;        /* the next tile's columns of the weight, to prefetch */
    int64_t ask_panel;
    int ask_step;
} Block;

static inline __attribute__((always_inline)) void backward_rows(float *sums, int64_t sums_row,
                                                                Block o, float scale, int add,
                                                                const int height, const int vectors,
                                                                const GemvBackwardForm form)
{
    const int of_panel = form == PAIRS ? PANEL / 2 : PANEL;
    vf acc[HEIGHT_1][3];
#pragma GCC unroll 16
    for (int j = 0; j < height; j++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) acc[j][v] = v_set(0.0f);
    for (int first = 0; first < o.k; first += of_panel, o.w += o.w_panel, o.ask += o.ask_panel) {
        int live = o.k - first < of_panel ? o.k - first : of_panel;
        for (int i = 0; i < live; i++, o.b += o.b_step) {
            vf b[3];
            __builtin_prefetch(o.ask + i * o.ask_step, 0, 3);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) b[v] = v_load(o.b + v * VL);
#pragma GCC unroll 16
            for (int j = 0; j < height; j++) {
#if defined(__AVX512BF16__)
                if (form == PAIRS) {
                    vu x = v_set_pair(o.w + j / 2 * PANEL + j % 2 * 2 + i / 2 * 4 + i % 2);
#pragma GCC unroll 3
                    for (int v = 0; v < vectors; v++)
                        acc[j][v] = v_dot_pairs(x, (vu)b[v], acc[j][v]);
                    continue;
                }
#endif
                vf x = v_set(o.w[j * PANEL + i]);
#pragma GCC unroll 3
                for (int v = 0; v < vectors; v++) acc[j][v] = v_fma(x, b[v], acc[j][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < height; j++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            float *to = sums + j * sums_row + v * VL;
            vf y = acc[j][v] * scale;
            if (add) y += v_load(to);
            v_store(to, y);
        }
}

/* The switch makes the tile's size and the form constants. */
static void backward_tile(const Back *s, float *sums, Block o, int add)
{
    float scale = s->p->scale;
#define CASE(n)                                                                  \
    case n:                                                                      \
        if (s->form == FLOATS)                                                   \
            backward_rows(sums, s->lanes, o, scale, add, HEIGHT_##n, n, FLOATS); \
        else                                                                     \
            backward_rows(sums, s->lanes, o, scale, add, HEIGHT_##n, n, HALVES); \
        return
    switch (s->vectors) {
        CASE(1);
        CASE(2);
        CASE(3);
    }
#undef CASE
    assert(!"a tile is one to three vectors wide");
}

/* ---- tiles and threads ---- */

/* Columns [n0, n0 + live) of c, of all rows and the packed k. */
static void columns_run(const Back *s, int n0, int live)
{
    _Alignas(64) float sums[WAITING], own[HEIGHT_1 * DEPTH];
    const Product *p = s->p;
    int add = p->plus || s->k0 > 0, whole = s->form == FLOATS && live == s->height;
    int wide = s->vectors * VL;
    if (add) tile_turn(s, sums, n0, live, 0);
    for (int r = 0; r < p->m && !add; r++) __builtin_prefetch(p->c + r * p->ldc + n0 + live - 1, 1);
    for (int k = 0; k == 0 || k < s->depth; k += DEPTH, add = 1) {
        int depth = s->depth - k < DEPTH ? s->depth - k : DEPTH;
        Block o = {.w = own,
                   .b = s->packed + (int64_t)row_lanes(s->form, k) * s->lanes,
                   .w_panel = (s->form == PAIRS ? s->height / 2 : s->height) * PANEL,
                   .b_step = s->lanes,
                   .k = row_lanes(s->form, depth),
                   .ask = weight_at(s, s->k0 + k, n0 + s->height),
                   .ask_panel = panel_step(s),
                   .ask_step = s->form == WIDEN ? 8 : 16};
        if (whole) {
            o.w = weight_at(s, s->k0 + k, n0);
            o.w_panel = panel_step(s);
        } else {
            bring(own, s, s->k0 + k, depth, n0, live);
        }
        for (int r = 0; r < s->lanes; r += wide, o.b += wide) {
            backward_tile(s, sums + r, o, add);
            o.ask_step = 0; /* once is enough */
        }
    }
    tile_turn(s, sums, n0, live, 1);
}

static void back_job(void *context, int64_t job)
{
    const Back *s = context;
    int n = s->p->n, first = (int)job * s->columns;
    int last = n - first < s->columns ? n : first + s->columns;
    for (int n0 = first; n0 < last; n0 += s->height)
        columns_run(s, n0, last - n0 < s->height ? last - n0 : s->height);
}

/* Vectors of a tile for `m` rows. */
static int vectors_of(int m)
{
    int all = (m + VL - 1) / VL;
    return all == 1 ? 1 : all % 3 == 0 ? 3 : 2;
}

/* Lanes of `m` rows, in whole tiles. */
static int lanes_of(int m)
{
    int wide = vectors_of(m) * VL;
    return (m + wide - 1) / wide * wide;
}

int CPU(streams_back)(const Product *p)
{
    if (p->order != PANELS_T || p->m > BACK_ROWS) return 0;
    DType type = ((const frozen *)p->b)->type;
    return type == DTYPE_F32 ||
           (type == DTYPE_BF16 && lanes_of(p->m) - p->m <= VL / 2 - p->m / FULL_ROWS);
}

void CPU(product_stream_back)(Device *dev, const Product *p)
{
    static const int heights[] = {0, HEIGHT_1, HEIGHT_2, HEIGHT_3};
    assert(p->order == PANELS_T && p->a_col == 1 && !p->bias && p->m <= BACK_ROWS);
    float *packed = cpu_scratch(dev); /* the caller's: workers only read it */
    Back s = {.p = p, .packed = packed};
    s.form = ((const frozen *)p->b)->type == DTYPE_F32 ? FLOATS : HALVES;
    s.vectors = vectors_of(p->m);
    s.lanes = lanes_of(p->m);
    s.height = heights[s.vectors];
    s.columns = cpu_size_of_piece(dev, p->n, p->n, s.height);
    int most = PACKED_LANES / s.lanes * (s.form == PAIRS ? 2 : 1) / DEPTH * DEPTH;
    for (s.k0 = 0; s.k0 == 0 || s.k0 < p->k; s.k0 += s.depth) {
        s.depth = p->k - s.k0 < most ? p->k - s.k0 : most;
        pack(packed, &s);
        cpu_run_of(dev, CPU_PRODUCT_NS * s.lanes * p->n * p->k, (p->n + s.columns - 1) / s.columns,
                   back_job, &s);
        if (!s.depth) return;
    }
}
