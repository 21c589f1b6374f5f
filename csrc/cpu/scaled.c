/* cpu/scaled.c - rows against a weight whose codes stand for numbers that bf16 holds exactly, in
 * pairs: int4, q4_0 and mxfp4 on cpu-bf16.
 *
 *   c[r,n] = scale·Σ_blocks s(n, block)·Σ_k level(code[n,k])·a[r,k] [+ bias] [+ plus]
 *
 * A block's sum is one of pairs, and is scaled in f32. So what is rounded is a alone, no weight is
 * multiplied on its way, and a pair of weights costs one shuffle: the lowest four bits of a 16-bit
 * lane name a level, and a word of eight codes is looked at four times. That gives the pairs of
 * inputs k and k + 4, so rows are packed so (APART in block.h). Up to FEW rows read both vectors of
 * a panel at once, up to TILE_ROWS one after the other; more rows meet levels that were looked up
 * once, in L1. The sums are the same: blocks in order within DEPTH inputs, each from zero.
 *
 * Roofline: 4.5 bits a weight, 2·m flops each. For 128 weights 2 loads, 6 shifts and 8 shuffles,
 * then 4·m products: bound by memory at one or two rows, by products of pairs from some six on. */
#include <assert.h>

#include "block.h"
#include "packed.h"

#if defined(__AVX512BF16__)

enum {
    FEW = 6,        /* rows of a tile of two vectors: 12 sums, and 12 of blocks before */
    TILE_ROWS = 12, /* rows of a tile of one */
    GROUP_ROWS = 8 * TILE_ROWS,
    PACKED_LANES = 64 << 10,      /* of packed rows: a quarter of L2 */
    LEVEL_LANES = DEPTH / 2 * VL, /* of DEPTH inputs of VL outputs */
    AHEAD = 8192,                 /* bytes from what is read to what is asked of memory */
};

#define NS_BYTE 0.018 /* of a byte of a weight in L3 (cpu.h); twice that from memory */

_Static_assert((PACKED_LANES + PACKED_SLACK + LEVEL_LANES) * sizeof(float) <= POOL_SCRATCH,
               "packed rows, and the levels of a part of a panel");
_Static_assert(PACKED_LANES / GROUP_ROWS * 2 >= DEPTH, "a block of all rows is packed");

/* The rows of a group, and their inputs [k0, k0 + depth). */
typedef struct Scaled {
    const Product *p;
    const Device *dev;
    const float *packed;   /* [tile][lane][row of it] */
    int row, rows, height; /* of the group; of its tiles, of which the last may have fewer */
    int k0, depth;
} Scaled;

/* Lanes that `k` inputs of a row take. */
static inline int apart_lanes(int k)
{
    return (k + NIBBLES - 1) / NIBBLES * (NIBBLES / 2);
}

/* The levels as bf16, twice: an index has five bits, of which the last is another code's. */
static inline __m512i levels_of(DType type)
{
    vf once = v_load(CPU(levels)[type]);
    __m512i pairs = (__m512i)v_round_pairs(once, once);
    return pairs;
}

static inline vu look_up(__m512i levels, vu codes)
{
    return (vu)_mm512_permutexvar_epi16((__m512i)codes, levels);
}

/* What a tile multiplies: `count` blocks from number `first` of a panel on, the last with `live`
 * inputs, of outputs [x, x + vectors·VL). */
typedef struct Codes {
    const frozen *w;
    int panel, first, count, live, x;
    const float *levels; /* looked up before: lanes of VL; NULL: in the tile */
    int asks;            /* asks memory for blocks to come */
} Codes;

static inline __attribute__((always_inline)) void scaled_rows(vf (*total)[2], const float *a,
                                                              const Codes *c, const int rows,
                                                              const int vectors, const int known)
{
    DType kind = block_kind(c->w->type);
    __m512i levels = levels_of(c->w->type);
    const float *at = c->levels;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = v_set(0.0f);
    for (int b = 0; b < c->count; b++) {
        Square s = square_at(c->w, kind, c->panel, c->first + b);
        int inputs = b + 1 < c->count ? BLOCK : c->live;
        if (c->asks)
            for (size_t line = 0; line < blocks_of(kind).bytes; line += 64)
                __builtin_prefetch(s.block + AHEAD + line, 0, 3);
        vf sum[TILE_ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = v_set(0.0f);
        for (int k = 0; k < inputs; k += NIBBLES) {
            vu word[2] = {{0}, {0}};
            for (int v = 0; v < vectors && !known; v++)
                word[v] = low_word(s, kind, k, c->x + v * VL);
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++, a += rows) {
                vu part[2];
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    part[v] = known ? v_load_pairs(at) : look_up(levels, word[v] >> (4 * i));
                at += known ? VL : 0;
#pragma GCC unroll 16
                for (int r = 0; r < rows; r++) {
                    vu x = v_set_pair(a + r);
#pragma GCC unroll 2
                    for (int v = 0; v < vectors; v++)
                        sum[r][v] = v_dot_pairs(x, part[v], sum[r][v]);
                }
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            vf scale = square_scale(s, kind, 0, c->x + v * VL);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) total[r][v] = v_fma(sum[r][v], scale, total[r][v]);
        }
    }
}

