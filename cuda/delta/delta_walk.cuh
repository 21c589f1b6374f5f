/* cuda/delta/delta_walk.cuh - du and dM of all pages, from the last to the first. */
#ifndef TINSMITH_CUDA_DELTA_DELTA_WALK_CUH
#define TINSMITH_CUDA_DELTA_DELTA_WALK_CUH

#include "delta_backward.cuh"

/* du and dM of all pages, to c.du and c.dpages. */
void delta_walk(CudaDevice *cuda, const DeltaBackward &c);

#endif
