/* cpu/linear.c - the ops that are one product: with frozen weights, and with anybody's own
 * matrices.
 *
 *   linear    y = x·wᵀ + bias          linear_backward  dx = dy·w          head  logits = x·wᵀ
 *   matmul    c = a·b
 *
 * matmul.c says what a product costs; LoRA's narrow ones are in lora.c. */
#include "matmul.h"
#include "simd.h"

void CPU(linear)(Device *dev, real *y, const real *x, const frozen *w, const float *bias, int T,
                 int N, int D, int accumulate)
{
    Product p = {.c = f32(y),
                 .ldc = N,
                 .a = f32c(x),
                 .a_row = D,
                 .a_col = 1,
                 .b = w,
                 .order = PANELS,
                 .m = T,
                 .n = N,
                 .k = D,
                 .scale = 1.0f,
                 .bias = bias,
                 .accumulate = accumulate};
    CPU(product_run)(dev, &p);
}

void CPU(linear_backward)(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int accumulate)
{
    Product p = {.c = f32(dx),
                 .ldc = D,
                 .a = f32c(dy),
                 .a_row = N,
                 .a_col = 1,
                 .b = w,
                 .order = PANELS_T,
                 .m = T,
                 .n = D,
                 .k = N,
                 .scale = 1.0f,
                 .accumulate = accumulate};
    CPU(product_run)(dev, &p);
}

void CPU(matmul)(Device *dev, float *c, const real *a, const void *b, int a_turned, int b_turned,
                 int b_bf16, int M, int N, int K, int accumulate)
{
    Product p = {.c = c,
                 .ldc = N,
                 .a = f32c(a),
                 .a_row = a_turned ? 1 : K,
                 .a_col = a_turned ? M : 1,
                 .b = b,
                 .ldb = b_turned ? K : N,
                 .order = b_turned ? BY_COLUMN : BY_ROW,
                 .bf16 = b_bf16,
                 .m = M,
                 .n = N,
                 .k = K,
                 .scale = 1.0f,
                 .accumulate = accumulate};
    CPU(product_run)(dev, &p);
}

void CPU(head)(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    CPU(linear)(dev, (real *)logits, x, w, NULL, T, V, D, 0);
}
