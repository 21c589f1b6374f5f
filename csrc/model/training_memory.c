/* model/training_memory.c - the memory that training calls on a model share: a step's arena, and
 * vectors for gradients.
 *
 * One micro-batch runs at a time, and it needs nothing of the last one's activations. So all
 * adapters of a model use one arena, even if their calls take turns. A call's gradients and the
 * sums of its parts (gradient_parts.c) need vectors only while there are gradients. A vector that
 * waits is not cleared: a page that was used is zeroed faster than the system gives a new one. */
#include "training_memory.h"

size_t training_bytes(const Model *model)
{
    const TrainingMemory *memory = &model->training;
    size_t bytes = memory->arena.size;
    for (int i = 0; i < VECTORS_WAITING; i++) bytes += memory->waiting[i].size;
    return bytes;
}

static void waiting_release(Model *model)
{
    for (int i = 0; i < VECTORS_WAITING; i++) arena_release(&model->training.waiting[i]);
}

void training_trim(Model *model)
{
    waiting_release(model);
    arena_release(&model->training.arena);
}

void vector_blank(Model *model, float *vector, size_t bytes)
{
    Device *dev = model->dev;
    (dev->blank ? dev->blank : dev->zero)(dev, vector, bytes);
}

static Status vector_make(Model *model, size_t bytes, float **vector)
{
    Arena memory = {.dev = model->dev};
    Status status = arena_reserve(&memory, bytes, "a vector of an adapter");
    if (status == STATUS_MEMORY) {
        waiting_release(model);
        status = arena_reserve(&memory, bytes, "a vector of an adapter");
    }
    if (status) return status;
    *vector = (float *)memory.base;
    vector_blank(model, *vector, bytes);
    return STATUS_OK;
}

Status vector_take(Model *model, size_t bytes, float **vector)
{
    Arena *waiting = model->training.waiting;
    for (int i = 0; i < VECTORS_WAITING; i++) {
        if (!waiting[i].base || waiting[i].size != arena_step(bytes)) continue;
        *vector = (float *)waiting[i].base;
        waiting[i].base = NULL;
        waiting[i].size = 0;
        model->dev->zero(model->dev, *vector, bytes);
        return STATUS_OK;
    }
    return vector_make(model, bytes, vector);
}

void vector_give(Model *model, float *vector, size_t bytes)
{
    Arena *waiting = model->training.waiting, *place = waiting;
    if (!vector) return;
    for (int i = 0; i < VECTORS_WAITING; i++)
        if (!waiting[i].base) place = &waiting[i];
    arena_release(place);
    place->dev = model->dev;
    place->base = (char *)vector;
    place->size = arena_step(bytes);
}
