/* cpu/delta/delta_backward.c - the gated delta rule's gradients, page by page, from a sequence's
 * last to its first.
 *
 * In the terms of delta.c, with D_ij = e^{G_i−G_j}, A_ij = k_j·k_i, B_ij = k_j·q_i, M the page's
 * state and M' the next one:
 *
 *   du_j = e^{G_last−G_j}·dM'ᵀk_j + Σ_{i≥j} D_ij·B_ij·dy_i − Σ_{i>j} D_ij·A_ij·dw_i
 *   dw = β·du;  dv = dw;  dβ = du·w
 *   dB_ij = D_ij·dy_i·u_j (j ≤ i);  dA_ij = −D_ij·dw_i·u_j (j < i)
 *   dq_i = e^{G_i}·M·dy_i + Σ_j dB_ij·k_j
 *   dk_i = −e^{G_i}·M·dw_i + Σ_j dA_ij·k_j + Σ_j (dA_ji·k_j + dB_ji·q_j) + e^{G_last−G_i}·dM'·u_i
 *   dM = e^{G_last}·dM' + Σ_i e^{G_i}·(q_i·dy_iᵀ − k_i·dw_iᵀ)
 *
 * dG_i sums over every exponent that contains G_i, and dg_i = Σ_{m≥i} dG_m. A piece of work is a
 * key head of a span; the gradients of its q and k are summed over its value heads in order.
 * Roofline: 12·N·E flops per row and value head for the states, and three times the forward's
 * within a page; compute bound, in L2. */
#include "delta.h"

#include "../product/gemm.h"
#include "../runtime/transpose.h"

/* Per state element and row (cpu.h). */
#define NS 0.2

typedef struct DeltaBackward {
    const Device *dev;
    float *dq, *dk, *dv, *dbeta, *ddecay;
    const float *dy, *w, *pages, *q, *k, *v, *beta, *decay;
    const Span *spans;
    int G, H, N, E;
} DeltaBackward;

typedef float Square[KV_PAGE * KV_PAGE];
typedef float Rows[KV_PAGE * DELTA_MOST];

typedef struct DeltaBackwardWork {
    _Alignas(64) float dstate[DELTA_MOST * DELTA_MOST], turned[DELTA_MOST * DELTA_MOST];
    _Alignas(64) Rows q, k, keys, u, u_turned, dy, du, dq, dk,
        read; /* keys and u_turned: columns */
    _Alignas(64) Square decays, kk, kq, dkk, dkq;
    _Alignas(64) float sums[SUMS], from_start[KV_PAGE], to_end[KV_PAGE];
    double dsums[KV_PAGE]; /* double: rows' terms cancel */
} DeltaBackwardWork;

_Static_assert(sizeof(DeltaBackwardWork) <= POOL_SCRATCH, "a piece's scratch");

/* A page of one value head: rows [t, t + rows) of the batch. NULL `state` or `dnext`: zero. */
typedef struct Page {
    int t, rows, g, h;
    const float *state;
    float *dnext;
} Page;

static float dot(const float *a, const float *b, int n)
{
    vf total = v_set(0.0f);
    for (int i = 0; i < n; i += VL) total = v_fma(v_load(a + i), v_load(b + i), total);
    return v_sum(total);
}

static void scale_rows(float *x, const float *by, int rows, int width)
{
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < width; e += VL)
            v_store(x + i * width + e, v_load(x + i * width + e) * by[i]);
}

/* c (m,n) [+]= scale·a·b with contiguous rows of b (k,n). */
static void times(float *c, const float *a, int64_t a_row, int64_t a_col, const float *b, int n,
                  int m, int k, float scale, int add)
{
    CPU(product)(c, n, a, a_row, a_col, b, n, m, n, k, scale, add);
}

