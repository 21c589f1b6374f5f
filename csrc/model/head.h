/* model/head.h - rows → logits → log-probabilities, in chunks. */
#ifndef TINSMITH_MODEL_HEAD_H
#define TINSMITH_MODEL_HEAD_H

#include "adapter.h"

#define LOGPROB_NONE (-99999.0f) /* padding for a top-K list with fewer ids */

/* Rows per chunk: their logits exist at the same time. */
int head_rows(const Model *model);

/* The head's arrays on the last stage's device, for T rows, in chunks of `chunk`. */
typedef struct Head {
    int T, chunk;
    real *x, *s, *dx, *ds;       /* (chunk,D), (chunk,R) */
    float *logits, *lse;         /* (chunk,V), (chunk,2) */
    int32_t *rows, *start, *ids; /* (T), (T+1), (targets), in the order of the head */
    float *logp, *dlogp;         /* (targets), in the order of the head */
} Head;

/* Places (or measures) the arrays that last as long as the rows; then those of one chunk, which
 * only the head uses. */
void head_place(Head *head, Arena *arena, const Model *model, int T, int64_t targets);
void head_place_chunk(Head *head, Arena *arena, const Model *model, int R);
/* Uploads the order of the rows (T), the start of each row's targets (T + 1), and their ids. */
void head_upload(Head *head, Device *dev, const int32_t *rows, const int32_t *start,
                 const int32_t *ids, int64_t targets);
/* Rows of the chunk that begins at `row`. */
int head_chunk(const Head *head, int row);
/* logits (rows,V) of hidden rows x (rows,D), with an adapter's LoRA (NULL: none), which leaves x·A
 * in s. */
void rows_logits(const Model *model, const Adapter *adapter, float *logits, real *s, const real *x,
                 int rows);
/* Logits of rows [row, row + rows), in head order, of hidden (T,D); then lse and targets' logp. */
void head_logits(const Head *head, const Adapter *adapter, const real *hidden, int row, int rows);
void head_logprob(const Head *head, const Model *model, int row, int rows);
/* dlogp → d loss / d logits, in the memory of the logits that head_logits has just written. */
void head_logprob_backward(const Head *head, const Model *model, int row, int rows);
/* d loss / d logits, in the logits' memory → those rows of dhidden (T,D), and the adapter's FRESH
 * gradients. */
void head_logits_backward(const Head *head, Adapter *adapter, real *dhidden, int row, int rows);

#endif
