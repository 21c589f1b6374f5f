/* train/step.h - the parts of a training call: datums → micro-batches of rows (pack.c), and rows →
 * chunks of logits and their way back (head.c). step.c puts them together; kept.c remembers a call
 * that is made in two halves. */
#ifndef TINSMITH_STEP_H
#define TINSMITH_STEP_H

#include "train.h"

/* ---- pack.c ---- */

/* Whole datums, in order: at most step_tokens rows, or one longer datum. */
typedef struct Micro {
    int first, last;         /* datums [first, last) */
    int64_t token0, target0; /* where theirs begin in the flat arrays */
    int T, S, pages;
    int64_t targets;
} Micro;

/* The micro-batches of a call, and host arrays that are large enough for any of them. */
typedef struct Pack {
    const Datums *datums;
    int count;
    Micro *micro, most; /* most: the largest of each number */
    Span *spans;
    int32_t *pos, *slot, *page;
    /* The order in which the head sees rows: row indices, where each one's targets begin, their
     * ids, and the place of each among the micro-batch's targets. */
    int32_t *rows, *start, *ids, *source;
    int live; /* rows, first in that order, that may have a gradient */
} Pack;

Status pack_open(Pack *pack, const Datums *datums, int step_tokens);
void pack_close(Pack *pack);
/* The rows of a micro-batch → batch, which was placed for them. */
void pack_rows(Pack *pack, const Micro *micro, Batch *batch, Device *dev);
/* Orders them for the head: first those with a target whose gate (flat, like all targets; NULL:
 * no gate) is not zero. */
void pack_order(Pack *pack, const Micro *micro, const float *gate);

/* ---- kept.c ---- */

/* A forward that backward may follow: a copy of its datums, without the loss's inputs, in one
 * block. */
struct Kept {
    Datums datums;
};

Status kept_copy(Kept **kept, const Datums *datums);

/* ---- step.c ---- */

/* Asked between layers and chunks: fails where the call is to stop. */
Status not_interrupted(const Adapter *adapter);
/* Whether an adapter can have gradients. */
Status trainable(const Adapter *adapter);
/* Ends a call that made FRESH gradients: adds them to the others, with the loss and the counts that
 * are behind them, unless it failed or they are not finite; clears them. */
Status gradients_take(Adapter *adapter, Status status, double loss, double tokens,
                      double sequences);

#endif
