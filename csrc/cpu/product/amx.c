/* cpu/product/amx.c - products with a frozen weight on Intel's matrix unit (amx.h), for any number
 * of rows.
 *
 *   forward    c (m,n) = scale·a (m,k)·wᵀ [+ bias] [+ plus]     w (n,k) in PANELS
 *   backward   c (m,n) = scale·a (m,k)·w [+ plus]               w (k,n) in PANELS_T
 *
 * A bf16 panel in memory already consists of the unit's tiles of b: 16 pairs of inputs by 16
 * outputs, two side by side. So forward packs the rows of a as tiles of a, once for all panels, and
 * reads the weight in place. Backward sums over a panel's lanes, so the weight becomes the tiles of
 * a: a shift and a blend per 32 numbers gather one column, as pairs of inputs k and k + 16. The
 * rows of a are then the tiles of b, and the result is transposed when it is written.
 *
 * A loop computes four tiles of sums, two tiles of a by two of b, over SPAN tiles of inputs. The
 * weight's tiles stay in L1 while strips of rows are read from L2. Between spans the sums are in
 * L2. Each sum is one chain over CHUNK or BACK_CHUNK inputs (amx.h has its order). Then it is
 * scaled, and the bias or the previous value is added. The order is the same for any number of
 * rows, so a row's bits do not depend on other rows.
 *
 * Weights with blocks are first widened to pairs in L1. If bf16 holds their codes' values exactly,
 * each block has its own sum from zero, which is scaled in f32 (gemm_quantized.c).
 *
 * Roofline: up to some 64 rows the weight's memory; above it 1,024 multiply-adds a cycle, of which
 * reading a's and b's tiles from L2 leaves about half. */
#include "amx.h"

#include "../weights/packed.h"
#include "gemm_quantized.h"
#include "gemm_tiled.h"
#include "prefetch.h"

#if defined(__AMX_BF16__)

#include <assert.h>

enum {
    ROWS = 256,        /* packed at once */
    STRIP = 2 * TILE,  /* rows, or columns, of a loop's tiles */
    CHUNK = 2048,      /* inputs of one sum */
    BACK_CHUNK = 1024, /* the same backward: 6 % faster than 2,048, whose columns evict a from L2 */
    SPAN = 8,          /* tiles of inputs in one loop */
    GROUP = 4,         /* panels whose sums are kept at once */
    STEPS = CHUNK / TILE_DEPTH,        /* tiles of a chunk */
    PACKED_LANES = ROWS * CHUNK / 2,   /* of packed rows: 1 MB */
    FOUND_LANES = SPAN * TILE * PANEL, /* of a span of a widened panel */
    SUM_LANES = GROUP * PANEL * ROWS,
};

#define NS_PACK 0.1 /* per packed number (cpu.h) */

/* A block of rows times a weight, over one or more chunks of the sum. */
typedef struct Tiled {
    const Product *p;
    const Device *dev;
    const frozen *w;
    float *packed;     /* [span][strip][step of it]: two tiles of a or b; in caller's scratch */
    int row, rows;     /* of the block */
    int k0, depth;     /* the packed inputs */
    int steps, strips; /* tiles of the inputs; pairs of tiles of the rows */
    int height;        /* rows of a tile: fewer if the block has fewer */
    int panels;        /* of one job */
    int scaled;        /* each block's sum is scaled */
} Tiled;

/* A thread's scratch, after the caller's packed rows. */
typedef struct AmxScratch {
    _Alignas(64) float packed[PACKED_LANES];
    _Alignas(64) float found[FOUND_LANES], scales[SPAN * PANEL];
    _Alignas(64) float columns[2 * BACK_CHUNK / TILE_DEPTH * TILE_LANES];
    _Alignas(64) float sums[SUM_LANES];
} AmxScratch;

_Static_assert(sizeof(AmxScratch) <= POOL_SCRATCH, "packed rows, a span of a weight, and sums");
_Static_assert((int)BLOCK == (int)TILE_DEPTH && 2 * TILE == (int)PANEL && (int)TILE == (int)VL,
               "a block of a panel is two tiles");

