/* cpu/pointwise/swiglu.c - the gated unit of the feed-forward layer.
 *
 *   y = gate·σ(gate)·up
 *   dup = dy·gate·σ,  dgate = dy·up·σ·(1 + gate·(1 − σ)),  σ = σ(gate)
 *
 * and the same times a share per row, whose gradient is Σ dy·gate·σ·up.
 *
 * Forward reads 2·T·F and writes T·F; backward reads 3·T·F and writes 2·T·F; memory bound. An
 * element's result is the same in any lane, so jobs are flat ranges across rows, or with shares
 * whole rows. Each vector is loaded before it is stored, so gradients may overwrite their
 * inputs. */
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum {
    GRAIN = 1 << 13, /* elements of one job */
    BLOCK = 256,     /* elements summed in f32 lanes; blocks are added in double */
};

/* Of an element (cpu.h). */
#define NS 0.2
#define NS_BACKWARD 0.4

/* Rows of `width` numbers; gate_step and up_step are the row strides of gate, up and their
 * gradients. */
typedef struct Glu {
    float *y, *dgate, *dup;
    const float *dy, *gate, *up;
    int64_t rows, width, gate_step, up_step;
} Glu;

/* A job's range [i, to) of the rows' numbers; it may end in the middle of a row. */
typedef struct Stretch {
    int64_t i, to;
} Stretch;

static Stretch stretch_of(const Glu *g, int64_t job)
{
    int64_t all = g->rows * g->width, i = job * GRAIN;
    return (Stretch){i, all - i < GRAIN ? all : i + GRAIN};
}

/* The next numbers of a range within one row: their offsets in y, gate and up, and their count. */
typedef struct Piece {
    int64_t y, gate, up, n;
} Piece;

static Piece piece_take(const Glu *g, Stretch *s)
{
    int64_t t = s->i / g->width, column = s->i % g->width, rest = s->to - s->i;
    Piece piece = {s->i, t * g->gate_step + column, t * g->up_step + column,
                   g->width - column < rest ? g->width - column : rest};
    s->i += piece.n;
    return piece;
}

static void glu_job(void *context, int64_t job)
{
    const Glu *g = context;
    for (Stretch s = stretch_of(g, job); s.i < s.to;) {
        Piece piece = piece_take(g, &s);
        const float *gates = g->gate + piece.gate, *ups = g->up + piece.up;
        float *y = g->y + piece.y;
        int64_t i = 0;
        for (; i + VL <= piece.n; i += VL) {
            vf gate = v_load(gates + i);
            v_store(y + i, gate * v_sigmoid(gate) * v_load(ups + i));
        }
        if (i == piece.n) continue;
        int rest = (int)(piece.n - i);
        vf gate = v_load_part(gates + i, rest, 0.0f);
        v_store_part(y + i, gate * v_sigmoid(gate) * v_load_part(ups + i, rest, 0.0f), rest);
    }
}

static inline void gradients(vf *dgate, vf *dup, vf dy, vf gate, vf up)
{
    vf s = v_sigmoid(gate);
    *dup = dy * (gate * s);
    *dgate = dy * up * (s * (1.0f + gate * (1.0f - s)));
}

static void glu_backward_job(void *context, int64_t job)
{
    const Glu *g = context;
    vf dgate, dup;
    for (Stretch s = stretch_of(g, job); s.i < s.to;) {
        Piece piece = piece_take(g, &s);
        const float *dy = g->dy + piece.y, *gate = g->gate + piece.gate, *up = g->up + piece.up;
        float *dgates = g->dgate + piece.gate, *dups = g->dup + piece.up;
        int64_t i = 0;
        for (; i + VL <= piece.n; i += VL) {
            gradients(&dgate, &dup, v_load(dy + i), v_load(gate + i), v_load(up + i));
            v_store(dgates + i, dgate);
            v_store(dups + i, dup);
        }
        if (i == piece.n) continue;
        int rest = (int)(piece.n - i);
        gradients(&dgate, &dup, v_load_part(dy + i, rest, 0.0f), v_load_part(gate + i, rest, 0.0f),
                  v_load_part(up + i, rest, 0.0f));
        v_store_part(dgates + i, dgate, rest);
        v_store_part(dups + i, dup, rest);
    }
}

/* A job has the same number of elements for any stride. */
static void glu_run(Device *dev, Glu *g, double ns, void (*work)(void *, int64_t))
{
    if (g->gate_step == g->width && g->up_step == g->width) { /* one long row */
        g->width *= g->rows;
        g->rows = g->width > 0;
    }
    int64_t all = g->rows * g->width;
    cpu_run_of(dev, ns * (double)all, (all + GRAIN - 1) / GRAIN, work, g);
}

void CPU(swiglu)(Device *dev, real *y, const real *gate, const real *up, int T, int F,
                 int gate_step, int up_step)
{
    Glu g = {.y = f32(y),
             .gate = f32c(gate),
             .up = f32c(up),
             .rows = T,
             .width = F,
             .gate_step = gate_step,
             .up_step = up_step};
    glu_run(dev, &g, NS, glu_job);
}

