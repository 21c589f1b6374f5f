/* model/model.c - a frozen base model: checks shapes, places weights by weights.inc, loads tensors
 * by name, or fills them with a block of numbers for a benchmark.
 *
 * It knows slots, not checkpoints: registry.py decides which file tensor fills which slot. A slot
 * with several matrices in a layer (its experts) has them contiguous. */
#include "model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/delta_state.h"
#include "../device/finite.h"
#include "stage_devices.h"
#include "stages.h"

SlotInfo slot_info(const Shape *s, Slot slot, int l)
{
    switch (slot) {
#define MODEL_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return (SlotInfo){#slot, 0, 1, present, 1, rows, cols, group, EACH};
#define MODEL_VECTOR(slot, length, present) \
    case SLOT_##slot: return (SlotInfo){#slot, 0, 0, present, 1, 1, length, NONE, EACH};
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    case SLOT_##slot: return (SlotInfo){#slot, 1, 1, present, count, rows, cols, group, factors};
#define LAYER_VECTOR(slot, length, present) \
    case SLOT_##slot: return (SlotInfo){#slot, 1, 0, present, 1, 1, length, NONE, EACH};
#include "weights.inc"
    case SLOT_COUNT: break;
    }
    return (SlotInfo){0};
}

/* Sums of bytes are size_t, which a shape with all sizes at their maximum would overflow. So this
 * check sums in double. */
static Status bytes_check(const Shape *s)
{
    double bytes = 0.0, most = 0x1p50;
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < s->layers; l++) {
            SlotInfo info = slot_info(s, slot, l);
            if (!info.per_layer && l > 0) break;
            if (info.present) bytes += (double)info.count * info.rows * info.cols * sizeof(float);
        }
    if (bytes <= most) return STATUS_OK;
    return fail(STATUS_INVALID, "a model of %.0f TiB is more than %.0f", bytes / 0x1p40,
                most / 0x1p40);
}

static size_t slot_place(const Model *model, Slot slot, int layer)
{
    return (size_t)slot * (size_t)model->shape.layers + (size_t)(layer < 0 ? 0 : layer);
}

DType matrix_type(const Model *model, Slot slot, int layer)
{
    return model->types[slot_place(model, slot, layer)];
}

size_t matrix_step(const Model *model, Slot slot, int layer)
{
    SlotInfo info = slot_info(&model->shape, slot, layer);
    DType type = matrix_type(model, slot, layer);
    return arena_step(model->dev->frozen_bytes(model->dev, type, info.rows, info.cols));
}

/* Whether the device can compute with every matrix's type. */
static Status types_check(const Model *model)
{
    const Device *dev = model->dev;
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < model->shape.layers; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            DType type = matrix_type(model, slot, l);
            if (!info.present || !info.matrix || matrix_step(model, slot, l)) continue;
            return fail(STATUS_INVALID,
                        "the device %s does not compute from %s weights (%s): keep them as bf16 "
                        "(weights 'bf16')",
                        dev->name, dtype_info(type).name, info.name);
        }
    return STATUS_OK;
}

/* Whether the stage has a slot of the whole model. */
static int stage_has(const Model *model, const Stage *stage, Slot slot)
{
    int last = stage == stage_last(model);
    if (slot == SLOT_embed) return stage == model->stage || (last && model->shape.tied);
    return last || (slot != SLOT_head && slot != SLOT_final_norm);
}

/* Walks weights.inc: measures while the arena has no base, places when it has one. No memory is
 * reserved before the first tensor, so a model larger than any memory can be planned. */
