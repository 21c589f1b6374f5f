/* cpu/product/gemm_quantized.c - forward products with a weight whose codes' values fit exactly
 * into 16 bits, in pairs: int8, int4, q4_0 and mxfp4; with integers q4_1, q4_k, q5_k and q6_k too.
 * (With a matrix unit amx.c multiplies them.)
 *
 *   c[r,n] = scale·Σ_blocks (s(n, block)·Σ_k level(code[n,k])·a[r,k] + o(n, block)·Σ_k a[r,k])
 *            [+ bias] [+ plus]
 *
 * A block's sum is over pairs, of bf16 or of integers (gemm_quantized.h), and is scaled in f32. So
 * only a is rounded, and no weight is scaled before its product. A pair has inputs k and k + 4 of
 * eight (APART in gemm_tiled.h): with 4 bits the lowest bits of a 16-bit lane are the index of a
 * shuffle, and four lookups read a word of eight codes. With bf16 a byte's magnitude is looked up
 * in 128 numbers, whose halves are in two registers each. The rows of one tile look codes up as
 * they multiply; more rows share numbers looked up once, in L1. The sums are the same: blocks in
 * order within DEPTH inputs, each from zero.
 *
 * All rows prefetch ASKED bytes ahead while they multiply: on a Zen 4 one row of 4 bits reads 26.8
 * GB/s, 25.8 with half the distance and 24.2 without prefetch; 10 rows of 8 bits with AVX2 multiply
 * at 105 GFLOP/s, and without at 74. If the hardware prefetcher does not follow a stream, one or
 * two rows prefetch its pages in turns instead (prefetch.h).
 *
 * Roofline: 4.5 or 8.5 bits a weight, 2·m flops each. In bf16, for 128 weights of 4 bits 2 loads, 6
 * shifts and 8 shuffles, of 8 bits 4 loads and 16 others, then 4·m products: bound by memory at one
 * or two rows, by products of pairs from some six on. With integers and AVX2, 17 instructions for
 * 64 weights of 4 bits and one row, and 8 per further row: compute bound for all rows. With VNNI a
 * product and its sum are one instruction: on a Zen 4 8 rows of 4 bits reach 183 GFLOP/s for
 * 136. */
#include "gemm_quantized.h"

#include <assert.h>

#include "code_pairs.h"
#include "prefetch.h"

#if defined(__AVX2__)

/* TILE_ROWS, BYTE_ROWS: the most rows of a tile, and of one that looks up bytes. ONCE_ROWS, LOOKED:
 * the most rows that look up words for a whole panel before the next eight inputs, and the vectors
 * looked up together. FOUND_SPAN, FOUND_LOOP: the vectors that a tile sums from earlier lookups,
 * and the lanes of its loop. */
#if defined(__AVX512VNNI__)
enum { TILE_ROWS = 12, BYTE_ROWS = 8, ONCE_ROWS = 8, LOOKED = 2, FOUND_SPAN = 1, FOUND_LOOP = 2 };
#elif defined(__AVX512F__)
enum { TILE_ROWS = 12, BYTE_ROWS = 6, ONCE_ROWS = 6, LOOKED = 2, FOUND_SPAN = 1, FOUND_LOOP = 2 };
#else
enum { TILE_ROWS = 5, BYTE_ROWS = 2, ONCE_ROWS = 2, LOOKED = 1, FOUND_SPAN = 2, FOUND_LOOP = 4 };
#endif

enum {
    ACROSS = PANEL / VL, /* vectors of a panel */
    SORTED_ROWS = 4,     /* the most that look up words of blocks not PLAIN */
    GROUP_ROWS = 96 / TILE_ROWS * TILE_ROWS,
    TURN_ROWS = 2,                   /* the most that prefetch pages in turns */
    ASKED = 13 << 10,                /* prefetch distance in bytes: DEPTH inputs of 8 bits */
    PACKED_LANES = 64 << 10,         /* of packed rows: a quarter of L2 */
    FOUND_LANES = DEPTH / 2 * PANEL, /* of DEPTH inputs */
    SUM_LANES = GROUP_ROWS * PANEL,  /* of a group's partial results */
    BLOCK_LANES = HEADS + BLOCK / 2, /* of a row's block */
};

_Static_assert((PACKED_LANES + PACKED_SLACK + FOUND_LANES + SUM_LANES) * sizeof(float) <=
                   POOL_SCRATCH,
               "packed rows, what is looked up of a panel, and its sums");
