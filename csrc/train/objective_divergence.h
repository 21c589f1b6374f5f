/* train/objective_divergence.h - a loss between two distributions over the vocabulary:
 * distillation. */
#ifndef TINSMITH_TRAIN_OBJECTIVE_DIVERGENCE_H
#define TINSMITH_TRAIN_OBJECTIVE_DIVERGENCE_H

#include "trainer.h"

/* The teacher's sequences: one for each datum, its own prompt and then the datum's completion. */
typedef struct Lesson {
    const Model *model;     /* of the student's vocabulary */
    const Adapter *adapter; /* on that model; NULL: none */
    const int32_t *tokens, *lengths;
    int64_t token_total, count; /* lengths of the two arrays, as passed */
} Lesson;

/* As trainer_forward_backward, for a taught loss. Another result is each row's divergence
 * (token_total), 0 if its weight is 0. */
Status trainer_distill(TrainStep **step, Trainer *trainer, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, Pass pass, int part, float *logp, float *divergence);

#endif