/* ---- the weight ---- */

/* Cache lines of a block, or of the same number of tiles in bf16. */
static int block_lines(const frozen *w)
{
    return dtype_packed(w->type) ? (int)(blocks_of(w->type).bytes / 64) : TILE * PANEL * 4 / 64;
}

/* Block number `number` of a panel, or those tiles. */
static const void *block_at(const frozen *w, int panel, int number)
{
    if (dtype_packed(w->type)) return square_at(w, w->type, panel, number).block;
    size_t lanes = ((size_t)w->cols + 1) / 2;
    return (const float *)w->data + ((size_t)panel * lanes + (size_t)number * TILE) * PANEL;
}

/* How many lines of a block each strip prefetches: an equal share. */
static int lines_of_strip(const Tiled *s)
{
    return (block_lines(s->w) + s->strips - 1) / s->strips;
}

/* ---- packing ---- */

/* A strip's tiles of a step. */
static inline float *packed_at(const Tiled *s, int strip, int step)
{
    return s->packed + ((step / SPAN * s->strips + strip) * SPAN + step % SPAN) * 2 * TILE_LANES;
}

/* One tile's rows, as tiles of a. */
static void pack_rows(void *context, int64_t tile)
{
    const Tiled *s = context;
    const Product *p = s->p;
    int first = (int)tile * TILE, live = s->rows - first;
    for (int i = 0; i < s->steps; i++) {
        const float *at = p->a + (s->row + first) * p->a_row + s->k0 + i * TILE_DEPTH;
        float *to = packed_at(s, (int)tile / 2, i) + tile % 2 * TILE_LANES;
        for (int r = 0; r < s->height; r++, at += p->a_row, to += TILE) {
            int n = r < live ? s->depth - i * TILE_DEPTH : 0;
            vf low = v_load_masked(at, n), high = v_load_masked(at + VL, n - VL);
            vu pairs = v_round_pairs(low, high);
            v_store(to, (vf)(s->scaled ? v_pairs_apart(pairs) : pairs));
        }
    }
}

/* A strip's rows, as tiles of b. */
static void pack_columns(void *context, int64_t strip)
{
    const Tiled *s = context;
    const Product *p = s->p;
    int first = (int)strip * STRIP, rows = s->rows - first < STRIP ? s->rows - first : STRIP;
    const float *from = p->a + (s->row + first) * p->a_row + s->k0;
    for (int step = 0; step < s->steps; step += SPAN) {
        float *to = packed_at(s, (int)strip, step);
        int depth = s->depth - step * TILE_DEPTH;
        if (depth > SPAN * TILE_DEPTH) depth = SPAN * TILE_DEPTH;
        if (rows < STRIP) memset(to, 0, SPAN * TILE * PANEL * sizeof *to);
        CPU(tile_pack)(to, PANEL, from + step * TILE_DEPTH, p->a_row, rows, depth, HALVES);
    }
}

/* ---- the unit ---- */

/* What a loop prefetches: `lines` per step, or its own input ahead. */
typedef struct Ask {
    const char *at;
    int lines, streams;
    int64_t step; /* from one step's lines to the next's */
} Ask;

static inline __attribute__((always_inline)) void ask_step(Ask *ask, const float *b)
{
    for (int line = 0; ask->streams && line < TILE * PANEL; line += PANEL) {
        far_ask(b + line);
        near_ask(b + line);
    }
    for (int i = 0; i < ask->lines; i++) __builtin_prefetch(ask->at + 64 * i, 0, 2);
    ask->at += ask->step;
}

