/* cpu/product/gemm.c - the product that all others of the CPU device use, and its paths.
 *
 *   c (m,n) = scale·a (m,k)·b (k,n) [+ bias] [+ plus]
 *
 * Up to STREAM_ROWS rows stream a frozen weight from memory (gemv.c), in backward too if that is
 * faster (gemv_backward.c). Other products with a frozen weight, and those of more than FEW rows
 * with more than one panel of b, pack a once and multiply it with groups of panels (gemm_tiled.c).
 * The remaining products read a in place, with this file's register tile. If a is rounded, weights
 * of 8 to 4 bits have their own path (gemm_quantized.c), and with a matrix unit all weights that
 * are not f32 (amx.c).
 *
 * On each path b is read as panels that are row-major in k. Frozen weights are stored that way
 * (frozen.h); other matrices are copied to a scratch block that stays in L1 or L2. bf16 weights are
 * widened to f32, which is exact. The device cpu-bf16, for processors with a bf16 dot product,
 * rounds a to bf16 too and multiplies pairs, for half the instructions.
 *
 * Every element of c is summed over k in the same order with fused multiply-adds, in blocks of
 * DEPTH, for any m, n, path, tile, thread and vector width (amx.h has the unit's order;
 * gemm_quantized.c sums 32 first). So a row's result depends only on that row, bit for bit. That is
 * why this is not a BLAS call; benchmarks/ops.py compares it with oneDNN. Roofline: 2·m·n·k flops,
 * compute bound for m > 16; for m = 1 one pass over b, memory bound. */
#include "gemm.h"

#include <assert.h>

#include "../runtime/transpose.h"
#include "../weights/packed.h"
#include "amx.h"
#include "gemm_quantized.h"
#include "gemm_tiled.h"
#include "gemv.h"
#include "gemv_backward.h"

enum {
    AHEAD = 48,                /* rows of b to prefetch when few rows of a are bound by memory */
    TILE_M = VL == 16 ? 8 : 6, /* rows of a register tile: that many addresses of a fit into
                                  registers, so taller tiles need a packed (gemm_tiled.c) */
    FEW = 2 * TILE_M,          /* the most rows for which packing a does not pay off */
    GROUP = 4,                 /* panels that stay in L2 for many rows: 300 KB */
    SCRATCH = (PACKED_DEPTH + PANEL) * PANEL, /* lanes of a copied panel */
};

/* ---- the register tile ---- */

static inline __attribute__((always_inline)) void loose_rows(Out out, const float *a, int64_t a_row,
                                                             int64_t a_col, const float *b,
                                                             int64_t ldb, int k, const int rows)
{
    vf acc[TILE_M][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = v_set(0.0f);
    for (int i = 0; i < k; i++, a += a_col, b += ldb) {
        if (rows <= 4) __builtin_prefetch(b + AHEAD * ldb);
        tile_step(acc, a, a_row, v_load(b), v_load(b + VL), rows);
    }
    tile_write(out, acc, rows);
}

/* One tile of `rows` ≤ TILE_M rows: the switch makes the row count a constant. */
static void loose_tile(Out out, const float *a, int64_t a_row, int64_t a_col, const float *b,
                       int64_t ldb, int k, int rows)
{
#define CASE(n) \
    case n: loose_rows(out, a, a_row, a_col, b, ldb, k, n); return
    switch (rows) {
#if defined(__AVX512F__)
        ROWS_TO_8(CASE);
#else
        ROWS_TO_6(CASE);
#endif
    }
#undef CASE
    assert(!"a tile has 1 to TILE_M rows");
}

/* A block of rows times `n` ≤ PANEL columns of b, which must be readable (with any content) up to
 * the full width of the last tile. */
static void rows_strip(Out out, const float *a, int64_t a_row, int64_t a_col, const float *b,
                       int64_t ldb, int m, int n, int k)
{
    for (int j = 0; j < n; j += WIDE) {
        int width = n - j < WIDE ? n - j : WIDE;
        for (int i = 0; i < m; i += TILE_M) {
            int rows = m - i < TILE_M ? m - i : TILE_M;
            Out to = out_at(out, i, j);
            const float *ai = a + i * a_row;
            if (width == WIDE) {
                loose_tile(to, ai, a_row, a_col, b + j, ldb, k, rows);
                continue;
            }
            Edge edge;
            loose_tile(edge_open(&edge, to, rows, width), ai, a_row, a_col, b + j, ldb, k, rows);
            edge_close(&edge, to, rows, width);
        }
    }
}

/* ---- copying b to k-major order ---- */

/* Whether both operands of a product are pairs of bf16. */
static int in_pairs(const Product *p)
{
#if defined(__AVX512BF16__)
    return p->order >= PANELS && ((const frozen *)p->b)->type != DTYPE_F32;
#else
    (void)p;
    return 0;
#endif
}

/* Element `at` of a matrix that is f32 or bf16: its address. */
static const void *element(const void *matrix, int64_t at, int bf16)
{
    return (const unsigned char *)matrix + at * (bf16 ? 2 : 4);
}

/* The panel of 32 rows of a weight that begins at `from`, transposed: k runs over the rows, and
 * `width` of its columns, from `from` on, become b's. Both sides have PANEL lanes in a row; missing
 * columns become zeros. */
static void turn_floats(float *to, const float *from, int width)
{
    for (int x = 0; x < PANEL; x += VL)
        for (int j = 0; j < width; j += VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++)
                v[r] = j + r < width ? v_load(from + (j + r) * PANEL + x) : v_set(0.0f);
            square_turn(v);
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) v_store(to + (x + r) * PANEL + j, v[r]);
        }
}

