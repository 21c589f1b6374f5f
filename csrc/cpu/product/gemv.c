/* cpu/product/gemv.c - a few rows times a frozen weight, as in decoding.
 *
 *   c (m,n) = scale·a (m,k)·wᵀ [+ bias] [+ plus],  m ≤ STREAM_ROWS
 *
 * The weight is read once, in memory order. It is prefetched from memory about AHEAD bytes before
 * use, across the ends of blocks and panels, because the hardware prefetcher stops at each page,
 * and into L1 from L2 shortly before use. AMD's prefetcher goes on, so up to STEADY_ROWS rows
 * prefetch less there (processor_follows). A block of DEPTH inputs of one panel is multiplied with
 * all rows while it is in L1. If several tiles read it, it is split into parts that leave L1 room
 * for the rows, and the tiles' sums are kept between parts. The rows are packed first, once for all
 * panels, each tile k-major. So the inner loop reads two streams, whatever the row stride. One or
 * two rows have registers left: a tile is then as wide as the panel and reads it once, in order
 * (with AVX2 and f32 one row reads 14 GB/s instead of 10; a core can read 14). Sums are gemm.c's,
 * bit for bit: blocks of DEPTH, each from zero in the order of k, then scale, bias, and plus.
 *
 * Roofline: n·k weights, 2·m·n·k flops. Memory bound up to some 9 to 14 rows of bf16, compute bound
 * above. On a core with 16.5 to 17.5 GB/s and 178 GFLOP/s (Intel, AVX-512): 16.6 GB/s at one and
 * two rows of bf16, 15.7 at 4, 15.0 at 8, and 139 GFLOP/s at 16; from L2 172. */
#include "gemv.h"

#include <assert.h>

#include "../weights/packed.h"
#include "gemm_tiled.h"
#include "prefetch.h"

enum {
    TILE_ROWS = VL == 16 ? 13 : 6, /* of a tile: 26 of 32 registers hold sums, or 12 of 16 */
    ACROSS = PANEL / WIDE,         /* tiles of a panel */
    ACROSS_ROWS = VL == 4 ? 1 : 2, /* the most whose sums for all of them fit into registers */
    BLOCK_ROWS = VL - 4,           /* 12, 4 or 0: the most that widen a block in registers */
    WIDEN_ROWS = VL == 8 ? 16 : STREAM_ROWS,  /* the same for bf16 multiplied as f32 */
    STEPS = VL == 16 ? 4 : 8,                 /* loop steps of eight inputs widened in registers */
    STEADY_ROWS = VL == 16 ? 4 : ACROSS_ROWS, /* the most for which this is faster */
    PACKED_LANES = STREAM_ROWS << 10,         /* of packed rows: a quarter of L2 */
    PART = 96,                                /* lanes of the weight shared by tiles in L1 */
    WIDE_LANES = PART * PANEL,                /* of a widened part */
    SUM_LANES = (STREAM_ROWS + TILE_ROWS) * PANEL, /* of a panel's sums between parts */
};

_Static_assert((PACKED_LANES + PACKED_SLACK + WIDE_LANES + SUM_LANES) * sizeof(float) <=
                   POOL_SCRATCH,
               "all packed rows, a part of a weight that is widened, and the sums of a panel");
_Static_assert(PART % FROZEN_BLOCK == 0 && DEPTH % PART == 0, "parts of whole blocks");
_Static_assert(PACKED_LANES / (STREAM_ROWS + TILE_ROWS) >= DEPTH, "a block of all rows is packed");

/* The content of the operands' 32-bit lanes. */
typedef enum GemvForm {
    FLOATS, /* both: a float */
    WIDEN,  /* a: a float; b: two k of bf16, widened in registers */
    PAIRS,  /* both: two k of bf16 */
} GemvForm;

/* The form of a bf16 weight read in place. */
#define OF_BF16 (PAIRS_ALONE ? PAIRS : WIDEN)

/* The part of a block for one tile. */
typedef struct GemvPart {
    float *sums;     /* the tile's, between parts */
    int begun, more; /* whether there are parts before and after it */
    int turn, turns; /* the tile prefetches every turns-th pair of lines; turns 0: none */
} GemvPart;

typedef struct Stream {
    const Product *p;
    const Device *dev;
    GemvForm form;       /* for a weight with blocks: after widening */
    int steady;          /* the hardware prefetcher follows the weight, and only needs help */
    int tiles, height;   /* tiles, and rows of each (the last may have fewer) */
    const float *packed; /* [tile][lane][row of it], of the inputs [k0, k0 + depth) */
    int k0, depth;
} Stream;

