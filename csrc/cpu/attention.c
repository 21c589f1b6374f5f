/* cpu/attention.c - causal grouped-query attention over pages of KV_PAGE keys, forward and
 * backward.
 *
 *   y[t,h,:] = Σ_j softmax_j(q[t,h,:]·k[j,g,:]/√E)·v[j,g,:],  p−window < j ≤ p = position of t,
 *   g = h·G/H;  without a window, j ≤ p
 *
 * A layer's pages hold keys as [page][G][E][KV_PAGE] and values as [page][G][KV_PAGE][E], the
 * orders in which the two products read them. The forward walks the pages in order with a running
 * maximum, so a row does the same arithmetic whether it is one of many in training or alone in
 * decoding; it begins with the first page that one of its block's windows reaches. The backward
 * recomputes the probabilities from lse; dq, dk and dv of one key-value head belong to one piece of
 * work, so nothing is summed in an order that threads decide. Roofline: 4·E flops a query, head and
 * key forward, 10·E backward; compute bound in training; decoding reads each key and value once a
 * group of heads; memory bound, and so its rows, the heads of a group, have a product of their own,
 * which takes four registers of a page's row at once and asks for what is to come. */
#include "cpu.h"
#include "simd.h"

enum {
    QUERIES = 32,           /* query rows of one block: its scores (8 KB) stay in L1 */
    FEW = VL == 16 ? 4 : 2, /* rows whose sums with four registers of a page stay in registers */
    AHEAD = 1 << 10,        /* prefetch distance, in floats of a page */
};

enum { WRITE_ROWS = 64 }; /* of one job that writes keys and values */

/* Of an element that is written, which misses the cache, and of an element of a query against a
 * key, in both products and the softmax of a decoding step (cpu.h). */
#define NS_WRITE 2.0
#define NS 0.15

typedef struct Attention {
    float *y, *lse;
    const float *q, *k_pages, *v_pages;
    const Span *spans;
    const int32_t *pages;
    int S, H, G, E;
    int window; /* keys that a query sees at most, itself among them */
} Attention;

/* The window of an op that was given one, or 0 for none. */
static int window_of(int window)
{
    return window ? window : 1 << 30;
}

/* Pairs of a query and a key, at most: the first queries of a long span have fewer. */
static double pairs_of(const Span *spans, int S, int window)
{
    double pairs = 0;
    for (int s = 0; s < S; s++) {
        int seen = spans[s].pos + spans[s].rows;
        pairs += (double)spans[s].rows * (seen < window ? seen : window);
    }
    return pairs;
}

/* ---- the cache ---- */

typedef struct Write {
    float *k_pages, *v_pages;
    const float *k, *v;
    const int32_t *slot;
    int T, G, E;
    int64_t v_step; /* of v's rows */
} Write;

/* One key-value head of some rows: a key is a column of its page, so each number has a cache line
 * of its own, and two threads never write the same ones but where rows are cut. */
static void write_job(void *context, int64_t job)
{
    const Write *w = context;
    int g = (int)(job % w->G), E = w->E, from = (int)(job / w->G) * WRITE_ROWS;
    int to = w->T - from < WRITE_ROWS ? w->T : from + WRITE_ROWS;
    for (int t = from; t < to; t++) {
        int64_t page = w->slot[t] / KV_PAGE, offset = w->slot[t] % KV_PAGE;
        int64_t block = (page * w->G + g) * KV_PAGE * E, row = ((int64_t)t * w->G + g) * E;
        float *keys = w->k_pages + block + offset;
        for (int e = 0; e < E; e++) keys[e * KV_PAGE] = w->k[row + e];
        memcpy(w->v_pages + block + offset * E, w->v + t * w->v_step + g * E, (size_t)E * 4);
    }
}

void CPU(kv_write)(Device *dev, real *k_pages, real *v_pages, const real *k, const real *v,
                   const int32_t *slot, int T, int G, int E, int v_step)
{
    Write w = {f32(k_pages), f32(v_pages), f32c(k), f32c(v), slot, T, G, E, v_step};
    int64_t jobs = (int64_t)((T + WRITE_ROWS - 1) / WRITE_ROWS) * G;
    cpu_run_of(dev, NS_WRITE * T * G * E, jobs, write_job, &w);
}

