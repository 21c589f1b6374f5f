/* cpu/linear.c - the ops that are products: with frozen weights, with LoRA's matrices, and with
 * anybody's own.
 *
 *   linear    y = x·wᵀ + bias          linear_backward  dx = dy·w          head  logits = x·wᵀ
 *   lora      s = x·a,  y += scale·s·b, and back
 *   matmul    c = a·b
 *
 * Each is a list of calls of the one product (matmul.c), which says what they cost. */
#include "matmul.h"
#include "simd.h"

typedef struct Operand {
    const float *at;
    int64_t row, col;
} Operand;

typedef struct Right {
    const void *at;
    int64_t stride;
    Order order;
} Right;

static Operand as_is(const float *a, int width)
{
    return (Operand){a, width, 1};
}

static Operand turned(const float *a, int width)
{
    return (Operand){a, 1, width};
}

static Right matrix(const void *b, int width)
{
    return (Right){b, width, BY_ROW};
}

static Right matrix_turned(const void *b, int width)
{
    return (Right){b, width, BY_COLUMN};
}

static Right weight(const frozen *w)
{
    return (Right){w, 0, PANELS_T};
}

static Right weight_turned(const frozen *w)
{
    return (Right){w, 0, PANELS};
}

/* c (m,n) = scale·a·b + bias, or += when accumulate. */
static void multiply(Device *dev, float *c, Operand a, Right b, int m, int n, int k, float scale,
                     const float *bias, int accumulate)
{
    Product p = {.c = c,
                 .ldc = n,
                 .a = a.at,
                 .a_row = a.row,
                 .a_col = a.col,
                 .b = b.at,
                 .ldb = b.stride,
                 .order = b.order,
                 .m = m,
                 .n = n,
                 .k = k,
                 .scale = scale,
                 .bias = bias,
                 .accumulate = accumulate};
    CPU(product_run)(dev, &p);
}

void CPU(linear)(Device *dev, real *y, const real *x, const frozen *w, const float *bias, int T,
                 int N, int D, int accumulate)
{
    multiply(dev, f32(y), as_is(f32c(x), D), weight_turned(w), T, N, D, 1, bias, accumulate);
}

void CPU(linear_backward)(Device *dev, real *dx, const real *dy, const frozen *w, int T, int N,
                          int D, int accumulate)
{
    multiply(dev, f32(dx), as_is(f32c(dy), N), weight(w), T, D, N, 1, NULL, accumulate);
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

void CPU(lora)(Device *dev, const Lora *group, int count, const real *x, int T, int D, int R,
               float scale)
{
    for (const Lora *m = group; m < group + count; m++) {
        multiply(dev, f32(m->s), as_is(f32c(x), D), matrix(m->a, R), T, R, D, 1, NULL, 0);
        multiply(dev, f32(m->y), as_is(f32c(m->s), R), matrix(m->b, m->N), T, m->N, R, scale, NULL,
                 1);
    }
}

void CPU(lora_backward)(Device *dev, real *dx, const Lora *group, int count, const real *x, int T,
                        int D, int R, float scale)
{
    for (const Lora *m = group; m < group + count; m++) {
        int N = m->N;
        multiply(dev, f32(m->ds), as_is(f32c(m->y), N), matrix_turned(m->b, N), T, R, N, scale,
                 NULL, 0);
        multiply(dev, m->db, turned(f32c(m->s), R), matrix(m->y, N), R, N, T, scale, NULL, 1);
        multiply(dev, m->da, turned(f32c(x), D), matrix(m->ds, R), D, R, T, 1, NULL, 1);
        if (dx)
            multiply(dev, f32(dx), as_is(f32c(m->ds), R), matrix_turned(m->a, R), T, D, R, 1, NULL,
                     1);
    }
}

void CPU(head)(Device *dev, float *logits, const real *x, const frozen *w, int T, int V, int D)
{
    CPU(linear)(dev, (real *)logits, x, w, NULL, T, V, D, 0);
}

void CPU(head_lora)(Device *dev, float *logits, real *s, const real *x, const float *a,
                    const float *b, int T, int V, int D, int R, float scale)
{
    CPU(lora)(dev, &(Lora){.y = (real *)logits, .s = s, .a = a, .b = b, .N = V}, 1, x, T, D, R,
              scale);
}