/* The sums of one or two tiles of a and two of b over `steps` steps: [a's][b's][16][16]. */
static inline __attribute__((always_inline)) void tiles_sum(float *sums, int begun, const float *a,
                                                            const float *b, int steps, Ask ask,
                                                            const int both)
{
    enum { ROW = TILE * 4, B_ROW = PANEL * 4 };
    if (begun) {
        TILE_LOAD(0, sums, ROW);
        TILE_LOAD(1, sums + TILE_LANES, ROW);
        if (both) TILE_LOAD(2, sums + 2 * TILE_LANES, ROW);
        if (both) TILE_LOAD(3, sums + 3 * TILE_LANES, ROW);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (both) TILE_ZERO(2);
        if (both) TILE_ZERO(3);
    }
    for (int i = 0; i < steps; i++, a += 2 * TILE_LANES, b += TILE * PANEL) {
        ask_step(&ask, b);
        TILE_LOAD(4, a, ROW);
        TILE_LOAD(6, b, B_ROW);
        TILE_DOT(0, 4, 6);
        TILE_LOAD(7, b + TILE, B_ROW);
        TILE_DOT(1, 4, 7);
        if (!both) continue;
        TILE_LOAD(5, a + TILE_LANES, ROW);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, sums, ROW);
    TILE_STORE(1, sums + TILE_LANES, ROW);
    if (both) TILE_STORE(2, sums + 2 * TILE_LANES, ROW);
    if (both) TILE_STORE(3, sums + 3 * TILE_LANES, ROW);
}

/* One step's own sum, in tile register c, then stored to L1. */
#define STEP_SUM(c, a_tile, b_tile, step)                                        \
    TILE_ZERO(c);                                                                \
    TILE_LOAD(a_tile, a + 2 * (i + (step)) * TILE_LANES, TILE * 4);              \
    TILE_LOAD(b_tile, b + (i + (step)) * TILE * PANEL + half * TILE, PANEL * 4); \
    TILE_DOT(c, a_tile, b_tile);                                                 \
    TILE_STORE(c, waiting[step], TILE * 4)

/* The sums of one tile of a over `steps` steps, each with its own scales (PANEL). Four steps are in
 * flight in the unit, whose latency is 52 cycles. */
static inline __attribute__((always_inline)) void blocks_sum(float *sums, int begun, const float *a,
                                                             const float *b, const float *scales,
                                                             int steps, const int rows)
{
    for (int half = 0; half < 2; half++, sums += TILE_LANES) {
        _Alignas(64) float waiting[4][TILE_LANES];
        vf total[TILE];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) total[r] = begun ? v_load(sums + r * TILE) : v_set(0.0f);
        for (int i = 0, together; i < steps; i += together) {
            together = steps - i < 4 ? 1 : 4;
            STEP_SUM(0, 4, 6, 0);
            if (together == 4) {
                STEP_SUM(1, 5, 7, 1);
                STEP_SUM(2, 4, 6, 2);
                STEP_SUM(3, 5, 7, 3);
            }
            for (int j = 0; j < together; j++) {
                vf scale = v_load(scales + (i + j) * PANEL + half * VL);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++)
                    total[r] = v_fma(v_load(waiting[j] + r * TILE), scale, total[r]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) v_store(sums + r * TILE, total[r]);
    }
}

#undef STEP_SUM

/* ---- forward ---- */

/* Prefetches the lines of c that will be written. */
static inline void write_ask(Out out, int rows, int n)
{
    for (int r = 0; r < rows; r++) {
        __builtin_prefetch(out.c + r * out.ldc, 1, 2);
        __builtin_prefetch(out.c + r * out.ldc + n - 1, 1, 2);
    }
}

/* c = scale·sums [+ bias] [+ add] of `rows` rows and n ≤ PANEL columns. */
static void rows_write(Out out, const float *sums, int rows, int n)
{
    for (int r = 0; r < rows; r++)
        for (int x = 0; x < n; x += VL) {
            const float *at = sums + (r / TILE * 2 + x / VL) * TILE_LANES + r % TILE * TILE;
            sums_write(out_at(out, r, x), v_load(at), n - x);
        }
}

/* The tiles of b of `count` steps of a panel, from number `step` of the packed ones on; *count
 * shrinks to those that can be read in one place. */
