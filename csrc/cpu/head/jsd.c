/* cpu/head/jsd.c - the generalized Jensen-Shannon divergence of rows of logits, and its gradient.
 *
 *   p = softmax(student / τ), q = softmax(teacher / τ), m = (1−β)·p + β·q
 *   term[v]  = min(clip, β·q·log(q/m) + (1−β)·p·log(p/m)),  KL(q‖p) and KL(p‖q) at β = 0 and 1
 *   slope[v] = d term[v] / d log p[v]:  (1−β)·p·log(p/m),  −q,  p·(1 + log(p/q));  0 when clipped
 *   dstudent[v] = scale/τ·(slope[v] − p[v]·Σ slope)
 *
 * Three passes over a row, the first from memory and the others from the cache: both logsumexps;
 * sums of terms and slopes; the gradient. 24·T·V bytes read and 4·T·V written, with three
 * exponentials and a logarithm per term in each of the last two: compute bound.
 *
 * Everything is a function of the larger of p and q and of gap = log(q/p), which is (teacher −
 * student)/τ minus the difference of the logsumexps: with y = |gap|, w the weight of the smaller
 * one and z = w·(e⁻ʸ − 1), log(m / larger) is L = log(1 + z), and a term is larger·f of
 *
 *   f = −(1 + z)·L − w·y·e⁻ʸ  =  w·(1 − e⁻ʸ·(1 + y)) − ((1 + z)·L − z)
 *
 * The first form loses digits as y² does. The second's parts, from the remainders of the two
 * series, lose none: it is used where p and q are near, as for a student and its own teacher. A row
 * is one job; each block is summed in f32, the blocks in double. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "../runtime/simd.h"
#include "logprob.h"
#include "topk.h"

enum { BLOCK = 32 * VL }; /* terms that are summed in f32, 32 in a lane */

#define NS 8.0 /* of a term (cpu.h) */

static const float LEAST = 1e-8f; /* lower bound of probabilities */
static const float NEAR = 0.34f;  /* |gap| below which the series converge: under ln2/2 */

typedef struct Divergence {
    float *loss, *dstudent;
    const float *student, *teacher, *scale;
    Jsd how;
    float by; /* 1 / temperature */
    int T, V;
    int32_t *ids; /* (T,K), and the logits there: */
    float *best, *student_best;
} Divergence;

/* A double as the sum of two floats. The difference of two near values then has only its own
 * rounding. */
typedef struct Wide {
    float high, low;
} Wide;

/* A row's constants: log p = (logit − base)/τ − rest, likewise log q; and the teacher's base and
 * rest minus the student's. */
typedef struct JsdRow {
    float student_base, teacher_base;
    Wide student_rest, teacher_rest, base, rest;
} JsdRow;

typedef struct Term {
    vf value, slope, p;
} Term;

/* ---- one term ---- */

static Wide wide(double x)
{
    return (Wide){(float)x, (float)(x - (double)(float)x)};
}

static inline vf log_share(vf logit, float base, float by, Wide rest)
{
    return v_fma(logit - base, v_set(by), v_set(-rest.high)) - rest.low;
}

/* The larger of p and q, and log(q/p). Equal logits have equal shares, even if they are −inf. */
static inline vf larger_of(const Divergence *r, const JsdRow *row, vf student, vf teacher, vf *gap)
{
    if (r->how.probs) {
        vf p = v_select(student < LEAST, v_set(LEAST), student);
        vf q = v_select(teacher < LEAST, v_set(LEAST), teacher);
        *gap = v_log(q / p);
        return v_max(p, q);
    }
    vf apart = v_select(student == teacher, v_set(0.0f), teacher - student);
    vf back = teacher - apart, lost = (teacher - (apart + back)) + (back - student);
    lost = v_select(lost == lost, lost, v_set(0.0f)); /* the rounding error of apart */
    apart = (apart - row->base.high) + (lost - row->base.low);
    *gap = v_fma(apart, v_set(r->by), v_set(-row->rest.high)) - row->rest.low;
    vf log_p = log_share(student, row->student_base, r->by, row->student_rest);
    return v_exp(v_max(log_p, log_share(teacher, row->teacher_base, r->by, row->teacher_rest)));
}

