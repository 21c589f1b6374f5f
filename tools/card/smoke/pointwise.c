/* tools/card/smoke/pointwise.c - checks of ops whose rows or elements are alone: copies, types,
 * norms, rotations, swiglu, and the optimizer. */
#include "smoke.h"

/* The op's sizes that most of these results have. */
static void sizes_of(int T, int D)
{
    sizes("\"T\": %d, \"D\": %d", T, D);
}

/* ---- copies ---- */

typedef struct Rows {
    const float *x;
    const int32_t *ids; /* NULL: row t itself */
    int cols;
} Rows;

static void row_of(double *row, int t, const void *of)
{
    const Rows *rows = of;
    size_t from = rows->ids ? (size_t)rows->ids[t] : (size_t)t;
    for (int i = 0; i < rows->cols; i++) row[i] = rows->x[from * (size_t)rows->cols + (size_t)i];
}

void check_rows(void)
{
    int T = shape.T, D = shape.D, V = shape.V;
    size_t n = (size_t)T * (size_t)D;
    Input table = weight(V, D, 1, 1), x = input(n, 2, 1, REAL);
    int32_t *ids = host((size_t)T * 4), *turned = host((size_t)T * 4);
    for (int t = 0; t < T; t++) ids[t] = (int32_t)((long long)t * 7919 % V), turned[t] = T - 1 - t;
    real *y = room(n, REAL), *z = room(n, REAL), *gathered = room(n, REAL);
    const int32_t *at = put(ids, (size_t)T * 4), *back = put(turned, (size_t)T * 4);
    RUN(dev->embed(dev, y, at, table.at, T, V, D));
    RUN(dev->gather(dev, gathered, x.at, back, T, D));
    RUN(dev->scatter(dev, z, gathered, back, T, D));
    Rows of_table = {table.x, ids, D}, of_x = {x.x, turned, D}, same = {x.x, NULL, D};
    sizes("\"T\": %d, \"D\": %d, \"V\": %d", T, D, V);
    Result r = {"embed", "y", y, REAL, T, D, .exact = row_of, .of = &of_table};
    judge(r);
    sizes_of(T, D);
    r.op = "gather", r.at = gathered, r.of = &of_x;
    judge(r);
    r.op = "scatter", r.at = z, r.of = &same;
    judge(r);
    forget();
}

static void narrowed_row(double *row, int t, const void *of)
{
    const Rows *rows = of;
    for (int i = 0; i < rows->cols; i++)
        row[i] = of_bf16(to_bf16(rows->x[(size_t)t * (size_t)rows->cols + (size_t)i]));
}

void check_types(void)
{
    int T = shape.T, cols = shape.D + 1; /* an odd length */
    size_t n = (size_t)T * (size_t)cols;
    Input x = input(n, 3, 1, F32);
    void *half = device_bytes(n * 2);
    float *y = room(n, F32);
    RUN(dev->narrow(dev, half, x.at, (int64_t)n));
    RUN(dev->widen(dev, y, half, (int64_t)n));
    Rows of = {x.x, NULL, cols};
    sizes("\"n\": %zu", n);
    judge((Result){"narrow, widen", "y", y, F32, T, cols, .exact = narrowed_row, .of = &of});
    forget();
}

/* ---- rmsnorm ---- */

typedef struct Norm {
    const float *x, *w, *dy;
    int D;
} Norm;

static double norm_rstd(const Norm *norm, int t)
{
    const float *x = norm->x + (size_t)t * (size_t)norm->D;
    return 1 / sqrt(dot(x, x, norm->D) / norm->D + 1e-6);
}

static void norm_row(double *row, int t, const void *of)
{
    const Norm *norm = of;
    double rstd = norm_rstd(norm, t);
    for (int d = 0; d < norm->D; d++)
        row[d] = norm->x[(size_t)t * (size_t)norm->D + (size_t)d] * rstd * norm->w[d];
}

static void norm_rstd_row(double *row, int t, const void *of)
{
    row[0] = norm_rstd(of, t);
}

static void norm_backward_row(double *row, int t, const void *of)
{
    const Norm *norm = of;
    const float *x = norm->x + (size_t)t * (size_t)norm->D;
    const float *dy = norm->dy + (size_t)t * (size_t)norm->D;
    double rstd = norm_rstd(norm, t), sum = 0;
    for (int d = 0; d < norm->D; d++) sum += (double)dy[d] * norm->w[d] * x[d] * rstd;
    for (int d = 0; d < norm->D; d++)
        row[d] = rstd * ((double)dy[d] * norm->w[d] - x[d] * rstd * sum / norm->D);
}

