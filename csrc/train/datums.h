/* train/datums.h - a call's sequences, targets and the loss's inputs, as flat arrays. */
#ifndef TINSMITH_TRAIN_DATUMS_H
#define TINSMITH_TRAIN_DATUMS_H

#include "../model/model.h"
#include "losses.h"

struct Datums {
    int count;
    const int32_t *tokens, *lengths, *targets, *counts;
    int64_t token_total, target_total; /* lengths of the flat arrays, as passed */
    const float *input[LOSS_INPUTS];   /* NULL: missing */
    int64_t input_total[LOSS_INPUTS];
    double key[LOSS_KEYS];
};

/* Checks lengths, ids and numbers, against the model and the loss; an error names the datum. */
Status datums_check(const Datums *datums, const Model *model, const Loss *loss);

#endif
