/* cpu/scaled.c - rows against a weight whose codes stand for numbers that bf16 holds exactly, in
 * pairs: int8, int4, q4_0 and mxfp4 on cpu-bf16. (With a matrix unit amx.c multiplies them.)
 *
 *   c[r,n] = scale·Σ_blocks s(n, block)·Σ_k level(code[n,k])·a[r,k] [+ bias] [+ plus]
 *
 * A block's sum is one of pairs, and is scaled in f32. So what is rounded is a alone, and no weight
 * is multiplied on its way. A pair has inputs k and k + 4 of eight (APART in block.h): in 4 bits
 * the lowest bits of a 16-bit lane name a level for a shuffle, and a word of eight codes is looked
 * at four times. A byte's magnitude is looked up in 128 bf16, whose halves are in two registers
 * each. Of a panel's two vectors, up to FEW rows of 4-bit codes, and up to TILE_ROWS of bytes, read
 * both at once; up to TILE_ROWS of 4-bit codes one after the other. More rows meet numbers that
 * were looked up once, in L1. The sums are the same: blocks in order within DEPTH inputs, each from
 * zero. Bytes are not asked of memory ahead: then one row has 25 GB/s and not 17 (Zen 4).
 *
 * Roofline: 4.5 or 8.5 bits a weight, 2·m flops each. For 128 weights of 4 bits 2 loads, 6 shifts
 * and 8 shuffles, of 8 bits 4 loads and 16 others, then 4·m products: bound by memory at one or two
 * rows, by products of pairs from some six on. */
#include <assert.h>

#include "block.h"
#include "packed.h"

#if defined(__AVX512BF16__)

enum {
    FEW = 6,        /* rows of a tile of two vectors: 12 sums, and 12 of blocks before */
    TILE_ROWS = 12, /* rows of a tile of one vector */
    GROUP_ROWS = 8 * TILE_ROWS,
    PACKED_LANES = 64 << 10,         /* of packed rows: a quarter of L2 */
    FOUND_LANES = DEPTH / 2 * PANEL, /* of DEPTH inputs */
    AHEAD = 4096,                    /* bytes from what is read to what is asked of memory */
};

_Static_assert((PACKED_LANES + PACKED_SLACK + FOUND_LANES) * sizeof(float) <= POOL_SCRATCH,
               "packed rows, and what is looked up of a panel");
_Static_assert(PACKED_LANES / GROUP_ROWS * 2 >= DEPTH, "a block of all rows is packed");

/* The rows of a group, and their inputs [k0, k0 + depth). */
typedef struct Scaled {
    const Product *p;
    const Device *dev;
    const float *packed;   /* [tile][lane][row of it] */
    int row, rows, height; /* of the group; of its tiles, of which the last may have fewer */
    int k0, depth;
} Scaled;

/* ---- codes as bf16 ---- */

/* The levels as bf16, twice: an index has five bits, of which the last is another code's. */
static inline __m512i levels_of(DType type)
{
    vf once = v_load(CPU(levels)[type]);
    return (__m512i)v_round_pairs(once, once);
}

/* bf16 of 1 to 128, by the lowest seven bits: that of 128 is number 0. */
#define EXPONENT(m) (((m) > 1) + ((m) > 3) + ((m) > 7) + ((m) > 15) + ((m) > 31) + ((m) > 63))
#define MAGNITUDE(m) ((127 + EXPONENT(m)) << 7 | ((m) - (1 << EXPONENT(m))) << (7 - EXPONENT(m)))
#define LOW_BYTE(m) ((m) ? MAGNITUDE(m) & 0xff : 0)
#define HIGH_BYTE(m) ((m) ? MAGNITUDE(m) >> 8 : 0x43)
#define FOUR(X, m) X(m), X((m) + 1), X((m) + 2), X((m) + 3)
#define SIXTEEN(X, m) FOUR(X, m), FOUR(X, (m) + 4), FOUR(X, (m) + 8), FOUR(X, (m) + 12)
#define SIXTY_FOUR(X, m) \
    SIXTEEN(X, m), SIXTEEN(X, (m) + 16), SIXTEEN(X, (m) + 32), SIXTEEN(X, (m) + 48)
/* Of two rows of PANEL bytes that stand side by side: which goes to place b, so that weaving what
 * is made of them, low and high bytes, gives pairs of one row's number and the other's. */
#define WOVEN(b) ((b) / 8 % 2 * 16 + (b) / 16 * 4 + (b) % 8 / 2 + (b) % 2 * PANEL)

