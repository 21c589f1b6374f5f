/* cpu/optimizer/adamw.c - the optimizer over flat vectors of an adapter.
 *
 *   square_sum  total += Σ g²                 reads n; memory bound
 *   accumulate  y += x                        reads 2·n, writes n; memory bound
 *   average     y += rate·(scale·x − y)       reads 2·n, writes n; memory bound
 *   adamw       torch.optim.AdamW's one step  reads 4·n, writes 3·n; memory bound
 *   adamw_norm  Σ w² after such a step        reads 4·n; memory bound
 *
 * AdamW rounds like torch on the CPU: moments and weight in f32, fused where torch's compiler
 * fuses, the step's corrections in double and rounded once. So the moments equal torch's to the
 * last bit, and the weight too, unless torch's square root is not correctly rounded. The sum of
 * squares is split into parts that depend only on n and added in order, so it is the same for any
 * number of threads. adamw_norm computes each block of weights like adamw and adds it like
 * square_sum, so a step with results that are not finite is known before anything is written.
 * Gradient clipping is in `scale`. */
#include <math.h>
#include <string.h>

#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum {
    GRAIN = 1 << 14, /* elements of one job */
    PARTS_MAX = 256, /* of a sum of squares */
    BLOCK = 1 << 10, /* weights per block of adamw_norm */
    WIDTH = VL / 2,  /* doubles of a register */
};

/* Of an element (cpu.h). */
#define NS_SUM 0.1
#define NS_ADAMW 0.4

typedef float vn __attribute__((vector_size(2 * VL)));  /* half a register of floats … */
typedef double vd __attribute__((vector_size(4 * VL))); /* … is a whole one of doubles */

typedef struct Parts {
    double part[PARTS_MAX];
    int64_t n, part_size;
} Parts;

typedef struct SquareSum {
    Parts parts; /* first: parts_add() takes any job's */
    const float *g;
} SquareSum;

typedef struct Accumulate {
    float *y;
    const float *x;
    int64_t n;
    float scale, rate; /* average's */
} Accumulate;

typedef struct AdamW {
    float *w, *m, *v;
    const float *before, *g;
    int64_t n;
    float scale, keep, one_beta1, beta2, one_beta2, root_correction2, eps, step_size;
} AdamW;

typedef struct AdamWNorm {
    Parts parts; /* first */
    AdamW step;
} AdamWNorm;

/* ---- sums of squares ---- */

static inline vd squares(const float *p)
{
    vn narrow;
    memcpy(&narrow, p, sizeof narrow);
    vd wide = __builtin_convertvector(narrow, vd);
    return wide * wide;
}

/* Adds the squares of whole groups of 4·WIDTH; returns how many that are. */
static inline int64_t groups_add(vd sum[4], const float *p, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 * WIDTH <= n; i += 4 * WIDTH)
        for (int k = 0; k < 4; k++) sum[k] += squares(p + i + k * WIDTH);
    return i;
}

/* The sum of a part, with the last numbers that fill no group. */
static inline double part_sum(const vd sum[4], const float *rest, int64_t n)
{
    vd all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    double total = 0.0;
    for (int lane = 0; lane < WIDTH; lane++) total += all[lane];
    for (int64_t i = 0; i < n; i++) total += (double)rest[i] * rest[i];
    return total;
}

/* The end of a part that begins at `from`. */
static inline int64_t part_end(const Parts *parts, int64_t from)
{
    return parts->n - from < parts->part_size ? parts->n : from + parts->part_size;
}

static void square_sum_job(void *context, int64_t job)
{
    SquareSum *s = context;
    int64_t from = job * s->parts.part_size, n = part_end(&s->parts, from) - from;
    vd sum[4] = {{0}, {0}, {0}, {0}};
    int64_t i = groups_add(sum, s->g + from, n);
    s->parts.part[job] = part_sum(sum, s->g + from + i, n - i);
}

/* Runs a job for each part of n numbers and adds the parts in their order. */
static void parts_add(Device *dev, double *total, Parts *parts, int64_t n, double ns,
                      void (*job)(void *, int64_t))
{
    parts->n = n;
    parts->part_size = GRAIN;
    while (parts->part_size * PARTS_MAX < n) parts->part_size *= 2;
    int64_t count = (n + parts->part_size - 1) / parts->part_size;
    cpu_run_of(dev, ns * (double)n, count, job, parts);
    for (int64_t i = 0; i < count; i++) total[0] += parts->part[i];
}

/* ---- steps ---- */

static void accumulate_job(void *context, int64_t job)
{
    const Accumulate *a = context;
    int64_t from = job * GRAIN, left = a->n - from, n = left < GRAIN ? left : GRAIN;
    float *restrict y = a->y + from;
    const float *restrict x = a->x + from;
    for (int64_t i = 0; i < n; i++) y[i] += x[i];
}

static void average_job(void *context, int64_t job)
{
    const Accumulate *a = context;
    int64_t from = job * GRAIN, left = a->n - from, n = left < GRAIN ? left : GRAIN;
    float *restrict y = a->y + from, scale = a->scale, rate = a->rate;
    const float *restrict x = a->x + from;
    for (int64_t i = 0; i < n; i++) y[i] += rate * (scale * x[i] - y[i]);
}