void check_norm(void)
{
    int T = shape.T, D = shape.D;
    size_t n = (size_t)T * (size_t)D;
    Input x = input(n, 11, 1, REAL), w = input((size_t)D, 12, 1, F32), dy = input(n, 13, 1, REAL);
    real *y = room(n, REAL), *dx = room(n, REAL);
    float *rstd = room((size_t)T, F32);
    RUN(dev->rmsnorm(dev, y, rstd, x.at, w.at, T, D, 1e-6f));
    RUN(dev->rmsnorm_backward(dev, dx, dy.at, x.at, w.at, rstd, NULL, T, D));
    Norm of = {x.x, w.x, dy.x, D};
    sizes_of(T, D);
    judge((Result){"rmsnorm", "y", y, REAL, T, D, bar_real(), 1, .exact = norm_row, .of = &of});
    judge((Result){"rmsnorm", "rstd", rstd, F32, T, 1, BAR_F32, 1, .exact = norm_rstd_row,
                   .of = &of});
    judge((Result){"rmsnorm_backward", "dx", dx, REAL, T, D, bar_real(), .exact = norm_backward_row,
                   .of = &of});
    forget();
}

/* ---- rotate ---- */

typedef struct Rotation {
    const float *x, *norm, *freq; /* norm: NULL where there is none */
    const int32_t *pos;
    int heads, E;
} Rotation;

static void rotate_row(double *row, int t, const void *of)
{
    const Rotation *r = of;
    int E = r->E, half = E / 2;
    for (int h = 0; h < r->heads; h++) {
        const float *u = r->x + ((size_t)t * (size_t)r->heads + (size_t)h) * (size_t)E;
        double rstd = r->norm ? 1 / sqrt(dot(u, u, E) / E + 1e-6) : 1;
        for (int e = 0; e < half; e++) {
            double angle = (float)r->pos[t] * r->freq[e], c = cos(angle), s = sin(angle);
            double a = rstd * u[e] * (r->norm ? r->norm[e] : 1);
            double b = rstd * u[e + half] * (r->norm ? r->norm[e + half] : 1);
            row[h * E + e] = a * c - b * s;
            row[h * E + e + half] = b * c + a * s;
        }
    }
}

void check_rotate(void)
{
    int T = shape.T, H = shape.H, G = shape.G, E = shape.E;
    size_t n = (size_t)T * (size_t)(H * E), nk = (size_t)T * (size_t)(G * E);
    size_t half = (size_t)T * (size_t)(E / 2);
    Input x = input(n, 14, 1, REAL), keys = input(nk, 32, 1, REAL);
    Input w = input((size_t)E, 31, 1, F32);
    float *freq = host((size_t)E * 2);
    int32_t *pos = host((size_t)T * 4);
    for (int e = 0; e < E / 2; e++) freq[e] = powf(1e4f, -2.0f * (float)e / (float)E);
    for (int t = 0; t < T; t++) pos[t] = t * 3;
    real *q = room(n, REAL), *k = room(nk, REAL);
    float *cosine = room(half, F32), *sine = room(half, F32), *inv = put(freq, (size_t)E * 2);
    float *rstd = room((size_t)T * (size_t)H, F32);
    const int32_t *at = put(pos, (size_t)T * 4);
    RUN(dev->rope_table(dev, cosine, sine, at, NULL, inv, T, E, 1, 1));
    RUN(dev->rotate(dev, q, k, rstd, NULL, x.at, keys.at, w.at, NULL, cosine, sine, T, H, G, E, E,
                    H * E, G * E, 1e-6f));
    Rotation of_q = {x.x, w.x, freq, pos, H, E}, of_k = {keys.x, NULL, freq, pos, G, E};
    sizes("\"T\": %d, \"H\": %d, \"G\": %d, \"E\": %d", T, H, G, E);
    judge((Result){"rope_table, rotate", "q", q, REAL, T, H * E, bar_real(), .exact = rotate_row,
                   .of = &of_q});
    judge((Result){"rope_table, rotate", "k", k, REAL, T, G * E, bar_real(), .exact = rotate_row,
                   .of = &of_k});
    forget();
}

/* ---- swiglu ---- */

typedef struct Swiglu {
    const float *gate, *up, *dy;
    int F, which; /* of y, dgate, dup */
} Swiglu;

