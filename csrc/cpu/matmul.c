/* cpu/matmul.c - every product of the CPU device.
 *
 *   c (m,n) = scale·a (m,k)·b (k,n) [+ bias] [+ c]
 *
 * A tile of TILE_M rows and 2·VL columns of c stays in registers while k runs: one vector load of b
 * and one broadcast of a per multiply-add. b must be row-major in k; frozen weights are stored so
 * (panels, cpu.h), anything else is brought to that order in a scratch block of DEPTH × PANEL that
 * stays in L1 or L2. bf16 weights widen to f32 on the way, which is exact. Every element of c is
 * summed over k in the same order with fused multiply-adds, in blocks of DEPTH, whatever m, n, the
 * tile, the thread and the vector width are: a row's result depends on that row alone, bit for bit.
 * That is why this is not a BLAS call; benchmarks/ops.py measures it against oneDNN. Roofline:
 * 2·m·n·k flops, compute bound for m > 16; for m = 1 one pass over w, memory bound. */
#include <assert.h>

#include "cpu.h"
#include "simd.h"

enum {
    DEPTH = 384,   /* k of one block: a panel of b is 48 KB */
    ROWS = 336,    /* m of one block: DEPTH·ROWS of a stay in L2 */
    WIDE = 2 * VL, /* columns of a register tile */
    AHEAD = 48, /* rows of b to prefetch when few rows of a keep the processor waiting for memory */
    TILE_M = VL == 16 ? 8 : 6, /* rows of a register tile: 16 of 32 or 12 of 16 registers hold sums;
                                  8 rows gave 99 GF/s of 117, 12 gave 80, 14 gave 62: GCC runs out
                                  of address registers first */
    FEW = 2 * TILE_M, /* up to so many rows bf16 is widened in registers, not through the scratch */
};

/* How b's element (k, n) is found. */
typedef enum Order {
    BY_ROW,    /* b[k·ldb + n] */
    BY_COLUMN, /* b[n·ldb + k] */
    PANELS,    /* frozen w (N,D), k over its D columns */
    PANELS_T,  /* frozen w (N,D), k over its N rows */
} Order;

typedef struct Product {
    float *c;
    int64_t ldc;
    const float *a;
    int64_t a_row, a_col;
    const void *b;
    int64_t ldb;
    Order order;
    int m, n, k;
    float scale;
    const float *bias;
    int accumulate;
    int rows, panels; /* of one piece of work */
    int bf16;         /* b, BY_ROW or BY_COLUMN, is bf16 */
} Product;

/* ---- the register tile ---- */

static inline __attribute__((always_inline)) void tile_rows(float *c, int64_t ldc, const float *a,
                                                            int64_t a_row, int64_t a_col,
                                                            const void *b, int64_t ldb, int k,
                                                            float scale, const float *bias, int add,
                                                            const int rows, const int bf16)
{
    vf acc[TILE_M][2];
    for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = v_set(0.0f);
    for (int i = 0; i < k; i++) {
        vf b0, b1;
        if (bf16) {
            b0 = v_load_bf16((const uint16_t *)b + i * ldb);
            b1 = v_load_bf16((const uint16_t *)b + i * ldb + VL);
        } else {
            b0 = v_load((const float *)b + i * ldb);
            b1 = v_load((const float *)b + i * ldb + VL);
        }
        if (rows <= 4) __builtin_prefetch((const char *)b + (i + AHEAD) * ldb * (bf16 ? 2 : 4));
        const float *column = a + i * a_col;
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            vf x = v_set(column[r * a_row]);
            acc[r][0] = v_fma(x, b0, acc[r][0]);
            acc[r][1] = v_fma(x, b1, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            float *out = c + r * ldc + half * VL;
            vf y = acc[r][half] * scale;
            if (bias) y += v_load(bias + half * VL);
            if (add) y += v_load(out);
            v_store(out, y);
        }
}

/* One tile of `rows` ≤ TILE_M rows: the switch makes the row count a constant. */
static void tile(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col, const void *b,
                 int64_t ldb, int k, float scale, const float *bias, int add, int rows, int bf16)
{
#define CASE(n)                                                                    \
    case n:                                                                        \
        if (bf16)                                                                  \
            tile_rows(c, ldc, a, a_row, a_col, b, ldb, k, scale, bias, add, n, 1); \
        else                                                                       \
            tile_rows(c, ldc, a, a_row, a_col, b, ldb, k, scale, bias, add, n, 0); \
        return
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
#if defined(__AVX512F__)
        CASE(7);
        CASE(8);
#endif
    }
#undef CASE
    assert(!"a tile has 1 to TILE_M rows");
}

