/* cuda/product/gemm.cuh - a product with one bf16 matrix: its description, and its implementation.
 *
 * matmul.cu gives it to cuBLASLt (cublaslt.cuh), or to our own kernel (gemm.cu) if cuBLASLt is
 * missing or has no algorithm for it. */
#ifndef TINSMITH_CUDA_PRODUCT_GEMM_CUH
#define TINSMITH_CUDA_PRODUCT_GEMM_CUH

#include "../runtime/cuda.cuh"

/* c (M,N) = a (M,K)·b (K,N) [+ bias (N)] [+ plus]. An operand with by_column is stored transposed;
 * `stride` is the stride of its rows as stored. c and plus, which may be c, have the row stride
 * c_stride. */
typedef struct Gemm {
    void *c;
    bool f32_out; /* else real */
    const real *a, *b;
    const float *bias;       /* rounded to bf16 before it is added */
    const real *narrow_bias; /* the rounded bias, for cuBLASLt */
    int64_t a_stride, b_stride, c_stride;
    bool a_by_column, b_by_column;
    int M, N, K;
    const void *plus; /* NULL: none */
} Gemm;

/* Our own kernel: any product, sums in the order of gemm_tiles.cuh. */
void own_product(CudaDevice *cuda, const Gemm &g);

#endif