static void stage_place(Model *model, Stage *stage)
{
    Arena *arena = &stage->weights;
    const Shape *s = &model->shape;
    stage->inv_freq = arena_take(arena, (size_t)s->rotary / 2 * sizeof(float));
    stage->axis = s->axes > 1 ? arena_take(arena, (size_t)s->rotary / 2 * sizeof(int32_t)) : NULL;
#define MATRIX(slot, l, count, present) \
    (present) ? arena_take(arena, (size_t)(count) * matrix_step(model, SLOT_##slot, l)) : NULL
#define VECTOR(length, present) \
    (present) ? arena_take(arena, (size_t)(length) * sizeof(float)) : NULL
#define MODEL_MATRIX(slot, rows, cols, present, group) \
    stage->slot = MATRIX(slot, 0, 1, (present) && stage_has(model, stage, SLOT_##slot));
#define MODEL_VECTOR(slot, length, present) \
    stage->slot = VECTOR(length, (present) && stage_has(model, stage, SLOT_##slot));
#include "weights.inc"
    for (int l = stage->first; l < stage->end; l++) {
        LayerWeights *w = &model->layer[l];
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    w->slot = MATRIX(slot, l, count, present);
#define LAYER_VECTOR(slot, length, present) w->slot = VECTOR(length, present);
#include "weights.inc"
    }
#undef MATRIX
#undef VECTOR
    if (s->tied) stage->head = stage->embed;
}

/* Measures all stages. */
static void model_measure(Model *model)
{
    for (int k = 0; k < model->stages; k++) {
        Stage *stage = &model->stage[k];
        stage->weights = (Arena){.dev = stage->dev};
        stage_place(model, stage);
        stage->bytes = stage->weights.used;
        model->bytes += stage->bytes;
    }
}

static size_t slot_bytes(const Model *model, Slot slot, int layer)
{
    SlotInfo info = slot_info(&model->shape, slot, layer);
    if (!info.present) return 0;
    return info.matrix ? (size_t)info.count * matrix_step(model, slot, layer)
                       : arena_step((size_t)info.cols * sizeof(float));
}

/* Cuts the layers into stages by their bytes. The embedding counts for the first layer, the head
 * for the last one. */
static Status model_cut(Model *model)
{
    int L = model->shape.layers;
    size_t *bytes = calloc((size_t)L, sizeof *bytes);
    if (!bytes) return fail(STATUS_MEMORY, "no memory for a model of %d layers", L);
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < L; l++) {
            int per_layer = slot_info(&model->shape, slot, l).per_layer;
            if (!per_layer && l > 0) break;
            bytes[per_layer || slot == SLOT_embed ? l : L - 1] += slot_bytes(model, slot, l);
        }
    if (model->shape.tied) bytes[L - 1] += slot_bytes(model, SLOT_embed, 0);
    stages_cut(model, bytes);
    free(bytes);
    for (int k = 0; k < model->stages; k++) {
        Stage *stage = &model->stage[k];
        stage->cached = lists_cut(&model->shape, model->region, stage->first, stage->end);
    }
    return STATUS_OK;
}

/* The stage's first matrix, or its vector, in a slot; NULL: it has none. */
static void *slot_memory(const Model *model, const Stage *stage, Slot slot, int layer)
{
    int here = stage->first <= layer && layer < stage->end;
    switch (slot) {
#define MODEL_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return stage->slot;
#define MODEL_VECTOR(slot, length, present) \
    case SLOT_##slot: return stage->slot;
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    case SLOT_##slot: return here ? model->layer[layer].slot : NULL;
#define LAYER_VECTOR(slot, length, present) \
    case SLOT_##slot: return here ? model->layer[layer].slot : NULL;
#include "weights.inc"
    case SLOT_COUNT: break;
    }
    return NULL;
}

/* The host's arrays of each layer. */
static Status model_tables(Model *model, const Shape *shape, const DType *types)
{
    size_t L = (size_t)shape->layers;
    model->layer = calloc(L, sizeof *model->layer);
    model->kinds = calloc(L, sizeof *model->kinds);
    model->region = calloc(L, sizeof *model->region);
    if (!model->layer || !model->kinds || !model->region) goto failed;
    memcpy(model->kinds, shape->layer, L * sizeof *model->kinds);
    model->shape = *shape;
    model->shape.layer = model->kinds;
    model->lists = lists_of(&model->shape, model->region);
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < shape->layers; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            if (info.present && info.count > model->most) model->most = info.count;
        }
    model->loaded = calloc((size_t)SLOT_COUNT * L, (size_t)model->most);
    model->types = calloc((size_t)SLOT_COUNT * L, sizeof *model->types);
    if (!model->loaded || !model->types) goto failed;
    memcpy(model->types, types, (size_t)SLOT_COUNT * L * sizeof *model->types);
    return STATUS_OK;
failed:
    return fail(STATUS_MEMORY, "no memory for a model of %d layers", shape->layers);
}

static unsigned char *loaded_at(const Model *model, Slot slot, int layer, int index)
{
    return model->loaded + slot_place(model, slot, layer) * (size_t)model->most + (size_t)index;
}

/* Copies the numbers of rope. */
static Status rope_keep(Model *model, const Shape *shape, const float *inv_freq)
{
    size_t pairs = (size_t)shape->rotary / 2;
    model->host_freq = malloc((pairs + 1) * sizeof *model->host_freq);
    model->host_axis = malloc((pairs + 1) * sizeof *model->host_axis);
    if (!model->host_freq || !model->host_axis)
        return fail(STATUS_MEMORY, "no memory for a model of %d layers", shape->layers);
    memcpy(model->host_freq, inv_freq, pairs * sizeof *inv_freq);
    model->shape.axis = NULL;
    if (shape->axes == 1) return STATUS_OK;
    memcpy(model->host_axis, shape->axis, pairs * sizeof *shape->axis);
    model->shape.axis = model->host_axis;
    return STATUS_OK;
}

Status model_open(Model **out, const Shape *shape, const float *inv_freq, const DType *types,
                  const char *device, int threads)
{
    TRY(shape_check(shape));
    TRY(bytes_check(shape));
    Model *model = calloc(1, sizeof *model);
    if (!model) return fail(STATUS_MEMORY, "no memory for a model");
    Status status = stages_open(model, device, shape->layers, threads);
    if (status) goto failed;
    status = model_tables(model, shape, types);
    if (!status) status = types_check(model);
    if (!status) status = model_cut(model);
    if (status) goto failed;
    status = rope_keep(model, shape, inv_freq);
    if (status) goto failed;
    model_measure(model);
    *out = model;
    return STATUS_OK;
failed:
    model_close(model);
    return status;
}

static Status weights_reserve(Model *model)
{
    size_t pairs = (size_t)model->shape.rotary / 2;
    model->mapped = 0;
    for (int k = 0; k < model->stages; k++) {
        Stage *stage = &model->stage[k];
        if (stage->weights.base) continue;
        TRY(arena_reserve(&stage->weights, stage->bytes, "the base model"));
        stage_place(model, stage);
        stage->dev->upload(stage->dev, stage->inv_freq, model->host_freq,
                           pairs * sizeof *model->host_freq);
        if (stage->axis)
            stage->dev->upload(stage->dev, stage->axis, model->host_axis,
                               pairs * sizeof *model->host_axis);
    }
    return STATUS_OK;
}

void model_close(Model *model)
{
    if (!model) return;
    arenas_release(&model->training.step);
    for (int i = 0; i < VECTORS_WAITING; i++) arenas_release(&model->training.waiting[i]);
    if (model->tower) features_drop(model->tower);
    tower_close(model->tower);
    stages_close(model);
    free(model->layer);
    free(model->kinds);
    free(model->region);
    free(model->loaded);
    free(model->types);
    free(model->host_freq);
    free(model->host_axis);
    free(model);
}

Slot slot_named(const char *name)
{
    static const char *const names[] = {
#define MODEL_MATRIX(slot, rows, cols, present, group) #slot,
#define MODEL_VECTOR(slot, length, present) #slot,
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) #slot,
#define LAYER_VECTOR(slot, length, present) #slot,
#include "weights.inc"
    };
    Slot slot = 0;
    while (slot < SLOT_COUNT && strcmp(names[slot], name) != 0) slot++;
    return slot;
}

/* The slot with that name. The layer must have a matrix with that number in it. */
static Status slot_find(const Model *model, const char *name, int layer, int index, Slot *slot)
{
    const Shape *s = &model->shape;
    *slot = slot_named(name);
    if (*slot == SLOT_COUNT) return fail(STATUS_INVALID, "no slot is called '%s'", name);
    SlotInfo info = slot_info(s, *slot, 0);
    if (info.per_layer ? layer < 0 || layer >= s->layers : layer != -1)
        return fail(STATUS_INVALID, "%s: layer %d, but the model has %d%s", name, layer, s->layers,
                    info.per_layer ? "" : " and this slot belongs to none (-1)");
    if (info.per_layer) info = slot_info(s, *slot, layer);
    if (!info.present)
        return info.per_layer ? fail(STATUS_INVALID, "layer %d has no %s", layer, name)
                              : fail(STATUS_INVALID, "this model has no %s", name);
    if (index < 0 || index >= info.count)
        return fail(STATUS_INVALID, "%s: number %d, but there are %d", name, index, info.count);
    return STATUS_OK;
}

typedef struct TensorName {
    char text[96];
} TensorName;

/* "embed", "layer 3 wq" or, where the layer has several, "layer 3 w_gate 17". */
static TensorName tensor_name(const SlotInfo *info, int layer, int index)
{
    TensorName name;
    char before[32] = "", behind[16] = "";
    if (info->per_layer) snprintf(before, sizeof before, "layer %d ", layer);
    if (info->count > 1) snprintf(behind, sizeof behind, " %d", index);
    snprintf(name.text, sizeof name.text, "%s%s%s", before, info->name, behind);
    return name;
}

Status model_load(Model *model, const char *slot_name, int layer, int index, const void *array,
                  DType type, int rows, int cols)
{
    Slot slot = SLOT_embed;
    if (model->sealed)
        return fail(STATUS_INVALID, "the model is sealed: nothing more can be loaded");
    TRY(slot_find(model, slot_name, layer, index, &slot));
    SlotInfo info = slot_info(&model->shape, slot, layer);
    TensorName name = tensor_name(&info, layer, index);
    if (rows != info.rows || cols != info.cols)
        return fail(STATUS_INVALID, "%s: file has (%d, %d), the model needs (%d, %d)", name.text,
                    rows, cols, info.rows, info.cols);
    DType kept = info.matrix ? matrix_type(model, slot, layer) : DTYPE_F32;
    if (info.matrix) {
        if (!dtype_loads(kept, type))
            return fail(STATUS_INVALID, "%s: the array is %s, the model keeps this matrix in %s",
                        name.text, dtype_info(type).name, dtype_info(kept).name);
    } else if (type != DTYPE_F32) {
        return fail(STATUS_INVALID, "%s: vectors must arrive as float32", name.text);
    }
    TRY(weights_reserve(model));
    int finite = 1;
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        char *memory = slot_memory(model, &model->stage[k], slot, layer);
        if (!memory) continue;
        if (info.matrix)
            finite &= dev->frozen_load(
                dev, (frozen *)(memory + (size_t)index * matrix_step(model, slot, layer)), kept,
                array, type, rows, cols);
        else
            dev->upload(dev, memory, array, (size_t)cols * sizeof(float));
    }
    TRY(model_sync(model));
    if (!info.matrix) finite = first_bad(array, DTYPE_F32, cols) < 0;
    *loaded_at(model, slot, layer, index) = finite != 0;
    return finite ? STATUS_OK : fail(STATUS_INVALID, "%s: a number is not finite", name.text);
}

/* Fills `to` with repetitions of a device block, from its byte `at` on; returns the block's byte to
 * go on with. */
static size_t block_repeat(Device *dev, char *to, size_t bytes, const char *block, size_t size,
                           size_t at)
{
    while (bytes) {
        size_t part = size - at < bytes ? size - at : bytes;
        dev->copy(dev, to, block + at, part);
        to += part;
        bytes -= part;
        at = (at + part) % size;
    }
    return at;
}

/* A block can fill weights that the device keeps as plain rows of bf16. */
static Status fill_check(const Model *model)
{
    Device *dev = model->dev;
    if (dev->map)
        return fail(STATUS_INVALID,
                    "the device %s keeps weights in an order of its own: a block fills a GPU's",
                    dev->name);
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < model->shape.layers; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            DType type = matrix_type(model, slot, l);
            if (!info.present || !info.matrix) continue;
            if (type != DTYPE_BF16)
                return fail(STATUS_INVALID, "%s is kept in %s: a block fills matrices in bf16",
                            tensor_name(&info, l, 0).text, dtype_info(type).name);
            size_t bytes = (size_t)info.rows * (size_t)info.cols * sizeof(uint16_t);
            if (dev->frozen_bytes(dev, type, info.rows, info.cols) != bytes)
                return fail(STATUS_INVALID,
                            "%s has rows of %d numbers: a block fills rows of a multiple of 8",
                            tensor_name(&info, l, 0).text, info.cols);
        }
    return STATUS_OK;
}

/* Fills matrix `index` of a slot on each stage that has it, from the block's byte `at` on; returns
 * the byte to go on with. */
static size_t matrix_fill(Model *model, const Arenas *block, Slot slot, int layer, int index,
                          size_t at)
{
    SlotInfo info = slot_info(&model->shape, slot, layer);
    size_t bytes = (size_t)info.rows * (size_t)info.cols * sizeof(uint16_t), next = at;
    unsigned char *loaded = loaded_at(model, slot, info.per_layer ? layer : -1, index);
    for (int k = 0; k < model->stages && !*loaded; k++) {
        const Arena *from = &block->of[k];
        char *to = slot_memory(model, &model->stage[k], slot, layer);
        if (to)
            next = block_repeat(from->dev, to + (size_t)index * matrix_step(model, slot, layer),
                                bytes, from->base, from->used, at);
    }
    *loaded = 1;
    return next;
}

Status model_fill(Model *model, const void *numbers, int64_t count)
{
    size_t size = (size_t)count * sizeof(uint16_t), at = 0;
    Arenas block = {0}, measured = {0};
    if (model->sealed)
        return fail(STATUS_INVALID, "the model is sealed: nothing more can be loaded");
    if (count < 1) return fail(STATUS_INVALID, "the block has no numbers");
    if (first_bad(numbers, DTYPE_BF16, count) >= 0)
        return fail(STATUS_INVALID, "the block: a number is not finite");
    TRY(fill_check(model));
    TRY(weights_reserve(model));
    for (int k = 0; k < model->stages; k++) measured.of[k].used = size;
    Status status = arenas_reserve(model, &block, &measured, "a block of weights");
    for (int k = 0; k < model->stages && !status; k++) {
        block.of[k].used = size;
        model->stage[k].dev->upload(model->stage[k].dev, block.of[k].base, numbers, size);
    }
    for (Slot slot = 0; slot < SLOT_COUNT && !status; slot++)
        for (int l = 0; l < model->shape.layers; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            if (!info.per_layer && l > 0) break;
            for (int i = 0; info.present && info.matrix && i < info.count; i++)
                at = matrix_fill(model, &block, slot, l, i, at);
        }
    if (!status) status = model_sync(model);
    arenas_release(&block);
    return status;
}

Status model_seal(Model *model)
{
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < model->shape.layers; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            for (int i = 0; info.present && i < info.count; i++)
                if (!*loaded_at(model, slot, info.per_layer ? l : -1, i))
                    return fail(STATUS_INVALID, "%s was not loaded", tensor_name(&info, l, i).text);
        }
    model->sealed = 1;
    return STATUS_OK;
}