/* A block of rows against `n` ≤ PANEL columns of b. The last columns, fewer than a tile is wide, go
 * through a temporary tile; b must be readable (not meaningful) to the full width there. */
static void strip(float *c, int64_t ldc, const float *a, int64_t a_row, int64_t a_col,
                  const void *b, int64_t ldb, int m, int n, int k, float scale, const float *bias,
                  int add, int bf16)
{
    for (int j = 0; j < n; j += WIDE) {
        const void *bj = bf16 ? (const void *)((const uint16_t *)b + j) : (const float *)b + j;
        int width = n - j < WIDE ? n - j : WIDE;
        for (int i = 0; i < m; i += TILE_M) {
            int rows = m - i < TILE_M ? m - i : TILE_M;
            float *out = c + i * ldc + j;
            const float *ai = a + i * a_row;
            if (width == WIDE) {
                tile(out, ldc, ai, a_row, a_col, bj, ldb, k, scale, bias ? bias + j : NULL, add,
                     rows, bf16);
                continue;
            }
            float edge[TILE_M * WIDE], edge_bias[WIDE] = {0};
            for (int x = 0; bias && x < width; x++) edge_bias[x] = bias[j + x];
            for (int r = 0; r < rows; r++)
                for (int x = 0; x < WIDE; x++)
                    edge[r * WIDE + x] = add && x < width ? out[r * ldc + x] : 0;
            tile(edge, WIDE, ai, a_row, a_col, bj, ldb, k, scale, bias ? edge_bias : NULL, add,
                 rows, bf16);
            for (int r = 0; r < rows; r++)
                for (int x = 0; x < width; x++) out[r * ldc + x] = edge[r * WIDE + x];
        }
    }
}

/* ---- bringing b to k-major order ---- */

#if defined(__AVX512F__)
#define LANES(f)                                          \
    {f(0), f(1), f(2),  f(3),  f(4),  f(5),  f(6),  f(7), \
     f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#elif defined(__AVX2__)
#define LANES(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#else
#define LANES(f) {f(0), f(1), f(2), f(3)}
#endif

/* Swaps the off-diagonal halves of each 2·step × 2·step block: log2(VL) of these transpose a
 * square. */
#define BUTTERFLY(v, step)                                           \
    do {                                                             \
        const vi low = LANES(LOW_##step), high = LANES(HIGH_##step); \
        _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++)        \
        {                                                            \
            if (i & step) continue;                                  \
            vf x = v[i], y = v[i + step];                            \
            v[i] = __builtin_shuffle(x, y, low);                     \
            v[i + step] = __builtin_shuffle(x, y, high);             \
        }                                                            \
    } while (0)
#define LOW(l, step) ((l) & step ? VL + (l) - step : (l))
#define HIGH(l, step) ((l) & step ? VL + (l) : (l) + step)
#define LOW_1(l) LOW(l, 1)
#define LOW_2(l) LOW(l, 2)
#define LOW_4(l) LOW(l, 4)
#define LOW_8(l) LOW(l, 8)
#define HIGH_1(l) HIGH(l, 1)
#define HIGH_2(l) HIGH(l, 2)
#define HIGH_4(l) HIGH(l, 4)
#define HIGH_8(l) HIGH(l, 8)

static inline void transpose_square(float *out, int64_t out_row, const void *in, int64_t in_row,
                                    int bf16)
{
    vf v[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++)
        v[i] = bf16 ? v_load_bf16((const uint16_t *)in + i * in_row)
                    : v_load((const float *)in + i * in_row);
    BUTTERFLY(v, 1);
    BUTTERFLY(v, 2);
#if defined(__AVX2__)
    BUTTERFLY(v, 4);
#endif
#if defined(__AVX512F__)
    BUTTERFLY(v, 8);
#endif
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) v_store(out + i * out_row, v[i]);
}

static float widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* Element `at` of a matrix that is f32 or bf16: its address. */
static const void *element(const void *matrix, int64_t at, int bf16)
{
    return (const unsigned char *)matrix + at * (bf16 ? 2 : 4);
}

