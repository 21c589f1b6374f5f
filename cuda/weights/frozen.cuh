/* cuda/weights/frozen.cuh - the layout of a frozen bf16 weight.
 *
 * It has no header: two adjacent weights of one width are one. It is row-major bf16, each row
 * zero-padded to a multiple of 16 bytes, or blocks (packed.cuh). */
#ifndef TINSMITH_CUDA_WEIGHTS_FROZEN_CUH
#define TINSMITH_CUDA_WEIGHTS_FROZEN_CUH

#include "../runtime/cuda.cuh"

enum { FROZEN_ALIGN = 8 }; /* a row's elements are a multiple of this */

struct frozen {
    real first;
};

/* The row stride of a frozen (rows, cols), in elements. */
__host__ __device__ static inline int64_t frozen_stride(int cols)
{
    return (cols + FROZEN_ALIGN - 1) / FROZEN_ALIGN * FROZEN_ALIGN;
}

/* Row 0. */
__host__ __device__ static inline const real *frozen_data(const frozen *w)
{
    return &w->first;
}

#endif