/* A device with map() shares the host's memory. */
static Status device_maps(const Model *model)
{
    if (!model->dev->map)
        return fail(STATUS_INVALID, "the device %s has memory of its own, which is no file's",
                    model->device);
    if (model->stages == 1) return STATUS_OK;
    return fail(STATUS_INVALID, "a model with %d stages has no single memory", model->stages);
}

Status model_map(Model *model, int file, size_t at)
{
    Stage *stage = &model->stage[0];
    TRY(device_maps(model));
    if (stage->weights.base) return fail(STATUS_INVALID, "the model has weights already");
    TRY(arena_map(&stage->weights, file, at, model->bytes));
    stage_place(model, stage);
    model->mapped = 1;
    if (!model->shape.tied) model->looked_up = matrix_step(model, SLOT_embed, 0);
    if (model->looked_up) model->dev->rarely(model->dev, stage->embed, model->looked_up);
    memset(model->loaded, 1,
           (size_t)SLOT_COUNT * (size_t)model->shape.layers * (size_t)model->most);
    model->sealed = 1;
    return STATUS_OK;
}

Status model_memory(const Model *model, const void **memory, size_t *bytes)
{
    TRY(device_maps(model));
    if (!model->sealed) return fail(STATUS_INVALID, "the model is not sealed");
    *memory = model->stage[0].weights.base;
    *bytes = model->stage[0].weights.size;
    return STATUS_OK;
}

size_t model_bytes(const Model *model)
{
    return model->bytes;
}

size_t stage_held(const Model *model, int k)
{
    int looked_up = k == 0 && model->mapped && !model->shape.tied;
    return model->stage[k].bytes - (looked_up ? matrix_step(model, SLOT_embed, 0) : 0);
}

size_t model_held(const Model *model)
{
    size_t bytes = 0;
    for (int k = 0; k < model->stages; k++) bytes += stage_held(model, k);
    return bytes;
}
