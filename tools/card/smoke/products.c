/* tools/card/smoke/products.c - checks of products with base weights, of LoRA's, and of experts':
 * against sums in double, and a base weight's at few rows against the bits of the same rows among
 * many. */
#include "smoke.h"

#include <stdlib.h>
#include <string.h>

static const int few[] = {1, 17, 129};

enum { FEW = sizeof few / sizeof *few };

/* ---- base weights ---- */

typedef struct Product {
    const float *x, *w;
    int N, D;
} Product;

static void linear_row(double *row, int t, const void *of)
{
    const Product *p = of;
    const float *x = p->x + (size_t)t * (size_t)p->D;
    for (int n = 0; n < p->N; n++) row[n] = dot(x, p->w + (size_t)n * (size_t)p->D, p->D);
}

static void linear_backward_row(double *row, int t, const void *of)
{
    const Product *p = of;
    const float *dy = p->x + (size_t)t * (size_t)p->N;
    memset(row, 0, (size_t)p->D * sizeof *row);
    for (int n = 0; n < p->N; n++) add(row, dy[n], p->w + (size_t)n * (size_t)p->D, p->D);
}

/* Rows from the middle of x, `count` of them, have the bits that they had among all T. */
static void judge_bits(Result r, int first, int count, const float *all)
{
    char name[64];
    snprintf(name, sizeof name, "%s of %d rows", r.name, count);
    Same same = {all + (size_t)first * (size_t)r.cols, r.cols};
    r.name = name, r.rows = count, r.bar = 0, r.bits = 1, r.exact = same_row, r.of = &same;
    judge(r);
}

static void check_linear(int T, int N, int D)
{
    Input w = weight(N, D, 4, 1.0f / sqrtf((float)D));
    Input x = input((size_t)T * (size_t)D, 5, 1, REAL);
    real *y = room((size_t)T * (size_t)N, REAL);
    RUN(dev->linear(dev, y, x.at, w.at, NULL, NULL, T, N, D, N));
    Product of = {x.x, w.x, N, D};
    Result r = {"linear", "y", y, REAL, T, N, bar_real(), .exact = linear_row, .of = &of};
    sizes("\"T\": %d, \"N\": %d, \"D\": %d", T, N, D);
    judge(r);
    const float *all = fetched(y, (size_t)T * (size_t)N, REAL);
    for (int i = 0; i < FEW; i++) {
        int first = (T - few[i]) / 2;
        const char *from = (char *)x.at + (size_t)first * (size_t)D * dev->real_bytes;
        real *part = room((size_t)few[i] * (size_t)N, REAL);
        r.at = part;
        RUN(dev->linear(dev, part, (const real *)from, w.at, NULL, NULL, few[i], N, D, N));
        judge_bits(r, first, few[i], all);
    }
    forget();
}

static void check_linear_backward(int T, int N, int D)
{
    Input w = weight(N, D, 4, 1.0f / sqrtf((float)D));
    Input dy = input((size_t)T * (size_t)N, 6, 1, REAL);
    real *dx = room((size_t)T * (size_t)D, REAL);
    RUN(dev->linear_backward(dev, dx, dy.at, w.at, T, N, D, N, 0));
    Product of = {dy.x, w.x, N, D};
    Result r = {"linear_backward", "dx", dx, REAL, T, D, bar_real(), .exact = linear_backward_row,
                .of = &of};
    judge(r);
    const float *all = fetched(dx, (size_t)T * (size_t)D, REAL);
    for (int i = 0; i < FEW; i++) {
        int first = (T - few[i]) / 2;
        const char *from = (char *)dy.at + (size_t)first * (size_t)N * dev->real_bytes;
        real *part = room((size_t)few[i] * (size_t)D, REAL);
        r.at = part;
        RUN(dev->linear_backward(dev, part, (const real *)from, w.at, few[i], N, D, N, 0));
        judge_bits(r, first, few[i], all);
    }
    forget();
}

void check_products(void)
{
    check_linear(shape.T, shape.F, shape.D);
    check_linear_backward(shape.T, shape.F, shape.D);
}

/* ---- LoRA ---- */

enum { MATRICES = 2 };

static const float LORA_SCALE = 0.5f;

typedef struct LoraSums {
    const float *x, *dx; /* dx and y: what is added to */
    const float *a[MATRICES], *b[MATRICES], *y[MATRICES], *s[MATRICES], *da[MATRICES];
    const float *db[MATRICES];
    double *ds[MATRICES]; /* (T,R), exact */
    int T, D, N[MATRICES], one;
} LoraSums;

static void lora_row(double *row, int t, const void *of)
{
    const LoraSums *o = of;
    double s[RANK] = {0};
    int N = o->N[0];
    for (int d = 0; d < o->D; d++)
        add(s, o->x[(size_t)t * (size_t)o->D + (size_t)d], o->a[0] + (size_t)d * RANK, RANK);
    for (int n = 0; n < N; n++) row[n] = o->y[0][(size_t)t * (size_t)N + (size_t)n];
    for (int r = 0; r < RANK; r++) add(row, LORA_SCALE * s[r], o->b[0] + r * N, N);
}