/* A term of KL(weight‖other): weight·log(weight/other). The smaller of the two is larger·e. ey is
 * e·y without the NaN of 0·inf. If `other` is 0 and `weight` is not, the term is inf, however small
 * `weight` is. */
static inline vf kl_term(vf larger, vf y, vf e, vf ey, vi weight_is_larger, vf *weight)
{
    *weight = v_select(weight_is_larger, larger, larger * e);
    vf over = v_select(y == INFINITY, y, larger * y);
    return v_select(weight_is_larger, over, -(larger * ey));
}

/* f and log(m / larger) of the head comment. */
static inline vf mixture(vf y, vf e, vf ey, vf w, vf rest_weight, vf *log_m)
{
    vf a = v_exp_rest(-y), y2 = y * y;
    vi near = y < NEAR;
    vf z = w * v_select(near, y2 * a - y, e - 1.0f);
    vf b = v_log_rest(z), z2 = z * z, u = v_fma(w, e, rest_weight);
    vf far_log = v_log(u);
    *log_m = v_select(near, z - z2 * b, far_log);
    vf f_near = w * y2 * (1.0f - a * (1.0f + y)) - z2 * (1.0f - b * (1.0f + z));
    return v_select(near, f_near, -(u * far_log + w * ey));
}

static inline Term term_of(const Divergence *r, const JsdRow *row, vf student, vf teacher)
{
    float beta = r->how.beta;
    vf gap, larger = larger_of(r, row, student, teacher, &gap);
    vf y = v_select(gap < 0.0f, -gap, gap), e = v_exp(-y), ey = v_select(e > 0.0f, e * y, e);
    vi student_is_larger = gap <= 0.0f;
    Term term;
    term.p = v_select(student_is_larger, larger, larger * e);
    if (beta == 0.0f) {
        vf q;
        term.value = kl_term(larger, y, e, ey, ~student_is_larger, &q);
        term.slope = -q;
    } else if (beta == 1.0f) {
        vf p;
        term.value = kl_term(larger, y, e, ey, student_is_larger, &p);
        term.slope = p + term.value;
    } else {
        vf of_q = v_set(beta), of_p = v_set(1.0f - beta), log_m;
        vf w = v_select(student_is_larger, of_q, of_p);
        vf rest = v_select(student_is_larger, of_p, of_q);
        term.value = larger * mixture(y, e, ey, w, rest, &log_m);
        vf log_ratio = v_select(student_is_larger, -log_m, -v_fma(e, log_m, ey));
        term.slope = of_p * larger * log_ratio;
    }
    vi clipped = term.value > r->how.clip;
    term.value = v_select(clipped, v_set(r->how.clip), term.value);
    term.slope = v_select(clipped, v_set(0.0f), term.slope);
    return term;
}

/* ---- a row ---- */

/* VL floats at p, of which n exist. */
static inline vf some(const float *p, int n, float rest)
{
    return n >= VL ? v_load(p) : v_load_part(p, n, rest);
}

static inline void put(float *p, vf v, int n)
{
    if (n >= VL)
        v_store(p, v);
    else
        v_store_part(p, v, n);
}

/* The padding past a row's end: no mass. */
static float nothing(const Divergence *r)
{
    return r->how.probs ? 0.0f : -INFINITY;
}

static JsdRow row_of(const Divergence *r, const float *student, const float *teacher, int V)
{
    if (r->how.probs) return (JsdRow){0};
    JsdRow row;
    double p = CPU(row_lse)(student, V, r->by, &row.student_base);
    double q = CPU(row_lse)(teacher, V, r->by, &row.teacher_base);
    row.student_rest = wide(p);
    row.teacher_rest = wide(q);
    row.base = wide((double)row.teacher_base - (double)row.student_base);
    row.rest = wide(q - p);
    return row;
}

/* Returns the sum of the slopes, each times its weight unless that is NULL; writes the loss: the
 * terms, or their sum. */