static const uint8_t low_bytes[] = {SIXTY_FOUR(LOW_BYTE, 0), SIXTY_FOUR(LOW_BYTE, 64)};
static const uint8_t high_bytes[] = {SIXTY_FOUR(HIGH_BYTE, 0), SIXTY_FOUR(HIGH_BYTE, 64)};
static const uint8_t woven[] = {SIXTY_FOUR(WOVEN, 0)};

/* What codes are looked up in. */
typedef struct Known {
    __m512i levels, low[2], high[2], order;
} Known;

static inline Known known_of(DType type)
{
    return (Known){levels_of(type),
                   {_mm512_loadu_si512(low_bytes), _mm512_loadu_si512(low_bytes + 64)},
                   {_mm512_loadu_si512(high_bytes), _mm512_loadu_si512(high_bytes + 64)},
                   _mm512_loadu_si512(woven)};
}

/* Both vectors of a panel: the pairs of the inputs whose codes of 8 bits begin at `row`, and four
 * rows behind it. */
static inline void pairs_of_bytes(vu *pairs, const unsigned char *row, const Known *known)
{
    __m256i one, other;
    memcpy(&one, row, sizeof one);
    memcpy(&other, row + NIBBLES / 2 * PANEL, sizeof other);
    __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
    codes = _mm512_permutexvar_epi8(known->order, codes);
    __m512i m = _mm512_abs_epi8(codes), sign = _mm512_set1_epi8((char)0x80);
    __m512i low = _mm512_permutex2var_epi8(known->low[0], m, known->low[1]);
    __m512i high = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes),
                                                  known->high[0], m, known->high[1]);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8); /* high | (codes & sign) */
    pairs[0] = (vu)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (vu)_mm512_unpackhi_epi8(low, high);
}

/* Of inputs k + i and k + i + 4, i < 4: the pairs of codes of 4 bits, of their word. */
static inline vu pairs_of_word(vu word, int i, const Known *known)
{
    return (vu)_mm512_permutexvar_epi16((__m512i)(word >> (4 * i)), known->levels);
}

/* ---- codes that were looked up ---- */

static inline __attribute__((always_inline)) void
blocks_find(float *to, const frozen *w, int panel, int first, int count, const DType kind)
{
    Known known = known_of(w->type);
    for (int b = 0; b < count; b++) {
        const unsigned char *codes =
            square_at(w, kind, panel, first + b).block + blocks_of(kind).codes;
        for (int k = 0; k < BLOCK; k += NIBBLES) {
            vu word[2] = {{0}, {0}};
            if (!has_bytes(kind)) memcpy(word, codes + 4 * (k / NIBBLES) * PANEL, sizeof word);
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++, to += PANEL) {
                vu pairs[2];
                if (has_bytes(kind)) {
                    pairs_of_bytes(pairs, codes + (k + i) * PANEL, &known);
                } else {
                    pairs[0] = pairs_of_word(word[0], i, &known);
                    pairs[1] = pairs_of_word(word[1], i, &known);
                }
                v_store(to, (vf)pairs[0]);
                v_store(to + VL, (vf)pairs[1]);
            }
        }
    }
}

/* The kind becomes a constant. */
void CPU(codes_find)(float *to, const frozen *w, int panel, int first, int count)
{
    switch (block_kind(w->type)) {
    case DTYPE_INT8: blocks_find(to, w, panel, first, count, DTYPE_INT8); return;
    case DTYPE_INT4: blocks_find(to, w, panel, first, count, DTYPE_INT4); return;
    case DTYPE_MXFP4: blocks_find(to, w, panel, first, count, DTYPE_MXFP4); return;
    default: assert(!"a type whose sums are scaled");
    }
}

#if !defined(__AMX_BF16__) /* for which amx.c multiplies */

/* ---- the register tile ---- */

/* Where a tile has its pairs from: words of 4-bit codes, 8-bit codes, or L1. */
typedef enum Form { WORDS, BYTES, FOUND } Form;

/* What a tile multiplies: `count` blocks from number `first` of a panel on, the last with `live`
 * inputs, of outputs [x, x + vectors·VL). */
typedef struct Codes {
    const frozen *w;
    int panel, first, count, live, x;
    const float *found; /* what was looked up before, PANEL lanes a row; NULL: in the tile */
    int asks;           /* asks memory for blocks to come */
} Codes;

