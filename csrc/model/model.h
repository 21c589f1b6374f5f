/* model/model.h - a frozen base model: its shape, and its weights in slots (weights.inc). */
#ifndef TINSMITH_MODEL_MODEL_H
#define TINSMITH_MODEL_MODEL_H

#include "../device/arena.h"
#include "../device/dtype.h"
#include "shape.h"

typedef enum Group { NONE = 0, ATTN = 1, MLP = 2, UNEMBED = 4 } Group;
typedef enum Factors { EACH, ONE_A, ONE_B } Factors;

/* Slots in the order of weights.inc. */
typedef enum Slot {
#define MODEL_MATRIX(slot, rows, cols, present, group) SLOT_##slot,
#define MODEL_VECTOR(slot, length, present) SLOT_##slot,
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) SLOT_##slot,
#define LAYER_VECTOR(slot, length, present) SLOT_##slot,
#include "weights.inc"
    SLOT_COUNT
} Slot;

/* One row of weights.inc for one layer of one model. */
typedef struct SlotInfo {
    const char *name;
    int per_layer, matrix, present;
    int count;      /* matrices of the layer in this slot, one behind the other */
    int rows, cols; /* a vector has one row */
    Group group;
    Factors factors;
} SlotInfo;

typedef struct LayerWeights {
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    frozen *slot; /* the first                                         \
                   */
#define LAYER_VECTOR(slot, length, present) float *slot;
#include "weights.inc"
} LayerWeights;

typedef struct Model {
    Device *dev;
    Shape shape;
    DType *types; /* of the matrices: [slot · layers + layer] */
    Arena weights;
    size_t bytes;     /* of all weights, also before they are there */
    int mapped;       /* they are a file's, or will be: only what is read takes memory */
    size_t looked_up; /* bytes of a mapped embedding that is no head; 0: there is none */
    float *inv_freq, *host_freq;
    frozen *embed, *head; /* the same where they are tied */
    float *final_norm, *delta_q_unit, *delta_k_unit;
    LayerWeights *layer;
    LayerKinds *kinds;     /* the shape's */
    Lists lists;           /* of the layers that keep keys and values */
    Region *region;        /* [layers] */
    int most;              /* of all slots' counts */
    unsigned char *loaded; /* [(slot · layers + layer) · most + index] */
    int sealed;
} Model;

/* `layer` is ignored for a slot that belongs to no layer. */
SlotInfo slot_info(const Shape *shape, Slot slot, int layer);
/* The slot with that name; SLOT_COUNT: there is none. */
Slot slot_named(const char *name);
/* types [slot · layers + layer]: what each matrix is kept in; one that belongs to no layer has its
 * type in all of them. */
Status model_open(Model **model, const Shape *shape, const float *inv_freq, const DType *types,
                  const char *device, int threads);
void model_close(Model *model);
/* Puts one tensor in, number `index` of those that the layer has in the slot; `rows`, `cols` and
 * `type` are the array's. Vectors arrive as f32. */
Status model_load(Model *model, const char *slot, int layer, int index, const void *array,
                  DType type, int rows, int cols);
/* Makes every matrix that was not loaded of `count` numbers in bf16, again and again, in the order
 * of the slots: for benchmarks, as only one block is uploaded. A GPU's matrices in bf16 alone,
 * whose rows are a multiple of 8 numbers. */
Status model_fill(Model *model, const void *numbers, int64_t count);
/* Ends loading; an error names what is missing. */
Status model_seal(Model *model);
/* Instead of loading: the weights are bytes of an open file, what model_memory() gave of a model
 * with the same shape, frequencies and types. The model is sealed. */
Status model_map(Model *model, int file, size_t at);
/* All bytes of a sealed model's weights, where the device's memory is the host's. */
Status model_memory(const Model *model, const void **memory, size_t *bytes);
/* What the matrices of a slot are kept in. */
DType matrix_type(const Model *model, Slot slot, int layer);
/* Bytes from one matrix of a slot to the next of the same layer's. */
size_t matrix_step(const Model *model, Slot slot, int layer);
/* Bytes of all weights. */
size_t model_bytes(const Model *model);
/* Those of them that take memory: where they are mapped, all but an embedding that is no head. */
size_t model_held(const Model *model);

#endif
