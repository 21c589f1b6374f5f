/* model/training_memory.c - the memory that training calls on a model share: a step's arena, and
 * vectors for gradients.
 *
 * One micro-batch runs at a time, and it needs nothing of the last one's activations. So all
 * adapters of a model use one arena, even if their calls take turns. A call's gradients and the
 * sums of its parts (gradient_parts.c) need vectors only while there are gradients. A vector that
 * waits is not cleared: a page that was used is zeroed faster than the system gives a new one. */
#include "training_memory.h"

#include "stages.h"

size_t training_bytes(const Model *model)
{
    size_t bytes = arenas_size(&model->training.step);
    for (int i = 0; i < VECTORS_WAITING; i++) bytes += arenas_size(&model->training.waiting[i]);
    return bytes;
}

static void waiting_release(Model *model)
{
    for (int i = 0; i < VECTORS_WAITING; i++) arenas_release(&model->training.waiting[i]);
}

void training_trim(Model *model)
{
    waiting_release(model);
    arenas_release(&model->training.step);
}

/* ---- pieces ---- */

/* A piece without numbers has memory too, so that a vector without memory is one that is not. */
static size_t piece_size(const FlatBytes *bytes, int k)
{
    return arena_step(bytes->of[k] ? bytes->of[k] : 1);
}

Status flat_reserve(const Model *model, const FlatBytes *bytes, Arenas *memory, const char *purpose)
{
    Arenas measured = {0};
    for (int k = 0; k < model->stages; k++) measured.of[k].used = piece_size(bytes, k);
    Status status = arenas_reserve(model, memory, &measured, purpose);
    if (status) arenas_release(memory);
    return status;
}

Flat flat_in(const Arenas *memory)
{
    Flat vector;
    for (int k = 0; k < STAGES_MOST; k++) vector.of[k] = (float *)memory->of[k].base;
    return vector;
}

/* The memory of a vector. */
static Arenas memory_of(const Model *model, const FlatBytes *bytes, const Flat *vector)
{
    Arenas memory = {0};
    for (int k = 0; k < model->stages; k++)
        memory.of[k] = (Arena){model->stage[k].dev, (char *)vector->of[k], piece_size(bytes, k), 0};
    return memory;
}

void vector_free(const Model *model, const FlatBytes *bytes, Flat *vector)
{
    Arenas memory = memory_of(model, bytes, vector);
    arenas_release(&memory);
    *vector = (Flat){0};
}

void vector_blank(Model *model, const FlatBytes *bytes, const Flat *vector)
{
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        (dev->blank ? dev->blank : dev->zero)(dev, vector->of[k], bytes->of[k]);
    }
}

void vector_add(const Model *model, const FlatBytes *bytes, const Flat *to, const Flat *from)
{
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        int64_t n = (int64_t)(bytes->of[k] / sizeof(float));
        if (n) dev->accumulate(dev, to->of[k], from->of[k], n);
    }
}

void vector_upload(const Model *model, const FlatBytes *bytes, const Flat *to, const float *from)
{
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        dev->upload(dev, to->of[k], from, bytes->of[k]);
        from += bytes->of[k] / sizeof(float);
    }
}

void vector_download(const Model *model, const FlatBytes *bytes, float *to, const Flat *from)
{
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        dev->download(dev, to, from->of[k], bytes->of[k]);
        to += bytes->of[k] / sizeof(float);
    }
}

/* ---- vectors that wait ---- */

static Status vector_make(Model *model, const FlatBytes *bytes, Flat *vector)
{
    Arenas memory = {0};
    Status status = flat_reserve(model, bytes, &memory, "a vector of an adapter");
    if (status == STATUS_MEMORY) {
        waiting_release(model);
        status = flat_reserve(model, bytes, &memory, "a vector of an adapter");
    }
    if (status) return status;
    *vector = flat_in(&memory);
    vector_blank(model, bytes, vector);
    return STATUS_OK;
}

/* Whether this vector waits, and has these bytes. */
static int waits(const Model *model, const Arenas *one, const FlatBytes *bytes)
{
    int k = 0;
    while (k < model->stages && one->of[k].base && one->of[k].size == piece_size(bytes, k)) k++;
    return k == model->stages;
}

Status vector_take(Model *model, const FlatBytes *bytes, Flat *vector)
{
    for (int i = 0; i < VECTORS_WAITING; i++) {
        Arenas *one = &model->training.waiting[i];
        if (!waits(model, one, bytes)) continue;
        *vector = flat_in(one);
        *one = (Arenas){0};
        for (int k = 0; k < model->stages; k++) {
            Device *dev = model->stage[k].dev;
            dev->zero(dev, vector->of[k], bytes->of[k]);
        }
        return STATUS_OK;
    }
    return vector_make(model, bytes, vector);
}

void vector_give(Model *model, const FlatBytes *bytes, Flat *vector)
{
    Arenas *waiting = model->training.waiting, *place = waiting;
    if (!flat_exists(vector)) return;
    for (int i = 0; i < VECTORS_WAITING; i++)
        if (!waiting[i].of[0].base) place = &waiting[i];
    arenas_release(place);
    *place = memory_of(model, bytes, vector);
    *vector = (Flat){0};
}