/* CPU(transpose) of f32 or bf16. */
static void transpose_to_f32(float *out, int64_t out_row, const void *in, int64_t in_row, int rows,
                             int cols, int bf16)
{
    int full_rows = rows - rows % VL, full_cols = cols - cols % VL;
    for (int i = 0; i < full_rows; i += VL)
        for (int j = 0; j < full_cols; j += VL)
            transpose_square(out + j * out_row + i, out_row, element(in, i * in_row + j, bf16),
                             in_row, bf16);
    for (int i = 0; i < rows; i++)
        for (int j = i < full_rows ? full_cols : 0; j < cols; j++)
            out[j * out_row + i] = bf16 ? widen(((const uint16_t *)in)[i * in_row + j])
                                        : ((const float *)in)[i * in_row + j];
}

void CPU(transpose)(float *out, int64_t out_row, const float *in, int64_t in_row, int rows,
                    int cols)
{
    transpose_to_f32(out, out_row, in, in_row, rows, cols, 0);
}

/* Rows [k0, k0+depth) of columns [n0, n0+width) of b, width ≤ PANEL, k-major, as f32 or (as stored)
 * bf16. `few` says that so few rows of a will use it that widening bf16 in registers is cheaper. */
static const void *bring(const Product *p, int k0, int depth, int n0, int width, float *scratch,
                         int few, int64_t *ldb, int *bf16)
{
    *bf16 = 0;
    *ldb = PANEL;
    if (p->order == BY_ROW && p->bf16) {
        const uint16_t *b = (const uint16_t *)p->b + k0 * p->ldb + n0;
        for (int i = 0; i < depth; i++, b += p->ldb)
            for (int j = 0; j < width; j++) scratch[i * PANEL + j] = widen(b[j]);
        return scratch;
    }
    if (p->order == BY_ROW) {
        const float *b = (const float *)p->b + k0 * p->ldb + n0;
        if (width % WIDE == 0) {
            *ldb = p->ldb;
            return b;
        }
        for (int i = 0; i < depth; i++)
            memcpy(scratch + i * PANEL, b + i * p->ldb, (size_t)width * 4);
        return scratch;
    }
    if (p->order == BY_COLUMN) {
        transpose_to_f32(scratch, PANEL, element(p->b, n0 * p->ldb + k0, p->bf16), p->ldb, width,
                         depth, p->bf16);
        return scratch;
    }
    const frozen *w = p->b;
    int wide = w->type == DTYPE_BF16;
    if (p->order == PANELS) {
        size_t at = ((size_t)(n0 / PANEL) * (size_t)w->cols + (size_t)k0) * PANEL;
        *bf16 = wide && few;
        if (!wide || few) return w->data + at * (wide ? 2 : 4);
        const uint16_t *from = (const uint16_t *)w->data + at;
        for (int i = 0; i < depth * PANEL; i += VL) v_store(scratch + i, v_load_bf16(from + i));
        return scratch;
    }
    /* PANELS_T: k runs over the weight's rows, n over its columns; k0 is a multiple of PANEL */
    for (int i = 0; i < depth; i += PANEL) {
        size_t at = ((size_t)((k0 + i) / PANEL) * (size_t)w->cols + (size_t)n0) * PANEL;
        const unsigned char *from = w->data + at * (wide ? 2 : 4);
        for (int x = 0; x < PANEL; x += VL)
            for (int j = 0; j < width; j += VL) {
                float *to = scratch + (i + x) * PANEL + j;
                if (width - j >= VL) {
                    transpose_square(to, PANEL, from + (j * PANEL + x) * (wide ? 2 : 4), PANEL,
                                     wide);
                    continue;
                }
                for (int col = j; col < width; col++)
                    for (int row = x; row < x + VL; row++) {
                        int at = col * PANEL + row;
                        scratch[(i + row) * PANEL + col] =
                            wide ? widen(((const uint16_t *)from)[at]) : ((const float *)from)[at];
                    }
            }
    }
    return scratch;
}

/* ---- blocks and threads ---- */

static void product_block(const Product *p, int m0, int m, int n0, int width, int k0,
                          float *scratch, int few)
{
    int depth = p->k - k0 < DEPTH ? p->k - k0 : DEPTH, add = p->accumulate || k0 > 0, bf16;
    int64_t ldb;
    const void *b = bring(p, k0, depth, n0, width, scratch, few, &ldb, &bf16);
    strip(p->c + m0 * p->ldc + n0, p->ldc, p->a + m0 * p->a_row + k0 * p->a_col, p->a_row, p->a_col,
          b, ldb, m, width, depth, p->scale, p->bias && k0 == 0 ? p->bias + n0 : NULL, add, bf16);
}

