/* cpu/delta/delta.c - the gated delta rule, forward: one state M (N,E) per value head instead of
 * keys.
 *
 *   M ← e^g·M;  w = v − Mᵀk;  M ← M + k·(β·w)ᵀ;  y = Mᵀq
 *
 * Training, prefill and decoding must give the same bits, so none is summed as above. Every
 * sequence is split at multiples of KV_PAGE. In a page that begins with state M, with G_i the sum
 * of g over the page's rows up to i, and u = β·w:
 *
 *   w_i = v_i − (e^{G_i}·Mᵀk_i + Σ_{j<i} e^{G_i−G_j}·(k_j·k_i)·u_j)
 *   y_i = e^{G_i}·Mᵀq_i + Σ_{j≤i} e^{G_i−G_j}·(k_j·q_i)·u_j
 *   M ← e^{G_last}·M + Σ_j k_j·(e^{G_last−G_j}·u_j)ᵀ, after the page's last row
 *
 * A row reads M and earlier rows of its page, so the number of rows run at once does not matter:
 * products sum in one order for any shape, and the sums over j are made row by row. A sequence
 * keeps M, and k, u and G of its open page (delta_state.h). M advances only with the next page's
 * first row, so that the newest row can be rerun. Exponents are at most 0.
 *
 * A piece of work is a key head of a span: its value heads share the keys' products. Roofline:
 * about 4·N·E flops a row and value head for the state, 2·KV_PAGE·(N + E) within the page; compute
 * bound in training, where M is in L2; decoding reads M and the open page once: memory bound. */
#include "delta.h"

#include "../product/gemm.h"

/* Per state element and row (cpu.h). */
#define NS 0.06

typedef struct Rule {
    const Device *dev;
    float *y, *w, *pages, *state, *open;
    const float *q, *k, *v, *beta, *decay;
    const Span *spans;
    int G, H, N, E;
    int64_t step;
} Rule;

enum { ROWS = KV_PAGE };

/* Scratch of one key head and one of its value heads. If the sequence keeps a state, the keys, u
 * and sums of decays of the open page are there instead. */
typedef struct DeltaWork {
    _Alignas(64) float keys[DELTA_MOST * KV_PAGE], u[KV_PAGE * DELTA_MOST], sums[SUMS];
    _Alignas(64) float kq[2 * ROWS * DELTA_MOST];     /* rows of k, then of q */
    _Alignas(64) float within[2 * ROWS * KV_PAGE];    /* kq times the page's keys */
    _Alignas(64) float read[2 * ROWS * DELTA_MOST];   /* kq times the state */
    _Alignas(64) float weights[2 * ROWS * KV_PAGE];   /* `within`, decayed */
    _Alignas(64) float decayed[DELTA_MOST * KV_PAGE]; /* keys */
} DeltaWork;

_Static_assert(sizeof(DeltaWork) <= POOL_SCRATCH, "a piece's scratch");

/* One value head of a span, in its open page. */
typedef struct DeltaHead {
    float *state; /* NULL: all zeros */
    float *u, *sums, *keys;
    int h;
} DeltaHead;

/* to = the state after the page; `to` may be the state itself. */
static void advance(const Rule *c, DeltaWork *work, const DeltaHead *head, float *to)
{
    int N = c->N, E = c->E;
    float factor[KV_PAGE];
    vf whole = v_set(sums_factor(head->sums, KV_PAGE - 1));
    for (int j = 0; j < KV_PAGE; j += VL)
        v_store(factor + j, sums_decay(head->sums, KV_PAGE - 1, j));
    for (int n = 0; n < N; n++)
        for (int j = 0; j < KV_PAGE; j += VL)
            v_store(work->decayed + n * KV_PAGE + j,
                    v_load(head->keys + n * KV_PAGE + j) * v_load(factor + j));
    for (int i = 0; i < N * E; i += VL)
        v_store(to + i, head->state ? v_load(head->state + i) * whole : v_set(0.0f));
    CPU(product)(to, E, work->decayed, KV_PAGE, 1, head->u, E, N, E, KV_PAGE, 1.0f, 1);
}