void check_lora(void)
{
    int T = shape.T, D = shape.D, N = shape.D, R = RANK;
    float small = 1.0f / sqrtf((float)D);
    Input a = input((size_t)(D * R), 7, small, F32_HALF);
    Input b = input((size_t)(R * N), 8, 1, F32_HALF);
    Input x = input((size_t)T * (size_t)D, 9, 1, REAL),
          y = input((size_t)T * (size_t)N, 10, 1, REAL);
    Lora one = {.y = y.at, .s = room((size_t)(T * R), REAL), .a = a.at, .b = b.at, .N = N};
    one.step = N;
    RUN(dev->lora(dev, &one, 1, x.at, T, D, R, LORA_SCALE));
    LoraSums of = {.x = x.x, .a = {a.x}, .b = {b.x}, .y = {y.x}, .T = T, .D = D, .N = {N}};
    sizes("\"T\": %d, \"N\": %d, \"D\": %d, \"R\": %d", T, N, D, R);
    judge((Result){"lora", "y", y.at, REAL, T, N, 2 * bar_real(), .exact = lora_row, .of = &of});
    forget();
}

/* ds[t,:] of both matrices */
static void lora_ds(int t, const void *of)
{
    const LoraSums *o = of;
    for (int i = 0; i < MATRICES; i++) {
        const float *dy = o->y[i] + (size_t)t * (size_t)o->N[i];
        for (int r = 0; r < RANK; r++)
            o->ds[i][t * RANK + r] = LORA_SCALE * dot(dy, o->b[i] + r * o->N[i], o->N[i]);
    }
}

static void lora_ds_row(double *row, int t, const void *of)
{
    const LoraSums *o = of;
    memcpy(row, o->ds[o->one] + t * RANK, RANK * sizeof *row);
}

static void lora_da_row(double *row, int d, const void *of)
{
    const LoraSums *o = of;
    for (int r = 0; r < RANK; r++) row[r] = o->da[o->one][d * RANK + r];
    for (int t = 0; t < o->T; t++) {
        double x = o->x[(size_t)t * (size_t)o->D + (size_t)d];
        for (int r = 0; r < RANK; r++) row[r] += x * o->ds[o->one][t * RANK + r];
    }
}

static void lora_db_row(double *row, int r, const void *of)
{
    const LoraSums *o = of;
    int N = o->N[o->one];
    for (int n = 0; n < N; n++) row[n] = o->db[o->one][r * N + n];
    for (int t = 0; t < o->T; t++)
        add(row, LORA_SCALE * (double)o->s[o->one][t * RANK + r],
            o->y[o->one] + (size_t)t * (size_t)N, N);
}

static void lora_dx_row(double *row, int t, const void *of)
{
    const LoraSums *o = of;
    for (int d = 0; d < o->D; d++) row[d] = o->dx[(size_t)t * (size_t)o->D + (size_t)d];
    for (int i = 0; i < MATRICES; i++)
        for (int d = 0; d < o->D; d++)
            for (int r = 0; r < RANK; r++) row[d] += o->ds[i][t * RANK + r] * o->a[i][d * RANK + r];
}

/* One matrix's arrays, on the device and in `of`. */
static Lora lora_of(LoraSums *of, int i)
{
    size_t T = (size_t)of->T, D = (size_t)of->D, N = (size_t)of->N[i];
    float small = 1.0f / sqrtf((float)of->D);
    Input y = input(T * N, 40 + i, 1, REAL), s = input(T * RANK, 42 + i, 1, REAL);
    Input a = input(D * RANK, 44 + i, small, F32_HALF), b = input(RANK * N, 46 + i, 1, F32_HALF);
    Input da = input(D * RANK, 48 + i, 1, F32), db = input(RANK * N, 50 + i, 1, F32);
    of->y[i] = y.x, of->s[i] = s.x, of->a[i] = a.x, of->b[i] = b.x, of->da[i] = da.x;
    of->db[i] = db.x, of->ds[i] = host(T * RANK * sizeof(double));
    return (Lora){.y = y.at,
                  .s = s.at,
                  .ds = room(T * RANK, REAL),
                  .a = a.at,
                  .b = b.at,
                  .da = da.at,
                  .db = db.at,
                  .N = (int)N,
                  .step = (int)N};
}