void CPU(kv_copy)(Device *dev, real *k_pages, real *v_pages, int from, int to, int count, int G,
                  int E)
{
    (void)dev;
    for (int g = 0; g < G; g++) {
        int64_t source = ((int64_t)from * G + g) * KV_PAGE * E,
                target = ((int64_t)to * G + g) * KV_PAGE * E;
        for (int e = 0; e < E; e++)
            memcpy(f32(k_pages) + target + e * KV_PAGE, f32c(k_pages) + source + e * KV_PAGE,
                   (size_t)count * 4);
        memcpy(f32(v_pages) + target, f32c(v_pages) + source, (size_t)count * (size_t)E * 4);
    }
}

/* ---- forward ---- */

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

/* c (rows,n) = a·b, or c += a·b, with a page as b (k,n). */
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

/* Turns one row of scores, of which keys [hidden, live) are seen, into probabilities against the
 * running maximum; returns the factor by which the earlier sums must shrink. */
static float soften(float *score, int hidden, int live, float scale, float *top, float *sum)
{
    vf tallest = v_set(-INFINITY);
    for (int j = 0; j < hidden; j++) score[j] = -INFINITY;
    for (int j = live; j < KV_PAGE; j++) score[j] = -INFINITY;
    for (int j = 0; j < KV_PAGE; j += VL) tallest = v_max(v_load(score + j), tallest);
    float highest = v_top(tallest) * scale;
    if (!(highest > *top)) highest = *top;
    float shrink = *top == highest ? 1.0f : f_exp(*top - highest);
    vf total = v_set(0.0f);
    for (int j = 0; j < KV_PAGE; j += VL) {
        vf p = v_exp(v_load(score + j) * scale - highest);
        v_store(score + j, p);
        total += p;
    }
    *sum = *sum * shrink + v_sum(total);
    *top = highest;
    return shrink;
}

/* `rows` ≤ QUERIES queries of a span whose pages begin at `at` in the list; row i is q + i·q_row,
 * writes y + i·q_row and lse + i·lse_row, and sees the `window` keys up to position pos +
 * i·pos_step. */
static void attend(const Attention *c, int at, int g, int rows, int pos, int pos_step,
                   const float *q, float *y, int64_t q_row, float *lse, int64_t lse_row)
{
    int E = c->E, last = pos + (rows - 1) * pos_step, before = pos + 1 - c->window;
    float scale = 1.0f / sqrtf((float)E);
    float top[QUERIES], sum[QUERIES];
    _Alignas(64) float scores[QUERIES * KV_PAGE];
    for (int i = 0; i < rows; i++) {
        top[i] = -INFINITY;
        sum[i] = 0.0f;
        memset(y + i * q_row, 0, (size_t)E * 4);
    }
    for (int first = before > 0 ? before / KV_PAGE * KV_PAGE : 0; first <= last; first += KV_PAGE) {
        int64_t block = ((int64_t)c->pages[at + first / KV_PAGE] * c->G + g) * KV_PAGE * E;
        int keys = last - first + 1 < KV_PAGE ? last - first + 1 : KV_PAGE;
        int scored = (keys + 2 * VL - 1) / (2 * VL) * (2 * VL); /* whole tiles of a product */
        page_product(scores, KV_PAGE, q, q_row, c->k_pages + block, KV_PAGE, rows, scored, E, 0);
        for (int i = 0; i < rows; i++) {
            int live = pos + i * pos_step - first + 1, hidden = live - c->window;
            if (live <= 0 || hidden >= KV_PAGE) { /* the row does not see this page: exact zeros */
                memset(scores + i * KV_PAGE, 0, sizeof(float) * KV_PAGE);
                continue;
            }
            float shrink = soften(scores + i * KV_PAGE, hidden, live < KV_PAGE ? live : KV_PAGE,
                                  scale, &top[i], &sum[i]);
            if (shrink == 1.0f) continue;
            for (int e = 0; e < E; e++) y[i * q_row + e] *= shrink;
        }
        page_product(y, q_row, scores, KV_PAGE, c->v_pages + block, E, rows, E, keys, 1);
    }
    for (int i = 0; i < rows; i++) {
        float inverse = 1.0f / sum[i];
        for (int e = 0; e < E; e++) y[i * q_row + e] *= inverse;
        lse[i * lse_row] = top[i] + logf(sum[i]);
    }
}

/* One key-value head of one span: decoding takes its heads as rows, anything longer takes blocks of
 * positions. */