/* Lanes of `k` inputs of a row. */
static int row_lanes(GemvForm form, int k)
{
    return form == PAIRS ? (k + 1) / 2 : k;
}

/* ---- packing the rows ---- */

static void pack(float *to, const Stream *s)
{
    const Product *p = s->p;
    int64_t tile = (int64_t)row_lanes(s->form, s->depth) * s->height;
    for (int r = 0; r < p->m; r += s->height, to += tile) {
        int rows = p->m - r < s->height ? p->m - r : s->height;
        CPU(tile_pack)(to, rows, p->a + r * p->a_row + s->k0, p->a_row, rows, s->depth,
                       s->form == PAIRS ? PAIR : ONE);
    }
    int whole = (s->depth + BLOCK - 1) / BLOCK * BLOCK; /* the last block is multiplied whole */
    int behind = row_lanes(s->form, whole) - row_lanes(s->form, s->depth);
    if (p->m <= BLOCK_ROWS) memset(to, 0, (size_t)behind * (size_t)p->m * sizeof *to);
}

/* ---- the register tile ---- */

static inline __attribute__((always_inline)) void gemv_rows(Out out, const float *a, const float *b,
                                                            int k, GemvPart part, const int rows,
                                                            const int across, const GemvForm form,
                                                            const int steady)
{
    vf acc[ACROSS][TILE_ROWS][2];
#pragma GCC unroll 4
    for (int j = 0; j < across; j++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                acc[j][r][half] = part.begun
                                      ? v_load(part.sums + (r * across + j) * WIDE + half * VL)
                                      : v_set(0.0f);
    int lanes = form == FLOATS ? k : (k + 1) / 2, wait = part.turns ? part.turn : lanes;
    int near = part.turns > 0 && part.turn == 0;
    for (int i = 0; i < lanes; i++, b += PANEL) {
        if (steady) {
            steady_ask(b);
        } else if (wait-- == 0) {
            far_ask(b);
            wait = part.turns - 1;
        }
        if (!steady && near) near_ask(b);
#pragma GCC unroll 4
        for (int j = 0; j < across; j++) {
            const float *at = b + j * WIDE;
            if (form == FLOATS) {
                tile_step(acc[j], a, 1, v_load(at), v_load(at + VL), rows);
                continue;
            }
            vu b0 = v_load_pairs(at), b1 = v_load_pairs(at + VL);
#if defined(__AVX512BF16__)
            if (form == PAIRS) {
                tile_step_pairs(acc[j], a, b0, b1, rows);
                continue;
            }
#endif
            tile_step(acc[j], a, 1, v_first(b0), v_first(b1), rows);
            if (2 * i + 1 < k) tile_step(acc[j], a + rows, 1, v_second(b0), v_second(b1), rows);
        }
        a += form == WIDEN ? 2 * rows : rows;
    }
    float sums[TILE_ROWS * ACROSS * WIDE];
    Out to =
        part.more ? out_to(part.sums, across * WIDE, 1.0f, 0) : sums_out(out, sums, across * WIDE);
#pragma GCC unroll 4
    for (int j = 0; j < across; j++) sums_store(to.c + j * WIDE, to.ldc, acc[j], to.scale, rows);
    if (to.c == sums) CPU(sums_add)(out, sums, rows, across * WIDE);
}

/* Makes the form a constant: f32's, or the set's other one. */
#if defined(__AMX_BF16__) /* for which amx.c takes the other weights */
#define FORMS(n, across, steady) \
    (void)form;                  \
    gemv_rows(out, a, b, k, part, n, across, FLOATS, steady)
#else
#define FORMS(n, across, steady)                                  \
    if (form == FLOATS)                                           \
        gemv_rows(out, a, b, k, part, n, across, FLOATS, steady); \
    else                                                          \
        gemv_rows(out, a, b, k, part, n, across, OF_BF16, steady)
#endif

/* One tile of `rows` ≤ TILE_ROWS rows: the switch makes the row count a constant. */
static void gemv_tile(Out out, const float *a, const float *b, int k, GemvPart part, int rows,
                      GemvForm form)
{
#define CASE(n) \
    case n: FORMS(n, 1, 0); return
    switch (rows) {
#if defined(__AVX512F__)
        ROWS_TO_13(CASE);
#else
        ROWS_TO_6(CASE);
#endif
    }
#undef CASE
    assert(!"a tile has 1 to TILE_ROWS rows");
}

/* The same for 1 to ACROSS_ROWS rows times a whole panel. */
static void tile_across(Out out, const float *a, const float *b, int k, GemvPart part, int rows,
                        GemvForm form)
{
    if (rows == 1) {
        FORMS(1, ACROSS, 0);
    } else {
        FORMS(ACROSS_ROWS, ACROSS, 0);
    }
}

/* The same for 1 to STEADY_ROWS rows, with steady prefetch of the weight. */
static void tile_steady(Out out, const float *a, const float *b, int k, GemvPart part, int rows,
                        GemvForm form)
{
#define CASE(n) \
    case n: FORMS(n, ACROSS, 1); return
    switch (rows) {
        CASE(1);
        CASE(2);
#if defined(__AVX512F__)
        CASE(3);
        CASE(4);
#endif
    }
#undef CASE
    assert(!"so many rows are asked for steadily");
}

#undef FORMS

/* ---- weights with blocks, widened in registers ---- */

/* Input k of a block (k and k + 1 in PAIRS) times all rows. */
static inline __attribute__((always_inline)) void
block_step(vf (*acc)[2], const float *a, const vf *w, const int rows, const GemvForm form)
{
#if defined(__AVX512BF16__)
    if (form == PAIRS) {
        tile_step_pairs(acc, a, v_join_pairs(w[0], w[2]), v_join_pairs(w[1], w[3]), rows);
        return;
    }
#endif
    (void)form;
    tile_step(acc, a, 1, w[0], w[1], rows);
}

/* A block, for WIDE outputs from x0 on. */
static inline __attribute__((always_inline)) void block_rows(vf (*acc)[2], const float *a, Square s,
                                                             int x0, Values values, const int rows,
                                                             const DType kind, const GemvForm form)
{
    const int each = form == PAIRS ? 2 : 1; /* inputs of a step */
    vf scale[2], offset[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
        scale[j] = square_scale(s, kind, 0, x0 + j * VL) * code_unit(kind);
        offset[j] = square_offset(s, kind, x0 + j * VL);
    }
#pragma GCC unroll 1
    for (int k = 0; k < BLOCK; k += NIBBLES) {
        vu low[2] = {{0}, {0}}, higher[2] = {{0}, {0}};
        for (int j = 0; j < 2 && !has_bytes(kind); j++) {
            int x = x0 + j * VL;
            low[j] = low_word(s, kind, k, x);
            higher[j] = higher_word(s, kind, k, x) >> (k * higher_bits(kind) % 32);
            if (k == scale_span(kind)) scale[j] = square_scale(s, kind, k, x) * code_unit(kind);
        }
#pragma GCC unroll STEPS
        for (int i = 0; i < NIBBLES; i += each, a += rows) {
            vf w[4];
#pragma GCC unroll 4
            for (int j = 0; j < 2 * each; j++) {
                int at = i + j / 2, h = j % 2;
                vf value = has_bytes(kind) ? byte_value(s, kind, k + at, x0 + h * VL)
                                           : code_next(values, &low[h], &higher[h], at, kind);
                w[j] = weight_of(value, scale[h], offset[h], kind);
            }
            block_step(acc, a, w, rows, form);
        }
    }
}

/* `k` inputs from block `first` on, for WIDE outputs from x0 on of a panel. */
static inline __attribute__((always_inline)) void blocks_rows(Out out, const float *a,
                                                              const Stream *s, int panel, int x0,
                                                              int first, int k, const int rows,
                                                              const DType kind)
{
    const GemvForm form = PAIRS_ALONE ? PAIRS : FLOATS;
    const frozen *w = s->p->b;
    vf acc[BLOCK_ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = v_set(0.0f);
    Values values = values_of(w->type, kind);
    for (; k > 0; k -= BLOCK, first++, a += row_lanes(form, BLOCK) * rows) {
        Square at = square_at(w, kind, panel, first);
        if (x0 == 0) block_ask(at.block, blocks_of(kind).bytes, s->steady);
        block_rows(acc, a, at, x0, values, rows, kind, form);
    }
    tile_write(out, acc, rows);
}

/* The switch makes the row count a constant. */
#define ROWS(n)                                               \
    case n:                                                   \
        if (n > BLOCK_ROWS) break;                            \
        blocks_rows(out, a, s, panel, x0, first, k, n, kind); \
        return

static inline __attribute__((always_inline)) void tile_kind(Out out, const float *a,
                                                            const Stream *s, int panel, int x0,
                                                            int first, int k, const DType kind)
{
    switch (s->p->m) {
        ROWS_TO_12(ROWS);
    }
    assert(!"a tile has 1 to BLOCK_ROWS rows");
}

#undef ROWS

/* A function per kind: for a single one the compiler takes twice as long. That, whole loops of
 * eight inputs (STEPS), and a separate end for each block took 68 s instead of 6. */
#if !defined(__AMX_BF16__)
#define KIND(kind)                                                                               \
    static ALONE void tile_##kind(Out out, const float *a, const Stream *s, int panel, int x0,   \
                                  int first, int k)                                              \
    {                                                                                            \
        if (!PAIRS_ALONE || !scales_sums(kind)) tile_kind(out, a, s, panel, x0, first, k, kind); \
    }
EACH_KIND(KIND)
#undef KIND
#endif

/* The same for the weight's kind. */
static void tile_blocks(Out out, const float *a, const Stream *s, int panel, int x0, int first,
                        int k)
{
#if defined(__AMX_BF16__)
    (void)out, (void)a, (void)s, (void)panel, (void)x0, (void)first, (void)k; /* amx.c's */
#else
#define KIND(kind)                                                            \
    case kind:                                                                \
        if (PAIRS_ALONE && scales_sums(kind)) break; /* gemm_quantized.c's */ \
        tile_##kind(out, a, s, panel, x0, first, k);                          \
        return
    switch (block_kind(((const frozen *)s->p->b)->type)) {
        EACH_KIND(KIND);
    default: break;
    }
    assert(!"a type has blocks, and weights that are scaled");
#undef KIND
#endif
}

/* ---- panels and threads ---- */

/* Whether the weight is widened into L1 before tiles read it. */
static int widens(const Stream *s)
{
    DType type = ((const frozen *)s->p->b)->type;
    return dtype_packed(type) || (type == DTYPE_BF16 && s->form == FLOATS);
}

/* A panel's inputs from k0 on, k-major. */
static const float *weight_part(const Stream *s, int n0, int k0, int depth)
{
    const frozen *w = s->p->b;
    if (dtype_packed(w->type)) {
        float *wide = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK, *to = wide;
        for (int k = 0; k < depth; k += BLOCK) {
            block_ask(square_at(w, w->type, n0 / PANEL, (k0 + k) / BLOCK).block,
                      blocks_of(w->type).bytes, 0);
#if defined(__AVX512BF16__)
            CPU(block_widen_pairs)(to, w, n0 / PANEL, (k0 + k) / BLOCK);
            to += BLOCK / 2 * PANEL;
#else
            CPU(block_widen)(to, w, n0 / PANEL, (k0 + k) / BLOCK);
            to += BLOCK * PANEL;
#endif
        }
        return wide;
    }
    int halves = w->type == DTYPE_BF16; /* a lane of the weight holds two inputs */
    size_t lanes = halves ? ((size_t)w->cols + 1) / 2 : (size_t)w->cols;
    const float *from = (const float *)w->data +
                        ((size_t)(n0 / PANEL) * lanes + (size_t)(halves ? k0 / 2 : k0)) * PANEL;
    if (!widens(s)) return from;
    float *wide = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK;
    for (int k = 0; k < depth; k += 2, from += PANEL) {
        far_ask(from);
        near_ask(from);
        for (int x = 0; x < PANEL; x += VL) {
            vu pairs = v_load_pairs(from + x);
            v_store(wide + k * PANEL + x, v_first(pairs));
            v_store(wide + (k + 1) * PANEL + x, v_second(pairs));
        }
    }
    return wide;
}

/* One part of a block (`k` inputs of n ≤ PANEL outputs, at b) times all rows, from their lane
 * `lane` on. */
static void part_tiles(const Stream *s, Out all, int lane, const float *b, int n, int k, int begun,
                       int more)
{
    int64_t tile_lanes = (int64_t)row_lanes(s->form, s->depth) * s->height;
    int across = n == PANEL && s->p->m <= ACROSS_ROWS;
    GemvPart part = {.begun = begun, .more = more};
    part.sums = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK + WIDE_LANES;
    if (!widens(s)) part.turns = across ? 1 : (n + WIDE - 1) / WIDE * s->tiles;
    if (s->steady && !widens(s) && n == PANEL) {
        tile_steady(all, s->packed + (int64_t)lane * s->p->m, b, k, part, s->p->m, s->form);
        return;
    }
    if (across) {
        tile_across(all, s->packed + (int64_t)lane * s->p->m, b, k, part, s->p->m, s->form);
        return;
    }
    for (int j = 0; j < n; j += WIDE)
        for (int t = 0; t < s->tiles; t++) {
            int r0 = t * s->height, rows = s->p->m - r0 < s->height ? s->p->m - r0 : s->height;
            Out out = out_at(all, r0, j);
            const float *at = s->packed + t * tile_lanes + (int64_t)lane * rows;
            if (more || n - j >= WIDE) {
                gemv_tile(out, at, b + j, k, part, rows, s->form);
            } else {
                Edge edge; /* the panel is zero-padded there */
                gemv_tile(edge_open(&edge, out, rows, n - j), at, b + j, k, part, rows, s->form);
                edge_close(&edge, out, rows, n - j);
            }
            part.sums += s->height * WIDE;
            part.turn++;
        }
}

/* `depth` inputs from k0 on of the panel at output n0, times all rows. */
static void panel_block(const Stream *s, int n0, int k0, int depth)
{
    const Product *p = s->p;
    int lane = row_lanes(s->form, k0 - s->k0);
    int n = p->n - n0 < PANEL ? p->n - n0 : PANEL;
    Out whole = product_out(p, k0);
    int packed = dtype_packed(((const frozen *)p->b)->type);
    for (int x = 0; packed && p->m <= BLOCK_ROWS; x += WIDE) {
        if (x >= n) return;
        Out out = out_at(whole, 0, n0 + x);
        int live = n - x < WIDE ? n - x : WIDE;
        Edge edge;
        tile_blocks(live == WIDE ? out : edge_open(&edge, out, p->m, live),
                    s->packed + (int64_t)lane * p->m, s, n0 / PANEL, x, k0 / BLOCK, depth);
        if (live < WIDE) edge_close(&edge, out, p->m, live);
    }
    int size = PART * (s->form == FLOATS ? 1 : 2);
    if (!widens(s) && (s->tiles * ACROSS == 1 || p->m <= ACROSS_ROWS)) size = DEPTH; /* one tile */
    for (int k = 0; k == 0 || k < depth; k += size) {
        int inputs = depth - k < size ? depth - k : size;
        const float *b = weight_part(s, n0, k0 + k, inputs);
        part_tiles(s, out_at(whole, 0, n0), lane + row_lanes(s->form, k), b, n, inputs, k > 0,
                   k + inputs < depth);
    }
}

static void panel_job(void *context, int64_t panel)
{
    const Stream *s = context;
    for (int k = 0; k == 0 || k < s->depth; k += DEPTH)
        panel_block(s, (int)panel * PANEL, s->k0 + k, s->depth - k < DEPTH ? s->depth - k : DEPTH);
}

void CPU(product_stream)(Device *dev, const Product *p)
{
    assert(p->order == PANELS && p->a_col == 1 && p->m <= STREAM_ROWS);
    float *packed = cpu_scratch(dev); /* the caller's: workers only read it */
    DType type = ((const frozen *)p->b)->type;
    Stream s = {.p = p, .dev = dev, .packed = packed};
    s.form = type == DTYPE_BF16 && p->m <= WIDEN_ROWS ? WIDEN : FLOATS;
    if (PAIRS_ALONE && type != DTYPE_F32) s.form = PAIRS;
    s.steady = processor_follows() &&
               (dtype_packed(type) || p->m <= (s.form == WIDEN ? ACROSS_ROWS : STEADY_ROWS));
    s.tiles = (p->m + TILE_ROWS - 1) / TILE_ROWS;
    s.height = (p->m + s.tiles - 1) / s.tiles;
    double read = CPU_BYTE_NS * p->n * p->k * (s.form == FLOATS ? 4 : 2);
    double multiplied = CPU_PRODUCT_NS * p->m * p->n * p->k;
    int most = PACKED_LANES / (s.tiles * s.height) * (s.form == PAIRS ? 2 : 1) / DEPTH * DEPTH;
    for (s.k0 = 0; s.k0 == 0 || s.k0 < p->k; s.k0 += s.depth) {
        s.depth = p->k - s.k0 < most ? p->k - s.k0 : most;
        pack(packed, &s);
        cpu_run_of(dev, read > multiplied ? read : multiplied, (p->n + PANEL - 1) / PANEL,
                   panel_job, &s);
        if (!s.depth) return;
    }
}