/* `wide` registers of columns from e on of the page's row `at`: the sums over earlier rows, then w
 * and u, then y. `kk` and `kq` are the weights of those rows for w and for y. */
static inline __attribute__((always_inline)) void
row_columns(float *y, float *w, float *u, const float *v, const float *state_k,
            const float *state_q, const float *kk, const float *kq, int at, int e, int E,
            float first, float beta, const int wide)
{
    vf for_w[8], for_y[8];
#pragma GCC unroll 8
    for (int i = 0; i < wide; i++) for_w[i] = for_y[i] = v_set(0.0f);
    const float *row = u + e;
    for (int j = 0; j < at; j++, row += E) {
        vf a = v_set(kk[j]), b = v_set(kq[j]);
#pragma GCC unroll 8
        for (int i = 0; i < wide; i++) {
            vf x = v_load(row + i * VL);
            for_w[i] = v_fma(a, x, for_w[i]);
            for_y[i] = v_fma(b, x, for_y[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < wide; i++) {
        int at_e = e + i * VL;
        vf scale = v_set(first), left = v_load(v + at_e);
        left -= v_fma(scale, v_load(state_k + at_e), for_w[i]);
        vf own = v_set(beta) * left;
        v_store(u + (int64_t)at * E + at_e, own);
        if (w) v_store(w + at_e, left);
        for_y[i] = v_fma(v_set(kq[at]), own, for_y[i]);
        v_store(y + at_e, v_fma(scale, v_load(state_q + at_e), for_y[i]));
    }
}

/* Rows [first, first + rows) of the page, from row t on. */
static void head_rows_run(const Rule *c, DeltaWork *work, const DeltaHead *head, int t, int first,
                          int rows)
{
    int E = c->E, H = c->H, h = head->h;
    const float *beta = c->beta + (int64_t)t * H + h;
    for (int e = 0; e < E;) {
        int left = (E - e) / VL, wide = VL == 16 && left >= 8 ? 8 : left >= 4 ? 4 : 2;
        for (int i = 0; i < rows; i++) {
            int at = first + i;
            int64_t row = ((int64_t)(t + i) * H + h) * E;
            const float *kk = work->weights + i * KV_PAGE, *kq = kk + rows * KV_PAGE;
            const float *read = work->read + i * E;
            float *w = c->w ? c->w + row : NULL;
            float from_start = sums_factor(head->sums, at);
#define COLUMNS(n)                                                                           \
    row_columns(c->y + row, w, head->u, c->v + row, read, read + rows * E, kk, kq, at, e, E, \
                from_start, beta[(int64_t)i * H], n)
            if (wide == 8)
                COLUMNS(8);
            else if (wide == 4)
                COLUMNS(4);
            else
                COLUMNS(2);
#undef COLUMNS
        }
        e += wide * VL;
    }
}

/* The new rows' products in the page, decayed, and their products with the state. */
static void head_run(const Rule *c, DeltaWork *work, const DeltaHead *head, int t, int first,
                     int rows)
{
    int N = c->N, E = c->E, columns = page_columns(first + rows);
    sums_add(head->sums, c->decay + (int64_t)t * c->H + head->h, c->H, first, rows);
    for (int i = 0; i < 2 * rows; i++)
        for (int j = 0; j < columns; j += VL) {
            int at = i * KV_PAGE + j;
            vf decay = sums_decay(head->sums, first + i % rows, j);
            v_store(work->weights + at, decay * v_load(work->within + at));
        }
    if (head->state)
        CPU(product)(work->read, E, work->kq, N, 1, head->state, E, 2 * rows, E, N, 1.0f, 0);
    else
        memset(work->read, 0, (size_t)(2 * rows * E) * sizeof *work->read);
    head_rows_run(c, work, head, t, first, rows);
}

/* A sequence's state: its header, its matrices, its open page. */
typedef struct Kept {
    float *head, *matrices, *keys, *u, *sums;
} Kept;

static Kept kept_of(const Rule *c, int32_t slot)
{
    float *state = c->state + slot * c->step, *open = c->open + slot * c->step;
    size_t G = (size_t)c->G, H = (size_t)c->H, N = (size_t)c->N, E = (size_t)c->E;
    float *u = open + G * N * KV_PAGE;
    return (Kept){state, state + H * DELTA_HEAD, open, u, u + H * KV_PAGE * E};
}

static DeltaHead head_of(const Rule *c, DeltaWork *work, const Kept *kept, int g, int h)
{
    size_t N = (size_t)c->N, E = (size_t)c->E;
    if (!kept) return (DeltaHead){NULL, work->u, work->sums, work->keys, h};
    return (DeltaHead){kept->matrices + (size_t)h * N * E, kept->u + (size_t)h * KV_PAGE * E,
                       kept->sums + (size_t)h * SUMS, kept->keys + (size_t)g * N * KV_PAGE, h};
}

/* Advances a value head's kept state to the page of position `pos`. */
static void head_turn(const Rule *c, DeltaWork *work, const Kept *kept, const DeltaHead *head,
                      int pos)
{
    float *header = kept->head + (size_t)head->h * DELTA_HEAD;
    int32_t page = pos / KV_PAGE, known;
    memcpy(&known, header, sizeof known);
    if (!pos)
        memset(head->state, 0, (size_t)(c->N * c->E) * sizeof *head->state);
    else if (known != page)
        advance(c, work, head, head->state);
    memcpy(header, &page, sizeof page);
}

static float *page_state(const Rule *c, int row, int h)
{
    size_t number = (size_t)(row / KV_PAGE) * (size_t)c->H + (size_t)h;
    return c->pages + number * (size_t)c->N * (size_t)c->E;
}

static void rule_piece(void *context, int64_t piece)
{
    const Rule *c = context;
    Span span = c->spans[piece / c->G];
    int g = (int)(piece % c->G), group = c->H / c->G, N = c->N;
    DeltaWork *work = cpu_scratch(c->dev);
    Kept own, *kept = NULL;
    if (span.state >= 0) {
        own = kept_of(c, span.state);
        kept = &own;
    }
    for (int i = 0, rows; i < span.rows; i += rows) {
        int pos = span.pos + i, first = pos % KV_PAGE, t = span.row + i;
        rows = KV_PAGE - first < span.rows - i ? KV_PAGE - first : span.rows - i;
        for (int h = g * group; kept && h < (g + 1) * group; h++) {
            DeltaHead head = head_of(c, work, kept, g, h);
            head_turn(c, work, kept, &head, pos);
        }
        DeltaHead any = head_of(c, work, kept, g, g * group);
        rows_gather(work->kq, c->k + ((int64_t)t * c->G + g) * N, (int64_t)c->G * N, rows, N);
        rows_gather(work->kq + rows * N, c->q + ((int64_t)t * c->G + g) * N, (int64_t)c->G * N,
                    rows, N);
        keys_turn(any.keys, first, work->kq, N, rows, N);
        CPU(product)(work->within, KV_PAGE, work->kq, N, 1, any.keys, KV_PAGE, 2 * rows,
                     page_columns(first + rows), N, 1.0f, 0);
        for (int h = g * group; h < (g + 1) * group; h++) {
            DeltaHead head = head_of(c, work, kept, g, h);
            if (!kept && i && c->pages) head.state = page_state(c, t - KV_PAGE, h);
            head_run(c, work, &head, t, first, rows);
            if (!kept && c->pages && rows == KV_PAGE) advance(c, work, &head, page_state(c, t, h));
        }
    }
}

static double rows_of(const Span *spans, int S)
{
    double rows = 0;
    for (int s = 0; s < S; s++) rows += spans[s].rows;
    return rows;
}

void CPU(delta)(Device *dev, real *y, float *w, float *pages, float *state, float *open,
                const real *q, const real *k, const real *v, const float *beta, const float *decay,
                const Span *spans, int S, int T, int G, int H, int N, int E, int64_t step)
{
    (void)T;
    Rule c = {dev,  f32(y), w,     pages, state, open, f32c(q), f32c(k), f32c(v),
              beta, decay,  spans, G,     H,     N,    E,       step};
    cpu_run_uneven(dev, NS * rows_of(spans, S) * H * N * E, (int64_t)S * G, rule_piece, &c);
}
