/* cpu/pointwise/rows.c - rows looked up, blended, gathered, scattered and added, and numbers
 * between f32 and bf16.
 *
 *   embed   y[t,:] = w[ids[t],:]    reads T·D of w a cache line apart, writes T·D; latency bound
 *   gather  y[i,:] = x[rows[i],:]   reads T·D, writes T·D; memory bound
 *   scatter y[rows[i],:] = x[i,:]   the same; rows are distinct, so jobs never overlap
 *   blend   y[t,:] += Σ_k weights[t,k]·table[ids[t,k],:]: reads (1+K)·T·D, writes T·D; memory bound
 *   add     y[i] += x[i]            reads 2·n, writes n; memory bound
 *   widen, narrow  y[i] = x[i]      from bf16 and to it: 6·n bytes; memory bound
 *
 * The embedding has the panel layout of the head's product, so a row of it is strided. A token's D
 * cache lines cost microseconds, and a tied model needs only one copy of the weight. */
#include <assert.h>
#include <string.h>

#include "../runtime/simd.h"
#include "../weights/packed.h"

enum { GRAIN = 1 << 14, GRAIN_STRIDED = 1 << 11 }; /* elements of one job */

/* Per element, and per element in its own cache line (cpu.h). */
#define NS 0.1
#define NS_STRIDED 0.9

typedef struct Embed {
    float *y;           // (T, D)
    const int32_t *ids; // (T)
    const frozen *w;    // (V, D)
    int T, D, grain;
} Embed;

/* Row y_rows[i] of y becomes row x_rows[i] of x; NULL: row i. */
typedef struct Move {
    float *y;
    const float *x;
    const int32_t *y_rows, *x_rows; // (T)
    int T, D, grain;
} Move;

static void embed_row(float *y, const frozen *w, int id, int D)
{
    if (dtype_packed(w->type)) {
        CPU(row_widen)(y, w, id);
    } else if (w->type == DTYPE_BF16) {
        const uint16_t *in = (const uint16_t *)w->data + frozen_bf16_at(w, id, 0);
        for (int k = 0; k < D; k++) y[k] = f_bf16(in[(int64_t)(k / 2) * PANEL * 2 + k % 2]);
    } else {
        const float *in = (const float *)w->data + (int64_t)(id / PANEL) * D * PANEL + id % PANEL;
        for (int k = 0; k < D; k++) y[k] = in[(int64_t)k * PANEL];
    }
}

static void embed_job(void *context, int64_t job)
{
    const Embed *e = context;
    int from = (int)job * e->grain, to = e->T - from < e->grain ? e->T : from + e->grain;
    for (int t = from; t < to; t++) embed_row(e->y + (int64_t)t * e->D, e->w, e->ids[t], e->D);
}

static void move_job(void *context, int64_t job)
{
    const Move *m = context;
    int from = (int)job * m->grain, to = m->T - from < m->grain ? m->T : from + m->grain;
    for (int t = from; t < to; t++) {
        int64_t y_row = m->y_rows ? m->y_rows[t] : t, x_row = m->x_rows ? m->x_rows[t] : t;
        memcpy(m->y + y_row * m->D, m->x + x_row * m->D, (size_t)m->D * sizeof *m->y);
    }
}

void CPU(embed)(Device *dev, real *y, const int32_t *ids, const frozen *w, int T, int V, int D)
{
    assert(w->rows == V && w->cols == D);
    for (int t = 0; t < T; t++) assert(ids[t] >= 0 && ids[t] < V);
    (void)V;
    Embed e = {f32(y), ids, w, T, D, cpu_rows_of_job(GRAIN_STRIDED, D)};
    cpu_run_of(dev, NS_STRIDED * T * D, ((int64_t)T + e.grain - 1) / e.grain, embed_job, &e);
}

void CPU(gather)(Device *dev, real *y, const real *x, const int32_t *rows, int T, int D)
{
    Move m = {f32(y), f32c(x), NULL, rows, T, D, cpu_rows_of_job(GRAIN, D)};
    cpu_run_of(dev, NS * T * D, ((int64_t)T + m.grain - 1) / m.grain, move_job, &m);
}

