/* train/step.h - a training call: datums → micro-batches of rows (micro_batch.c) → forward → the
 * head, in chunks of logits → backward. An objective (objective_logprob.c, objective_divergence.c)
 * computes the loss of the head's logits and their gradient. step.c is the part that all objectives
 * share. */
#ifndef TINSMITH_TRAIN_STEP_H
#define TINSMITH_TRAIN_STEP_H

#include "../model/acts.h"
#include "../model/cache.h"
#include "../model/head.h"
#include "micro_batch.h"
#include "trainer.h"

typedef struct TrainStep TrainStep;

/* The host's work on rows [from, to), in the order of the head. */
typedef Status HostWork(TrainStep *step, int from, int to);

/* How the head's logits become a loss and their own gradient. A rehearsal runs `before` and `head`
 * as they are, so the host's work on a device's numbers goes through step_host. */
typedef struct Objective {
    const char *purpose; /* of its memory: a format for the tokens */
    /* Places (or measures) its arrays in the host's memory. */
    void (*arrays)(TrainStep *step, Arena *host);
    /* Places (or measures) the head, and the arrays it needs beside it. The forward may overwrite
     * the memory from arena->used on; returns where that memory ends. */
    size_t (*place)(TrainStep *step, Arena *arena);
    /* Likewise what is of use between the forward and the backward alone, a chunk of the head's. */
    void (*chunk)(TrainStep *step, Arena *arena);
    Status (*before)(TrainStep *step); /* comes before the forward; NULL: nothing does */
    /* Computes the logits of all rows whose log-probabilities are wanted, which step->logp holds
     * after the next wait. With with_backward, also the gradient of the first pack.live rows:
     * step->dlogp, grads.dxn. */
    Status (*head)(TrainStep *step);
    HostWork *tell; /* the losses that the head has not reported, and other results */
} Objective;

/* A call under way, with the current micro-batch. The caller sets the first seven fields. */
struct TrainStep {
    Trainer *trainer;
    const Datums *datums;
    const Loss *loss;
    const Objective *objective;
    Device *other; /* another device that the call computes on, or NULL */
    float *result; /* all log-probabilities, in the datums' order; NULL: not wanted */
    int held; /* how many micro-batches, the first ones, have activations that stay in the arena */
    int with_backward, rehearsing;
    int forwarded; /* the arena holds the activations of the current one */
    int *keep;     /* of each micro-batch, how much is kept; 0: no backward pass */
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

/* The memory of a step, before the step exists. */
typedef struct StepNeeds {
    size_t scratch;      /* for the ops */
    size_t least, whole; /* in all, with the least kept and with everything */
    size_t bytes;        /* of its arena, where `keep` is the most that fits; or 0 */
    int keep;
} StepNeeds;

/* Runs a call; on success its gradients are added to the adapter's. */
Status step_call(TrainStep *step, Pass pass, double *loss_sum);
Device *step_device(const TrainStep *step);
/* The memory that the current micro-batch, with all rows live, needs within a limit. */
void step_measure(TrainStep *step, size_t most, StepNeeds *needs);
/* Does the host's work, except in rehearsals. */
Status step_host(TrainStep *step, HostWork *work, int from, int to);
/* Called between layers and chunks: fails if the call is to stop. */
Status step_going(const TrainStep *step);
/* Adds to the loss of the current micro-batch; fails if it is not finite. */
Status step_loss(TrainStep *step, double loss);
/* Copies log-probabilities that have arrived to the result. */
void step_result(TrainStep *step);

#endif
