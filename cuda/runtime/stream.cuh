/* cuda/runtime/stream.cuh - copies to the card on the device's one stream, and back. */
#ifndef TINSMITH_CUDA_RUNTIME_STREAM_CUH
#define TINSMITH_CUDA_RUNTIME_STREAM_CUH

#include "cuda.cuh"

Status stream_open(CudaDevice *cuda);
void stream_close(CudaDevice *cuda);

/* Makes room for so many bytes of scratch (cuda_scratch). */
Status stream_reserve(CudaDevice *cuda, size_t bytes);

#endif
