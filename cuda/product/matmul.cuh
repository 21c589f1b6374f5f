/* cuda/product/matmul.cuh - opens and closes cuBLASLt for products with one matrix. */
#ifndef TINSMITH_CUDA_PRODUCT_MATMUL_CUH
#define TINSMITH_CUDA_PRODUCT_MATMUL_CUH

#include "../runtime/cuda.cuh"

/* A failure to open is kept on the device. */
void matmul_open(CudaDevice *cuda, const DeviceLibraries *libraries);
void matmul_close(CudaDevice *cuda);
/* Chooses algorithms for rehearsed products without one. Waits for the card. */
void matmul_choose(CudaDevice *cuda);

#endif
