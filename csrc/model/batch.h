/* model/batch.h - rows of many sequences, packed, with their spans and cache pages. */
#ifndef TINSMITH_MODEL_BATCH_H
#define TINSMITH_MODEL_BATCH_H

#include <stdatomic.h>

#include "../device/arena.h"
#include "adapter.h"

/* Rows [row, row + rows) that share an adapter (NULL: none). */
typedef struct Segment {
    const Adapter *adapter;
    int row, rows;
} Segment;

typedef struct Batch {
    int T, S, lists, segments;
    int32_t *tokens, *pos;    /* device */
    int32_t *slot;            /* device, of each list in turn: (lists,T) */
    Span *spans;              /* device, the same: (lists,S), alike but for their pages */
    int32_t *pages;           /* device: the pages' frames */
    Segment *segment;         /* host */
    Segment whole;            /* the one of a batch that has one (batch_whole) */
    const atomic_int *stop;   /* NULL, or, when set from outside: no further layer */
    const struct Batch *read; /* the rows whose hidden states are read; NULL: all */
    int32_t *rows; /* device, of such a batch: which of the other's rows its T rows are */
} Batch;

/* Host arrays that batch_upload sends. */
typedef struct BatchHost {
    int T, S, lists, page_count;
    const int32_t *tokens;
    int32_t *pos, *slot, *pages;
    Span *spans;
} BatchHost;

/* Places (or measures) the device arrays of a batch, whose layers are dealt to so many lists: in
 * training to one. */
void batch_place(Batch *batch, Arena *arena, int T, int S, int lists, int page_count);
void batch_upload(Batch *batch, Device *dev, const BatchHost *host);
/* A whole sequence behind the others, on pages of its own; its tokens are the caller's to put. */
void batch_add(BatchHost *host, int length);
/* All rows belong to one adapter, or to none where it is NULL. The batch may not be moved
 * afterwards. */
void batch_whole(Batch *batch, const Adapter *adapter, int rows);
/* Whether forward and backward ended early; their outputs are then of no use. */
int batch_stopped(const Batch *batch);

#endif
