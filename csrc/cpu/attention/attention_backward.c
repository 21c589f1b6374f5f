/* cpu/attention/attention_backward.c - the gradient of attention.c, for whole sequences.
 *
 *   p = exp(q·kᵀ/√E − lse);  dv = pᵀ·dy;  ds = p·(dy·vᵀ − Σ dy·y)/√E;  dq = ds·k;  dk = dsᵀ·q
 *
 * The probabilities are recomputed from lse. dq, dk and dv of one key-value head are one piece of
 * work, so threads decide no order of sums. In the set with bf16 pairs all five products take
 * pairs, of the forward's rounded queries, keys and values. Roofline: 10·E flops per query, head
 * and key; compute bound. */
#include "attention.h"

#include "../product/gemm.h"
#include "../runtime/transpose.h"

typedef struct AttentionBackward {
    const Device *dev;
    float *dq, *dk, *dv;
    const float *dy, *y, *lse, *q, *k, *v;
    const Span *spans;
    int H, G, E, window;
    int64_t q_step, kv_step; /* row strides of dq, and of dk, dv and v */
} AttentionBackward;

enum {
    HEAD_MAX = 256,                      /* widest head: a block's operands are scratch */
    BLOCK = KV_PAGE,                     /* query rows, and keys, of one block */
    OPERAND = BLOCK * HEAD_MAX + 2 * VL, /* a product reads whole tiles */
};

/* A block's operands, contiguous: in memory heads have power-of-two strides, at which rows would
 * share a few cache sets. With pairs, a dimension that is summed has half as many lanes. */
typedef struct Operands {
    _Alignas(64) float kt[OPERAND], vt[OPERAND]; /* (E,BLOCK) */
    _Alignas(64) float k[OPERAND], dk[OPERAND], dv[OPERAND], q[OPERAND],
        dy[OPERAND];                                            /* (BLOCK,E) */
    _Alignas(64) float p[BLOCK * KV_PAGE], ds[BLOCK * KV_PAGE]; /* of one block of queries */
#if defined(__AVX512BF16__)
    _Alignas(64) float q_down[OPERAND / 2], dy_down[OPERAND / 2]; /* pairs of rows */
    _Alignas(64) float p_down[BLOCK * KV_PAGE / 2], ds_down[BLOCK * KV_PAGE / 2];
#endif
#if defined(__AMX_BF16__)
    _Alignas(64) float dq[OPERAND]; /* of a block of partial tiles */
#endif
} Operands;

_Static_assert(sizeof(Operands) <= POOL_SCRATCH, "a block's operands");

static void rows_copy(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int E)
{
    for (int i = 0; i < rows; i++)
        memcpy(to + i * to_row, from + i * from_row, (size_t)E * sizeof *to);
}

/* ---- products of a block of queries with a block of keys ---- */

#if defined(__AVX512BF16__)

/* Pairs of vertical neighbours; for the matrix unit zero-padded to whole tiles. */
static void take_down(float *to, int64_t to_row, const float *from, int64_t from_row, int rows,
                      int n, int E)
{
    CPU(pairs_down)(to, to_row, from, from_row, rows, n);
#if defined(__AMX_BF16__)
    for (int i = (rows + 1) / 2; in_tiles(E) && i % TILE; i++)
        memset(to + i * to_row, 0, (size_t)n * sizeof *to);
#endif
    (void)E;
}

static void take_keys(Operands *o, const float *k, int64_t k_row, const float *v, int64_t v_row,
                      int keys, int E)
{
    CPU(pairs_along)(o->q, E / 2, k, k_row, keys, E); /* q and dy are not in use yet */
    CPU(pairs_along)(o->dy, E / 2, v, v_row, keys, E);
    CPU(transpose)(o->kt, KV_PAGE, o->q, E / 2, keys, E / 2);
    CPU(transpose)(o->vt, KV_PAGE, o->dy, E / 2, keys, E / 2);
    take_down(o->k, E, k, k_row, keys, E, E);
}

/* dy as the products take it: rounded, so that Σ ds is 0. */
static inline vf taken(vf dy)
{
    return v_round_bf16(dy);
}

/* p = scale·q·kᵀ and ds = dy·vᵀ */
static void multiply_keys(Operands *o, const float *q, const float *dy, int64_t row, int rows,
                          int keys, int E, float scale)
{
    CPU(pairs_along)(o->q, E / 2, q, row, rows, E);
    CPU(pairs_along)(o->dy, E / 2, dy, row, rows, E);
    take_down(o->q_down, E, q, row, rows, E, E);
    take_down(o->dy_down, E, dy, row, rows, E, E);
    Pairs p = {o->q, E / 2, 1, o->kt, KV_PAGE, E / 2, 0};
    Pairs ds = {o->dy, E / 2, 1, o->vt, KV_PAGE, E / 2, 0};
    page_multiply(o->p, KV_PAGE, p, rows, keys, scale, 0, E);
    page_multiply(o->ds, KV_PAGE, ds, rows, keys, 1.0f, 0, E);
}