static void attention_piece(void *context, int64_t piece)
{
    const Attention *c = context;
    Span span = c->spans[piece / c->G];
    int g = (int)(piece % c->G), group = c->H / c->G;
    int64_t row = (int64_t)c->H * c->E;
    if (span.rows == 1) {
        for (int h = 0; h < group; h += QUERIES) {
            int rows = group - h < QUERIES ? group - h : QUERIES;
            int64_t at = ((int64_t)span.row * c->H + g * group + h) * c->E;
            attend(c, span.first, g, rows, span.pos, 0, c->q + at, c->y + at, c->E,
                   c->lse + (int64_t)span.row * c->H + g * group + h, 1);
        }
        return;
    }
    for (int i = 0; i < span.rows; i += QUERIES) {
        int rows = span.rows - i < QUERIES ? span.rows - i : QUERIES;
        for (int h = g * group; h < (g + 1) * group; h++) {
            int64_t at = ((int64_t)(span.row + i) * c->H + h) * c->E;
            attend(c, span.first, g, rows, span.pos + i, 1, c->q + at, c->y + at, row,
                   c->lse + (int64_t)(span.row + i) * c->H + h, c->H);
        }
    }
}

void CPU(attention)(Device *dev, real *y, float *lse, const real *q, const real *k_pages,
                    const real *v_pages, const Span *spans, const int32_t *pages, int S, int T,
                    int H, int G, int E, int window)
{
    (void)T;
    Attention c = {f32(y), lse, f32c(q), f32c(k_pages),    f32c(v_pages), spans, pages, S,
                   H,      G,   E,       window_of(window)};
    cpu_run_uneven(dev, NS * pairs_of(spans, S, c.window) * H * E, (int64_t)S * G, attention_piece,
                   &c);
}

/* ---- backward ---- */

typedef struct Backward {
    const Device *dev;
    float *dq, *dk, *dv;
    const float *dy, *y, *lse, *q, *k, *v;
    const Span *spans;
    int H, G, E, window;
    int64_t q_step, kv_step; /* of dq's rows, and of dk's, dv's and v's */
} Backward;

enum {
    HEAD_MAX = 256,                      /* widest head: a block's operands are scratch */
    BLOCK = KV_PAGE,                     /* query rows, and keys, of one block */
    OPERAND = BLOCK * HEAD_MAX + 2 * VL, /* a product reads whole tiles */
};

/* The operands of a block, side by side: heads lie a power of two apart in memory, where their rows
 * would share a few sets of the cache. */
typedef struct Operands {
    _Alignas(64) float kt[OPERAND], vt[OPERAND]; /* (E,BLOCK) */
    _Alignas(64) float k[OPERAND], dk[OPERAND], dv[OPERAND], q[OPERAND],
        dy[OPERAND];                                            /* (BLOCK,E) */
    _Alignas(64) float p[BLOCK * KV_PAGE], ds[BLOCK * KV_PAGE]; /* of one block of queries */
} Operands;

_Static_assert(sizeof(Operands) <= POOL_SCRATCH, "a block's operands");

static void rows_copy(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int E)
{
    for (int i = 0; i < rows; i++)
        memcpy(to + i * to_row, from + i * from_row, (size_t)E * sizeof *to);
}

/* One block of queries against one block of keys of one head: adds to its dq, and dk, dv.
 * p = exp(q·kᵀ·scale − lse);  dv += pᵀ·dy;  ds = p·(dy·vᵀ − Σ dy·y)·scale;  dq += ds·k;  dk +=
 * dsᵀ·q.  The i-th query sees the `window` keys up to the block's number ahead + i. */
