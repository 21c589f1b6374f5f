/* model/stages.c - a model on several devices: each stage has consecutive layers, their LoRA, their
 * activations and their part of the cache. So a model may be larger than one card.
 *
 * A row runs the same ops in the same order on any number of stages, and crosses from one to the
 * next as it is. So results have the same bits. The layers are cut so that the stage with the most
 * bytes of weights has as few as possible. Stages work one after another: more of them give room,
 * not speed. */
#include "stages.h"

#include <stdlib.h>

const Stage *stage_of(const Model *model, int layer)
{
    const Stage *stage = model->stage;
    while (layer >= stage->end) stage++;
    return stage;
}

const Stage *stage_last(const Model *model)
{
    return &model->stage[model->stages - 1];
}

void stages_close(Model *model)
{
    for (int k = 0; k < model->stages; k++) {
        Stage *stage = &model->stage[k];
        if (!stage->dev) continue;
        arena_release(&stage->weights);
        stage->dev->close(stage->dev);
    }
    free(model->device);
}

/* ---- the cut ---- */

/* Whether stages of at most `most` bytes suffice; cuts the layers so. bytes[0] is the first
 * layer's, with the embedding's; the last one has the head's. */
static int cut(Model *model, const size_t *bytes, size_t most)
{
    int L = model->shape.layers, l = 0;
    for (int k = 0; k < model->stages; k++) {
        Stage *stage = &model->stage[k];
        int left = model->stages - 1 - k; /* stages after this one, each with a layer */
        stage->first = l;
        for (size_t used = 0; l < L - left && used + bytes[l] <= most; l++) used += bytes[l];
        stage->end = l;
        if (stage->end == stage->first) return 0;
    }
    return l == L;
}

void stages_cut(Model *model, const size_t *bytes)
{
    size_t below = 0, most = 0;
    for (int l = 0; l < model->shape.layers; l++) most += bytes[l];
    while (most - below > 1) {
        size_t middle = below + (most - below) / 2;
        *(cut(model, bytes, middle) ? &most : &below) = middle;
    }
    cut(model, bytes, most);
}

/* ---- memory and work ---- */

Status arenas_reserve(const Model *model, Arenas *arenas, const Arenas *measured,
                      const char *purpose)
{
    for (int k = 0; k < model->stages; k++) {
        arenas->of[k].dev = model->stage[k].dev;
        TRY(arena_reserve(&arenas->of[k], measured->of[k].used, purpose));
    }
    return STATUS_OK;
}

void arenas_release(Arenas *arenas)
{
    for (int k = 0; k < STAGES_MOST; k++) arena_release(&arenas->of[k]);
}

size_t arenas_size(const Arenas *arenas)
{
    size_t size = 0;
    for (int k = 0; k < STAGES_MOST; k++) size += arenas->of[k].size;
    return size;
}

void stage_copy(const Stage *to, void *at, const Stage *from, const void *source, size_t bytes)
{
    to->dev->receive(to->dev, at, from->dev, source, bytes);
}

Status model_sync(const Model *model)
{
    Status status = STATUS_OK;
    for (int k = 0; k < model->stages; k++) {
        Status one = model->stage[k].dev->sync(model->stage[k].dev);
        if (!status) status = one;
    }
    return status;
}

Status model_prepare(const Model *model, void (*work)(void *), void *context)
{
    size_t scratch[STAGES_MOST];
    if (!model->dev->rehearse) return STATUS_OK;
    model_rehearse(model);
    work(context);
    model_rehearsed(model, scratch);
    return model_reserve(model, scratch);
}

void model_rehearse(const Model *model)
{
    for (int k = 0; k < model->stages && model->dev->rehearse; k++)
        model->stage[k].dev->rehearse(model->stage[k].dev);
}

size_t model_rehearsed(const Model *model, size_t *scratch)
{
    size_t sum = 0;
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        scratch[k] = dev->rehearse ? dev->rehearsed(dev) : 0;
        sum += scratch[k];
    }
    return sum;
}

Status model_reserve(const Model *model, const size_t *scratch)
{
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        if (scratch[k]) TRY(dev->reserve(dev, scratch[k]));
    }
    return STATUS_OK;
}

void stage_memory(const Model *model, int k, size_t *free_bytes, size_t *all_bytes)
{
    Device *dev = model->stage[k].dev;
    dev->memory(dev, free_bytes, all_bytes);
    if (!dev->map) return;
    *free_bytes /= (size_t)model->stages; /* they share the host's */
    *all_bytes /= (size_t)model->stages;
}
