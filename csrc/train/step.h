/* train/step.h - a training call: datums → micro-batches of rows (pack.c) → forward → the head, in
 * chunks of logits, whose loss and gradient an objective makes (targets.c, distill.c) → backward.
 * step.c is what all objectives share. */
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
    BatchHost host;
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

/* ---- step.c ---- */

typedef struct TrainStep TrainStep;

/* What the host does about rows [from, to), in the order of the head. */
typedef Status HostWork(TrainStep *step, int from, int to);

/* How the head's logits become a loss and their own gradient. `before` and `head` are rehearsed as
 * they are: what the host makes of a device's numbers goes through step_host. */
typedef struct Objective {
    const char *purpose; /* of its memory: a format for the tokens */
    /* Places (or measures) its arrays in the host's memory. */
    void (*arrays)(TrainStep *step, Arena *host);
    /* Places (or measures) the head, and what it needs beside it. From arena->used on lies what the
     * forward may overwrite; returns where that ends. */
    size_t (*place)(TrainStep *step, Arena *arena);
    Status (*before)(TrainStep *step); /* comes before the forward; NULL: nothing does */
    /* Logits of all rows whose log-probabilities are wanted, told in step->logp by the next wait;
     * and, with_backward, the gradient of the first pack.live rows: step->dlogp, grads.dxn. */
    Status (*head)(TrainStep *step);
    HostWork *tell; /* the losses that the head has not told, and other results */
} Objective;

/* A call under way, with the micro-batch at hand. The first seven are the caller's to set. */
struct TrainStep {
    Trainer *trainer;
    const Datums *datums;
    const Loss *loss;
    const Objective *objective;
    Device *other; /* that it also computes on, or NULL */
    float *result; /* all log-probabilities, in the datums' order; NULL: of no interest */
    int held;      /* micro-batches, the first ones, whose activations lie or stay in the arena */
    int with_backward, rehearsing;
    int forwarded; /* the activations of the one at hand lie there */
    int *keep;     /* of each micro-batch, what is kept; 0: no backward pass */
    void *own;     /* the objective's */
    Pack pack;
    const Micro *micro;
    Batch batch;
    Acts acts;
    Grads grads;
    Head head;
    Cache cache;
    double *losses;      /* of each micro-batch */
    float *logp, *dlogp; /* (targets), in the order of the head */
    double tokens, sequences;
};

/* Bytes of a step before there is one. */
typedef struct StepNeeds {
    size_t scratch;      /* that its ops need for themselves */
    size_t least, whole; /* in all, with the least kept and with everything */
    size_t bytes;        /* of its arena, with `keep` kept: the most that fits, or 0 */
    int keep;
} StepNeeds;

/* Runs a call; what it makes is added to the gradients if it succeeds. */
Status step_call(TrainStep *step, Pass pass, double *loss_sum);
Device *step_device(const TrainStep *step);
/* What the micro-batch at hand, with all rows live, needs where it may take so much. */
void step_measure(TrainStep *step, size_t most, StepNeeds *needs);
/* Does the host's part, in all but rehearsals. */
Status step_host(TrainStep *step, HostWork *work, int from, int to);
/* Asked between layers and chunks: fails where the call is to stop. */
Status step_going(const TrainStep *step);
/* Adds to the loss of the micro-batch at hand; fails where it is not finite. */
Status step_loss(TrainStep *step, double loss);
/* Log-probabilities that have arrived → result. */
void step_result(TrainStep *step);

/* ---- targets.c: a loss on the targets' log-probabilities ---- */

extern const Objective targets_objective;
/* What a step of T rows of one datum needs, whatever its loss. */
Status targets_needs(Trainer *trainer, int T, StepNeeds *needs);

#endif
