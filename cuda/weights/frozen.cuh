/* cuda/weights/frozen.cuh - how a frozen bf16 weight lies in memory.
 *
 * It has no header: two of one width that lie one behind the other are one. It is row-major bf16,
 * each row filled up with zeros to a multiple of 16 bytes, or blocks (packed.cuh). */
#ifndef TINSMITH_CUDA_WEIGHTS_FROZEN_CUH
#define TINSMITH_CUDA_WEIGHTS_FROZEN_CUH

#include "../runtime/cuda.cuh"

enum { FROZEN_ALIGN = 8 }; /* a row's elements are a multiple of it */

struct frozen {
    real first;
};

/* Elements from one row of a frozen (rows, cols) to the next. */
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
