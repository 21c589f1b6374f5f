/* cuda/head/topk.cuh - the K best of rows of logits. */
#ifndef TINSMITH_CUDA_HEAD_TOPK_CUH
#define TINSMITH_CUDA_HEAD_TOPK_CUH

#include "../runtime/cuda.cuh"

/* Bytes of scratch for topk_rows. */
size_t topk_bytes(int T, int V, int K);
/* The K best of each row, like topk_logprob; lse NULL: logits, nothing subtracted. */
void topk_rows(CudaDevice *cuda, int32_t *ids, float *logp, const float *logits, const float *lse,
               void *work, int T, int V, int K);

#endif
