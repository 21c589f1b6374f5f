/* cpu/product/grouped.c - products of pairs with their expert's matrices: one product per expert
 * that has pairs.
 *
 *   grouped_linear    y = x·w_eᵀ + b_e   grouped_linear_backward  dx = dy·w_e
 *   grouped_matmul    y = scale·x·w_e    grouped_gradient         dw_e += scale·xᵀ·dy
 *
 * An element's sum doesn't depend on the number of rows (gemm.c), so a pair's result doesn't depend
 * on the other pairs of its expert. An expert without pairs costs nothing: decoding reads only the
 * chosen experts, once each. */
#include "gemm.h"

typedef struct ExpertPart {
    int64_t first; /* of its pairs */
    int count;
} ExpertPart;

/* The pairs of an expert; all pairs if bounds is NULL. */
static ExpertPart part_of(const int32_t *bounds, int e, int P)
{
    if (!bounds) return (ExpertPart){0, P};
    return (ExpertPart){bounds[2 * e], bounds[2 * e + 1] - bounds[2 * e]};
}

static const frozen *expert(const frozen *w, int64_t step, int e)
{
    return (const frozen *)(const void *)((const char *)w + e * step);
}

void CPU(grouped_linear)(Device *dev, real *y, const real *x, const frozen *w, int64_t step,
                         const float *bias, const int32_t *bounds, int X, int P, int N, int D,
                         int count)
{
    for (int e = 0; e < count * X; e++) {
        ExpertPart part = part_of(bounds, e % X, P);
        if (!part.count) continue;
        int64_t row = (int64_t)(e / X) * P + part.first;
        Product p = product_of(f32(y) + row * N, f32c(x) + part.first * D, D, expert(w, step, e), 0,
                               PANELS, part.count, N, D);
        p.bias = bias ? bias + (int64_t)e * N : NULL;
        CPU(product_run)(dev, &p);
    }
}

void CPU(grouped_linear_backward)(Device *dev, real *dx, const real *dy, const frozen *w,
                                  int64_t step, const int32_t *bounds, int X, int P, int N, int D,
                                  int accumulate)
{
    for (int e = 0; e < X; e++) {
        ExpertPart part = part_of(bounds, e, P);
        if (!part.count) continue;
        Product p = product_of(f32(dx) + part.first * D, f32c(dy) + part.first * N, N,
                               expert(w, step, e), 0, PANELS_T, part.count, D, N);
        if (accumulate) p.plus = p.c;
        CPU(product_run)(dev, &p);
    }
}

void CPU(grouped_matmul)(Device *dev, real *y, const real *x, const float *w, int64_t step,
                         int turned, const int32_t *bounds, int X, int P, int N, int D, float scale,
                         int accumulate)
{
    for (int e = 0; e < (bounds ? X : 1); e++) {
        ExpertPart part = part_of(bounds, e, P);
        if (!part.count) continue;
        Product p = product_of(f32(y) + part.first * N, f32c(x) + part.first * D, D, w + e * step,
                               turned ? D : N, turned ? BY_COLUMN : BY_ROW, part.count, N, D);
        p.scale = scale;
        if (accumulate) p.plus = p.c;
        CPU(product_run)(dev, &p);
    }
}

void CPU(grouped_gradient)(Device *dev, float *dw, int64_t step, const real *x, const real *dy,
                           const int32_t *bounds, int X, int P, int N, int D, float scale)
{
    for (int e = 0; e < (bounds ? X : 1); e++) {
        ExpertPart part = part_of(bounds, e, P);
        if (!part.count) continue;
        Product p = product_of(dw + e * step, f32c(x) + part.first * D, 1,
                               f32c(dy) + part.first * N, N, BY_ROW, D, N, part.count);
        p.a_col = D;
        p.scale = scale;
        p.plus = p.c;
        CPU(product_run)(dev, &p);
    }
}
