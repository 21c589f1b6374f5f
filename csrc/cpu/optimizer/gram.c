/* cpu/optimizer/gram.c - Gram matrices of LoRA's factors, and products of factors with small
 * matrices, in double.
 *
 *   gram  c (R,R) += xᵀ·x of x (n,R)          n·R²/2 multiply-adds; compute bound
 *   mix   y = before − x·k of x, y (n,R)      n·R² multiply-adds; compute bound
 *
 * and the same for transposed x (R,n). Both are for Dimuon (model/optimizers/dimuon.c): a Gram
 * matrix has the squares of singular values, so in f32 the small ones would be lost. A product of
 * two floats is exact in double. Tiles of ROWS × 2 registers are summed in registers. An element is
 * summed in order, except in the transposed gram, which adds a register's lanes at the end. Jobs
 * share no sum, so no result depends on the number of threads. x is reread for each tile of c, from
 * L2 if n·R floats fit. */
#include <string.h>

#include "../../device/numbers.h"
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum {
    WIDTH = VL / 2,   /* doubles of a register */
    ROWS = 4,         /* of a tile */
    TILE = 2 * WIDTH, /* its columns */
    GRAIN = 64,       /* rows, or columns when turned, of one of mix's jobs; a multiple of TILE */
};

#define NS 0.15 /* of a multiply-add (cpu.h) */

typedef float vn __attribute__((vector_size(2 * VL)));
typedef double vd __attribute__((vector_size(4 * VL)));

typedef struct Gram {
    double *c;
    const float *x;
    int64_t n;
    int R;
} Gram;

typedef struct FactorMix {
    float *y;
    const float *before, *x;
    const double *k;
    int64_t n;
    int R;
} FactorMix;

static inline vd widened(const float *p)
{
    vn narrow;
    memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, vd);
}

static inline vd loaded(const double *p)
{
    vd wide;
    memcpy(&wide, p, sizeof wide);
    return wide;
}

/* ---- gram ---- */

/* Adds to c (i,j), and to c (j,i) if j ≠ i. */
static inline void gram_add(const Gram *g, int i, int j, double sum)
{
    if (j < i) return;
    g->c[(int64_t)i * g->R + j] += sum;
    if (j > i) g->c[(int64_t)j * g->R + i] += sum;
}

/* Rows i … i + ROWS of c, from the diagonal on. */
static void gram_job(void *context, int64_t job)
{
    const Gram *g = context;
    int R = g->R, i = (int)job * ROWS, rows = min_int(R - i, ROWS), j = i;
    for (; rows == ROWS && j + TILE <= R; j += TILE) {
        vd sum[ROWS][2] = {{{0}}};
        for (int64_t t = 0; t < g->n; t++) {
            const float *x = g->x + t * R;
            vd a = widened(x + j), b = widened(x + j + WIDTH);
            for (int r = 0; r < ROWS; r++) {
                sum[r][0] += (double)x[i + r] * a;
                sum[r][1] += (double)x[i + r] * b;
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int e = 0; e < TILE; e++) gram_add(g, i + r, j + e, sum[r][e / WIDTH][e % WIDTH]);
    }
    for (; j < R; j++) {
        double sum[ROWS] = {0};
        for (int64_t t = 0; t < g->n; t++)
            for (int r = 0; r < rows; r++)
                sum[r] += (double)g->x[t * R + i + r] * (double)g->x[t * R + j];
        for (int r = 0; r < rows; r++) gram_add(g, i + r, j, sum[r]);
    }
}

/* The same of x (R,n): c (i,j) is the product of two of its rows. */
static void gram_turned_job(void *context, int64_t job)
{
    const Gram *g = context;
    int i = (int)job * ROWS, rows = min_int(g->R - i, ROWS);
    for (int j = i; j < g->R; j++) {
        const float *y = g->x + j * g->n;
        vd sum[ROWS] = {{0}};
        int64_t t = 0;
        for (; t + WIDTH <= g->n; t += WIDTH) {
            vd b = widened(y + t);
            for (int r = 0; r < rows; r++) sum[r] += widened(g->x + (i + r) * g->n + t) * b;
        }
        for (int r = 0; r < rows; r++) {
            double total = 0.0;
            for (int lane = 0; lane < WIDTH; lane++) total += sum[r][lane];
            for (int64_t u = t; u < g->n; u++)
                total += (double)g->x[(i + r) * g->n + u] * (double)y[u];
            gram_add(g, i + r, j, total);
        }
    }
}

void CPU(gram)(Device *dev, double *c, const float *x, int64_t n, int R, int turned)
{
    Gram g = {c, x, n, R};
    cpu_run_uneven(dev, NS / 2 * (double)n * R * R, (R + ROWS - 1) / ROWS,
                   turned ? gram_turned_job : gram_job, &g);
}

/* ---- mix ---- */

/* One element: y (t,j) of a row of x, or y (i,t) of a row of k, summed over R. */
static inline float mixed(float before, const float *x, int64_t x_step, const double *k,
                          int64_t k_step, int R)
{
    double sum = 0.0;
    for (int r = 0; r < R; r++) sum += (double)x[r * x_step] * k[r * k_step];
    return (float)((double)before - sum);
}

/* Writes `rows` rows of a tile as floats. */
static inline void tile_put(float *y, const float *before, int64_t step, vd sum[ROWS][2], int rows)
{
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < TILE; e++)
            y[r * step + e] = (float)((double)before[r * step + e] - sum[r][e / WIDTH][e % WIDTH]);
}

