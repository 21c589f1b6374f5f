/* cuda/product/gemm_quantized.cuh - products with a weight of 8 or 4 bits. */
#ifndef TINSMITH_CUDA_PRODUCT_GEMM_QUANTIZED_CUH
#define TINSMITH_CUDA_PRODUCT_GEMM_QUANTIZED_CUH

#include "../weights/packed.cuh"

/* A product of a weight with blocks. */
struct PackedCall {
    void *y;
    bool f32_out;
    const void *plus;
    const float *bias;
    int64_t y_step;
    bool narrow_bias; /* it is rounded to bf16, like a bf16 weight's bias */
    const real *x;
    int64_t x_step;
    Packed w;
    bool across; /* y = x·w, not x·wᵀ */
    int T, N, K; /* y (T,N), x (T,K) */
    /* experts: the stride in bytes, the bounds of their rows, and their number */
    int64_t w_step;
    const int32_t *bounds;
    int X, count; /* `count` contiguous weights of X experts each, and contiguous results */
};
/* y (T,N) of x (T,K) and a weight with blocks, which the caller sets. */
static inline PackedCall packed_call(void *y, int64_t y_step, const real *x, int64_t x_step, int T,
                                     int N, int K)
{
    PackedCall call = {};
    call.y = y;
    call.y_step = y_step;
    call.x = x;
    call.x_step = x_step;
    call.T = T;
    call.N = N;
    call.K = K;
    call.count = 1;
    return call;
}

void packed_product(CudaDevice *cuda, const PackedCall &call);

void packed_embed(CudaDevice *cuda, real *y, const int32_t *ids, const Packed &w, int T, int D);

#endif
