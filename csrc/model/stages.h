/* model/stages.h - the stages of a model: their devices, layers, memory and order. */
#ifndef TINSMITH_MODEL_STAGES_H
#define TINSMITH_MODEL_STAGES_H

#include "model.h"

/* The stage of a layer, and the last one. */
const Stage *stage_of(const Model *model, int layer);
const Stage *stage_last(const Model *model);
void stages_close(Model *model);
/* Cuts the layers, whose weights have these bytes (L). */
void stages_cut(Model *model, const size_t *bytes);

/* Copies to another stage's device, in the order of the work on both. */
void stage_copy(const Stage *to, void *at, const Stage *from, const void *source, size_t bytes);
/* Bytes that a stage's device can still give, and that it has. */
void stage_memory(const Model *model, int stage, size_t *free_bytes, size_t *all_bytes);
/* Waits for all devices; returns the first failure. */
Status model_sync(const Model *model);

/* Makes room for as many bytes on each stage as the measuring arenas used. */
Status arenas_reserve(const Model *model, Arenas *arenas, const Arenas *measured,
                      const char *purpose);
void arenas_release(Arenas *arenas);
/* The sum of their sizes. */
size_t arenas_size(const Arenas *arenas);

/* device.h's rehearsals, on all devices. model_rehearsed returns the sum, and each one's bytes. */
void model_rehearse(const Model *model);
size_t model_rehearsed(const Model *model, size_t *scratch);
Status model_reserve(const Model *model, const size_t *scratch);
/* Reserves the scratch that the ops of `work` need. */
Status model_prepare(const Model *model, void (*work)(void *), void *context);

#endif
