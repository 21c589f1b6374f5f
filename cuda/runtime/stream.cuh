/* cuda/runtime/stream.cuh - copies to and from the card on the device's one stream. */
#ifndef TINSMITH_CUDA_RUNTIME_STREAM_CUH
#define TINSMITH_CUDA_RUNTIME_STREAM_CUH

#include "cuda.cuh"

Status stream_open(CudaDevice *cuda);
void stream_close(CudaDevice *cuda);

/* Reserves `bytes` of scratch (cuda_scratch). */
Status stream_reserve(CudaDevice *cuda, size_t bytes);

#endif