#if !defined(__AVX512BF16__)

/* The same from bf16, widened: a lane of `from` holds two columns. */
static void turn_widened(float *to, const float *from, int width)
{
    for (int x = 0; x < PANEL; x += VL)
        for (int j = 0; j < width; j += VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; r += 2) {
                vu pairs = {0};
                if (j + r < width) pairs = v_load_pairs(from + (j + r) / 2 * PANEL + x);
                v[r] = v_first(pairs);
                v[r + 1] = v_second(pairs);
            }
            square_turn(v);
#pragma GCC unroll 16
            for (int r = 0; r < VL; r++) v_store(to + (x + r) * PANEL + j, v[r]);
        }
}

#else

#define FRONT(l) ((l) % 2 * VL + (l) / 2)
#define BACK(l) (FRONT(l) + VL / 2)

/* The same from bf16 to bf16: a lane of `from` holds two columns of one row, a lane of `to` two
 * rows of one column. */
static void turn_pairs(float *to, const float *from, int width)
{
    const vi front = LANES(FRONT), back = LANES(BACK);
    for (int x = 0; x < PANEL; x += VL) {
        vf v[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; r++)
            v[r] = 2 * r < width ? v_load(from + r * PANEL + x) : v_set(0.0f);
        square_turn(v);
#pragma GCC unroll 16
        for (int r = 0; r < VL; r += 2) {
            vu above = (vu)v[r], below = (vu)v[r + 1];
            vu even = (above & 0xffffu) | below << 16, odd = above >> 16 | (below & 0xffff0000u);
            float *out = to + (x + r) / 2 * PANEL;
            v_store(out, (vf)__builtin_shuffle(even, odd, front));
            v_store(out + VL, (vf)__builtin_shuffle(even, odd, back));
        }
    }
}

#endif

/* The start of rows [k0, …) of columns [n0, …) of b in a weight: in panel n0 with PANELS, in panel
 * k0 with PANELS_T. */
static const float *weight_at(const Product *p, int k0, int n0)
{
    const frozen *w = p->b;
    int halves = w->type == DTYPE_BF16; /* a lane holds two columns of the weight */
    size_t lanes = halves ? ((size_t)w->cols + 1) / 2 : (size_t)w->cols; /* of a panel's row */
    int row = p->order == PANELS ? n0 : k0, col = p->order == PANELS ? k0 : n0;
    return (const float *)w->data +
           ((size_t)(row / PANEL) * lanes + (size_t)(halves ? col / 2 : col)) * PANEL;
}

/* Prefetches part number `part` of `parts` of one such panel's blocks. */
static void blocks_ask(const Product *p, int k0, int depth, int n0, int part, int parts)
{
    const frozen *w = p->b;
    int count = (depth + BLOCK - 1) / BLOCK, share = (count + parts - 1) / parts;
    int last = (part + 1) * share < count ? (part + 1) * share : count;
    size_t bytes = blocks_of(w->type).bytes;
    for (int i = part * share; i < last; i++) {
        Square s = p->order == PANELS ? square_at(w, w->type, n0 / PANEL, k0 / BLOCK + i)
                                      : square_at(w, w->type, k0 / PANEL + i, n0 / BLOCK);
        for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(s.block + line, 0, 2);
    }
}

/* Prefetches part number `part` of `parts` of one such panel: stretches of lines with the stride
 * `step`. */
