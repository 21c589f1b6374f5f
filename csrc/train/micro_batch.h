/* train/micro_batch.h - whole datums packed into micro-batches of rows. */
#ifndef TINSMITH_TRAIN_MICRO_BATCH_H
#define TINSMITH_TRAIN_MICRO_BATCH_H

#include "../model/batch.h"
#include "datums.h"

/* Whole datums, in order: at most step_tokens rows, or one longer datum. */
typedef struct Micro {
    int first, last;         /* datums [first, last) */
    int64_t token0, target0; /* start of its data in the flat arrays */
    int T, S, pages;
    int64_t targets;
} Micro;

/* A call's micro-batches, and host arrays large enough for each. */
typedef struct Pack {
    const Datums *datums;
    int count;
    Micro *micro, most; /* most: the largest of each number */
    BatchHost host;
    /* With images: a micro-batch's tokens with 0 in their rows, a datum's images, and the rows. */
    int32_t *tokens; /* NULL: no datum has an image */
    ImageRun *runs;
    ImageRows *image;
    int images; /* of the micro-batch */
    /* The head's order of rows: row indices, the start of each row's targets, their ids, and each
     * one's index among the micro-batch's targets. */
    int32_t *rows, *start, *ids, *source;
    int live; /* the first rows of that order, which may have a gradient */
} Pack;

/* The first datum of each part of a call, and then the number of datums. */
void parts_cut(int first[GRADIENT_PARTS + 1], const int32_t *lengths, int count, int step_tokens);
Status pack_open(Pack *pack, const Datums *datums, const Model *model, int step_tokens);
void pack_close(Pack *pack);
/* Computes the features of a micro-batch's images. */
Status pack_images(Pack *pack, const Micro *micro, const Model *model, const atomic_int *stop);
/* Copies the rows of a micro-batch to the batch placed for them. */
void pack_upload(Pack *pack, const Micro *micro, Batch *batch, const Model *model);
/* Orders the rows for the head: first those with a target whose gate is not zero. The gate is flat,
 * like all targets; NULL: all rows. */
void pack_order(Pack *pack, const Micro *micro, const float *gate);

#endif
