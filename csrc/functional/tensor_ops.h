/* functional/tensor_ops.h - log-probabilities and divergences of a caller's tensors, and their
 * gradients.
 *
 * Rows are logits (N,V), or hidden states (N,D) with the head's weight (V,D), whose N·V logits
 * never exist at once. All arrays but `keep` are in device memory, row-major, in f32 or bf16. */
#ifndef TINSMITH_FUNCTIONAL_TENSOR_OPS_H
#define TINSMITH_FUNCTIONAL_TENSOR_OPS_H

#include "../device/device.h"

typedef struct TensorRows {
    const void *rows, *weight; /* weight NULL: the rows are logits */
    DType type, weight_type;
    int64_t N;
    int V, D;
} TensorRows;

/* The destination of a gradient, in the shapes and types of TensorRows.rows and .weight. NULL: not
 * requested. */
typedef struct RowsGradient {
    void *rows, *weight;
} RowsGradient;

/* The K best of each row: ids and logp (N,K). */
Status tensor_topk(Device *dev, int32_t *ids, float *logp, const TensorRows *rows, int K);
/* logp (N,K) of ids (N,K), all in [0, V), each row's lse (N,2), its logΣexp, and with dlogp (N,K)
 * the gradient of Σ dlogp·logp. */
Status tensor_gather(Device *dev, float *logp, float *lse, RowsGradient gradient,
                     const TensorRows *rows, const int32_t *ids, const float *dlogp, int K);
/* Only the gradient, for rows whose lse tensor_gather has computed. */
Status tensor_gather_backward(Device *dev, RowsGradient gradient, const TensorRows *rows,
                              const int32_t *ids, const float *dlogp, const float *lse, int K);
/* The op jsd's losses of the rows that `keep` selects (N host bytes; NULL: all), contiguous: one
 * per row, or one per term with `how.each`. With `scale`, of the same shape, also the gradient of Σ
 * scale·loss, which is 0 in the other rows. */
Status tensor_jsd(Device *dev, float *loss, RowsGradient gradient, const TensorRows *student,
                  const TensorRows *teacher, const unsigned char *keep, const float *scale,
                  Jsd how);

#endif