_Static_assert(PACKED_LANES / GROUP_ROWS / BLOCK_LANES * BLOCK >= DEPTH,
               "a block of all rows is packed");

/* The source of a tile's pairs: words of 4-bit codes, 8-bit codes, or L1. */
typedef enum CodeForm { WORDS, BYTES, FOUND } CodeForm;

/* A block's scales: one; one and an offset; one per half. */
typedef enum Sort { PLAIN, SHIFTED, SPLIT } Sort;

static inline Sort sort_of(DType kind)
{
    return has_offset(kind) ? SHIFTED : scale_span(kind) < BLOCK ? SPLIT : PLAIN;
}

/* The rows of a group, and their inputs [k0, k0 + depth). */
typedef struct Scaled {
    const Product *p;
    const Device *dev;
    const float *packed;   /* [tile][block][head or lane][row of the tile] */
    int row, rows, height; /* of the group; of its tiles (the last may have fewer) */
    int k0, depth;
    CodeForm form;
    int follows; /* the processor prefetches the weight itself */
} Scaled;

/* ---- codes looked up in advance ---- */

static inline __attribute__((always_inline)) void
blocks_find(float *to, const frozen *w, int panel, int first, int count, const DType kind)
{
    Known known = known_of(w->type, kind);
    const int bits = higher_bits(kind);
    for (int b = 0; b < count; b++) {
        Square s = square_at(w, kind, panel, first + b);
        for (int k = 0; k < BLOCK; k += NIBBLES, to += NIBBLES / 2 * PANEL) {
            for (int i = 0; i < NIBBLES / 2 && has_bytes(kind); i++) {
                vu pairs[ACROSS];
                pairs_of_bytes(pairs, s.block + blocks_of(kind).codes + (k + i) * PANEL, &known);
                for (int v = 0; v < ACROSS; v++) v_store(to + i * PANEL + v * VL, (vf)pairs[v]);
            }
            for (int v = 0; v < ACROSS && !has_bytes(kind); v++) {
                vu higher = higher_word(s, kind, k, v * VL) >> (k * bits % 32);
                Found found = codes_of_word(low_word(s, kind, k, v * VL), higher, bits, &known);
#pragma GCC unroll 4
                for (int i = 0; i < NIBBLES / 2; i++)
                    v_store(to + i * PANEL + v * VL, (vf)pairs_of_word(found, i, bits, &known));
            }
        }
    }
}

/* The kind becomes a constant. */
void CPU(codes_find)(float *to, const frozen *w, int panel, int first, int count)
{
#define KIND(kind)                                     \
    case kind:                                         \
        if (!scales_sums(kind)) break;                 \
        blocks_find(to, w, panel, first, count, kind); \
        return
    switch (block_kind(w->type)) {
        EACH_KIND(KIND);
    default: break;
    }
#undef KIND
    assert(!"a type whose sums are scaled");
}

#if !defined(__AMX_BF16__) /* for which amx.c multiplies */

/* ---- the register tile ---- */

/* A tile's weights: `depth` inputs from block `first` of a panel on, for outputs from x on. */
typedef struct Codes {
    const frozen *w;
    int panel, first, depth, x;
    const float *found; /* the numbers looked up before, PANEL lanes a row */
    size_t ahead;       /* prefetch distance in bytes; 0: none */
    int turns;          /* prefetches pages in turns instead */
} Codes;

/* Vectors of a panel that a tile sums, and that it sums at once. */
static inline int span_of(CodeForm form)
{
    return form == FOUND ? FOUND_SPAN : ACROSS;
}

static inline int at_once(CodeForm form, int rows)
{
    return form == WORDS && rows > ONCE_ROWS ? 1 : span_of(form);
}

/* One lane of a block: all rows' x with the pairs of `vectors` vectors from number v0 on. */
static inline __attribute__((always_inline)) void lane_add(Sum (*sum)[ACROSS], const float *x,
                                                           const vu *pairs, const int v0,
                                                           const int rows, const int vectors)
{
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        vu at = v_set_pair(x + r);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v0 + v] = sum_add(sum[r][v0 + v], at, pairs[v]);
    }
}