/* Two matrices of one input, of which the first is as wide as queries and the other as keys. */
void check_lora_backward(void)
{
    int T = shape.T, D = shape.D;
    LoraSums of = {.T = T, .D = D, .N = {shape.H * shape.E, shape.G * shape.E}};
    Lora group[MATRICES] = {lora_of(&of, 0), lora_of(&of, 1)};
    Input x = input((size_t)T * (size_t)D, 52, 1, REAL),
          dx = input((size_t)T * (size_t)D, 53, 1, REAL);
    of.x = x.x, of.dx = dx.x;
    RUN(dev->lora_backward(dev, dx.at, group, MATRICES, x.at, T, D, RANK, LORA_SCALE));
    each(T, lora_ds, &of);
    sizes("\"T\": %d, \"N0\": %d, \"N1\": %d, \"D\": %d, \"R\": %d", T, of.N[0], of.N[1], D, RANK);
    double bar = bar_real();
    const char *op = "lora_backward",
               *names[MATRICES][3] = {{"ds0", "da0", "db0"}, {"ds1", "da1", "db1"}};
    for (int i = 0; i < MATRICES; i++) {
        const char **name = names[i];
        of.one = i;
        judge((Result){op, name[0], group[i].ds, REAL, T, RANK, bar, .exact = lora_ds_row,
                       .of = &of});
        judge(
            (Result){op, name[1], group[i].da, F32, D, RANK, bar, .exact = lora_da_row, .of = &of});
        judge((Result){op, name[2], group[i].db, F32, RANK, of.N[i], BAR_F32, .exact = lora_db_row,
                       .of = &of});
    }
    judge((Result){op, "dx", dx.at, REAL, T, D, 2 * bar, .exact = lora_dx_row, .of = &of});
    forget();
}

/* ---- experts ---- */

enum { EXPERTS = 8, CHOSEN = 2, WIDTH = 64 };

typedef struct Experts {
    const float *logits, *x, *w;
    const int32_t *chosen;
    int D;
} Experts;

/* The best experts, of which the first is the lower one among equals. */
static void chosen_row(double *row, int t, const void *of)
{
    const float *l = ((const Experts *)of)->logits + (size_t)t * EXPERTS;
    int first = 0, then = -1;
    for (int e = 1; e < EXPERTS; e++) first = l[e] > l[first] ? e : first;
    for (int e = 0; e < EXPERTS; e++)
        if (e != first && (then < 0 || l[e] > l[then])) then = e;
    row[0] = first, row[1] = then;
}

static void unite_row(double *row, int t, const void *of)
{
    const Experts *o = of;
    for (int n = 0; n < WIDTH; n++) {
        row[n] = 0;
        for (int i = 0; i < CHOSEN; i++) {
            size_t expert = (size_t)o->chosen[t * CHOSEN + i];
            row[n] += dot(o->x + (size_t)t * (size_t)o->D,
                          o->w + (expert * WIDTH + (size_t)n) * (size_t)o->D, o->D);
        }
    }
}

void check_experts(void)
{
    int T = shape.T, D = shape.D, X = EXPERTS, K = CHOSEN, P = T * K, N = WIDTH;
    size_t ints = (size_t)P * 4;
    Input logits = input((size_t)(T * X), 23, 1, REAL);
    Input x = input((size_t)T * (size_t)D, 24, 1, REAL);
    size_t one = dev->frozen_bytes(dev, DTYPE_BF16, N, D), step = (one + 255) / 256 * 256;
    char *weights = device_bytes(step * EXPERTS);
    float *w = host((size_t)(X * N) * (size_t)D * 4);
    for (int e = 0; e < X; e++) {
        const float *expert = weight_load((frozen *)(weights + step * (size_t)e), N, D, 60 + e,
                                          1.0f / sqrtf((float)D));
        memcpy(w + (size_t)(e * N) * (size_t)D, expert, (size_t)N * (size_t)D * 4);
    }
    int32_t *chosen = room((size_t)P, I32), *pair = device_bytes(ints), *row = device_bytes(ints);
    int32_t *place = device_bytes(ints), *bounds = device_bytes(EXPERTS * 8);
    float *share = room((size_t)P, F32);
    real *ex = room((size_t)P * (size_t)D, REAL), *y = room((size_t)(P * N), REAL);
    real *sum = room((size_t)(T * N), REAL);
    RUN(dev->route(dev, chosen, share, logits.at, T, X, K, 1));
    RUN(dev->group(dev, pair, row, place, bounds, chosen, T, K, X));
    RUN(dev->gather(dev, ex, x.at, row, P, D));
    RUN(dev->grouped_linear(dev, y, ex, (frozen *)weights, (int64_t)step, NULL, bounds, X, P, N, D,
                            1));
    RUN(dev->unite(dev, sum, y, place, NULL, T, K, N));
    Experts of = {logits.x, x.x, w, get(chosen, ints), D};
    sizes("\"T\": %d, \"X\": %d, \"K\": %d, \"N\": %d, \"D\": %d", T, X, K, N, D);
    judge((Result){"route", "chosen", chosen, I32, T, K, .exact = chosen_row, .of = &of});
    judge((Result){"group, grouped_linear, unite", "y", sum, REAL, T, N, 2 * bar_real(),
                   .exact = unite_row, .of = &of});
    forget();
}
