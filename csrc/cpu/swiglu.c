/* cpu/swiglu.c - the gated unit of the feed-forward layer.
 *
 *   y = gate·σ(gate)·up
 *   dup = dy·gate·σ,  dgate = dy·up·σ·(1 + gate·(1 − σ)),  σ = σ(gate)
 *
 * and the same times a share that each row has, whose gradient is Σ dy·gate·σ·up.
 *
 * Forward reads 2·T·F and writes T·F; backward reads 3·T·F and writes 2·T·F; memory bound. Both
 * work on elements, not rows: an element's result is the same in any lane, so jobs are flat
 * stretches of the whole, or with shares, whole rows. Each vector of lanes is loaded before any of
 * it is stored, so that gradients may overwrite their inputs. */
#include "cpu.h"
#include "simd.h"

enum {
    GRAIN = 1 << 13, /* elements of one job */
    BLOCK = 256,     /* elements summed in f32 lanes; blocks are added in double */
};

/* Of an element (cpu.h). */
#define NS 0.2
#define NS_BACKWARD 0.4

typedef struct Glu {
    float *y;
    const float *gate, *up;
    int64_t n;
} Glu;

typedef struct GluBackward {
    float *dgate, *dup;
    const float *dy, *gate, *up;
    int64_t n;
} GluBackward;

static void glu_job(void *context, int64_t job)
{
    const Glu *g = context;
    int64_t i = job * GRAIN, to = g->n - i < GRAIN ? g->n : i + GRAIN;
    for (; i + VL <= to; i += VL) {
        vf gate = v_load(g->gate + i);
        v_store(g->y + i, gate * v_sigmoid(gate) * v_load(g->up + i));
    }
    if (i < to) {
        int rest = (int)(to - i);
        vf gate = v_load_part(g->gate + i, rest, 0.0f);
        v_store_part(g->y + i, gate * v_sigmoid(gate) * v_load_part(g->up + i, rest, 0.0f), rest);
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
    const GluBackward *g = context;
    int64_t i = job * GRAIN, to = g->n - i < GRAIN ? g->n : i + GRAIN;
    vf dgate, dup;
    for (; i + VL <= to; i += VL) {
        gradients(&dgate, &dup, v_load(g->dy + i), v_load(g->gate + i), v_load(g->up + i));
        v_store(g->dgate + i, dgate);
        v_store(g->dup + i, dup);
    }
    if (i < to) {
        int rest = (int)(to - i);
        gradients(&dgate, &dup, v_load_part(g->dy + i, rest, 0.0f),
                  v_load_part(g->gate + i, rest, 0.0f), v_load_part(g->up + i, rest, 0.0f));
        v_store_part(g->dgate + i, dgate, rest);
        v_store_part(g->dup + i, dup, rest);
    }
}

void CPU(swiglu)(Device *dev, real *y, const real *gate, const real *up, int T, int F)
{
    Glu g = {f32(y), f32c(gate), f32c(up), (int64_t)T * F};
    cpu_run_of(dev, NS * (double)g.n, (g.n + GRAIN - 1) / GRAIN, glu_job, &g);
}

void CPU(swiglu_backward)(Device *dev, real *dgate, real *dup, const real *dy, const real *gate,
                          const real *up, int T, int F)
{
    GluBackward g = {f32(dgate), f32(dup), f32c(dy), f32c(gate), f32c(up), (int64_t)T * F};
    cpu_run_of(dev, NS_BACKWARD * (double)g.n, (g.n + GRAIN - 1) / GRAIN, glu_backward_job, &g);
}

/* ---- with a share of each row ---- */

typedef struct Shared {
    float *y, *dgate, *dup, *dshare;
    const float *dy, *gate, *up, *share;
    const int32_t *pair; /* where a row's share is; NULL: at its own number */
    int P, F, grain;
    float limit;
} Shared;

#define SLOPE 1.702f /* of gpt-oss's sigmoid */

/* x, at most `most`; NaN stays NaN, for v_min returns its second argument then. */
static inline vf v_upto(vf x, vf most)
{
    return v_min(most, x);
}

/* x within ± most; NaN stays NaN. */
static inline vf v_within(vf x, vf most)
{
    return v_max(-most, v_upto(x, most));
}

/* The unit of a vector of elements; where `limit` is not 0, gpt-oss's. */
static inline vf unit(vf gate, vf up, float limit)
{
    if (limit == 0.0f) return gate * v_sigmoid(gate) * up;
    vf most = v_set(limit);
    gate = v_upto(gate, most);
    return gate * v_sigmoid(SLOPE * gate) * (v_within(up, most) + 1.0f);
}

/* Its gradients. A number beyond the limit has none. */
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
        for (int64_t i = t * g->F, end = i + g->F; i < end; i += VL) {
            int rest = end - i < VL ? (int)(end - i) : VL;
            vf gate = v_load_upto(g->gate + i, rest);
            vf act = unit(gate, v_load_upto(g->up + i, rest), g->limit);
            v_store_upto(g->y + i, share * act, rest);
        }
    }
}

static void shared_backward_job(void *context, int64_t job)
{
    const Shared *g = context;
    int from = (int)job * g->grain, to = g->P - from < g->grain ? g->P : from + g->grain;
    for (int64_t t = from; t < to; t++) {
        int64_t at = g->pair ? g->pair[t] : t;
        vf share = v_set(g->share[at]), sum = v_set(0.0f), dgate, dup;
        double total = 0.0;
        for (int64_t i = t * g->F, end = i + g->F, next = i + BLOCK; i < end; i += VL) {
            int rest = end - i < VL ? (int)(end - i) : VL;
            if (i >= next) {
                total += (double)v_sum(sum);
                sum = v_set(0.0f);
                next += BLOCK;
            }
            vf gate = v_load_upto(g->gate + i, rest), up = v_load_upto(g->up + i, rest);
            vf dy = v_load_upto(g->dy + i, rest);
            sum = v_fma(dy, unit(gate, up, g->limit), sum);
            unit_gradients(&dgate, &dup, share * dy, gate, up, g->limit);
            v_store_upto(g->dgate + i, dgate, rest);
            v_store_upto(g->dup + i, dup, rest);
        }
        g->dshare[at] = (float)(total + (double)v_sum(sum));
    }
}

void CPU(swiglu_share)(Device *dev, real *y, const real *gate, const real *up, const float *share,
                       const int32_t *pair, int P, int F, float limit)
{
    Shared g = {.y = f32(y),
                .gate = f32c(gate),
                .up = f32c(up),
                .share = share,
                .pair = pair,
                .P = P,
                .F = F,
                .grain = cpu_rows_of_job(GRAIN, F),
                .limit = limit};
    cpu_run_of(dev, NS * P * F, ((int64_t)P + g.grain - 1) / g.grain, shared_job, &g);
}

void CPU(swiglu_share_backward)(Device *dev, real *dgate, real *dup, float *dshare, const real *dy,
                                const real *gate, const real *up, const float *share,
                                const int32_t *pair, int P, int F, float limit)
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
                .grain = cpu_rows_of_job(GRAIN, F),
                .limit = limit};
    cpu_run_of(dev, NS_BACKWARD * P * F, ((int64_t)P + g.grain - 1) / g.grain, shared_backward_job,
               &g);
}
