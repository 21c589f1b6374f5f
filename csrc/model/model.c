/* model/model.c - a frozen base model: shapes checked, weights placed by weights.inc, tensors put
 * in by name.
 *
 * It knows slots, not checkpoints: which file tensor fills which slot is families.py's business. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

SlotInfo slot_info(const Shape *s, Slot slot)
{
    switch (slot) {
#define MODEL_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return (SlotInfo){#slot, 0, 1, present, rows, cols, group};
#define MODEL_VECTOR(slot, length, present) \
    case SLOT_##slot: return (SlotInfo){#slot, 0, 0, present, 1, length, NONE};
#define LAYER_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return (SlotInfo){#slot, 1, 1, present, rows, cols, group};
#define LAYER_VECTOR(slot, length, present) \
    case SLOT_##slot: return (SlotInfo){#slot, 1, 0, present, 1, length, NONE};
#include "weights.inc"
    case SLOT_COUNT: break;
    }
    return (SlotInfo){0};
}

static Status shape_check(const Shape *s)
{
    struct {
        const char *name;
        int value;
    } positive[] = {{"layers", s->layers},     {"width", s->width},           {"heads", s->heads},
                    {"kv_heads", s->kv_heads}, {"head_width", s->head_width}, {"ffn", s->ffn},
                    {"vocab", s->vocab},       {"context", s->context}};
    for (size_t i = 0; i < sizeof positive / sizeof *positive; i++)
        if (positive[i].value < 1)
            return fail(STATUS_INVALID, "a model's %s must be at least 1, not %d", positive[i].name,
                        positive[i].value);
    if (s->heads % s->kv_heads)
        return fail(STATUS_INVALID, "heads (%d) must be a multiple of kv_heads (%d)", s->heads,
                    s->kv_heads);
    if (s->head_width % 2 || s->head_width > 256)
        return fail(STATUS_INVALID, "head_width must be even and at most 256, not %d",
                    s->head_width);
    if (!(s->norm_eps > 0.0f))
        return fail(STATUS_INVALID, "norm_eps must be positive, not %g", (double)s->norm_eps);
    return STATUS_OK;
}

/* Walks weights.inc: measures while the arena has no base, places when it has one. Nothing is
 * reserved before the first tensor comes, so that a plan can be made of a model that fits nowhere.
 */
static void model_place(Model *model)
{
    Arena *arena = &model->weights;
    const Shape *s = &model->shape;
    Device *dev = model->dev;
    model->inv_freq = arena_take(arena, (size_t)s->head_width / 2 * sizeof(float));
#define MATRIX(rows, cols, present) \
    (present) ? arena_take(arena, dev->frozen_bytes(dev, model->type, rows, cols)) : NULL
#define VECTOR(length, present) \
    (present) ? arena_take(arena, (size_t)(length) * sizeof(float)) : NULL
#define MODEL_MATRIX(slot, rows, cols, present, group) model->slot = MATRIX(rows, cols, present);
#define MODEL_VECTOR(slot, length, present) model->slot = VECTOR(length, present);
#include "weights.inc"
    for (int l = 0; l < s->layers; l++) {
        LayerWeights *w = &model->layer[l];
#define LAYER_MATRIX(slot, rows, cols, present, group) w->slot = MATRIX(rows, cols, present);
#define LAYER_VECTOR(slot, length, present) w->slot = VECTOR(length, present);
#include "weights.inc"
    }
#undef MATRIX
#undef VECTOR
    if (s->tied) model->head = model->embed;
}

static void *slot_memory(const Model *model, Slot slot, int layer)
{
    switch (slot) {
#define MODEL_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return model->slot;
#define MODEL_VECTOR(slot, length, present) \
    case SLOT_##slot: return model->slot;
#define LAYER_MATRIX(slot, rows, cols, present, group) \
    case SLOT_##slot: return model->layer[layer].slot;
#define LAYER_VECTOR(slot, length, present) \
    case SLOT_##slot: return model->layer[layer].slot;
#include "weights.inc"
    case SLOT_COUNT: break;
    }
    return NULL;
}

