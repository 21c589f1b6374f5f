/* sampling/sequence.h - a sequence, and the rows of it that a step runs.
 *
 * A sequence is its tokens so far and how many of them have keys and values in the cache. A step
 * runs each sequence's missing tokens: a prompt, a preempted sequence's past, or just the newest
 * token. It draws the next token when none is missing. There is no other state, so joining,
 * preempting and resuming are the same operation, and none can change a result. */
#ifndef TINSMITH_SAMPLING_SEQUENCE_H
#define TINSMITH_SAMPLING_SEQUENCE_H

#include "page_pool.h"

/* The pages that a sequence holds, in order. page_table.c writes it. */
typedef struct PageTable {
    int32_t *page;
    int count;
    int window_begin; /* pages before this one are held without their windowed frames */
} PageTable;

/* Its recurrent state, if the model's layers have one. state_checkpoint.c writes it. */
typedef struct SequenceState {
    int32_t slot;   /* of state_pool.c; -1: none */
    int first_row;  /* the state is valid for rows from here up to `cached` */
    int checkpoint; /* tokens of full pages shared with an earlier sequence, after which no state or
                       window was cached; 0: none */
} SequenceState;

/* How much of it is cached. reuse.c writes it. */
typedef struct Progress {
    int ready;       /* 0: waits for the request's first sequence to share the prompt's pages */
    int waited;      /* for a page that another sequence was computing */
    int cached;      /* tokens whose keys and values are in the cache */
    int known;       /* full pages that prefix_cache.c has */
    uint64_t parent; /* the prefix cache's id of the last of them */
} Progress;

/* After sequence_open, only the file named above writes a part. */
typedef struct Sequence {
    Request *request;
    int sample;
    Tokens tokens; /* sequence.c */
    PageTable pages;
    SequenceState state;
    Progress progress;
} Sequence;

/* The rows of a sequence that a step runs: tokens [from, from + rows). */
typedef struct ScheduledRows {
    Sequence *sequence;
    int from, rows;
    int draws; /* a token is drawn after its last row */
} ScheduledRows;

static inline const RequestSpec *sequence_spec(const Sequence *s)
{
    return &s->request->spec;
}

/* A sample of a request, whose limit is set; 0: no memory. Close it even then. */
int sequence_open(Sequence *s, Request *request, int sample);
void sequence_close(Sequence *s);
/* Called after these rows have run: their keys and values are in the cache. */
void sequences_advance(PagePool *pool, const ScheduledRows *runs, int count);
/* The position (axes) of the token at `index` (vision/images.h). */
void sequence_position(int32_t *pos, const Sequence *s, int index, int axes);
/* The draw of the token after this index. */
Draw sequence_draw(const Sequence *s, int position);
/* Sets the k best of the token drawn next. If the step then fails, they are not read. */
void sequence_set_top(Sequence *s, int k, const int32_t *ids, const float *logprobs);
/* Appends a drawn token, which may finish the sequence. If its log-probability is not a number, the
 * token is dropped and the request is marked. */
void sequence_append(PagePool *pool, StepResult *result, Sequence *s, int32_t token, float logp);
void sequence_finish(Sequence *s, Finish finish);
/* Frees the pages of a sequence that ends or is preempted. Its state may be cached for others. */
void sequence_free(PagePool *pool, Sequence *s);
/* The same if its cache may be wrong: its state is not cached. */
void sequence_reset(PagePool *pool, Sequence *s);

#endif
