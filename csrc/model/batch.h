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

/* Rows [row, row + rows) are those of an image from its row `from` on. */
typedef struct ImageRows {
    const Features *features;
    int row, from, rows;
} ImageRows;

typedef struct Batch {
    int T, S, lists, segments;
    int32_t *tokens, *pos;  /* device; pos is (T, axes) */
    int32_t *slot;          /* device: (lists,T), list after list */
    Span *spans;            /* device: (lists,S); lists differ only in their pages */
    int32_t *pages;         /* device: the pages' frames */
    Segment *segment;       /* host */
    Segment whole;          /* the only one of a batch with one segment (batch_whole) */
    const ImageRows *image; /* host; they stand in place of the rows' embedding */
    int images;
    const atomic_int *stop;   /* NULL, or set from outside to stop before the next layer */
    const struct Batch *read; /* the rows whose hidden states are read; NULL: all */
    int32_t *rows; /* device, of a `read` batch: the indices of its T rows in the whole batch */
} Batch;

/* Host arrays that batch_upload sends. */
typedef struct BatchHost {
    int T, S, lists, page_count;
    const int32_t *tokens; /* 0 or more, in an image's rows too */
    int32_t *pos, *slot, *pages;
    Span *spans;
} BatchHost;

/* Places (or measures) a batch's arrays on one device, for layers in `lists` lists; training has
 * one list. */
void batch_place_on(Batch *batch, Arena *arena, int T, int S, int lists, int page_count, int axes);
/* The same batch on each stage's device. */
void batch_place(Batch *batch, Arenas *arenas, const Model *model, int T, int S, int lists,
                 int page_count);
void batch_upload(Batch *batch, const Model *model, const BatchHost *host);
/* Appends a whole sequence with its own pages and these images; the caller fills in its tokens. */
void batch_add(BatchHost *host, const ImageRun *runs, int images, int length, int axes);
/* On all stages: all rows belong to one adapter (NULL: none), and `stop` is the batch's. The batch
 * may not be moved afterwards. */
void batch_whole(Batch *batch, const Model *model, const Adapter *adapter, int rows,
                 const atomic_int *stop);
/* On all stages: these rows are images'. */
void batch_images(Batch *batch, const Model *model, const ImageRows *image, int images);
/* Whether forward and backward ended early; their outputs are then invalid. */
int batch_stopped(const Batch *batch);

#endif
