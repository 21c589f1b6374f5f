/* cpu/adamw.c - the optimizer over flat vectors of an adapter.
 *
 *   square_sum  total += Σ g²                 reads n; memory bound
 *   accumulate  y += x                        reads 2·n, writes n; memory bound
 *   average     y += rate·(x − y)             reads 2·n, writes n; memory bound
 *   adamw       torch.optim.AdamW's one step  reads 4·n, writes 3·n; memory bound
 *
 * AdamW rounds as torch does on the CPU: moments and weight in f32, fused where torch's compiler
 * fuses, the corrections of the step in double and rounded once. The moments are then torch's to
 * the last bit, the weight too but where torch's square root is not the nearest number. The sum of
 * squares is cut into parts that depend on n alone and added in their order, so it is the same
 * whatever the number of threads. No gradient clipping here: it is in `scale`. */
#include <math.h>
#include <string.h>

#include "cpu.h"
#include "simd.h"

enum {
    GRAIN = 1 << 14, /* elements of one job */
    PARTS_MAX = 256, /* of a sum of squares */
};

/* Of an element (cpu.h). */
#define NS_SUM 0.1
#define NS_ADAMW 0.4

typedef float vn __attribute__((vector_size(2 * VL)));  /* half a register of floats … */
typedef double vd __attribute__((vector_size(4 * VL))); /* … is a whole one of doubles */

typedef struct SquareSum {
    double part[PARTS_MAX];
    const float *g;
    int64_t n, part_size;
} SquareSum;

typedef struct Accumulate {
    float *y;
    const float *x;
    int64_t n;
    float rate; /* average's */
} Accumulate;

typedef struct AdamW {
    float *w, *m, *v;
    const float *before, *g;
    int64_t n;
    float scale, keep, one_beta1, beta2, one_beta2, root_correction2, eps, step_size;
} AdamW;

static inline vd squares(const float *p)
{
    vn narrow;
    memcpy(&narrow, p, sizeof narrow);
    vd wide = __builtin_convertvector(narrow, vd);
    return wide * wide;
}

static void square_sum_job(void *context, int64_t job)
{
    SquareSum *s = context;
    enum { WIDTH = VL / 2 };
    int64_t i = job * s->part_size, to = s->n - i < s->part_size ? s->n : i + s->part_size;
    vd a = {0}, b = {0}, c = {0}, d = {0};
    for (; i + 4 * WIDTH <= to; i += 4 * WIDTH) {
        a += squares(s->g + i);
        b += squares(s->g + i + WIDTH);
        c += squares(s->g + i + 2 * WIDTH);
        d += squares(s->g + i + 3 * WIDTH);
    }
    a = (a + b) + (c + d);
    double total = 0.0;
    for (int lane = 0; lane < WIDTH; lane++) total += a[lane];
    for (; i < to; i++) total += (double)s->g[i] * s->g[i];
    s->part[job] = total;
}

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
    float *restrict y = a->y + from, rate = a->rate;
    const float *restrict x = a->x + from;
    for (int64_t i = 0; i < n; i++) y[i] += rate * (x[i] - y[i]);
}

/* a·b + c, rounded once where the instruction set can. */
static inline float fused(float a, float b, float c)
{
#ifdef FP_FAST_FMAF
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

static void adamw_job(void *context, int64_t job)
{
    const AdamW a = *(const AdamW *)context;
    int64_t from = job * GRAIN, left = a.n - from, n = left < GRAIN ? left : GRAIN;
    float *w = a.w + from, *restrict m = a.m + from, *restrict v = a.v + from;
    const float *before = a.before + from, *restrict g = a.g + from;
#pragma GCC ivdep /* before is w, or far from it */
    for (int64_t i = 0; i < n; i++) {
        float gradient = a.scale * g[i];
        float first = fused(a.one_beta1, gradient - m[i], m[i]);
        float second = fused(a.one_beta2 * gradient, gradient, v[i] * a.beta2);
        float denominator = sqrtf(second) / a.root_correction2 + a.eps;
        m[i] = first;
        v[i] = second;
        w[i] = before[i] * a.keep - a.step_size * first / denominator;
    }
}

void CPU(square_sum)(Device *dev, double *total, const float *g, int64_t n)
{
    SquareSum s = {.g = g, .n = n, .part_size = GRAIN};
    while (s.part_size * PARTS_MAX < n) s.part_size *= 2;
    int64_t parts = (n + s.part_size - 1) / s.part_size;
    cpu_run_of(dev, NS_SUM * (double)n, parts, square_sum_job, &s);
    for (int64_t i = 0; i < parts; i++) total[0] += s.part[i];
}

void CPU(accumulate)(Device *dev, float *y, const float *x, int64_t n)
{
    Accumulate a = {.y = y, .x = x, .n = n};
    cpu_run_of(dev, NS_SUM * (double)n, (n + GRAIN - 1) / GRAIN, accumulate_job, &a);
}

void CPU(average)(Device *dev, float *y, const float *x, int64_t n, float rate)
{
    Accumulate a = {.y = y, .x = x, .n = n, .rate = rate};
    cpu_run_of(dev, NS_SUM * (double)n, (n + GRAIN - 1) / GRAIN, average_job, &a);
}

void CPU(adamw)(Device *dev, float *w, float *m, float *v, const float *before, const float *g,
                int64_t n, int step, float scale, double lr, double beta1, double beta2, double eps,
                double weight_decay)
{
    AdamW a = {
        .w = w,
        .m = m,
        .v = v,
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
    cpu_run_of(dev, NS_ADAMW * (double)n, (n + GRAIN - 1) / GRAIN, adamw_job, &a);
}
