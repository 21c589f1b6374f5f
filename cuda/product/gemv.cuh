/* cuda/product/gemv.cuh - products of few rows with a weight of 8 or 4 bits. */
#ifndef TINSMITH_CUDA_PRODUCT_GEMV_CUH
#define TINSMITH_CUDA_PRODUCT_GEMV_CUH

#include "gemm_quantized.cuh"

/* packed_product of few rows, with y = x·wᵀ and 16-byte aligned rows of x. */
void packed_few(CudaDevice *cuda, const PackedCall &call);

#endif