static void swiglu_row(double *row, int t, const void *of)
{
    const Swiglu *o = of;
    for (int i = 0; i < o->F; i++) {
        size_t at = (size_t)t * (size_t)o->F + (size_t)i;
        double g = o->gate[at], u = o->up[at], dy = o->dy[at], s = 1 / (1 + exp(-g));
        row[i] =
            o->which == 0 ? g * s * u : dy * (o->which == 1 ? u * s * (1 + g * (1 - s)) : g * s);
    }
}

void check_swiglu(void)
{
    int T = shape.T, F = shape.F;
    size_t n = (size_t)T * (size_t)F;
    Input gate = input(n, 15, 1, REAL), up = input(n, 16, 1, REAL), dy = input(n, 17, 1, REAL);
    real *y = room(n, REAL), *dgate = room(n, REAL), *dup = room(n, REAL);
    RUN(dev->swiglu(dev, y, gate.at, up.at, T, F, F, F));
    RUN(dev->swiglu_backward(dev, dgate, dup, dy.at, gate.at, up.at, T, F, F, F));
    Swiglu of = {gate.x, up.x, dy.x, F, 0};
    Result r = {"swiglu", "y", y, REAL, T, F, bar_real(), .exact = swiglu_row, .of = &of};
    sizes("\"T\": %d, \"F\": %d", T, F);
    judge(r);
    of.which = 1, r.op = "swiglu_backward", r.name = "dgate", r.at = dgate;
    judge(r);
    of.which = 2, r.name = "dup", r.at = dup;
    judge(r);
    forget();
}

/* ---- the optimizer ---- */

enum { COLS = 1003, STEP = 3 };

typedef struct Adam {
    const float *w, *m, *v, *g, *more;
} Adam;

static void adamw_row(double *row, int t, const void *of)
{
    const Adam *a = of;
    for (int i = 0; i < COLS; i++) {
        size_t at = (size_t)t * COLS + (size_t)i;
        double g = a->g[at], m = 0.9 * a->m[at] + 0.1 * g, v = 0.95 * a->v[at] + 0.05 * g * g;
        double root = sqrt(v / (1 - pow(0.95, STEP))) + 1e-8;
        row[i] = a->w[at] * (1 - 1e-2 * 0.01) - 1e-2 * (m / (1 - pow(0.9, STEP))) / root;
    }
}

static void sum_row(double *row, int t, const void *of)
{
    const Adam *a = of;
    for (int i = 0; i < COLS; i++) {
        size_t at = (size_t)t * COLS + (size_t)i;
        row[i] = (double)a->more[at] + a->g[at];
    }
}

static void square_row(double *row, int t, const void *of)
{
    const Rows *rows = of;
    (void)t;
    row[0] = 0;
    for (size_t i = 0; i < (size_t)rows->cols; i++) row[0] += (double)rows->x[i] * rows->x[i];
}

void check_optimizer(void)
{
    int rows = shape.D / 8 + 1;
    size_t n = (size_t)rows * COLS;
    Input w = input(n, 26, 1, F32), m = input(n, 27, 0.1f, F32), g = input(n, 29, 1, F32);
    Input more = input(n, 30, 1, F32);
    float *v = host(n * 4);
    for (size_t i = 0; i < n; i++) v[i] = m.x[n - 1 - i] * m.x[n - 1 - i];
    float *dv = put(v, n * 4);
    double *total = device_bytes(sizeof *total);
    dev->zero(dev, total, sizeof *total);
    RUN(dev->square_sum(dev, total, g.at, (int64_t)n));
    RUN(dev->accumulate(dev, more.at, g.at, (int64_t)n));
    RUN(dev->adamw(dev, w.at, m.at, dv, w.at, g.at, (int64_t)n, STEP, 1, 1e-2, 0.9, 0.95, 1e-8,
                   0.01));
    Adam of = {w.x, m.x, v, g.x, more.x};
    Rows all = {g.x, NULL, (int)n};
    sizes("\"n\": %zu", n);
    judge((Result){"square_sum", "total", total, F64, 1, 1, BAR_F32, .exact = square_row,
                   .of = &all});
    judge((Result){"accumulate", "y", more.at, F32, rows, COLS, BAR_F32, .exact = sum_row,
                   .of = &of});
    judge((Result){"adamw", "w", w.at, F32, rows, COLS, BAR_F32, .exact = adamw_row, .of = &of});
    forget();
}