static const float *span_bring(const Tiled *s, int panel, int step, int *count)
{
    const frozen *w = s->w;
    AmxScratch *own = cpu_scratch(s->dev);
    int first = s->k0 / BLOCK + step;
    if (!*count) return own->found; /* a weight without inputs */
    if (!dtype_packed(w->type)) {
        const float *from = block_at(w, panel, first);
        int whole = s->depth / TILE_DEPTH - step, rest = w->cols - first * TILE_DEPTH;
        if (whole > 0) {
            if (whole < *count) *count = whole;
            return from;
        }
        memset(own->found, 0, TILE * PANEL * sizeof *own->found); /* the last tile is partial */
        memcpy(own->found, from, (size_t)((rest + 1) / 2) * PANEL * sizeof *own->found);
        *count = 1;
        return own->found;
    }
    DType kind = block_kind(w->type);
    for (int i = 0; i < *count; i++) {
        Square at = square_at(w, kind, panel, first + i);
        for (size_t line = 0; s->strips == 1 && line < blocks_of(kind).bytes; line += 128) {
            far_ask(at.block + line);
            near_ask(at.block + line);
        }
        if (s->scaled)
            CPU(codes_find)(own->found + i * TILE * PANEL, w, panel, first + i, 1);
        else
            CPU(block_widen_pairs)(own->found + i * TILE * PANEL, w, panel, first + i);
        for (int x = 0; s->scaled && x < PANEL; x += VL)
            v_store(own->scales + i * PANEL + x, square_scale(at, kind, 0, x));
    }
    return own->found;
}

/* Prefetches the data read after `count` steps of a panel from `step` on, in the same panel or the
 * next group's first. Each strip prefetches a share. */
static Ask next_ask(const Tiled *s, int panel, int step, int count)
{
    int lines = lines_of_strip(s), next = s->k0 / BLOCK + step + count;
    if (step + count >= s->steps) {
        panel += s->panels;
        next = s->k0 / BLOCK;
    }
    if ((int64_t)panel * PANEL >= s->w->rows) return (Ask){0};
    return (Ask){block_at(s->w, panel, next), lines, 0, 64 * lines};
}

/* The switch makes the row count a constant, the next power of two. */
static void blocks_tile(const Tiled *s, float *sums, int begun, const float *a, const float *b,
                        const float *scales, int steps)
{
#define CASE(n)                                          \
    if (s->height <= n) {                                \
        blocks_sum(sums, begun, a, b, scales, steps, n); \
        return;                                          \
    }
    CASE(1);
    CASE(2);
    CASE(4);
    CASE(8);
    CASE(16);
#undef CASE
}

/* `count` steps of a panel times one strip of rows. */
static void strip_run(const Tiled *s, float *sums, int strip, int step, int count, const float *b,
                      Ask ask)
{
    int tiles = (s->rows + TILE - 1) / TILE - 2 * strip, begun = step % STEPS > 0;
    const float *a = packed_at(s, strip, step);
    if (s->scaled) {
        const float *scales = ((AmxScratch *)cpu_scratch(s->dev))->scales;
        for (int i = 0; i < count; i++) ask_step(&ask, b);
        for (int t = 0; t < tiles && t < 2; t++)
            blocks_tile(s, sums + 2 * t * TILE_LANES, begun, a + t * TILE_LANES, b, scales, count);
        return;
    }
    if (tiles > 1)
        tiles_sum(sums, begun, a, b, count, ask, 1);
    else
        tiles_sum(sums, begun, a, b, count, ask, 0);
}

/* The same for all rows, up to `count` steps of panel n; returns how many. Writes c at the end of a
 * chunk. */