/* Recomputes the forward's values in the page. */
static void page_open(const DeltaBackward *c, DeltaBackwardWork *o, const Page *p)
{
    int N = c->N, E = c->E, rows = p->rows;
    int64_t key = ((int64_t)p->t * c->G + p->g) * N, value = ((int64_t)p->t * c->H + p->h) * E;
    int64_t gate = (int64_t)p->t * c->H + p->h;
    memset(o->keys, 0, sizeof o->keys);
    memset(o->u_turned, 0, sizeof o->u_turned);
    rows_gather(o->q, c->q + key, (int64_t)c->G * N, rows, N);
    rows_gather(o->k, c->k + key, (int64_t)c->G * N, rows, N);
    rows_gather(o->u, c->w + value, (int64_t)c->H * E, rows, E);
    rows_gather(o->dy, c->dy + value, (int64_t)c->H * E, rows, E);
    for (int i = 0; i < rows; i++)
        for (int e = 0; e < E; e += VL)
            v_store(o->u + i * E + e, v_load(o->u + i * E + e) * c->beta[gate + (int64_t)i * c->H]);
    keys_turn(o->keys, 0, o->k, N, rows, N);
    keys_turn(o->u_turned, 0, o->u, E, rows, E);
    memset(o->sums, 0, sizeof o->sums);
    sums_add(o->sums, c->decay + gate, c->H, 0, rows);
    for (int i = 0; i < rows; i++) {
        o->from_start[i] = sums_factor(o->sums, i);
        o->dsums[i] = 0.0;
        for (int j = 0; j < KV_PAGE; j += VL)
            v_store(o->decays + i * KV_PAGE + j, sums_decay(o->sums, i, j));
        memset(o->decays + i * KV_PAGE + i + 1, 0, (size_t)(KV_PAGE - i - 1) * sizeof *o->decays);
    }
    memcpy(o->to_end, o->decays + (rows - 1) * KV_PAGE, sizeof o->to_end);
    CPU(product)(o->kk, KV_PAGE, o->k, N, 1, o->keys, KV_PAGE, rows, KV_PAGE, N, 1.0f, 0);
    CPU(product)(o->kq, KV_PAGE, o->q, N, 1, o->keys, KV_PAGE, rows, KV_PAGE, N, 1.0f, 0);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < KV_PAGE; j += VL) {
            int at = i * KV_PAGE + j;
            v_store(o->kk + at, v_load(o->kk + at) * v_load(o->decays + at));
            v_store(o->kq + at, v_load(o->kq + at) * v_load(o->decays + at));
        }
}

/* du, then dw in its place, from the last row down; dv and dbeta. */
static void solve(const DeltaBackward *c, DeltaBackwardWork *o, const Page *p)
{
    int N = c->N, E = c->E, rows = p->rows;
    if (p->dnext) {
        times(o->du, o->k, N, 1, p->dnext, E, rows, N, 1.0f, 0);
        scale_rows(o->du, o->to_end, rows, E);
    } else {
        memset(o->du, 0, sizeof o->du);
    }
    times(o->du, o->kq, 1, KV_PAGE, o->dy, E, rows, rows, 1.0f, 1);
    for (int j = rows - 1; j >= 0; j--) {
        int64_t gate = (int64_t)(p->t + j) * c->H + p->h;
        float *du = o->du + j * E;
        for (int i = j + 1; i < rows; i++) {
            vf by = v_set(-o->kk[i * KV_PAGE + j]);
            for (int e = 0; e < E; e += VL)
                v_store(du + e, v_fma(by, v_load(o->du + i * E + e), v_load(du + e)));
        }
        c->dbeta[gate] = dot(du, c->w + gate * E, E);
        vf beta = v_set(c->beta[gate]);
        for (int e = 0; e < E; e += VL) {
            vf dw = v_load(du + e) * beta;
            v_store(du + e, dw);
            v_store(c->dv + gate * E + e, dw);
        }
    }
}

/* dB and dA, and the terms of dsums from decays between the page's rows. */
static void pairs(const DeltaBackward *c, DeltaBackwardWork *o, const Page *p)
{
    int E = c->E, rows = p->rows;
    CPU(product)(o->dkq, KV_PAGE, o->dy, E, 1, o->u_turned, KV_PAGE, rows, KV_PAGE, E, 1.0f, 0);
    CPU(product)(o->dkk, KV_PAGE, o->du, E, 1, o->u_turned, KV_PAGE, rows, KV_PAGE, E, -1.0f, 0);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < KV_PAGE; j++) {
            int at = i * KV_PAGE + j;
            if (j < i) {
                double slope = (double)o->kq[at] * o->dkq[at] + (double)o->kk[at] * o->dkk[at];
                o->dsums[i] += slope;
                o->dsums[j] -= slope;
            }
            o->dkq[at] = j <= i ? o->dkq[at] * o->decays[at] : 0.0f;
            o->dkk[at] = j < i ? o->dkk[at] * o->decays[at] : 0.0f;
        }
}