/* dv += pᵀ·dy, dk += dsᵀ·q and dq += ds·k; ds is rounded in place */
static void multiply_queries(Operands *o, float *dq, int64_t dq_row, int rows, int keys, int E)
{
    int steps = (rows + 1) / 2;
    take_down(o->p_down, KV_PAGE, o->p, KV_PAGE, rows, KV_PAGE, E);
    take_down(o->ds_down, KV_PAGE, o->ds, KV_PAGE, rows, KV_PAGE, E);
    CPU(pairs_along)(o->ds, KV_PAGE, o->ds, KV_PAGE, rows, KV_PAGE);
    Pairs dv = {o->p_down, 1, KV_PAGE, o->dy_down, E, steps, 0};
    Pairs dk = {o->ds_down, 1, KV_PAGE, o->q_down, E, steps, 0};
    Pairs back = {o->ds, KV_PAGE, 1, o->k, E, (keys + 1) / 2, 0};
    page_multiply(o->dv, E, dv, keys, E, 1.0f, 1, E);
    page_multiply(o->dk, E, dk, keys, E, 1.0f, 1, E);
#if defined(__AMX_BF16__)
    if (in_tiles(E) && rows % TILE) { /* the last tile has rows past dq's end */
        rows_copy(o->dq, E, dq, dq_row, rows, E);
        page_multiply(o->dq, E, back, rows, E, 1.0f, 1, E);
        rows_copy(dq, dq_row, o->dq, E, rows, E);
        return;
    }
#endif
    page_multiply(dq, dq_row, back, rows, E, 1.0f, 1, E);
}

#else

static void take_keys(Operands *o, const float *k, int64_t k_row, const float *v, int64_t v_row,
                      int keys, int E)
{
    CPU(transpose)(o->kt, KV_PAGE, k, k_row, keys, E);
    CPU(transpose)(o->vt, KV_PAGE, v, v_row, keys, E);
    rows_copy(o->k, E, k, k_row, keys, E);
}

static inline vf taken(vf dy)
{
    return dy;
}

/* p = scale·q·kᵀ and ds = dy·vᵀ */
static void multiply_keys(Operands *o, const float *q, const float *dy, int64_t row, int rows,
                          int keys, int E, float scale)
{
    (void)keys;
    rows_copy(o->q, E, q, row, rows, E);
    rows_copy(o->dy, E, dy, row, rows, E);
    CPU(product)(o->p, KV_PAGE, o->q, E, 1, o->kt, KV_PAGE, rows, KV_PAGE, E, scale, 0);
    CPU(product)(o->ds, KV_PAGE, o->dy, E, 1, o->vt, KV_PAGE, rows, KV_PAGE, E, 1.0f, 0);
}

/* dv += pᵀ·dy, dk += dsᵀ·q and dq += ds·k */
static void multiply_queries(Operands *o, float *dq, int64_t dq_row, int rows, int keys, int E)
{
    CPU(product)(o->dv, E, o->p, 1, KV_PAGE, o->dy, E, keys, E, rows, 1.0f, 1);
    CPU(product)(dq, dq_row, o->ds, KV_PAGE, 1, o->k, E, rows, E, keys, 1.0f, 1);
    CPU(product)(o->dk, E, o->ds, 1, KV_PAGE, o->q, E, keys, E, rows, 1.0f, 1);
}

#endif

/* One block of queries times one block of keys of one head: adds to its dq, dk and dv. Query i sees
 * the last `window` keys up to the block's key ahead + i. */
static void backward_block(const AttentionBackward *c, Operands *o, int64_t q_at, float *dq,
                           int64_t lse_at, int rows, int keys, int ahead)
{
    int E = c->E;
    int64_t q_row = (int64_t)c->H * E;
    float scale = 1.0f / sqrtf((float)E);
    multiply_keys(o, c->q + q_at, c->dy + q_at, q_row, rows, keys, E, scale);
    for (int i = 0; i < rows; i++) {
        const float *dy = c->dy + q_at + i * q_row, *y = c->y + q_at + i * q_row;
        vf total = v_set(0.0f);
        int e = 0;
        for (; e + VL <= E; e += VL) total = v_fma(taken(v_load(dy + e)), v_load(y + e), total);
        float delta = v_sum(total), lse = c->lse[lse_at + (int64_t)i * c->H];
        for (; e < E; e++) delta += taken(v_set(dy[e]))[0] * y[e];
        float *pi = o->p + i * KV_PAGE, *di = o->ds + i * KV_PAGE;
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
    multiply_queries(o, dq, c->q_step, rows, keys, E);
}

static void backward_piece(void *context, int64_t piece)
{
    const AttentionBackward *c = context;
    Span span = c->spans[piece / c->G];
    int g = (int)(piece % c->G), group = c->H / c->G, E = c->E;
    int64_t q_row = (int64_t)c->H * E, k_row = (int64_t)c->G * E;
    float *dq = c->dq + g * group * E;
    size_t block = (size_t)E * BLOCK * sizeof(float);
    Operands *o = cpu_scratch(c->dev);
    unit_begin();
    memset(o->kt, 0, block);
    memset(o->vt, 0, block);
    for (int i = 0; i < span.rows; i++)
        memset(dq + (span.row + i) * c->q_step, 0, (size_t)group * (size_t)E * sizeof(float));
    for (int j = 0; j < span.rows; j += BLOCK) {
        int keys = span.rows - j < BLOCK ? span.rows - j : BLOCK;
        int64_t k_at = (int64_t)(span.row + j) * k_row + g * E;
        int64_t v_at = (span.row + j) * c->kv_step + g * E;
        take_keys(o, c->k + k_at, k_row, c->v + v_at, c->kv_step, keys, E);
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
    unit_end();
}

void CPU(attention_backward)(Device *dev, real *dq, real *dk, real *dv, const real *dy,
                             const real *y, const float *lse, const real *q, const real *k,
                             const real *v, const Span *spans, int S, int T, int H, int G, int E,
                             int window, int q_step, int kv_step)
{
    (void)T;
    if (!head_takes(dev, E, HEAD_MAX)) return;
    AttentionBackward c = {dev, f32(dq), f32(dk),           f32(dv), f32c(dy), f32c(y),
                           lse, f32c(q), f32c(k),           f32c(v), spans,    H,
                           G,   E,       window_of(window), q_step,  kv_step};
    cpu_run_uneven(dev, ATTENTION_NS * pairs_of(spans, S, c.window) * H * E, (int64_t)S * G,
                   backward_piece, &c);
}