/* `lanes` of a block, a multiple of four, times numbers looked up before. */
static inline __attribute__((always_inline)) void found_add(Sum (*sum)[ACROSS], const float *x,
                                                            const float *found, int lanes,
                                                            const int rows, const int vectors)
{
#pragma GCC unroll FOUND_LOOP
    for (int lane = 0; lane < lanes; lane++, x += rows, found += PANEL) {
        vu pairs[ACROSS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            pairs[v] = v_load_pairs(found + v * VL);
            __asm__("" : "+v"(pairs[v])); /* in a register: not loaded again for each row */
        }
        lane_add(sum, x, pairs, 0, rows, vectors);
    }
}

/* The same with a block's codes, from input k0 on, for outputs from x0 on. */
static inline __attribute__((always_inline)) void
codes_add(Sum (*sum)[ACROSS], const float *x, Square s, const Known *known, int k0, int x0,
          int lanes, const int rows, const int vectors, const CodeForm form, const DType kind)
{
    const unsigned char *codes = s.block + blocks_of(kind).codes;
    const int bits = higher_bits(kind), some = vectors < LOOKED ? vectors : LOOKED;
    vu pairs[ACROSS];
#pragma GCC unroll 1
    for (int k = k0; k < k0 + 2 * lanes; k += NIBBLES, x += NIBBLES / 2 * rows) {
        if (form == BYTES) {
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++) {
                pairs_of_bytes(pairs, codes + (k + i) * PANEL, known);
                lane_add(sum, x + i * rows, pairs, 0, rows, vectors);
            }
            continue;
        }
#pragma GCC unroll 4
        for (int v0 = 0; v0 < vectors; v0 += some) {
            Found found[LOOKED];
            for (int v = 0; v < some; v++) {
                int at = x0 + (v0 + v) * VL;
                vu higher = higher_word(s, kind, k, at) >> (k * bits % 32);
                found[v] = codes_of_word(word_at(codes, k, at), higher, bits, known);
            }
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++) {
                for (int v = 0; v < some; v++) pairs[v] = pairs_of_word(found[v], i, bits, known);
                lane_add(sum, x + i * rows, pairs, v0, rows, some);
            }
        }
    }
}

/* DEPTH inputs or fewer. One kind stands for all PLAIN ones, which differ only in their scales'
 * format. */
static inline __attribute__((always_inline)) void scaled_rows(vf (*total)[ACROSS], const float *a,
                                                              const Codes *c, const int rows,
                                                              const CodeForm form, const Sort sort,
                                                              const DType kind)
{
    const int span = span_of(form), vectors = at_once(form, rows), parts = sort == SPLIT ? 2 : 1;
    const Blocks blocks = blocks_of(kind);
    DType exact = block_kind(c->w->type);
    Known known = known_of(c->w->type, exact);
    const float *found = c->found, unit = known_unit(exact);
    int wide = exact == DTYPE_MXFP4, count = (c->depth + BLOCK - 1) / BLOCK;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < span; v++) total[r][v] = v_set(0.0f);
    Square s = square_at(c->w, kind, c->panel, c->first);
    for (int b = 0; b < count; b++, a += BLOCK_LANES * rows, s.block += blocks.bytes) {
        int lanes = block_lanes(b + 1 < count ? BLOCK : c->depth - b * BLOCK) / parts;
        if (has_groups(kind)) s = square_at(c->w, kind, c->panel, c->first + b);
        for (size_t line = 0; line < c->ahead && line < blocks.bytes; line += 64)
            __builtin_prefetch(s.block + c->ahead + line, 0, 2);
        if (c->turns) block_ask(s.block, blocks.bytes, 0);
#pragma GCC unroll 1
        for (int v0 = 0; v0 < span * parts; v0 += vectors) {
            int part = v0 / span, x = c->x + v0 % span * VL, lane = part * lanes;
            const float *at = a + (HEADS + lane) * rows;
            Sum sum[TILE_ROWS][ACROSS];
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++)
                    sum[r][v] = sum_begin(a + (sort == SPLIT ? HALF + part : BEGIN) * rows + r);
            if (form == FOUND)
                found_add(sum, at, found + (b * (BLOCK / 2) + lane) * PANEL + x, lanes, rows,
                          vectors);
            else
                codes_add(sum, at, s, &known, 2 * lane, x, lanes, rows, vectors, form, kind);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                int place = x + v * VL;
                vf scale = sort == PLAIN && wide ? v_load_bf16(s.block + 2 * place)
                                                 : square_scale(s, kind, 2 * lane, place);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    vf *sums = &total[r][v0 % span + v];
                    *sums = v_fma(sum_end(sum[r][v], a + r), scale * unit, *sums);
                }
                if (sort != SHIFTED) continue;
                vf offset = square_offset(s, kind, place);
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    vf *sums = &total[r][v0 % span + v];
                    *sums = v_fma(v_set(a[INPUTS * rows + r]), offset, *sums);
                }
            }
        }
    }
}