void CPU(swiglu_backward)(Device *dev, real *dgate, real *dup, const real *dy, const real *gate,
                          const real *up, int T, int F, int gate_step, int up_step)
{
    Glu g = {.dgate = f32(dgate),
             .dup = f32(dup),
             .dy = f32c(dy),
             .gate = f32c(gate),
             .up = f32c(up),
             .rows = T,
             .width = F,
             .gate_step = gate_step,
             .up_step = up_step};
    glu_run(dev, &g, NS_BACKWARD, glu_backward_job);
}

/* ---- with a share per row ---- */

typedef struct Shared {
    float *y, *dgate, *dup, *dshare;
    const float *dy, *gate, *up, *share;
    const int32_t *pair; /* index of a row's share; NULL: the row itself */
    int P, F, step, grain;
    float limit;
} Shared;

#define SLOPE 1.702f /* in gpt-oss's sigmoid */

/* min(x, most); NaN stays NaN, because v_min then returns its second argument. */
static inline vf v_upto(vf x, vf most)
{
    return v_min(most, x);
}

/* x clamped to ±most; NaN stays NaN. */
static inline vf v_within(vf x, vf most)
{
    return v_max(-most, v_upto(x, most));
}

/* The unit for a vector of elements; gpt-oss's if `limit` is not 0. */
static inline vf unit(vf gate, vf up, float limit)
{
    if (limit == 0.0f) return gate * v_sigmoid(gate) * up;
    vf most = v_set(limit);
    gate = v_upto(gate, most);
    return gate * v_sigmoid(SLOPE * gate) * (v_within(up, most) + 1.0f);
}

/* Its gradients. A clamped number has none. */
static inline void unit_gradients(vf *dgate, vf *dup, vf dy, vf gate, vf up, float limit)
{
    if (limit == 0.0f) {
        gradients(dgate, dup, dy, gate, up);
        return;
    }
    vf most = v_set(limit), g = v_upto(gate, most), u = v_within(up, most);
    vf s = v_sigmoid(SLOPE * g), none = v_set(0.0f);
    *dgate = v_select(gate > most, none, dy * (u + 1.0f) * (s * (1.0f + SLOPE * g * (1.0f - s))));
    *dup = v_select((up > most) | (up < -most), none, dy * (g * s));
}

static void shared_job(void *context, int64_t job)
{
    const Shared *g = context;
    int from = (int)job * g->grain, to = g->P - from < g->grain ? g->P : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        vf share = v_set(g->share[g->pair ? g->pair[t] : t]);
        for (int64_t i = 0, at = t * g->step, y = t * g->F; i < g->F; i += VL) {
            int rest = g->F - i < VL ? (int)(g->F - i) : VL;
            vf gate = v_load_upto(g->gate + at + i, rest);
            vf act = unit(gate, v_load_upto(g->up + at + i, rest), g->limit);
            v_store_upto(g->y + y + i, share * act, rest);
        }
    }
}

static void shared_backward_job(void *context, int64_t job)
{
    const Shared *g = context;
    int from = (int)job * g->grain, to = g->P - from < g->grain ? g->P : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        int64_t own = g->pair ? g->pair[t] : t;
        vf share = v_set(g->share[own]), sum = v_set(0.0f), dgate, dup;
        double total = 0.0;
        for (int64_t i = 0, at = t * g->step, next = BLOCK; i < g->F; i += VL, at += VL) {
            int rest = g->F - i < VL ? (int)(g->F - i) : VL;
            if (i >= next) {
                total += (double)v_sum(sum);
                sum = v_set(0.0f);
                next += BLOCK;
            }
            vf gate = v_load_upto(g->gate + at, rest), up = v_load_upto(g->up + at, rest);
            vf dy = v_load_upto(g->dy + t * g->F + i, rest);
            sum = v_fma(dy, unit(gate, up, g->limit), sum);
            unit_gradients(&dgate, &dup, share * dy, gate, up, g->limit);
            v_store_upto(g->dgate + at, dgate, rest);
            v_store_upto(g->dup + at, dup, rest);
        }
        g->dshare[own] = (float)(total + (double)v_sum(sum));
    }
}

void CPU(swiglu_share)(Device *dev, real *y, const real *gate, const real *up, const float *share,
                       const int32_t *pair, int P, int F, int step, float limit)
{
    Shared g = {.y = f32(y),
                .gate = f32c(gate),
                .up = f32c(up),
                .share = share,
                .pair = pair,
                .P = P,
                .F = F,
                .step = step,
                .grain = cpu_rows_of_job(GRAIN, F),
                .limit = limit};
    cpu_run_of(dev, NS * P * F, ((int64_t)P + g.grain - 1) / g.grain, shared_job, &g);
}

void CPU(swiglu_share_backward)(Device *dev, real *dgate, real *dup, float *dshare, const real *dy,
                                const real *gate, const real *up, const float *share,
                                const int32_t *pair, int P, int F, int step, float limit)
{
    Shared g = {.dgate = f32(dgate),
                .dup = f32(dup),
                .dshare = dshare,
                .dy = f32c(dy),
                .gate = f32c(gate),
                .up = f32c(up),
                .share = share,
                .pair = pair,
                .P = P,
                .F = F,
                .step = step,
                .grain = cpu_rows_of_job(GRAIN, F),
                .limit = limit};
    cpu_run_of(dev, NS_BACKWARD * P * F, ((int64_t)P + g.grain - 1) / g.grain, shared_backward_job,
               &g);
}