/* dq and dk of the page, in o->dq and o->dk; dy and dw become those times e^{G_i}. */
static void keys_gradient(const DeltaBackward *c, DeltaBackwardWork *o, const Page *p)
{
    int N = c->N, E = c->E, rows = p->rows, last = rows - 1;
    memset(o->dq, 0, sizeof o->dq);
    memset(o->dk, 0, sizeof o->dk);
    if (p->dnext) { /* through the page's part of the next state */
        CPU(transpose)(o->turned, N, p->dnext, E, N, E);
        times(o->dk, o->u, E, 1, o->turned, N, rows, E, 1.0f, 0);
        scale_rows(o->dk, o->to_end, rows, N);
        for (int i = 0; i < rows; i++) {
            float slope = dot(o->dk + i * N, o->k + i * N, N);
            o->dsums[last] += slope;
            o->dsums[i] -= slope;
        }
    }
    scale_rows(o->dy, o->from_start, rows, E);
    scale_rows(o->du, o->from_start, rows, E);
    if (p->state) { /* through the page's reads of its state */
        float *read = o->read;
        CPU(transpose)(o->turned, N, p->state, E, N, E);
        times(o->dq, o->dy, E, 1, o->turned, N, rows, E, 1.0f, 0);
        times(read, o->du, E, 1, o->turned, N, rows, E, -1.0f, 0);
        for (int i = 0; i < rows; i++) {
            o->dsums[i] += dot(o->dq + i * N, o->q + i * N, N) + dot(read + i * N, o->k + i * N, N);
            for (int n = 0; n < N; n += VL)
                v_store(o->dk + i * N + n, v_load(o->dk + i * N + n) + v_load(read + i * N + n));
        }
    }
    times(o->dq, o->dkq, KV_PAGE, 1, o->k, N, rows, rows, 1.0f, 1);
    times(o->dk, o->dkk, KV_PAGE, 1, o->k, N, rows, rows, 1.0f, 1);
    times(o->dk, o->dkk, 1, KV_PAGE, o->k, N, rows, rows, 1.0f, 1);
    times(o->dk, o->dkq, 1, KV_PAGE, o->q, N, rows, rows, 1.0f, 1);
}

/* dstate becomes the gradient of the page's own state, decayed by e^{G_last}; o->dy and o->du
 * already have the factor e^{G_i}. */
static void state_gradient(const DeltaBackward *c, DeltaBackwardWork *o, const Page *p)
{
    int N = c->N, E = c->E, rows = p->rows;
    if (p->dnext) {
        float whole = o->from_start[rows - 1];
        o->dsums[rows - 1] += whole * dot(p->state, p->dnext, N * E);
        for (int i = 0; i < N * E; i += VL) v_store(o->dstate + i, v_load(p->dnext + i) * whole);
    } else {
        memset(o->dstate, 0, (size_t)(N * E) * sizeof *o->dstate);
    }
    times(o->dstate, o->q, 1, N, o->dy, E, N, rows, 1.0f, 1);
    times(o->dstate, o->k, 1, N, o->du, E, N, rows, -1.0f, 1);
}

static void page_leave(const DeltaBackward *c, const DeltaBackwardWork *o, const Page *p, int add)
{
    int N = c->N;
    for (int i = 0; i < p->rows; i++) {
        int64_t at = ((int64_t)(p->t + i) * c->G + p->g) * N;
        for (int n = 0; n < N; n += VL) {
            vf dq = v_load(o->dq + i * N + n), dk = v_load(o->dk + i * N + n);
            v_store(c->dq + at + n, add ? v_load(c->dq + at + n) + dq : dq);
            v_store(c->dk + at + n, add ? v_load(c->dk + at + n) + dk : dk);
        }
    }
    double sum = 0.0;
    for (int i = p->rows - 1; i >= 0; i--)
        c->ddecay[(int64_t)(p->t + i) * c->H + p->h] = (float)(sum += o->dsums[i]);
}

static void backward_piece(void *context, int64_t piece)
{
    const DeltaBackward *c = context;
    Span span = c->spans[piece / c->G];
    int g = (int)(piece % c->G), group = c->H / c->G;
    DeltaBackwardWork *o = cpu_scratch(c->dev);
    for (int h = g * group; h < (g + 1) * group; h++) {
        int first = (span.rows - 1) / KV_PAGE * KV_PAGE, end = span.rows;
        for (float *dnext = NULL; first >= 0; end = first, first -= KV_PAGE, dnext = o->dstate) {
            Page p = {span.row + first, end - first, g, h, NULL, dnext};
            size_t before = (size_t)((p.t - KV_PAGE) / KV_PAGE) * (size_t)c->H + (size_t)h;
            if (first) p.state = c->pages + before * (size_t)(c->N * c->E);
            page_open(c, o, &p);
            solve(c, o, &p);
            pairs(c, o, &p);
            keys_gradient(c, o, &p);
            if (p.state) state_gradient(c, o, &p);
            page_leave(c, o, &p, h > g * group);
        }
    }
}

void CPU(delta_backward)(Device *dev, real *dq, real *dk, real *dv, float *dbeta, float *ddecay,
                         const real *dy, const float *w, const float *pages, const real *q,
                         const real *k, const real *v, const float *beta, const float *decay,
                         const Span *spans, int S, int T, int G, int H, int N, int E)
{
    DeltaBackward c = {dev,   f32(dq), f32(dk), f32(dv), dbeta,   ddecay, f32c(dy),
                       w,     pages,   f32c(q), f32c(k), f32c(v), beta,   decay,
                       spans, G,       H,       N,       E};
    cpu_run_uneven(dev, NS * T * H * N * E, (int64_t)S * G, backward_piece, &c);
}
