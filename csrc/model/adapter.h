/* model/adapter.h - LoRA matrices A and B on a model, their gradients and an optimizer's moments,
 * in flat vectors; and snapshots of the weights. */
#ifndef TINSMITH_MODEL_ADAPTER_H
#define TINSMITH_MODEL_ADAPTER_H

#include "training_memory.h"

/* Below this norm the difference of any two weights is finite, so they can be averaged. */
#define WEIGHT_NORM_MAX 0x1p126

/* Offsets of a matrix's A (D,R) and B (R,N) in the flat vectors; a = -1: not trained. a_step and
 * b_step are the strides to the slot's next matrix; 0: shared. */
typedef struct Pair {
    int64_t a, b, a_step, b_step;
} Pair;

typedef struct LayerPairs {
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) Pair slot; /* the first */
#include "weights.inc"
} LayerPairs;

/* A snapshot has only WEIGHTS. GRADIENTS exist from the first call of a step on, FRESH in a call.
 */
typedef enum Vector { WEIGHTS, MOMENT_1, MOMENT_2, GRADIENTS, FRESH, VECTORS } Vector;

/* A call's gradient has GRADIENT_PARTS parts, summed as a binary tree (gradient_parts.c). Which
 * process computes a part changes no bit. The number is part of checkpoints. */
enum { PART_LEVELS = 3, GRADIENT_PARTS = 1 << PART_LEVELS, PART_NODES = 2 * GRADIENT_PARTS };

/* The sum of some parts of a call, and of their losses and counts. */
typedef struct PartSum {
    Flat vector; /* none: no gradient */
    double loss, tokens, sequences;
    int known;
} PartSum;

/* An adapter has the same optimizer from its first step to its last. */
typedef enum Optimizer { ADAMW, DIMUON, OPTIMIZERS } Optimizer;

typedef struct Weights Weights;

/* A step that made the weights' norm grow so much that the model's sums may overflow. step 0: none
 * since the weights were set. */
typedef struct Growth {
    int step;
    double before, after;
} Growth;

typedef struct Adapter {
    Model *model;
    uint64_t number; /* from 1; unique in this process, new when the weights move */
    int rank, groups;
    Optimizer optimizer;
    float alpha, scale; /* scale = alpha / rank */
    int64_t size;       /* parameters */
    Pair head;
    LayerPairs *layer;
    int64_t *begin;  /* (L+2): where each layer's numbers begin in the flat vectors, the head's, and
                        their end */
    FlatBytes bytes; /* of each piece */
    Weights *weights; /* shared with its snapshots */
    Weights *spare;   /* memory for the next change of shared weights, or NULL */
    Flat vector[VECTORS];
    PartSum sum[PART_NODES];  /* of the call in flight; 1 is the root, GRADIENT_PARTS the first
                                 part's leaf */
    uint64_t stamp;           /* of the weights: unique, 0 is the base model */
    int step;                 /* optimizer steps taken */
    double loss;              /* sum of the losses in the gradients */
    double tokens, sequences; /* in the gradients: those with a nonzero gradient */
    Arenas total;             /* on each stage: a sum, of double */
    double weight_norm;       /* of the weights; NaN: not known */
    Growth growth;
} Adapter;

/* The number at `offset` of a flat vector, which is in that stage's piece. */
static inline float *vector_at(const Adapter *adapter, Vector which, const Stage *stage,
                               int64_t offset)
{
    float *piece = adapter->vector[which].of[stage - adapter->model->stage];
    return piece + (offset - adapter->begin[stage->first]);
}

typedef struct AdapterSpec {
    int rank, groups;
    Optimizer optimizer;
    float alpha;
    uint64_t seed;
} AdapterSpec;

/* Whether such an adapter can exist, on any model. */
Status adapter_check(const AdapterSpec *spec);
Status adapter_open(Adapter **adapter, Model *model, const AdapterSpec *spec);
/* The layout only, without memory. */
Status adapter_measure(Adapter **adapter, Model *model, const AdapterSpec *spec);
void adapter_close(Adapter *adapter);
/* Bytes of one of its vectors, in all stages. */
size_t adapter_vector_bytes(const Adapter *adapter);
/* Bytes of its vectors now. Shared weights count for each owner. */
size_t adapter_memory(const Adapter *adapter);
/* The current weights, without gradients and moments. They are shared, copy-on-write; the memory
 * for the next change of either is allocated now. */
Status adapter_snapshot(Adapter **copy, Adapter *adapter);
/* Whether it can be trained. */
Status adapter_trainable(const Adapter *adapter);
/* Puts `size` numbers into a vector. */
Status adapter_put(Adapter *adapter, Vector which, const float *values);
/* A trained matrix, number `index` of the layer's in its slot. */
typedef void VisitMatrix(void *context, const SlotInfo *info, int layer, int index, Pair pair);
/* Calls visit for each in the order of the flat vectors. */
void adapter_visit(const Adapter *adapter, VisitMatrix *visit, void *context);

enum { GROWTH_TEXT = 160 }; /* bytes */

/* A sentence about the adapter's growth, or "". */
void growth_text(const Adapter *adapter, char *text);
/* Fails: `what` is not finite; names the adapter's growth, if any. NULL: the base model. */
Status adapter_overflow(const Adapter *adapter, const char *what);
/* The same of log-probabilities. */
Status logprobs_overflow(const Adapter *adapter);
Status adapter_clear(Adapter *adapter);
/* Makes a vector of zeros, if there is none; gives it back. */
Status adapter_take(Adapter *adapter, Vector which);
void adapter_give(Adapter *adapter, Vector which);
/* The FRESH gradients are added to the others. */
void adapter_gather(Adapter *adapter);
Status adapter_norm(Adapter *adapter, Vector which, double *norm);
/* weights += (1 − decay)·(leader's weights − weights): an exponential moving average. Both adapters
 * have the same layout. */
Status adapter_ema_update(Adapter *average, const Adapter *leader, double decay);

/* ---- for optimizers ---- */

/* Adds numbers [from, from + n), a layer's, to a stage's total. */
typedef void LayerSum(const Adapter *adapter, const Stage *stage, double *total, int64_t from,
                      int64_t n, const void *context);
/* The square root of the sums of all layers, which are added in their order on any stages. */
Status layers_root(const Adapter *adapter, LayerSum *sum, const void *context, double *root);
/* Called before the weights change, so that no other adapter reads them. *before is the old
 * weights, readable until weights_leave(). */
Status weights_change(Adapter *adapter, Weights **before);
void weights_leave(Weights *weights);
/* Zeroes a vector that exists; on a CPU it then takes no memory. */
void adapter_blank(const Adapter *adapter, Vector which);

#endif