static void backward_block(const Backward *c, Operands *o, int64_t q_at, float *dq, int64_t lse_at,
                           int rows, int keys, int ahead)
{
    int E = c->E;
    int64_t q_row = (int64_t)c->H * E;
    float scale = 1.0f / sqrtf((float)E);
    float *p = o->p, *ds = o->ds;
    rows_copy(o->q, E, c->q + q_at, q_row, rows, E);
    rows_copy(o->dy, E, c->dy + q_at, q_row, rows, E);
    CPU(product)(p, KV_PAGE, o->q, E, 1, o->kt, KV_PAGE, rows, KV_PAGE, E, scale, 0);
    CPU(product)(ds, KV_PAGE, o->dy, E, 1, o->vt, KV_PAGE, rows, KV_PAGE, E, 1.0f, 0);
    for (int i = 0; i < rows; i++) {
        const float *dy = o->dy + i * E, *y = c->y + q_at + i * q_row;
        vf total = v_set(0.0f);
        int e = 0;
        for (; e + VL <= E; e += VL) total = v_fma(v_load(dy + e), v_load(y + e), total);
        float delta = v_sum(total), lse = c->lse[lse_at + (int64_t)i * c->H];
        for (; e < E; e++) delta += dy[e] * y[e];
        float *pi = p + i * KV_PAGE, *di = ds + i * KV_PAGE;
        int live = ahead + i + 1 < keys ? ahead + i + 1 : keys, hidden = ahead + i + 1 - c->window;
        hidden = hidden < 0 ? 0 : hidden < live ? hidden : live;
        for (int j = hidden / VL * VL; j < live; j += VL) {
            vf x = v_exp(v_load(pi + j) - lse);
            v_store(pi + j, x);
            v_store(di + j, x * (v_load(di + j) - delta) * scale);
        }
        for (int j = 0; j < hidden; j++) pi[j] = di[j] = 0.0f;
        for (int j = live; j < KV_PAGE; j++) pi[j] = di[j] = 0.0f;
    }
    CPU(product)(o->dv, E, p, 1, KV_PAGE, o->dy, E, keys, E, rows, 1.0f, 1);
    CPU(product)(dq, c->q_step, ds, KV_PAGE, 1, o->k, E, rows, E, keys, 1.0f, 1);
    CPU(product)(o->dk, E, ds, 1, KV_PAGE, o->q, E, keys, E, rows, 1.0f, 1);
}

static void backward_piece(void *context, int64_t piece)
{
    const Backward *c = context;
    Span span = c->spans[piece / c->G];
    int g = (int)(piece % c->G), group = c->H / c->G, E = c->E;
    int64_t q_row = (int64_t)c->H * E, k_row = (int64_t)c->G * E;
    float *dq = c->dq + g * group * E;
    size_t block = (size_t)E * BLOCK * sizeof(float);
    Operands *o = cpu_scratch(c->dev);
    memset(o->kt, 0, block);
    memset(o->vt, 0, block);
    for (int i = 0; i < span.rows; i++)
        memset(dq + (span.row + i) * c->q_step, 0, (size_t)group * (size_t)E * sizeof(float));
    for (int j = 0; j < span.rows; j += BLOCK) {
        int keys = span.rows - j < BLOCK ? span.rows - j : BLOCK;
        int64_t k_at = (int64_t)(span.row + j) * k_row + g * E;
        int64_t v_at = (span.row + j) * c->kv_step + g * E;
        CPU(transpose)(o->kt, KV_PAGE, c->k + k_at, k_row, keys, E);
        CPU(transpose)(o->vt, KV_PAGE, c->v + v_at, c->kv_step, keys, E);
        rows_copy(o->k, E, c->k + k_at, k_row, keys, E);
        memset(o->dk, 0, block);
        memset(o->dv, 0, block);
        for (int i = j; i < span.rows && i - (j + keys) < c->window - 1; i += BLOCK) {
            int rows = span.rows - i < BLOCK ? span.rows - i : BLOCK;
            for (int h = 0; h < group; h++) {
                int64_t head = g * group + h;
                backward_block(c, o, (span.row + i) * q_row + head * E,
                               dq + (span.row + i) * c->q_step + h * E,
                               (int64_t)(span.row + i) * c->H + head, rows, keys, i - j);
            }
        }
        rows_copy(c->dk + v_at, c->kv_step, o->dk, E, keys, E);
        rows_copy(c->dv + v_at, c->kv_step, o->dv, E, keys, E);
    }
}

void CPU(attention_backward)(Device *dev, real *dq, real *dk, real *dv, const real *dy,
                             const real *y, const float *lse, const real *q, const real *k,
                             const real *v, const Span *spans, int S, int T, int H, int G, int E,
                             int window, int q_step, int kv_step)
{
    (void)T;
    if (E > HEAD_MAX) {
        cpu_fail(dev, STATUS_INVALID, "head width %d is more than the CPU's attention takes (%d)",
                 E, HEAD_MAX);
        return;
    }
    Backward c = {dev, f32(dq), f32(dk),           f32(dv), f32c(dy), f32c(y),
                  lse, f32c(q), f32c(k),           f32c(v), spans,    H,
                  G,   E,       window_of(window), q_step,  kv_step};
    cpu_run_uneven(dev, NS * pairs_of(spans, S, c.window) * H * E, (int64_t)S * G, backward_piece,
                   &c);
}
