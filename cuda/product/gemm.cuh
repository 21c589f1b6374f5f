/* cuda/product/gemm.cuh - a product with one bf16 matrix: what it is, and who makes it.
 *
 * matmul.cu gives it to cuBLASLt (cublaslt.cuh), and to our own kernel (gemm.cu) where cuBLASLt
 * has no algorithm for it, or is not there. */
#ifndef TINSMITH_CUDA_PRODUCT_GEMM_CUH
#define TINSMITH_CUDA_PRODUCT_GEMM_CUH

#include "../runtime/cuda.cuh"

/* c (M,N) = a (M,K)·b (K,N) [+ bias (N)] [+ plus]. An operand that is stored by_column lies there
 * transposed; `stride` is the distance of what is stored as rows. c's rows are c_stride apart, and
 * so are those of plus, which may be c. */
typedef struct Gemm {
    void *c;
    bool f32_out; /* else real */
    const real *a, *b;
    const float *bias;       /* rounded to bf16 before it is added */
    const real *narrow_bias; /* it, rounded, for cuBLASLt */
    int64_t a_stride, b_stride, c_stride;
    bool a_by_column, b_by_column;
    int M, N, K;
    const void *plus; /* NULL: none */
} Gemm;

/* Our own kernel's: any product, sums in the order of gemm_tiles.cuh. */
void own_product(CudaDevice *cuda, const Gemm &g);

#endif