/* c = scale·total [+ bias] [+ add], for the n outputs that exist: one loop for all tiles. Inlined,
 * its sums would take too many registers from the rest. */
static ALONE void scaled_write(Out out, vf (*total)[ACROSS], int n, int rows, int span)
{
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < span; v++) sums_write(out_at(out, r, v * VL), total[r][v], n - v * VL);
}

static inline __attribute__((always_inline)) void scaled_tile(Out out, const float *a,
                                                              const Codes *c, int n, const int rows,
                                                              const CodeForm form, const Sort sort,
                                                              const DType kind)
{
    const int span = span_of(form);
    Codes part = *c;
    for (int k = 0; k == 0 || k < c->depth; k += DEPTH) {
        vf total[TILE_ROWS][ACROSS];
        part.first = c->first + k / BLOCK;
        part.depth = c->depth - k < DEPTH ? c->depth - k : DEPTH;
        scaled_rows(total, a + (int64_t)row_lanes(k) * rows, &part, rows, form, sort, kind);
        scaled_write(out, total, n, rows, span);
        out = out_to(out.c, out.ldc, out.scale, 1);
    }
}

/* The most rows of a tile. */
static inline int most_rows(CodeForm form, Sort sort)
{
    return form == FOUND   ? TILE_ROWS
           : form == BYTES ? BYTE_ROWS
           : sort == PLAIN ? TILE_ROWS
                           : SORTED_ROWS;
}

/* The switch makes the row count a constant. */
static inline __attribute__((always_inline)) void tile_of(Out out, const float *a, const Codes *c,
                                                          int n, int rows, const CodeForm form,
                                                          const Sort sort, const DType kind)
{
#define ROWS(count)                                         \
    case count:                                             \
        if (count > most_rows(form, sort)) break;           \
        scaled_tile(out, a, c, n, count, form, sort, kind); \
        return
    switch (rows) {
#if defined(__AVX512F__)
        ROWS_TO_12(ROWS);
#else
        ROWS_TO_5(ROWS);
#endif
    }
#undef ROWS
    assert(!"a tile has 1 to most_rows rows");
}

/* Separate functions: for a single one the compiler takes three times as long. */
#define TILES(name, form, sort, kind)                                                       \
    static ALONE void tile_##name(Out out, const float *a, const Codes *c, int n, int rows) \
    {                                                                                       \
        tile_of(out, a, c, n, rows, form, sort, kind);                                      \
    }
TILES(words, WORDS, PLAIN, DTYPE_INT4)
TILES(bytes, BYTES, PLAIN, DTYPE_INT8)
#if defined(__AVX512BF16__)
TILES(found, FOUND, PLAIN, block_kind(c->w->type))
#else
TILES(q4_1, WORDS, SHIFTED, DTYPE_Q4_1)
TILES(q4_k, WORDS, SHIFTED, DTYPE_Q4_K)
TILES(q5_k, WORDS, SHIFTED, DTYPE_Q5_K)
TILES(q6_k, WORDS, SPLIT, DTYPE_Q6_K)
TILES(found, FOUND, PLAIN, block_kind(c->w->type))
TILES(found_shifted, FOUND, SHIFTED, block_kind(c->w->type))
TILES(found_split, FOUND, SPLIT, DTYPE_Q6_K)
#endif
#undef TILES

/* One tile; words of blocks that are not PLAIN have a function per kind. */
static void codes_tile(Out out, const float *a, const Codes *c, int n, int rows, CodeForm form)
{
    void (*run)(Out, const float *, const Codes *, int, int) = tile_words;
    if (form == FOUND) run = tile_found;
    if (form == BYTES) run = tile_bytes;
#if !defined(__AVX512BF16__)
    DType type = c->w->type;
    if (form == WORDS && sort_of(type) != PLAIN)
        run = type == DTYPE_Q4_1   ? tile_q4_1
              : type == DTYPE_Q4_K ? tile_q4_k
              : type == DTYPE_Q5_K ? tile_q5_k
                                   : tile_q6_k;
    if (form == FOUND &&
        sort_of(type) != PLAIN) /* one function for all sorts takes up to 1.3 times as long */
        run = sort_of(type) == SHIFTED ? tile_found_shifted : tile_found_split;
#endif
    run(out, a, c, n, rows);
}

