/* model/model.h - a frozen base model: its shape, and its weights in slots (weights.inc). */
#ifndef TINSMITH_MODEL_MODEL_H
#define TINSMITH_MODEL_MODEL_H

#include "../device/arena.h"
#include "../device/dtype.h"
#include "../vision/features.h"
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
    int count;      /* matrices of the layer in this slot, contiguous */
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

/* Consecutive layers on one device (stages.c). Everything of a layer is on its stage's device. */
enum { STAGES_MOST = 16 };
typedef struct Stage {
    Device *dev;
    int first, end; /* its layers [first, end) */
    int cached;     /* of these, the most in one list of the cache */
    size_t bytes;   /* of its weights */
    Arena weights;
    float *inv_freq;
    int32_t *axis; /* (rotary/2); NULL: positions have one axis */
    /* Of the whole model, where the stage has it: the first has embed, the last final_norm, head,
     * and embed if it is tied to head. */
#define MODEL_MATRIX(slot, rows, cols, present, group) frozen *slot;
#define MODEL_VECTOR(slot, length, present) float *slot;
#include "weights.inc"
} Stage;

/* One arena on each stage. */
typedef struct Arenas {
    Arena of[STAGES_MOST];
} Arenas;

enum { VECTORS_WAITING = 4 };

/* training_memory.c */
typedef struct TrainingMemory {
    Arenas step;
    uint64_t user;                   /* the trainer whose step used it last; 0: none */
    Arenas waiting[VECTORS_WAITING]; /* vectors for the next gradients */
} TrainingMemory;

typedef struct Model {
    int stages;
    Stage stage[STAGES_MOST];
    Device *dev;  /* the last stage's, which computes logits and losses */
    char *device; /* the devices' names, separated by commas */
    Shape shape;
    DType *types;     /* of the matrices: [slot · layers + layer] */
    size_t bytes;     /* of all weights, even before they are loaded */
    int mapped;       /* the weights are, or will be, a mapped file: only pages read take memory */
    size_t looked_up; /* bytes of a mapped, untied embedding; 0: there is none */
    float *host_freq;
    int32_t *host_axis;
    Tower *tower; /* model_tower.c; NULL: none was opened */
    LayerWeights *layer;
    LayerKinds *kinds;     /* the shape's */
    Lists lists;           /* of the layers with keys and values */
    Region *region;        /* [layers] */
    int most;              /* the largest count of all slots */
    unsigned char *loaded; /* [(slot · layers + layer) · most + index] */
    int sealed;
    TrainingMemory training;
} Model;

/* `layer` is ignored for a slot that belongs to no layer. */
SlotInfo slot_info(const Shape *shape, Slot slot, int layer);
/* The slot with that name; SLOT_COUNT: no such slot. */
Slot slot_named(const char *name);
/* types [slot · layers + layer] is each matrix's type; a matrix outside the layers has its type in
 * all of them. `device` is a name, or several, separated by commas: one for each stage. */
Status model_open(Model **model, const Shape *shape, const float *inv_freq, const DType *types,
                  const char *device, int threads);
void model_close(Model *model);
/* Loads one tensor, number `index` of the layer's in this slot; `rows`, `cols` and `type` describe
 * the array. Vectors must be f32. */
Status model_load(Model *model, const char *slot, int layer, int index, const void *array,
                  DType type, int rows, int cols);
/* Fills every matrix that was not loaded with `count` bf16 numbers, repeated, in the order of the
 * slots. For benchmarks: only one block is uploaded. Only for a GPU's bf16 matrices whose rows are
 * a multiple of 8 numbers. */
Status model_fill(Model *model, const void *numbers, int64_t count);
/* Ends loading; an error names a missing tensor. */
Status model_seal(Model *model);
/* Instead of loading, maps the weights from an open file: the bytes that model_memory() returned
 * for a model with the same shape, frequencies and types. Seals the model. */
Status model_map(Model *model, int file, size_t at);
/* All bytes of a sealed model's weights, if device memory is host memory. */
Status model_memory(const Model *model, const void **memory, size_t *bytes);
/* The type of a slot's matrices. */
DType matrix_type(const Model *model, Slot slot, int layer);
/* The stride in bytes between a layer's matrices of one slot. */
size_t matrix_step(const Model *model, Slot slot, int layer);
/* Bytes of all weights. */
size_t model_bytes(const Model *model);
/* Those that take memory: if mapped, all but an untied embedding. */
size_t model_held(const Model *model);
/* The same of one stage. */
size_t stage_held(const Model *model, int stage);

#endif