/* c = scale·total [+ bias] [+ add], of the n outputs that exist. */
static inline __attribute__((always_inline)) void scaled_write(Out out, vf (*total)[2], int n,
                                                               const int rows, const int vectors)
{
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        int live = n - v * VL;
        __mmask16 lanes = live >= VL ? 0xffff : live > 0 ? (__mmask16)((1u << live) - 1) : 0;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf y = total[r][v] * out.scale;
            if (out.bias) y += (vf)_mm512_maskz_loadu_ps(lanes, out.bias + v * VL);
            if (out.add) y += (vf)_mm512_maskz_loadu_ps(lanes, out.add + r * out.add_row + v * VL);
            _mm512_mask_storeu_ps(out.c + r * out.ldc + v * VL, lanes, (__m512)y);
        }
    }
}

static inline __attribute__((always_inline)) void scaled_tile(Out out, const float *a,
                                                              const Codes *c, int n, const int rows,
                                                              const int vectors, const int known)
{
    vf total[TILE_ROWS][2];
    scaled_rows(total, a, c, rows, vectors, known);
    scaled_write(out, total, n, rows, vectors);
}

/* The switches make the row count a constant. */
static void tile_known(Out out, const float *a, const Codes *c, int n, int rows)
{
#define ROWS(count) \
    case count: scaled_tile(out, a, c, n, count, 1, 1); return
    switch (rows) {
        ROWS_TO_12(ROWS);
    }
#undef ROWS
    assert(!"a tile has 1 to TILE_ROWS rows");
}

static void tile_codes(Out out, const float *a, const Codes *c, int n, int rows)
{
#define ROWS(count) \
    case count: scaled_tile(out, a, c, n, count, count > FEW ? 1 : 2, 0); return
    switch (rows) {
        ROWS_TO_12(ROWS);
    }
#undef ROWS
    assert(!"a tile has 1 to TILE_ROWS rows");
}

/* The levels of `c`'s blocks, as tile_known reads them. */
static void levels_find(float *to, const Codes *c)
{
    DType kind = block_kind(c->w->type);
    __m512i levels = levels_of(c->w->type);
    for (int b = 0; b < c->count; b++) {
        Square s = square_at(c->w, kind, c->panel, c->first + b);
        for (int k = 0; k < BLOCK; k += NIBBLES) {
            vu word = low_word(s, kind, k, c->x);
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++, to += VL)
                v_store(to, (vf)look_up(levels, word >> (4 * i)));
        }
    }
}

/* DEPTH inputs or fewer, from k on, of one panel against the group's rows. */
static void panel_part(const Scaled *s, int panel, int k, int depth)
{
    const Product *p = s->p;
    int n = p->n - panel * PANEL < PANEL ? p->n - panel * PANEL : PANEL;
    int count = (depth + BLOCK - 1) / BLOCK;
    Codes c = {p->b, panel, (s->k0 + k) / BLOCK, count, depth - (count - 1) * BLOCK, 0, NULL, 1};
    Out all = out_at(product_out(p, s->k0 + k), s->row, panel * PANEL);
    const float *rows = s->packed;
    if (s->rows <= FEW) {
        tile_codes(all, rows + (int64_t)apart_lanes(k) * s->rows, &c, n, s->rows);
        return;
    }
    float *levels = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK;
    for (c.x = 0; c.x < n; c.x += VL, c.asks = 0) {
        Out out = out_at(all, 0, c.x);
        if (s->rows <= TILE_ROWS) {
            tile_codes(out, rows + (int64_t)apart_lanes(k) * s->rows, &c, n - c.x, s->rows);
            continue;
        }
        levels_find(levels, &c);
        c.levels = levels;
        for (int r = 0; r < s->rows; r += s->height) {
            int tall = s->rows - r < s->height ? s->rows - r : s->height;
            const float *a = rows + (int64_t)r * apart_lanes(s->depth);
            tile_known(out_at(out, r, 0), a + (int64_t)apart_lanes(k) * tall, &c, n - c.x, tall);
        }
    }
}

static void panel_job(void *context, int64_t panel)
{
    const Scaled *s = context;
    for (int k = 0; k == 0 || k < s->depth; k += DEPTH)
        panel_part(s, (int)panel, k, s->depth - k < DEPTH ? s->depth - k : DEPTH);
}

/* One group of rows. */
static void group_run(Device *dev, Scaled *s, float *packed)
{
    const Product *p = s->p;
    int tiles = (s->rows + TILE_ROWS - 1) / TILE_ROWS;
    s->height = (s->rows + tiles - 1) / tiles;
    int most = PACKED_LANES / (tiles * s->height) * 2 / DEPTH * DEPTH;
    double read = NS_BYTE * p->n * p->k / 2, multiplied = CPU_PRODUCT_NS * s->rows * p->n * p->k;
    for (s->k0 = 0; s->k0 == 0 || s->k0 < p->k; s->k0 += s->depth) {
        s->depth = p->k - s->k0 < most ? p->k - s->k0 : most;
        for (int r = 0; r < s->rows; r += s->height) {
            int tall = s->rows - r < s->height ? s->rows - r : s->height;
            CPU(tile_pack)(packed + (int64_t)r * apart_lanes(s->depth), tall,
                           p->a + (s->row + r) * p->a_row + s->k0, p->a_row, tall, s->depth, APART);
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
    Scaled s = {.p = p, .dev = dev, .packed = packed};
    for (s.row = 0; s.row < p->m; s.row += s.rows) {
        s.rows = p->m - s.row < GROUP_ROWS ? p->m - s.row : GROUP_ROWS;
        group_run(dev, &s, packed);
    }
}

#endif
