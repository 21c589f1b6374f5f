/* cuda/weights/quantize.cuh - 8 and 4 bits out of wide weights, on the card. */
#ifndef TINSMITH_CUDA_WEIGHTS_QUANTIZE_CUH
#define TINSMITH_CUDA_WEIGHTS_QUANTIZE_CUH

#include "packed.cuh"

/* Makes `rows` rows from `first` on of numbers, or of a file's blocks, that lie in the
 * card's memory. */
void packed_make(CudaDevice *cuda, const Packed &w, const void *from, DType type, int first,
                 int rows, int cols);

#endif