static int span_run(const Tiled *s, float *sums, int n, int step, int count)
{
    const Product *p = s->p;
    int few = s->strips == 1, width = p->n - n * PANEL < PANEL ? p->n - n * PANEL : PANEL;
    const float *b = span_bring(s, n, step, &count);
    int ends = step + count == s->steps || (step + count) % STEPS == 0;
    Ask ask = {.streams = few && !dtype_packed(s->w->type)};
    if (!few) ask = next_ask(s, n, step, count);
    Out all = out_at(product_out(p, s->k0 + step / STEPS * CHUNK), s->row, n * PANEL);
    for (int i = 0; i < s->strips; i++, ask.at += count * ask.step, sums += STRIP * PANEL) {
        int rows = s->rows - i * STRIP < STRIP ? s->rows - i * STRIP : STRIP;
        Out out = out_at(all, i * STRIP, 0);
        if (ends) write_ask(out, rows, width);
        strip_run(s, sums, i, step, count, b, ask);
        if (ends) rows_write(out, sums, rows, width);
    }
    return count;
}

/* Some panels, in groups, span by span; with one strip of rows, each panel in memory order. */
static void forward_job(void *context, int64_t job)
{
    const Tiled *s = context;
    float *sums = ((AmxScratch *)cpu_scratch(s->dev))->sums;
    int first = (int)job * s->panels, last = (s->p->n + PANEL - 1) / PANEL;
    if (last > first + s->panels) last = first + s->panels;
    int few = s->strips == 1, group = few ? 1 : GROUP;
    int most = few && !dtype_packed(s->w->type) ? STEPS : SPAN;
    tiles_begin(s->height);
    for (int g = first; g < last; g += group)
        for (int step = 0, done; step == 0 || step < s->steps; step += done ? done : 1) {
            int count = s->steps - step < most ? s->steps - step : most;
            done = count;
            for (int n = g; n < last && n < g + group; n++)
                done = span_run(s, sums + (n - g) * PANEL * ROWS, n, step, count);
        }
    tiles_end();
}

/* ---- backward ---- */

/* From a pair of columns in 32 rows (`low`: the first 16, `high`: the others) one column, as pairs
 * of rows k and k + 16. */
static inline vf one_column(vu low, vu high, int second)
{
    const __mmask32 uppers = 0xaaaaaaaa;
    __m512i first = (__m512i)(second ? low >> 16 : low);
    __m512i other = (__m512i)(second ? high : high << 16);
    return (vf)_mm512_mask_blend_epi16(uppers, first, other);
}

/* Columns [n0, n0 + PANEL) of the weight as tiles of a: [step][tile of columns][16][16]. */
static void columns_bring(const Tiled *s, float *to, int n0)
{
    const frozen *w = s->w;
    int live = (w->cols - n0 + 1) / 2; /* pairs of columns */
    for (int i = 0; i < s->steps; i++, to += 2 * TILE_LANES) {
        int panel = s->k0 / PANEL + i;
        _Alignas(64) float block[TILE * PANEL];
        const float *from = block;
        if (dtype_packed(w->type))
            CPU(block_widen_pairs)(block, w, panel, n0 / BLOCK);
        else
            from = block_at(w, panel, n0 / BLOCK);
        for (int j = 0; j < TILE; j++, from += PANEL) {
            vu low = {0}, high = {0};
            if (j < live) {
                low = v_load_pairs(from);
                high = v_load_pairs(from + VL);
            }
            float *at = to + j * 2 * TILE;
            v_store(at, one_column(low, high, 0));
            v_store(at + TILE, one_column(low, high, 1));
        }
    }
}

/* Prefetches columns from n0 on of each step's panels, a share per strip. */
static Ask columns_ask(const Tiled *s, int step, int n0)
{
    if (n0 >= s->w->cols) return (Ask){0};
    int panel = s->k0 / PANEL + step;
    const char *at = block_at(s->w, panel, n0 / BLOCK);
    const char *after = block_at(s->w, panel + 1, n0 / BLOCK);
    return (Ask){at, lines_of_strip(s), 0, after - at};
}