static void product_piece(void *context, int64_t piece)
{
    const Product *p = context;
    int groups = (p->n + p->panels * PANEL - 1) / (p->panels * PANEL);
    int m0 = (int)(piece / groups) * p->rows, n_first = (int)(piece % groups) * p->panels * PANEL;
    int m = p->m - m0 < p->rows ? p->m - m0 : p->rows;
    int n_last = n_first + p->panels * PANEL < p->n ? n_first + p->panels * PANEL : p->n;
    int few = m <= FEW;
    _Alignas(64) float scratch[(DEPTH + PANEL) * PANEL];
    if (p->order != PANELS || !few) memset(scratch, 0, sizeof scratch);
    /* Many rows: all panels meet one block of a while it is in L2. Few rows: each panel is read
     * once, in order, as memory likes it. The sums are the same. */
    int step_n = few ? PANEL : n_last - n_first;
    for (int n1 = n_first; n1 < n_last; n1 += step_n)
        for (int k0 = 0; k0 == 0 || k0 < p->k; k0 += DEPTH)
            for (int n0 = n1; n0 < n1 + step_n && n0 < n_last; n0 += PANEL)
                product_block(p, m0, m, n0, n_last - n0 < PANEL ? n_last - n0 : PANEL, k0, scratch,
                              few);
}

/* Cuts the product into pieces, a few for each thread, and runs them. */
static void product_run(Device *dev, Product *p)
{
    if (p->m <= 0 || p->n <= 0) return;
    int panels = (p->n + PANEL - 1) / PANEL, threads = pool_threads(((CpuDevice *)dev)->pool);
    int64_t wanted = (double)p->m * p->n * p->k < 2e5 ? 1 : threads > 1 ? 4 * threads : 1;
    p->rows = p->m < ROWS ? p->m : ROWS;
    int64_t blocks = (p->m + p->rows - 1) / p->rows;
    if (blocks * panels < wanted && p->m > TILE_M) { /* narrow: cut the rows finer */
        int64_t pieces = (wanted + panels - 1) / panels;
        p->rows = (int)((p->m + pieces - 1) / pieces + TILE_M - 1) / TILE_M * TILE_M;
        blocks = (p->m + p->rows - 1) / p->rows;
    }
    int64_t groups = (wanted + blocks - 1) / blocks;
    if (groups > panels) groups = panels;
    p->panels = (int)((panels + groups - 1) / groups);
    groups = (panels + p->panels - 1) / p->panels;
    cpu_run(dev, blocks * groups, product_piece, p);
}

void CPU(product)(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col,
                  const float *b, int64_t b_row, int m, int n, int k, float scale, int accumulate)
{
    for (int k0 = 0; k0 == 0 || k0 < k; k0 += DEPTH) {
        int depth = k - k0 < DEPTH ? k - k0 : DEPTH;
        strip(c, c_row, a + k0 * a_col, a_row, a_col, b + k0 * b_row, b_row, m, n, depth, scale,
              NULL, accumulate || k0 > 0, 0);
    }
}

/* ---- the ops, as products ---- */

typedef struct Left {
    const float *at;
    int64_t row, col;
} Left;

typedef struct Right {
    const void *at;
    int64_t stride;
    Order order;
} Right;

static Left as_is(const float *a, int width)
{
    return (Left){a, width, 1};
}

static Left turned(const float *a, int width)
{
    return (Left){a, 1, width};
}

static Right matrix(const void *b, int width)
{
    return (Right){b, width, BY_ROW};
}

static Right matrix_turned(const void *b, int width)
{
    return (Right){b, width, BY_COLUMN};
}

static Right weight(const frozen *w)
{
    return (Right){w, 0, PANELS_T};
}

static Right weight_turned(const frozen *w)
{
    return (Right){w, 0, PANELS};
}

/* c (m,n) = scale·a·b + bias, or += when accumulate. */
static void multiply(Device *dev, float *c, Left a, Right b, int m, int n, int k, float scale,
                     const float *bias, int accumulate)
{
    Product p = {c, n, a.at,  a.row, a.col,      b.at, b.stride, b.order, m,
                 n, k, scale, bias,  accumulate, 0,    0,        0};
    product_run(dev, &p);
}