/* a·b + c, rounded once if the instruction set can. */
static inline float fused(float a, float b, float c)
{
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* One number's step: its weight, with its moments in *m and *v. A first moment of 0 is divided by 1
 * if the second one's root is 0 too; no other result changes. */
static inline float adamw_one(const AdamW *a, float before, float g, float *m, float *v)
{
    float gradient = a->scale * g;
    float first = *m = fused(a->one_beta1, gradient - *m, *m);
    float second = *v = fused(a->one_beta2 * gradient, gradient, *v * a->beta2);
    float denominator = sqrtf(second) / a->root_correction2 + a->eps;
    if (first == 0.0f) denominator = 1.0f;
    return before * a->keep - a->step_size * first / denominator;
}

static void adamw_job(void *context, int64_t job)
{
    const AdamW a = *(const AdamW *)context;
    int64_t from = job * GRAIN, left = a.n - from, n = left < GRAIN ? left : GRAIN;
    float *w = a.w + from, *restrict m = a.m + from, *restrict v = a.v + from;
    const float *before = a.before + from, *restrict g = a.g + from;
#pragma GCC ivdep /* before is w, or does not overlap it */
    for (int64_t i = 0; i < n; i++) w[i] = adamw_one(&a, before[i], g[i], &m[i], &v[i]);
}

static void adamw_norm_job(void *context, int64_t job)
{
    AdamWNorm *c = context;
    const AdamW a = c->step;
    int64_t from = job * c->parts.part_size, to = part_end(&c->parts, from), used = 0;
    float w[BLOCK];
    int n = 0;
    vd sum[4] = {{0}, {0}, {0}, {0}};
    for (; from < to; from += BLOCK) {
        n = to - from < BLOCK ? (int)(to - from) : BLOCK;
        const float *restrict before = a.before + from, *restrict g = a.g + from;
        for (int i = 0; i < n; i++) {
            float m = a.m[from + i], v = a.v[from + i];
            w[i] = adamw_one(&a, before[i], g[i], &m, &v);
            w[i] += 0.0f * m + 0.0f * v; /* a NaN if one of them is not finite */
        }
        used = groups_add(sum, w, n);
    }
    c->parts.part[job] = part_sum(sum, w + used, n - used);
}

/* ---- the ops ---- */

void CPU(square_sum)(Device *dev, double *total, const float *g, int64_t n)
{
    SquareSum s = {.g = g};
    parts_add(dev, total, &s.parts, n, NS_SUM, square_sum_job);
}

void CPU(accumulate)(Device *dev, float *y, const float *x, int64_t n)
{
    Accumulate a = {.y = y, .x = x, .n = n};
    cpu_run_of(dev, NS_SUM * (double)n, (n + GRAIN - 1) / GRAIN, accumulate_job, &a);
}

void CPU(average)(Device *dev, float *y, const float *x, int64_t n, float scale, float rate)
{
    Accumulate a = {.y = y, .x = x, .n = n, .scale = scale, .rate = rate};
    cpu_run_of(dev, NS_SUM * (double)n, (n + GRAIN - 1) / GRAIN, average_job, &a);
}

static AdamW adamw_of(float *w, const float *m, const float *v, const float *before, const float *g,
                      int64_t n, int step, float scale, double lr, double beta1, double beta2,
                      double eps, double weight_decay)
{
    return (AdamW){
        .w = w,
        .m = (float *)m,
        .v = (float *)v,
        .before = before,
        .g = g,
        .n = n,
        .scale = scale,
        .keep = (float)(1.0 - lr * weight_decay),
        .one_beta1 = (float)(1.0 - beta1),
        .beta2 = (float)beta2,
        .one_beta2 = (float)(1.0 - beta2),
        .root_correction2 = (float)sqrt(1.0 - pow(beta2, step)),
        .eps = (float)eps,
        .step_size = (float)(lr / (1.0 - pow(beta1, step))),
    };
}

void CPU(adamw)(Device *dev, float *w, float *m, float *v, const float *before, const float *g,
                int64_t n, int step, float scale, double lr, double beta1, double beta2, double eps,
                double weight_decay)
{
    AdamW a = adamw_of(w, m, v, before, g, n, step, scale, lr, beta1, beta2, eps, weight_decay);
    cpu_run_of(dev, NS_ADAMW * (double)n, (n + GRAIN - 1) / GRAIN, adamw_job, &a);
}

void CPU(adamw_norm)(Device *dev, double *total, const float *m, const float *v,
                     const float *before, const float *g, int64_t n, int step, float scale,
                     double lr, double beta1, double beta2, double eps, double weight_decay)
{
    AdamWNorm c = {.step = adamw_of(NULL, m, v, before, g, n, step, scale, lr, beta1, beta2, eps,
                                    weight_decay)};
    parts_add(dev, total, &c.parts, n, NS_ADAMW, adamw_norm_job);
}