static void weight_ask(const Product *p, int k0, int depth, int n0, int part, int parts)
{
    if (p->order < PANELS || n0 >= p->n) return;
    if (dtype_packed(((const frozen *)p->b)->type))
        return blocks_ask(p, k0, depth, n0, part, parts);
    int lines = ((const frozen *)p->b)->type == DTYPE_BF16 ? 1 : 2; /* PANEL elements */
    int stretch = (p->order == PANELS ? depth : PANEL) * lines;
    const float *at = weight_at(p, k0, n0);
    int64_t step = p->order == PANELS ? 0 : weight_at(p, k0 + PANEL, n0) - at;
    int share = (depth * lines + parts - 1) / parts, from = part * share;
    for (int i = from; i < from + share && i < depth * lines; i++)
        __builtin_prefetch(at + i / stretch * step + i % stretch * 16, 0, 2);
}

/* bring_weight for a weight with blocks, in the form that is multiplied. */
static const float *bring_blocks(const Product *p, int k0, int depth, int n0, int width,
                                 float *scratch)
{
    const frozen *w = p->b;
    int lanes = in_pairs(p) ? BLOCK / 2 : BLOCK; /* of a block's inputs */
    for (int i = 0; i < depth; i += BLOCK) {
        float *to = scratch + i / BLOCK * lanes * PANEL;
        _Alignas(64) float block[BLOCK * PANEL];
        float *wide = p->order == PANELS ? to : block;
        int panel = (p->order == PANELS ? n0 : k0 + i) / PANEL;
        int number = (p->order == PANELS ? k0 + i : n0) / BLOCK;
#if defined(__AVX512BF16__)
        CPU(block_widen_pairs)(wide, w, panel, number);
        if (p->order == PANELS_T) turn_pairs(to, wide, width);
#else
        CPU(block_widen)(wide, w, panel, number);
        if (p->order == PANELS_T) turn_floats(to, wide, width);
#endif
    }
    return scratch;
}

/* Rows [k0, k0+depth) of columns [n0, n0+width) of a weight, k-major: floats, or with in_pairs()
 * two rows in a lane. */
static const float *bring_weight(const Product *p, int k0, int depth, int n0, int width,
                                 float *scratch)
{
    if (dtype_packed(((const frozen *)p->b)->type))
        return bring_blocks(p, k0, depth, n0, width, scratch);
    int halves = ((const frozen *)p->b)->type == DTYPE_BF16;
    if (p->order == PANELS) {
        const float *from = weight_at(p, k0, n0);
        if (!halves || in_pairs(p)) return from;
        for (int i = 0; i < depth; i += 2)
            for (int x = 0; x < PANEL; x += VL) {
                vu pairs = v_load_pairs(from + i / 2 * PANEL + x);
                v_store(scratch + i * PANEL + x, v_first(pairs));
                v_store(scratch + (i + 1) * PANEL + x, v_second(pairs));
            }
        return scratch;
    }
    /* PANELS_T: k runs over the weight's rows, n over its columns; k0 is a multiple of PANEL */
    for (int i = 0; i < depth; i += PANEL) {
        const float *from = weight_at(p, k0 + i, n0);
#if defined(__AVX512BF16__)
        if (halves) turn_pairs(scratch + i / 2 * PANEL, from, width);
#else
        if (halves) turn_widened(scratch + i * PANEL, from, width);
#endif
        if (!halves) turn_floats(scratch + i * PANEL, from, width);
    }
    return scratch;
}

/* Rows [k0, k0+depth) of columns [n0, n0+width) of b, width ≤ PANEL, k-major. */
static const float *bring(const Product *p, int k0, int depth, int n0, int width, float *scratch,
                          int few, int64_t *ldb)
{
    *ldb = PANEL;
    if (p->order == BY_ROW && p->bf16) {
        const uint16_t *b = (const uint16_t *)p->b + k0 * p->ldb + n0;
        for (int i = 0; i < depth; i++, b += p->ldb)
            for (int j = 0; j < width; j++) scratch[i * PANEL + j] = f_bf16(b[j]);
        return scratch;
    }
    if (p->order == BY_ROW) {
        const float *b = (const float *)p->b + k0 * p->ldb + n0;
        if (few && width % WIDE == 0) { /* else power-of-two strides would share cache sets */
            *ldb = p->ldb;
            return b;
        }
        panel_copy(scratch, b, p->ldb, depth, width);
        return scratch;
    }
    if (p->order == BY_COLUMN) {
        CPU(transpose_any)(scratch, PANEL, element(p->b, n0 * p->ldb + k0, p->bf16), p->ldb, width,
                           depth, p->bf16);
        return scratch;
    }
    return bring_weight(p, k0, depth, n0, width, scratch);
}

