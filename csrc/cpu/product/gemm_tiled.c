/* cpu/product/gemm_tiled.c - many rows of a product times one panel of b.
 *
 * A tile of TALL rows and 2·VL columns of c stays in registers while k runs: two vector loads of b
 * and TALL broadcasts of a for 2·TALL multiply-adds. a is packed first, once for all panels: rows
 * with a power-of-two stride would share a few cache sets and take a TLB entry each, and TALL
 * addresses do not fit into registers. The lines of c are prefetched before the loop, which hides
 * their latency. Each sum equals that of gemm.c's tile of few rows, bit for bit. Compute bound:
 * 2·m·width·k flops on m·k + k·width + m·width elements. */
#include "gemm_tiled.h"

_Static_assert((int)TALL <= (int)TILE_ROWS_MAX, "the last columns' temporary tile");

int CPU(block_rows)(int depth, int pairs)
{
    int lanes = pairs ? (depth + 1) / 2 : depth;
    int rows = PACKED / (lanes > 0 ? lanes : 1);
    return rows < TALL ? TALL : rows / TALL * TALL;
}

/* ---- packing ---- */

/* VL lanes of one row, from element `k` on; `n` of its elements exist. */
static inline vf row_lanes(const float *row, int n, Lanes form)
{
#if defined(__AVX512BF16__)
    if (form != ONE) {
        float part[2 * VL] = {0};
        if (n < 2 * VL) row = memcpy(part, row, (size_t)n * sizeof *part);
        if (form == HALVES) return (vf)v_join_pairs(v_load(row), v_load(row + VL));
        vu pairs = v_round_pairs(v_load(row), v_load(row + VL));
        return (vf)(form == APART ? v_pairs_apart(pairs) : pairs);
    }
#endif
    (void)form;
    return n >= VL ? v_load(row) : v_load_part(row, n, 0.0f);
}

/* k is along each row: squares of VL rows are transposed, and their columns stored with the stride
 * `height`. Each store overwrites the surplus lanes of the one before. */
void CPU(tile_pack)(float *to, int height, const float *a, int64_t a_row, int rows, int depth,
                    Lanes form)
{
    int step = form == ONE ? VL : 2 * VL;
    int lanes = packed_lanes(depth, form);
    if (height == 1) { /* nothing to transpose */
        for (int k = 0; k < depth; k += step, to += VL)
            v_store(to, row_lanes(a + k, depth - k < step ? depth - k : step, form));
        return;
    }
    for (int first = 0; first < rows; first += VL)
        for (int k = 0, lane = 0; k < depth; k += step, lane += VL) {
            int n = depth - k < step ? depth - k : step;
            vf v[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++)
                v[r] = first + r < rows ? row_lanes(a + (first + r) * a_row + k, n, form)
                                        : v_set(0.0f);
            square_turn(v);
            int width = lanes - lane < VL ? lanes - lane : VL;
            for (int i = 0; i < width; i++) {
                float *out = to + (int64_t)(lane + i) * height + first;
                if (rows <= VL || first + VL <= height)
                    v_store(out, v[i]);
                else
                    v_store_part(out, v[i], height - first);
            }
        }
}

/* The same for a transposed matrix, whose rows are adjacent. */
static void pack_columns(float *to, const float *a, int64_t a_row, int64_t a_col, int rows,
                         int depth)
{
    for (int k = 0; k < depth; k++, a += a_col, to += TALL)
        for (int r = 0; r < rows; r++) to[r] = a[r * a_row];
}

void CPU(block_pack)(float *to, const float *a, int64_t a_row, int64_t a_col, int m, int depth,
                     int pairs)
{
    int64_t tile = (int64_t)(pairs ? (depth + 1) / 2 : depth) * TALL;
    for (int i = 0; i < m; i += TALL, to += tile) {
        int rows = m - i < TALL ? m - i : TALL;
        if (a_col == 1)
            CPU(tile_pack)(to, TALL, a + i * a_row, a_row, rows, depth, pairs ? PAIR : ONE);
        else
            pack_columns(to, a + i * a_row, a_row, a_col, rows, depth);
    }
}

/* ---- the register tile ---- */

static inline __attribute__((always_inline)) void tall_rows(Out out, const float *a, int64_t a_step,
                                                            const float *b, int lanes,
                                                            const int rows, const int pairs)
{
    vf acc[TALL][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        acc[r][0] = acc[r][1] = v_set(0.0f);
        __builtin_prefetch(out.c + r * out.ldc, 1);
        __builtin_prefetch(out.c + r * out.ldc + WIDE - 1, 1);
    }
    for (int i = 0; i < lanes; i++, a += a_step, b += PANEL) {
#if defined(__AVX512BF16__)
        if (pairs) {
            tile_step_pairs(acc, a, v_load_pairs(b), v_load_pairs(b + VL), rows);
            continue;
        }
#endif
        tile_step(acc, a, 1, v_load(b), v_load(b + VL), rows);
    }
    (void)pairs;
    tile_write(out, acc, rows);
}

/* The switch makes the row count a constant. Each form is a separate function: the compiler takes a
 * third of the time for two of half the size. */
#if defined(__AVX512F__)
#define TALL_ROWS(CASE) ROWS_TO_14(CASE)
#else
#define TALL_ROWS(CASE) ROWS_TO_6(CASE)
#endif
#define TALL_FORM(name, pairs)                                                                 \
    static ALONE void name(Out out, const float *a, int64_t a_step, const float *b, int lanes, \
                           int rows)                                                           \
    {                                                                                          \
        switch (rows) {                                                                        \
            TALL_ROWS(CASE_##pairs);                                                           \
        }                                                                                      \
    }
#define CASE_0(n) \
    case n: tall_rows(out, a, a_step, b, lanes, n, 0); return
#define CASE_1(n) \
    case n: tall_rows(out, a, a_step, b, lanes, n, 1); return
TALL_FORM(tall_floats, 0)
#if defined(__AVX512BF16__)
TALL_FORM(tall_pairs, 1)
#else
#define tall_pairs tall_floats /* no product has pairs */
#endif

/* A tile's sums, block by block: partial sums stay in L1, and c is read and written once. */
static void tall_blocks(Out out, const float *a, int64_t a_step, const float *b, int lanes,
                        int rows, int pairs)
{
    _Alignas(64) float waiting[TALL * WIDE];
    int block = pairs ? DEPTH / 2 : DEPTH;
    void (*tall)(Out, const float *, int64_t, const float *, int, int) =
        pairs ? tall_pairs : tall_floats;
    for (; lanes > block; lanes -= block, a += block * a_step, b += block * PANEL) {
        Out wait = out;
        wait.c = waiting;
        wait.ldc = WIDE;
        tall(wait, a, a_step, b, block, rows);
        out.add = waiting;
        out.add_row = WIDE;
        out.bias = NULL;
    }
    tall(out, a, a_step, b, lanes, rows);
}

void CPU(block_multiply)(Out out, Tiles a, const float *b, int m, int width, int lanes)
{
    for (int j = 0; j < width; j += WIDE) {
        int live = width - j < WIDE ? width - j : WIDE;
        const float *tile = a.at;
        for (int i = 0; i < m; i += TALL, tile += a.tile) {
            int rows = m - i < TALL ? m - i : TALL;
            Out to = out_at(out, i, j);
            if (live == WIDE) {
                tall_blocks(to, tile, a.step, b + j, lanes, rows, a.pairs);
                continue;
            }
            Edge edge;
            tall_blocks(edge_open(&edge, to, rows, live), tile, a.step, b + j, lanes, rows,
                        a.pairs);
            edge_close(&edge, to, rows, live);
        }
    }
}