/* The destination of sums over inputs [k, k + depth): a group's first sums add c's initial value,
 * its last go to c. Sums in between are contiguous: the rows of c often have a stride at which L1
 * can't hold a few of them, so they would be evicted each time. */
static Out part_out(const Scaled *s, int panel, int k, int depth, float *sums)
{
    Out out = out_at(product_out(s->p, s->k0 + k), s->row, panel * PANEL);
    if (k) out.add = sums, out.add_row = PANEL;
    if (k + depth < s->depth) out.c = sums, out.ldc = PANEL;
    return out;
}

/* `depth` inputs from k on of one panel times the group's rows: DEPTH or fewer if looked up
 * before. */
static void panel_part(const Scaled *s, int panel, int k, int depth)
{
    float *found = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK;
    const Product *p = s->p;
    int n = p->n - panel * PANEL < PANEL ? p->n - panel * PANEL : PANEL;
    Codes c = {p->b, panel, (s->k0 + k) / BLOCK, depth, 0, NULL, 0, 0};
    Out all = part_out(s, panel, k, depth, found + FOUND_LANES);
    if (s->form == FOUND) {
        CPU(codes_find)(found, c.w, panel, c.first, (depth + BLOCK - 1) / BLOCK);
        c.found = found;
    }
    for (; c.x < n; c.x += span_of(s->form) * VL)
        for (int r = 0; r < s->rows; r += s->height) {
            int live = s->rows - r < s->height ? s->rows - r : s->height;
            const float *a = s->packed + (int64_t)r * row_lanes(s->depth);
            int asks = c.x == 0 && r + live == s->rows; /* the last tile that reads the codes */
            c.turns = asks && s->rows <= TURN_ROWS && !s->follows;
            c.ahead = asks && !c.turns ? ASKED : 0;
            codes_tile(out_at(all, r, c.x), a + (int64_t)row_lanes(k) * live, &c, n - c.x, live,
                       s->form);
        }
}

static void panel_job(void *context, int64_t panel)
{
    const Scaled *s = context;
    int step = s->form == FOUND ? DEPTH : s->depth;
    for (int k = 0; k == 0 || k < s->depth; k += step)
        panel_part(s, (int)panel, k, s->depth - k < step ? s->depth - k : step);
}

/* One group of rows. */
static void group_run(Device *dev, Scaled *s, float *packed)
{
    const Product *p = s->p;
    DType kind = block_kind(((const frozen *)p->b)->type);
    s->form = has_bytes(kind) ? BYTES : WORDS;
    if (s->rows > most_rows(s->form, sort_of(kind))) s->form = FOUND;
    int tiles = (s->rows + TILE_ROWS - 1) / TILE_ROWS; /* one, if a tile looks up codes */
    s->height = (s->rows + tiles - 1) / tiles;
    int most = PACKED_LANES / (tiles * s->height) / BLOCK_LANES * BLOCK / DEPTH * DEPTH;
    double read = CPU_BYTE_NS * p->n * p->k / 2,
           multiplied = CPU_PRODUCT_NS * s->rows * p->n * p->k;
    for (s->k0 = 0; s->k0 == 0 || s->k0 < p->k; s->k0 += s->depth) {
        s->depth = p->k - s->k0 < most ? p->k - s->k0 : most;
        for (int r = 0; r < s->rows; r += s->height) {
            int live = s->rows - r < s->height ? s->rows - r : s->height;
            rows_pack(packed + (int64_t)r * row_lanes(s->depth),
                      p->a + (s->row + r) * p->a_row + s->k0, p->a_row, live, s->depth);
        }
        cpu_run_of(dev, read > multiplied ? read : multiplied, (p->n + PANEL - 1) / PANEL,
                   panel_job, s);
        if (!s->depth) return;
    }
}

void CPU(product_scaled)(Device *dev, const Product *p)
{
    assert(p->order == PANELS && p->a_col == 1);
    float *packed = cpu_scratch(dev); /* the caller's: workers only read it */
    Scaled s = {.p = p, .dev = dev, .packed = packed, .follows = processor_follows()};
    for (s.row = 0; s.row < p->m; s.row += s.rows) {
        s.rows = p->m - s.row < GROUP_ROWS ? p->m - s.row : GROUP_ROWS;
        group_run(dev, &s, packed);
    }
}

#endif
#endif