static float row_loss(const Divergence *r, const JsdRow *row, float *loss, const float *student,
                      const float *teacher, const float *weight, int V)
{
    double value = 0.0, slope = 0.0;
    for (int from = 0; from < V; from += BLOCK) {
        int to = V - from < BLOCK ? V : from + BLOCK;
        vf values = v_set(0.0f), slopes = values;
        for (int v = from; v < to; v += VL) {
            Term term = term_of(r, row, some(student + v, V - v, nothing(r)),
                                some(teacher + v, V - v, nothing(r)));
            if (weight) term.slope *= some(weight + v, V - v, 0.0f);
            if (r->how.each) put(loss + v, term.value, V - v);
            values += term.value;
            slopes += term.slope;
        }
        value += (double)v_sum(values);
        slope += (double)v_sum(slopes);
    }
    if (!r->how.each) *loss = (float)value;
    return (float)slope;
}

/* d log p / d logit is the softmax's; for probabilities 1/p, and 0 below LEAST. */
static void row_gradient(const Divergence *r, const JsdRow *row, float *out, const float *student,
                         const float *teacher, const float *weight, float scale, float slopes,
                         int V)
{
    for (int v = 0; v < V; v += VL) {
        vf x = some(student + v, V - v, nothing(r));
        Term term = term_of(r, row, x, some(teacher + v, V - v, nothing(r)));
        if (weight) term.slope *= some(weight + v, V - v, 0.0f);
        vf y = r->how.probs ? v_select(x < LEAST, v_set(0.0f), term.slope / term.p)
                            : term.slope - term.p * slopes;
        put(out + v, scale * y, V - v);
    }
}

/* Loss and, unless dstudent is NULL, gradient of a row of n shares. */
static void row_run(const Divergence *r, int64_t t, float *dstudent, const float *student,
                    const float *teacher, int n)
{
    JsdRow row = row_of(r, student, teacher, n);
    int64_t each = r->how.each ? n : 1;
    const float *scale = r->scale ? r->scale + t * each : NULL,
                *weight = r->how.each ? scale : NULL;
    float slopes = row_loss(r, &row, r->loss + t * each, student, teacher, weight, n);
    if (!scale) return;
    if (!weight && *scale == 0.0f)
        memset(dstudent, 0, (size_t)n * sizeof *dstudent);
    else
        row_gradient(r, &row, dstudent, student, teacher, weight, (weight ? 1.0f : *scale) * r->by,
                     slopes, n);
}

static void jsd_job(void *context, int64_t t)
{
    const Divergence *r = context;
    const float *student = r->student + t * r->V, *teacher = r->teacher + t * r->V;
    float *dstudent = r->scale ? r->dstudent + t * r->V : NULL;
    int K = r->how.top_k;
    if (!K) {
        row_run(r, t, dstudent, student, teacher, r->V);
        return;
    }
    int32_t *ids = r->ids + t * K;
    float *x = r->student_best + t * K, *y = r->best + t * K;
    CPU(row_topk)(ids, y, teacher, r->V, K);
    for (int k = 0; k < K; k++) x[k] = student[ids[k]];
    row_run(r, t, x, x, y, K);
    if (!dstudent) return;
    memset(dstudent, 0, (size_t)r->V * sizeof *dstudent);
    for (int k = 0; k < K; k++) dstudent[ids[k]] = x[k];
}

void CPU(jsd)(Device *dev, float *loss, real *dstudent, const float *student, const float *teacher,
              const float *scale, Jsd how, int T, int V)
{
    assert(how.top_k >= 0 && how.top_k <= V && !(how.top_k && how.probs));
    float by = how.probs ? 1.0f : 1.0f / how.temperature;
    Divergence r = {loss, f32(dstudent), student, teacher, scale, how, by, T, V, NULL, NULL, NULL};
    int64_t picked = (int64_t)T * how.top_k;
    size_t bytes = (size_t)picked * (sizeof *r.ids + 2 * sizeof(float));
    void *memory = NULL;
    if (picked) {
        Status status = dev->alloc(dev, &memory, bytes);
        if (status) {
            cpu_fail(dev, status, "%s", status_text());
            return;
        }
        r.best = memory;
        r.student_best = r.best + picked;
        r.ids = (int32_t *)(r.student_best + picked);
    }
    cpu_run_of(dev, NS * T * V, T, jsd_job, &r);
    dev->release(dev, memory, bytes);
}