void CPU(linear)(Device *dev, real *y, const real *x, const frozen *w, const float *bias, int T,
                 int N, int D, int accumulate)
{
    multiply(dev, f32(y), as_is(f32c(x), D), weight_turned(w), T, N, D, 1, bias, accumulate);
}

void CPU(linear_backward)(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int accumulate)
{
    multiply(dev, f32(dx), as_is(f32c(dy), N), weight(w), T, D, N, 1, NULL, accumulate);
}

typedef struct Turned {
    float *c;
    const float *a, *b;
    int M, N, K, accumulate;
} Turned;

enum { TURNED_ROWS = 64 }; /* of c that one job makes */

/* A column of `a` is a row of c: read as it lies, each k is a page of its own, and a whole number
 * of pages apart falls into few sets of the cache. So a block is turned once and serves all
 * columns.
 */
static void turned_job(void *context, int64_t job)
{
    const Turned *t = context;
    int m0 = (int)job * TURNED_ROWS, m = t->M - m0 < TURNED_ROWS ? t->M - m0 : TURNED_ROWS;
    _Alignas(64) float block[TURNED_ROWS * DEPTH];
    for (int k0 = 0; k0 == 0 || k0 < t->K; k0 += DEPTH) {
        int depth = t->K - k0 < DEPTH ? t->K - k0 : DEPTH;
        CPU(transpose)(block, DEPTH, t->a + (int64_t)k0 * t->M + m0, t->M, depth, m);
        CPU(product)(t->c + (int64_t)m0 * t->N, t->N, block, DEPTH, 1, t->b + (int64_t)k0 * t->N,
                     t->N, m, t->N, depth, 1.0f, t->accumulate || k0 > 0);
    }
}

void CPU(matmul)(Device *dev, float *c, const float *a, const void *b, int a_turned, int b_turned,
                 int b_bf16, int M, int N, int K, int accumulate)
{
    if (a_turned && !b_turned && !b_bf16 && N % WIDE == 0) {
        Turned t = {c, a, b, M, N, K, accumulate};
        cpu_run(dev, (M + TURNED_ROWS - 1) / TURNED_ROWS, turned_job, &t);
        return;
    }
    Product p = {.c = c,
                 .ldc = N,
                 .a = a,
                 .a_row = a_turned ? 1 : K,
                 .a_col = a_turned ? M : 1,
                 .b = b,
                 .ldb = b_turned ? K : N,
                 .order = b_turned ? BY_COLUMN : BY_ROW,
                 .bf16 = b_bf16,
                 .m = M,
                 .n = N,
                 .k = K,
                 .scale = 1.0f,
                 .accumulate = accumulate};
    product_run(dev, &p);
}

void CPU(lora)(Device *dev, real *y, real *s, const real *x, const float *a, const float *b, int T,
               int N, int D, int R, float scale)
{
    multiply(dev, f32(s), as_is(f32c(x), D), matrix(a, R), T, R, D, 1, NULL, 0);
    multiply(dev, f32(y), as_is(f32c(s), R), matrix(b, N), T, N, R, scale, NULL, 1);
}

void CPU(lora_backward)(Device *dev, real *dx, float *da, float *db, real *ds, const real *dy,
                        const real *x, const real *s, const float *a, const float *b, int T, int N,
                        int D, int R, float scale)
{
    multiply(dev, f32(ds), as_is(f32c(dy), N), matrix_turned(b, N), T, R, N, scale, NULL, 0);
    multiply(dev, db, turned(f32c(s), R), matrix(dy, N), R, N, T, scale, NULL, 1);
    multiply(dev, da, turned(f32c(x), D), matrix(ds, R), D, R, T, 1, NULL, 1);
    if (dx) multiply(dev, f32(dx), as_is(f32c(ds), R), matrix_turned(a, R), T, D, R, 1, NULL, 1);
}

void CPU(head)(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    CPU(linear)(dev, (real *)logits, x, w, NULL, T, V, D, 0);
}

void CPU(head_lora)(Device *dev, float *logits, real *s, const real *x, const float *a,
                    const float *b, int T, int V, int D, int R, float scale)
{
    CPU(lora)(dev, (real *)logits, s, x, a, b, T, V, D, R, scale);
}
