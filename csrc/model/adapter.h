/* model/adapter.h - LoRA matrices A and B on a model, their gradients and an optimizer's moments,
 * in flat vectors; and snapshots of the weights. */
#ifndef TINSMITH_MODEL_ADAPTER_H
#define TINSMITH_MODEL_ADAPTER_H

#include "model.h"

/* A norm below this leaves the difference of any two weights finite, for an average of them. */
#define WEIGHT_NORM_MAX 0x1p126

/* Offsets of a matrix's A (D,R) and B (R,N) in the flat vectors; a = -1: not trained. The steps are
 * the strides to the slot's next matrix; 0: shared. */
typedef struct Pair {
    int64_t a, b, a_step, b_step;
} Pair;

typedef struct LayerPairs {
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) Pair slot; /* the first */
#include "weights.inc"
} LayerPairs;

typedef enum Vector { WEIGHTS, GRADIENTS, MOMENT_1, MOMENT_2, FRESH, VECTORS } Vector;

/* What an adapter is trained with, from its first step to its last. */
typedef enum Optimizer { ADAMW, DIMUON, OPTIMIZERS } Optimizer;

typedef struct Weights Weights;

/* A step in which the weights' norm has grown so far that they may have left the range in which the
 * model's sums are finite. step 0: there was none since the weights were put. */
typedef struct Growth {
    int step;
    double before, after;
} Growth;

typedef struct Adapter {
    Model *model;
    uint64_t number; /* from 1; no other place of weights in this process has had it */
    int rank, groups;
    Optimizer optimizer;
    float alpha, scale; /* scale = alpha / rank */
    int64_t size;       /* parameters */
    Pair head;
    LayerPairs *layer;
    Weights *weights;         /* shared with the snapshots that were made of them */
    Weights *spare;           /* where the weights go when they change while shared, or NULL */
    Arena memory;             /* of the other vectors */
    float *vector[VECTORS];   /* FRESH: the gradients of the call under way; a snapshot has WEIGHTS
                                 alone */
    uint64_t stamp;           /* of the weights: no others ever had it, and 0 is the base's */
    int step;                 /* optimizer steps taken */
    double loss;              /* sum of the losses behind the gradients */
    double tokens, sequences; /* behind the gradients: those with a gradient that is not zero */
    double *total;            /* device: a sum */
    int clear;                /* there are no gradients: their vector is zero */
    double weight_norm;       /* of the weights; NaN: not known */
    Growth growth;
} Adapter;

typedef struct AdapterSpec {
    int rank, groups;
    Optimizer optimizer;
    float alpha;
    uint64_t seed;
} AdapterSpec;

/* Whether there can be such an adapter, on any model. */
Status adapter_check(const AdapterSpec *spec);
Status adapter_open(Adapter **adapter, Model *model, const AdapterSpec *spec);
/* One without memory: its layout alone. */
Status adapter_measure(Adapter **adapter, Model *model, const AdapterSpec *spec);
void adapter_close(Adapter *adapter);
/* Bytes of the vectors of a trained adapter. */
size_t adapter_vector_bytes(const Adapter *adapter);
/* Bytes that its vectors hold. Weights that are shared count in each. */
size_t adapter_memory(const Adapter *adapter);
/* The weights as they are now, without gradients and moments. They are shared, copy-on-write: the
 * next change of either goes to memory that is allocated now. */
Status adapter_snapshot(Adapter **copy, Adapter *adapter);
/* Whether it can have gradients. */
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
/* Fails: `what` is not finite, and what is known of the reason. NULL: the base model's. */
Status adapter_overflow(const Adapter *adapter, const char *what);
/* The same of log-probabilities. */
Status logprobs_overflow(const Adapter *adapter);
Status adapter_clear(Adapter *adapter);
/* A call has succeeded, or has not: its FRESH gradients are added to the others, or dropped. */
void adapter_gather(Adapter *adapter);
void adapter_drop(Adapter *adapter);
Status adapter_norm(Adapter *adapter, Vector which, double *norm);
/* weights += (1 − decay)·(those of `leader` − weights): an exponential moving average of an adapter
 * of the same layout. */
Status adapter_ema_update(Adapter *average, const Adapter *leader, double decay);

/* ---- for optimizers ---- */

/* The root of the device's total, which ops were told to add to. */
Status total_root(const Adapter *adapter, double *root);
/* Called before the weights change: makes sure that no other adapter reads them. *before is the old
 * weights, to read until weights_leave(). */
Status weights_change(Adapter *adapter, Weights **before);
void weights_leave(Weights *weights);
/* Makes a vector zero; on a CPU it then takes no memory. */
void adapter_blank(const Adapter *adapter, Vector which);

#endif
