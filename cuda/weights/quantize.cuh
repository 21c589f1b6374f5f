/* cuda/weights/quantize.cuh - 8 and 4 bits from wide weights, on the card. */
#ifndef TINSMITH_CUDA_WEIGHTS_QUANTIZE_CUH
#define TINSMITH_CUDA_WEIGHTS_QUANTIZE_CUH

#include "packed.cuh"

/* Packs `rows` rows from `first` on, from numbers or a file's blocks in device memory. */
void packed_make(CudaDevice *cuda, const Packed &w, const void *from, DType type, int first,
                 int rows, int cols);

#endif