/* c = scale·sums [+ add] of `rows` rows and n ≤ PANEL columns; sums has columns by rows. */
static void columns_write(Out out, const float *sums, int rows, int n)
{
    for (int x = 0; x < n; x += VL)
        for (int r0 = 0; r0 < rows; r0 += TILE) {
            vf v[VL];
#pragma GCC unroll 16
            for (int i = 0; i < VL; i++)
                v[i] = v_load(sums + (x / VL * 2 + r0 / TILE) * TILE_LANES + i * TILE);
            square_turn(v);
            for (int i = 0; i < VL && r0 + i < rows; i++)
                sums_write(out_at(out, r0 + i, x), v[i], n - x);
        }
}

static void backward_job(void *context, int64_t job)
{
    const Tiled *s = context;
    const Product *p = s->p;
    AmxScratch *own = cpu_scratch(s->dev);
    int n0 = (int)job * PANEL, width = p->n - n0 < PANEL ? p->n - n0 : PANEL;
    Out all = out_at(product_out(p, s->k0), s->row, n0);
    tiles_begin(TILE);
    columns_bring(s, own->columns, n0);
    for (int step = 0; step < s->steps; step += SPAN) {
        int count = s->steps - step < SPAN ? s->steps - step : SPAN;
        Ask ask = columns_ask(s, step, n0 + PANEL);
        for (int i = 0; i < s->strips; i++, ask.at += 64 * ask.lines) {
            int rows = s->rows - i * STRIP < STRIP ? s->rows - i * STRIP : STRIP;
            int last_span = step + count >= s->steps;
            Out out = out_at(all, i * STRIP, 0);
            float *sums = own->sums + i * PANEL * STRIP;
            if (last_span) write_ask(out, rows, width);
            tiles_sum(sums, step > 0, own->columns + step * 2 * TILE_LANES, packed_at(s, i, step),
                      count, ask, 1);
            if (last_span) columns_write(out, sums, rows, width);
        }
    }
    tiles_end();
}

/* ---- blocks of rows, chunks and threads ---- */

/* Sets the packed inputs: a chunk, or in forward more if few rows leave room, so that a panel is
 * read in one stretch. */
static void chunks_run(Device *dev, Tiled *s)
{
    const Product *p = s->p;
    int back = p->order == PANELS_T, unit = back ? STRIP : TILE;
    int panels = (p->n + PANEL - 1) / PANEL;
    double multiplied = CPU_PRODUCT_NS / 8 * s->rows * p->n * s->depth;
    double read = CPU_BYTE_NS * 2 * p->n * s->depth;
    s->steps = (s->depth + TILE_DEPTH - 1) / TILE_DEPTH;
    s->height = s->rows < TILE && !back ? s->rows : TILE;
    s->panels = cpu_size_of_piece(dev, panels, GROUP, 1);
    cpu_run_of(dev, NS_PACK * s->rows * s->depth, (s->rows + unit - 1) / unit,
               back ? pack_columns : pack_rows, s);
    cpu_run_of(dev, multiplied > read ? multiplied : read,
               back ? panels : (panels + s->panels - 1) / s->panels,
               back ? backward_job : forward_job, s);
}

void CPU(product_amx)(Device *dev, const Product *p)
{
    assert(p->order >= PANELS && p->a_col == 1);
    const frozen *w = p->b;
    Tiled s = {.p = p, .dev = dev, .w = w, .packed = ((AmxScratch *)cpu_scratch(dev))->packed};
    s.scaled = p->order == PANELS && scales_sums(w->type);
    int blocks = (p->m + ROWS - 1) / ROWS;
    int rows = ((p->m + blocks - 1) / blocks + STRIP - 1) / STRIP * STRIP;
    for (s.row = 0; s.row < p->m; s.row += rows) {
        s.rows = p->m - s.row < rows ? p->m - s.row : rows;
        s.strips = (s.rows + STRIP - 1) / STRIP;
        int most = p->order == PANELS ? ROWS / STRIP / s.strips * CHUNK : BACK_CHUNK;
        for (s.k0 = 0; s.k0 == 0 || s.k0 < p->k; s.k0 += most) {
            s.depth = p->k - s.k0 < most ? p->k - s.k0 : most;
            chunks_run(dev, &s);
        }
    }
}

#endif