void CPU(scatter)(Device *dev, real *y, const real *x, const int32_t *rows, int T, int D)
{
    Move m = {f32(y), f32c(x), rows, NULL, T, D, cpu_rows_of_job(GRAIN, D)};
    cpu_run_of(dev, NS * T * D, ((int64_t)T + m.grain - 1) / m.grain, move_job, &m);
}

/* ---- blended and added ---- */

typedef struct Blend {
    float *y;             // (T, D)
    const float *table;   // (?, D)
    const int32_t *ids;   // (T, K)
    const float *weights; // (T, K)
    int T, K, D, grain;
} Blend;

static void blend_job(void *context, int64_t job)
{
    const Blend *g = context;
    int from = (int)job * g->grain, to = g->T - from < g->grain ? g->T : from + g->grain;
    for (int64_t t = from; t < to; t++)
        for (int i = 0; i < g->D; i += VL) {
            int rest = g->D - i < VL ? g->D - i : VL;
            float *y = g->y + t * g->D + i;
            vf sum = v_set(0.0f);
            for (int64_t k = t * g->K; k < (t + 1) * g->K; k++) {
                const float *row = g->table + (int64_t)g->ids[k] * g->D + i;
                sum = v_fma(v_set(g->weights[k]), v_load_upto(row, rest), sum);
            }
            v_store_upto(y, v_load_upto(y, rest) + sum, rest);
        }
}

void CPU(blend)(Device *dev, real *y, const float *table, const int32_t *ids, const float *weights,
                int T, int K, int D)
{
    Blend g = {f32(y), table, ids, weights, T, K, D, cpu_rows_of_job(GRAIN, (K + 1) * D)};
    cpu_run_of(dev, NS * T * (K + 1) * D, ((int64_t)T + g.grain - 1) / g.grain, blend_job, &g);
}

typedef struct Sum {
    float *y;
    const float *x;
    int64_t n;
} Sum;

static void add_job(void *context, int64_t job)
{
    const Sum *g = context;
    float *restrict y = g->y;
    const float *restrict x = g->x;
    int64_t from = job * GRAIN, to = g->n - from < GRAIN ? g->n : from + GRAIN;
    for (int64_t i = from; i < to; i++) y[i] += x[i];
}

void CPU(add)(Device *dev, real *y, const real *x, int64_t n)
{
    Sum g = {f32(y), f32c(x), n};
    cpu_run_of(dev, NS * (double)n, (n + GRAIN - 1) / GRAIN, add_job, &g);
}

/* ---- f32 and bf16 ---- */

typedef struct Convert {
    float *wide;
    uint16_t *half;
    int64_t n;
} Convert;

/* The count of a job's numbers, at least one; they begin at *from. */
static int64_t convert_part(const Convert *c, int64_t job, int64_t *from)
{
    *from = job * GRAIN;
    return c->n - *from < GRAIN ? c->n - *from : GRAIN;
}

static void widen_job(void *context, int64_t job)
{
    int64_t from, count = convert_part(context, job, &from);
    float *restrict to = ((const Convert *)context)->wide + from;
    const uint16_t *restrict half = ((const Convert *)context)->half + from;
    for (int64_t i = 0; i < count; i++) to[i] = f_bf16(half[i]);
}

static void narrow_job(void *context, int64_t job)
{
    int64_t from, count = convert_part(context, job, &from);
    uint16_t *restrict to = ((const Convert *)context)->half + from;
    const float *restrict wide = ((const Convert *)context)->wide + from;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, wide + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
        to[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
    }
}

/* One of the two arrays is only read. */
void CPU(widen)(Device *dev, float *y, const void *x, int64_t n)
{
    Convert c = {y, (uint16_t *)x, n};
    cpu_run_of(dev, NS * (double)n, (n + GRAIN - 1) / GRAIN, widen_job, &c);
}

void CPU(narrow)(Device *dev, void *y, const float *x, int64_t n)
{
    Convert c = {(float *)x, y, n};
    cpu_run_of(dev, NS * (double)n, (n + GRAIN - 1) / GRAIN, narrow_job, &c);
}
