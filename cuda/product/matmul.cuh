/* cuda/product/matmul.cuh - the life of the products with one matrix, for which cuBLASLt may be
 * used. */
#ifndef TINSMITH_CUDA_PRODUCT_MATMUL_CUH
#define TINSMITH_CUDA_PRODUCT_MATMUL_CUH

#include "../runtime/cuda.cuh"

/* A failure to open is kept on the device. */
void matmul_open(CudaDevice *cuda, const DeviceLibraries *libraries);
void matmul_close(CudaDevice *cuda);
/* Chooses algorithms for the products that were rehearsed and have none. Waits for the card. */
void matmul_choose(CudaDevice *cuda);

#endif
