/* cpu/product/matmul.c - the ops that are one product: with frozen weights, or of a caller's
 * matrices.
 *
 *   linear    y = x·wᵀ + bias + plus       linear_backward  dx = dy·w          head  logits = x·wᵀ
 *   matmul    c = a·b
 *
 * gemm.c gives the cost of a product; LoRA's narrow ones are in lora.c. */
#include "gemm.h"
#include "../runtime/simd.h"

void CPU(linear)(Device *dev, real *y, const real *x, const frozen *w, const float *bias,
                 const real *plus, int T, int N, int D, int step)
{
    Product p = product_of(f32(y), f32c(x), D, w, 0, PANELS, T, N, D);
    p.bias = bias;
    p.ldc = step;
    p.plus = plus ? f32c(plus) : NULL;
    CPU(product_run)(dev, &p);
}

void CPU(linear_backward)(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int step, int accumulate)
{
    Product p = product_of(f32(dx), f32c(dy), step, w, 0, PANELS_T, T, D, N);
    if (accumulate) p.plus = p.c;
    CPU(product_run)(dev, &p);
}

void CPU(matmul)(Device *dev, float *c, const real *a, const void *b, int a_turned, int b_turned,
                 int b_bf16, int M, int N, int K, int accumulate)
{
    Product p =
        product_of(c, f32c(a), K, b, b_turned ? K : N, b_turned ? BY_COLUMN : BY_ROW, M, N, K);
    if (a_turned) {
        p.a_row = 1;
        p.a_col = M;
    }
    p.bf16 = b_bf16;
    if (accumulate) p.plus = p.c;
    CPU(product_run)(dev, &p);
}

void CPU(head)(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    CPU(linear)(dev, (real *)logits, x, w, NULL, NULL, T, V, D, V);
}
