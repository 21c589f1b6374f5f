/* step.h - the parts of a training call: datums → micro-batches of rows (pack.c), and rows → chunks
 * of logits and their way back (head.c). step.c puts them together;
 * kept.c remembers a call that is made in two halves. */
#ifndef TINSMITH_STEP_H
#define TINSMITH_STEP_H

#include "core.h"

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

/* ---- head.c ---- */

/* What the head needs on the device for T rows, of which it sees `chunk` at a time. */
typedef struct Head {
    int T, chunk;
    real *x, *s, *dx, *ds;       /* (chunk,D), (chunk,R) */
    float *logits, *lse;         /* (chunk,V), (chunk) */
    int32_t *rows, *start, *ids; /* (T), (T+1), (targets), as in Pack */
    float *logp, *dlogp;         /* (targets), in the order of the head */
} Head;

void head_place(Head *head, Arena *arena, const Model *model, int T, int R, int64_t targets);
void head_upload(Head *head, Device *dev, const Pack *pack, const Micro *micro);
/* Rows of the chunk that begins at `row`. */
int head_chunk(const Head *head, int row);
/* logits (rows,V) of hidden rows x (rows,D), with an adapter's part (NULL: none), which leaves s.
 */
void rows_logits(const Model *model, const Adapter *adapter, float *logits, real *s, const real *x,
                 int rows);
/* Logits of rows [row, row + rows) in head order out of hidden (T,D); then lse, and logp of their
 * targets. */
void head_logits(const Head *head, const Adapter *adapter, const real *hidden, int row, int rows);
void head_logprob(const Head *head, const Model *model, int row, int rows);
/* dlogp → d loss / d logits, in the memory of the logits that head_logits has just left. */
void head_logprob_backward(const Head *head, const Model *model, int row, int rows);
/* d loss / d logits, which lie there → those rows of dhidden (T,D), and the adapter's FRESH
 * gradients. */
void head_logits_backward(const Head *head, Adapter *adapter, real *dhidden, int row, int rows);

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