/* ---- blocks and threads ---- */

/* Few rows, or a single panel: a is read in place. b is not frozen. */
static void few_rows(const Product *p, int m0, int m, int n_first, int n_last)
{
    float *scratch = cpu_scratch(p->dev);
    if ((n_last - n_first) % PANEL)
        memset(scratch, 0, DEPTH * PANEL * sizeof *scratch); /* missing columns */
    for (int n0 = n_first; n0 < n_last; n0 += PANEL)
        for (int k0 = 0; k0 == 0 || k0 < p->k; k0 += DEPTH) {
            int depth = p->k - k0 < DEPTH ? p->k - k0 : DEPTH;
            int width = n_last - n0 < PANEL ? n_last - n0 : PANEL;
            int64_t ldb;
            const float *b = bring(p, k0, depth, n0, width, scratch, 1, &ldb);
            rows_strip(out_at(product_out(p, k0), m0, n0), p->a + m0 * p->a_row + k0 * p->a_col,
                       p->a_row, p->a_col, b, ldb, m, width, depth);
        }
}

/* The k packed at once: equal parts of whole blocks. */
static int chunk(const Product *p)
{
    int blocks = (p->k + DEPTH - 1) / DEPTH, most = PACKED_DEPTH * (in_pairs(p) ? 2 : 1) / DEPTH;
    int chunks = (blocks + most - 1) / most;
    return blocks ? (blocks + chunks - 1) / chunks * DEPTH : DEPTH;
}

/* Many rows, k of one chunk: a group of panels stays in L2 while strips of a are read, if necessary
 * from L3: 32 KB for twelve blocks. The next group is prefetched meanwhile. */
static void many_rows_chunk(const Product *p, Out out, Tiles a, float *scratch, int m, int k0,
                            int depth, int n_first, int n_last)
{
    int lanes = in_pairs(p) ? (depth + 1) / 2 : depth;
    int few = lanes > 0 && lanes < DEPTH / 2; /* tiles are then little work; a strip has several */
    int strip = (few ? 4 * PACKED_DEPTH / lanes : 1) * TALL;
    for (int n0 = n_first; n0 < n_last; n0 += GROUP * PANEL) {
        int panels = (n_last - n0 + PANEL - 1) / PANEL;
        if (panels > GROUP) panels = GROUP;
        const float *b[GROUP];
        for (int i = 0; i < panels; i++) {
            int n = n0 + i * PANEL, width = n_last - n < PANEL ? n_last - n : PANEL;
            float *to = scratch + (int64_t)i * SCRATCH;
            int64_t ldb;
            if (width < PANEL && p->order < PANELS) /* missing columns */
                memset(to, 0, (size_t)depth * PANEL * sizeof *to);
            b[i] = bring(p, k0, depth, n, width, to, 0, &ldb);
        }
        for (int t = 0; t < m; t += strip)
            for (int i = 0; i < panels; i++) {
                int n = n0 + i * PANEL, width = n_last - n < PANEL ? n_last - n : PANEL;
                Tiles tiles = a;
                tiles.at += t / TALL * a.tile;
                weight_ask(p, k0, depth, n + GROUP * PANEL, t / strip, (m + strip - 1) / strip);
                CPU(block_multiply)(out_at(out, t, n), tiles, b[i], m - t < strip ? m - t : strip,
                                    width, lanes);
            }
    }
}

/* A thread's scratch for many rows; few rows need only the first panel. */
typedef struct GemmScratch {
    float panels[GROUP * SCRATCH];
    _Alignas(64) float packed[PACKED + PACKED_SLACK];
} GemmScratch;

_Static_assert(sizeof(GemmScratch) <= POOL_SCRATCH, "many rows' scratch");
_Static_assert((int)DEPTH <= (int)PACKED_DEPTH, "few rows' scratch");

static void many_rows(const Product *p, int m0, int m, int n_first, int n_last)
{
    GemmScratch *own = cpu_scratch(p->dev);
    int pairs = in_pairs(p), step = chunk(p);
    for (int k0 = 0; k0 == 0 || k0 < p->k; k0 += step) {
        int depth = p->k - k0 < step ? p->k - k0 : step;
        CPU(block_pack)(own->packed, p->a + m0 * p->a_row + k0 * p->a_col, p->a_row, p->a_col, m,
                        depth, pairs);
        many_rows_chunk(p, out_at(product_out(p, k0), m0, 0),
                        tiles_packed(own->packed, depth, pairs), own->panels, m, k0, depth, n_first,
                        n_last);
    }
}

