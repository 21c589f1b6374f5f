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

/* The pages that a sequence holds, in their order. page_table.c writes it. */
typedef struct PageTable {
    int32_t *page;
    int count;
    int window_begin; /* pages before this one are held without their windowed frames */
} PageTable;

/* What it has beside them. state_checkpoint.c writes it. */
typedef struct SequenceState {
    int32_t slot;   /* of state_pool.c; -1: none */
    int first_row;  /* the state is good for rows from here on, up to those that are cached */
    int shared_end; /* tokens of whole pages that it had in common with an earlier sequence, behind
                       which no state was kept, or no window; 0: none */
} SequenceState;

/* How far it is. reuse.c writes it. */
typedef struct Progress {
    int ready;       /* 0: waits for the request's first sequence to share the prompt's pages */
    int waited;      /* for a page that another sequence was computing */
    int cached;      /* tokens whose keys and values are in the cache */
    int known;       /* full pages that prefix_cache.c knows */
    uint64_t parent; /* its number of the last of them */
} Progress;

/* Each part is written by the file that it names, once sequence_open has begun it. */
typedef struct Sequence {
    Tokens tokens; /* sequence.c */
    PageTable pages;
    SequenceState state;
    Progress progress;
} Sequence;

typedef struct Turn {
    Request *request;
    int sample, from, rows; /* tokens [from, from + rows) */
    int draws;              /* its last row is followed by a draw */
} Turn;

static inline Sequence *turn_sequence(const Turn *turn)
{
    return &turn->request->sequence[turn->sample];
}

/* A sequence of a prompt, for at most `limit` tokens; 0: no memory. Even a failed one is closed. */
int sequence_open(Sequence *s, const RequestSpec *spec, int limit, int ready);
void sequence_close(Sequence *s);
/* The rows of these turns have their keys and values in the cache. */
void turns_cached(Kv *kv, const Turn *turns, int count);
/* The draw of the token behind a turn's last row. */
Draw sequence_draw(const Turn *turn);
/* The k best of the token that is drawn next. The places behind a sequence's tokens have no meaning
 * yet, so a failed step may leave something there. */
void sequence_take_top(Sequence *s, int k, const int32_t *ids, const float *logprobs);
/* A drawn token joins its sequence, and may end it. One whose log-probability is not a number was
 * drawn from nothing: it does not join, and the request is marked. */
void sequence_take_token(Kv *kv, StepResult *result, const Turn *turn, int32_t token, float logp);
/* Ends a sequence that runs. */
void sequence_end(Sequence *s, Ending ending);
/* Gives back what a sequence holds. Its state may be kept for others (state_checkpoint.c). */
void sequence_drop(Kv *kv, const Request *request, Sequence *s);
/* The same, of a sequence whose content is not known. */
void sequence_forget(Kv *kv, Sequence *s);

#endif
