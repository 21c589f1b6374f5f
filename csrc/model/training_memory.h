/* model/training_memory.h - the memory that training calls on a model share: a step's arena, and
 * vectors for gradients. */
#ifndef TINSMITH_MODEL_TRAINING_MEMORY_H
#define TINSMITH_MODEL_TRAINING_MEMORY_H

#include "model.h"

/* A vector of zeros. vector_give returns it; it then waits for the next one of its size. */
Status vector_take(Model *model, size_t bytes, float **vector);
void vector_give(Model *model, float *vector, size_t bytes);
/* Zeroes a vector; on a CPU it then takes no memory. */
void vector_blank(Model *model, float *vector, size_t bytes);
/* Bytes that are held between calls: the arena, and the vectors that wait. */
size_t training_bytes(const Model *model);
/* Frees them. No result depends on it: what a kept forward left in the arena is computed again. */
void training_trim(Model *model);

#endif
