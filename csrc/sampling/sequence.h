/* sampling/sequence.h - a sequence, and the rows of it that a step runs.
 *
 * A sequence is its tokens so far and how many of them have their keys and values in the cache. One
 * step runs, for each sequence, the tokens that are missing there: a prompt, a preempted sequence's
 * past, or just the newest token. It draws the next token when none is missing. There is no other
 * state, so joining, preempting and resuming are the same operation, and none can change a
 * result. */
#ifndef TINSMITH_SAMPLING_SEQUENCE_H
#define TINSMITH_SAMPLING_SEQUENCE_H

#include "page_pool.h"

/* The pages that a sequence holds, in order. page_table.c writes it. */
typedef struct PageTable {
    int32_t *page;
    int count;
    int window_begin; /* pages before this one are held without their windowed frames */
} PageTable;

/* Its state beside them, where the model's layers have one. state_checkpoint.c writes it. */
typedef struct SequenceState {
    int32_t slot;   /* of state_pool.c; -1: none */
    int first_row;  /* the state is good for rows from here on, up to those that are cached */
    int checkpoint; /* tokens of whole pages that it had in common with an earlier sequence, behind
                       which no state was cached, or no window; 0: none */
} SequenceState;

/* How far it is. reuse.c writes it. */
typedef struct Progress {
    int ready;       /* 0: waits for the request's first sequence to share the prompt's pages */
    int waited;      /* for a page that another sequence was computing */
    int cached;      /* tokens whose keys and values are in the cache */
    int known;       /* full pages that prefix_cache.c has */
    uint64_t parent; /* its id of the last of them */
} Progress;

/* Each part is written by the file that it names, once sequence_open has begun it. */
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
    int draws; /* its last row is followed by a draw */
} ScheduledRows;

static inline const RequestSpec *sequence_spec(const Sequence *s)
{
    return &s->request->spec;
}

/* A sample of a request, which has its limit; 0: no memory. Even a failed one is closed. */
int sequence_open(Sequence *s, Request *request, int sample);
void sequence_close(Sequence *s);
/* These rows have run: their keys and values are in the cache. */
void sequences_advance(PagePool *pool, const ScheduledRows *runs, int count);
/* The draw of the token after this position. */
Draw sequence_draw(const Sequence *s, int position);
/* The k best of the token that is drawn next. A step that fails then leaves them there, where they
 * mean nothing. */
void sequence_set_top(Sequence *s, int k, const int32_t *ids, const float *logprobs);
/* Appends a drawn token, which may finish the sequence. If its log-probability is not a number, the
 * token is dropped and the request is marked. */
void sequence_append(PagePool *pool, StepResult *result, Sequence *s, int32_t token, float logp);
void sequence_finish(Sequence *s, Finish finish);
/* Frees the pages of a sequence that ends or is preempted. Its state may be cached for others. */
void sequence_free(PagePool *pool, Sequence *s);
/* The same, of a sequence whose cache may be wrong. */
void sequence_reset(PagePool *pool, Sequence *s);

#endif
