/* cuda/delta/delta_scores.cuh - products of rows' keys and queries with the keys of their page. */
#ifndef TINSMITH_CUDA_DELTA_DELTA_SCORES_CUH
#define TINSMITH_CUDA_DELTA_DELTA_SCORES_CUH

#include "../runtime/cuda.cuh"

/* scores (T,G,2,KV_PAGE): the products of each row's k and q with the keys of its page up to its
 * own. `open` and `step` as in the op; open is NULL if no span has a state. */
void delta_scores(CudaDevice *cuda, float *scores, const float *open, const real *q, const real *k,
                  const Span *spans, int S, int T, int G, int N, int64_t step);

static inline size_t delta_scores_floats(int T, int G)
{
    return (size_t)T * (size_t)G * 2 * KV_PAGE;
}

/* Whether the kernels support these widths; keeps a failure if not. */
bool delta_takes(CudaDevice *cuda, int N, int E);

#endif