static void mix_job(void *context, int64_t job)
{
    const FactorMix *m = context;
    int R = m->R;
    int64_t end = (job + 1) * GRAIN < m->n ? (job + 1) * GRAIN : m->n;
    for (int64_t t = job * GRAIN; t < end; t += ROWS) {
        int rows = min_int(end - t, ROWS), j = 0;
        const float *x = m->x + t * R;
        for (; j + TILE <= R; j += TILE) {
            vd sum[ROWS][2] = {{{0}}};
            for (int r = 0; r < R; r++) {
                vd a = loaded(m->k + (int64_t)r * R + j),
                   b = loaded(m->k + (int64_t)r * R + j + WIDTH);
                for (int i = 0; i < rows; i++) {
                    sum[i][0] += (double)x[(int64_t)i * R + r] * a;
                    sum[i][1] += (double)x[(int64_t)i * R + r] * b;
                }
            }
            tile_put(m->y + t * R + j, m->before + t * R + j, R, sum, rows);
        }
        for (; j < R; j++)
            for (int i = 0; i < rows; i++)
                m->y[(t + i) * R + j] =
                    mixed(m->before[(t + i) * R + j], x + (int64_t)i * R, 1, m->k + j, R, R);
    }
}

/* Columns of x (R,n). */
static void mix_turned_job(void *context, int64_t job)
{
    const FactorMix *m = context;
    int R = m->R;
    int64_t from = job * GRAIN, end = from + GRAIN < m->n ? from + GRAIN : m->n, n = m->n;
    for (int i = 0; i < R; i += ROWS) {
        int rows = min_int(R - i, ROWS);
        const double *k = m->k + (int64_t)i * R;
        int64_t t = from;
        for (; t + TILE <= end; t += TILE) {
            vd sum[ROWS][2] = {{{0}}};
            for (int r = 0; r < R; r++) {
                vd a = widened(m->x + r * n + t), b = widened(m->x + r * n + t + WIDTH);
                for (int e = 0; e < rows; e++) {
                    sum[e][0] += k[(int64_t)e * R + r] * a;
                    sum[e][1] += k[(int64_t)e * R + r] * b;
                }
            }
            tile_put(m->y + i * n + t, m->before + i * n + t, n, sum, rows);
        }
        for (; t < end; t++)
            for (int e = 0; e < rows; e++)
                m->y[(i + e) * n + t] =
                    mixed(m->before[(i + e) * n + t], m->x + t, n, k + (int64_t)e * R, 1, R);
    }
}

void CPU(mix)(Device *dev, float *y, const float *before, const float *x, const double *k,
              int64_t n, int R, int turned)
{
    FactorMix m = {y, before, x, k, n, R};
    cpu_run_of(dev, NS * (double)n * R * R, (n + GRAIN - 1) / GRAIN,
               turned ? mix_turned_job : mix_job, &m);
}