/* Whether packing pays off for `m` rows. */
static int packs(const Product *p, int m)
{
    return p->order >= PANELS || (m > FEW && p->n > PANEL);
}

/* The number of the product's groups of panels. */
static int groups_of(const Product *p)
{
    return (p->n + p->panels * PANEL - 1) / (p->panels * PANEL);
}

static void product_piece(void *context, int64_t piece)
{
    const Product *p = context;
    int groups = groups_of(p);
    int m0 = (int)(piece / groups) * p->rows, n_first = (int)(piece % groups) * p->panels * PANEL;
    int m = p->m - m0 < p->rows ? p->m - m0 : p->rows;
    int n_last = n_first + p->panels * PANEL < p->n ? n_first + p->panels * PANEL : p->n;
    (packs(p, m) ? many_rows : few_rows)(p, m0, m, n_first, n_last);
}

/* Cuts the product into at least `wanted` pieces, if possible. It picks the cheapest cut: packing a
 * again for each group of panels costs time, and so does copying b again for each block of rows. */
static void cut(Product *p, int64_t wanted)
{
    enum { PACK = 10, READ = 2, TURN = 20 }; /* approximate costs per element */
    int panels = (p->n + PANEL - 1) / PANEL, step = chunk(p), first, last;
    int most = CPU(block_rows)(p->k < step ? p->k : step, in_pairs(p));
    if (p->order == PANELS && panels <= 2 * GROUP) /* a is short: it stays in L2 */
        most = (most / 4 + TALL - 1) / TALL * TALL;
    first = (p->m + most - 1) / most;
    if (first * (int64_t)panels < wanted)
        first = (int)((wanted + panels - 1) / panels); /* narrow */
    last = packs(p, p->m) && wanted > first ? (int)wanted : first;
    double least = 0;
    for (int blocks = first; blocks <= last; blocks++) {
        int rows = ((p->m + blocks - 1) / blocks + TALL - 1) / TALL * TALL;
        int64_t groups = (wanted + blocks - 1) / blocks;
        if (groups > panels) groups = panels;
        double cost = (double)groups * p->m * PACK +
                      (double)blocks * p->n * (p->order == PANELS ? READ : TURN);
        if (blocks > first && (cost >= least || rows < 4 * TALL)) continue;
        least = cost;
        p->rows = rows;
        p->panels = (int)((panels + groups - 1) / groups);
    }
}

/* Cuts the product into a few pieces per thread, and runs them. */
void CPU(product_run)(Device *dev, Product *p)
{
    if (p->m <= 0 || p->n <= 0) return;
#if defined(__AMX_BF16__)
    if (in_pairs(p)) {
        CPU(product_amx)(dev, p);
        return;
    }
#elif defined(__AVX2__)
    const CpuDevice *cpu = (const CpuDevice *)dev;
    if (p->order == PANELS && (PAIRS_ALONE || cpu->int16) &&
        scales_sums(((const frozen *)p->b)->type)) {
        cpu->product_scaled(dev, p);
        return;
    }
#endif
    if (p->order == PANELS && p->m <= STREAM_ROWS) {
        CPU(product_stream)(dev, p);
        return;
    }
    if (CPU(streams_back)(p)) {
        CPU(product_stream_back)(dev, p);
        return;
    }
    p->dev = dev;
    int threads = pool_threads(((CpuDevice *)dev)->pool);
    int shared = threads > 1 && CPU_PRODUCT_NS * p->m * p->n * p->k >= CPU_SHARED_NS;
    cut(p, shared ? 4 * threads : 1);
    int64_t blocks = (p->m + p->rows - 1) / p->rows;
    cpu_run(dev, blocks * groups_of(p), product_piece, p);
}

void CPU(product)(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col,
                  const float *b, int64_t b_row, int m, int n, int k, float scale, int accumulate)
{
    for (int k0 = 0; k0 == 0 || k0 < k; k0 += DEPTH) {
        int depth = k - k0 < DEPTH ? k - k0 : DEPTH;
        rows_strip(out_to(c, c_row, scale, accumulate || k0 > 0), a + k0 * a_col, a_row, a_col,
                   b + k0 * b_row, b_row, m, n, depth);
    }
}
