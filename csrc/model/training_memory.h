/* model/training_memory.h - the memory that training calls on a model share: a step's arena, and
 * vectors for gradients. */
#ifndef TINSMITH_MODEL_TRAINING_MEMORY_H
#define TINSMITH_MODEL_TRAINING_MEMORY_H

#include "model.h"

/* A flat vector of an adapter, in pieces: each stage has its layers' numbers, and the last one also
 * the head's. */
typedef struct Flat {
    float *of[STAGES_MOST]; /* all NULL: there is none */
} Flat;

/* Bytes of each piece. */
typedef struct FlatBytes {
    size_t of[STAGES_MOST];
} FlatBytes;

static inline int flat_exists(const Flat *vector)
{
    return vector->of[0] != NULL;
}

/* A vector of zeros. vector_give returns it; it then waits for the next one of its size. */
Status vector_take(Model *model, const FlatBytes *bytes, Flat *vector);
void vector_give(Model *model, const FlatBytes *bytes, Flat *vector);
/* Zeroes a vector; on a CPU it then takes no memory. */
void vector_blank(Model *model, const FlatBytes *bytes, const Flat *vector);
/* to += from */
void vector_add(const Model *model, const FlatBytes *bytes, const Flat *to, const Flat *from);
/* Copies between a vector and the host's array, piece after piece. */
void vector_upload(const Model *model, const FlatBytes *bytes, const Flat *to, const float *from);
void vector_download(const Model *model, const FlatBytes *bytes, float *to, const Flat *from);

/* Frees a vector, in any thread: so it does not wait for another call. */
void vector_free(const Model *model, const FlatBytes *bytes, Flat *vector);
/* Makes room for a vector's pieces, and the vector in it. */
Status flat_reserve(const Model *model, const FlatBytes *bytes, Arenas *memory,
                    const char *purpose);
Flat flat_in(const Arenas *memory);

/* Bytes that are held between calls: the step's arenas, and the vectors that wait. */
size_t training_bytes(const Model *model);
/* Frees them. No result depends on it: what a kept forward left in the arenas is computed again. */
void training_trim(Model *model);

#endif