static inline __attribute__((always_inline)) void scaled_rows(vf (*total)[2], const float *a,
                                                              const Codes *c, const int rows,
                                                              const int vectors, const Form form)
{
    DType kind = block_kind(c->w->type);
    Known known = known_of(c->w->type);
    const float *at = c->found;
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = v_set(0.0f);
    for (int b = 0; b < c->count; b++) {
        Square s = square_at(c->w, kind, c->panel, c->first + b);
        int inputs = b + 1 < c->count ? BLOCK : c->live;
        for (size_t line = 0; c->asks && form == WORDS && line < blocks_of(kind).bytes; line += 64)
            __builtin_prefetch(s.block + AHEAD + line, 0, 0);
        vf sum[TILE_ROWS][2];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = v_set(0.0f);
        for (int k = 0; k < inputs; k += NIBBLES) {
            vu word[2] = {{0}, {0}};
            for (int v = 0; v < vectors && form == WORDS; v++)
                word[v] = low_word(s, kind, k, c->x + v * VL);
#pragma GCC unroll 4
            for (int i = 0; i < NIBBLES / 2; i++, a += rows) {
                vu part[2];
                if (form == BYTES)
                    pairs_of_bytes(part, s.block + blocks_of(kind).codes + (k + i) * PANEL, &known);
#pragma GCC unroll 2
                for (int v = 0; v < vectors && form != BYTES; v++)
                    part[v] = form == FOUND ? v_load_pairs(at + c->x + v * VL)
                                            : pairs_of_word(word[v], i, &known);
                at += form == FOUND ? PANEL : 0;
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
    for (int v = 0; v < vectors; v++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sums_write(out_at(out, r, v * VL), total[r][v], n - v * VL);
}

static inline __attribute__((always_inline)) void scaled_tile(Out out, const float *a,
                                                              const Codes *c, int n, const int rows,
                                                              const int vectors, const Form form)
{
    vf total[TILE_ROWS][2];
    scaled_rows(total, a, c, rows, vectors, form);
    scaled_write(out, total, n, rows, vectors);
}

/* One tile of up to TILE_ROWS rows: the switch makes the row count and the form constants. */
static void tile(Out out, const float *a, const Codes *c, int n, int rows, Form form)
{
#define ROWS(count)                                                       \
    case count:                                                           \
        if (form == FOUND)                                                \
            scaled_tile(out, a, c, n, count, 1, FOUND);                   \
        else if (form == BYTES)                                           \
            scaled_tile(out, a, c, n, count, 2, BYTES);                   \
        else                                                              \
            scaled_tile(out, a, c, n, count, count > FEW ? 1 : 2, WORDS); \
        return
    switch (rows) {
        ROWS_TO_12(ROWS);
    }
#undef ROWS
    assert(!"a tile has 1 to TILE_ROWS rows");
}

/* DEPTH inputs or fewer, from k on, of one panel against the group's rows. */
static void panel_part(const Scaled *s, int panel, int k, int depth)
{
    const Product *p = s->p;
    int n = p->n - panel * PANEL < PANEL ? p->n - panel * PANEL : PANEL;
    int count = (depth + BLOCK - 1) / BLOCK;
    Codes c = {p->b, panel, (s->k0 + k) / BLOCK, count, depth - (count - 1) * BLOCK, 0, NULL, 1};
    Out all = out_at(product_out(p, s->k0 + k), s->row, panel * PANEL);
    const float *rows = s->packed, *few = rows + (int64_t)packed_lanes(k, APART) * s->rows;
    int bytes = has_bytes(block_kind(c.w->type)), looks = s->rows > TILE_ROWS;
    if (s->rows <= (bytes ? TILE_ROWS : FEW)) {
        tile(all, few, &c, n, s->rows, bytes ? BYTES : WORDS);
        return;
    }
    float *found = (float *)cpu_scratch(s->dev) + PACKED_LANES + PACKED_SLACK;
    if (looks) CPU(codes_find)(found, c.w, panel, c.first, count);
    for (c.x = 0, c.found = found; c.x < n; c.x += VL, c.asks = 0) {
        Out out = out_at(all, 0, c.x);
        if (!looks) tile(out, few, &c, n - c.x, s->rows, WORDS);
        for (int r = 0; looks && r < s->rows; r += s->height) {
            int tall = s->rows - r < s->height ? s->rows - r : s->height;
            const float *a = rows + (int64_t)r * packed_lanes(s->depth, APART);
            tile(out_at(out, r, 0), a + (int64_t)packed_lanes(k, APART) * tall, &c, n - c.x, tall,
                 FOUND);
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
    double read = CPU_BYTE_NS * p->n * p->k / 2,
           multiplied = CPU_PRODUCT_NS * s->rows * p->n * p->k;
    for (s->k0 = 0; s->k0 == 0 || s->k0 < p->k; s->k0 += s->depth) {
        s->depth = p->k - s->k0 < most ? p->k - s->k0 : most;
        for (int r = 0; r < s->rows; r += s->height) {
            int tall = s->rows - r < s->height ? s->rows - r : s->height;
            CPU(tile_pack)(packed + (int64_t)r * packed_lanes(s->depth, APART), tall,
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
#endif