Status model_open(Model **out, const Shape *shape, const float *inv_freq, DType type,
                  const char *device, int threads)
{
    TRY(shape_check(shape));
    Model *model = calloc(1, sizeof *model);
    if (!model) return fail(STATUS_MEMORY, "no memory for a model");
    Status status = device_open(&model->dev, device, threads);
    if (status) goto failed;
    model->shape = *shape;
    model->type = type;
    model->weights.dev = model->dev;
    size_t freq_bytes = (size_t)shape->head_width / 2 * sizeof(float);
    model->layer = calloc((size_t)shape->layers, sizeof *model->layer);
    model->loaded = calloc((size_t)SLOT_COUNT * (size_t)shape->layers, 1);
    model->host_freq = malloc(freq_bytes);
    if (!model->layer || !model->loaded || !model->host_freq) {
        status = fail(STATUS_MEMORY, "no memory for a model of %d layers", shape->layers);
        goto failed;
    }
    memcpy(model->host_freq, inv_freq, freq_bytes);
    model_place(model);
    model->bytes = model->weights.used;
    *out = model;
    return STATUS_OK;
failed:
    model_close(model);
    return status;
}

static Status model_reserve(Model *model)
{
    if (model->weights.base) return STATUS_OK;
    TRY(arena_reserve(&model->weights, model->bytes, "the base model"));
    model_place(model);
    model->dev->upload(model->dev, model->inv_freq, model->host_freq,
                       (size_t)model->shape.head_width / 2 * sizeof(float));
    return STATUS_OK;
}

void model_close(Model *model)
{
    if (!model) return;
    if (model->dev) {
        arena_release(&model->weights);
        model->dev->close(model->dev);
    }
    free(model->layer);
    free(model->loaded);
    free(model->host_freq);
    free(model);
}

static Status slot_find(const Model *model, const char *name, int layer, Slot *slot)
{
    for (int i = 0; i < SLOT_COUNT; i++) {
        SlotInfo info = slot_info(&model->shape, (Slot)i);
        if (strcmp(info.name, name) != 0) continue;
        if (!info.present) return fail(STATUS_INVALID, "this model has no %s", name);
        if (info.per_layer ? layer < 0 || layer >= model->shape.layers : layer != -1)
            return fail(STATUS_INVALID, "%s: layer %d, but the model has %d%s", name, layer,
                        model->shape.layers,
                        info.per_layer ? "" : " and this slot belongs to none (-1)");
        *slot = (Slot)i;
        return STATUS_OK;
    }
    return fail(STATUS_INVALID, "no slot is called '%s'", name);
}

Status model_load(Model *model, const char *name, int layer, const void *array, DType type,
                  int rows, int cols)
{
    Slot slot = SLOT_embed;
    if (model->sealed)
        return fail(STATUS_INVALID, "the model is sealed: nothing more can be loaded");
    TRY(slot_find(model, name, layer, &slot));
    SlotInfo info = slot_info(&model->shape, slot);
    char where[64] = "";
    if (info.per_layer) snprintf(where, sizeof where, "layer %d ", layer);
    if (rows != info.rows || cols != info.cols)
        return fail(STATUS_INVALID, "%s%s: file has (%d, %d), the model needs (%d, %d)", where,
                    name, rows, cols, info.rows, info.cols);
    Device *dev = model->dev;
    if (info.matrix) {
        if ((type == DTYPE_BF16) != (model->type == DTYPE_BF16))
            return fail(STATUS_INVALID,
                        "%s%s: the array is %s bf16, the model keeps its matrices in %s", where,
                        name, type == DTYPE_BF16 ? "" : "not",
                        model->type == DTYPE_BF16 ? "bf16" : "f32");
    } else if (type != DTYPE_F32) {
        return fail(STATUS_INVALID, "%s%s: vectors must arrive as float32", where, name);
    }
    TRY(model_reserve(model));
    void *memory = slot_memory(model, slot, layer);
    if (info.matrix)
        dev->frozen_load(dev, memory, array, type, rows, cols);
    else
        dev->upload(dev, memory, array, (size_t)cols * sizeof(float));
    TRY(dev->sync(dev));
    model->loaded[(size_t)slot * (size_t)model->shape.layers + (size_t)(layer < 0 ? 0 : layer)] = 1;
    return STATUS_OK;
}

Status model_seal(Model *model)
{
    for (int i = 0; i < SLOT_COUNT; i++) {
        SlotInfo info = slot_info(&model->shape, (Slot)i);
        for (int l = 0; info.present && l < (info.per_layer ? model->shape.layers : 1); l++)
            if (!model->loaded[(size_t)i * (size_t)model->shape.layers + (size_t)l])
                return info.per_layer
                           ? fail(STATUS_INVALID, "layer %d %s was not loaded", l, info.name)
                           : fail(STATUS_INVALID, "%s was not loaded", info.name);
    }
    model->sealed = 1;
    return STATUS_OK;
}

size_t model_bytes(const Model *model)
{
    return model->bytes;
}
