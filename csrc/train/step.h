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

/* The host's work on rows [from, to), in the order of the head. */
typedef Status HostWork(TrainStep *step, int from, int to);

/* How the head's logits become a loss and their own gradient. A rehearsal runs `before` and `head`
 * too, so host work on a device's numbers goes through step_host, which skips it. */
typedef struct Objective {
    const char *purpose; /* names its memory in errors; a format for the tokens */
    /* Places (or measures) its arrays in the host's memory. */
    void (*arrays)(TrainStep *step, Arena *host);
    /* Places (or measures) the head, on the last stage, and its other arrays. Forward may overwrite
     * each stage's memory from used on; `end` gets the end of that memory. */
    void (*place)(TrainStep *step, Arenas *arenas, size_t *end);
    /* The same for one chunk of the head, which is used only between forward and backward. */
    void (*chunk)(TrainStep *step, Arena *last);
    Status (*before)(TrainStep *step); /* runs before forward; NULL: nothing */
    /* Computes the logits of all rows whose log-probabilities are needed; step->logp has these
     * after the next wait. If with_backward, also the gradient of the first pack.live rows:
     * step->dlogp, grads.dxn. */
    Status (*head)(TrainStep *step);
    HostWork *tell; /* reports the losses that the head has not, and other results */
} Objective;

/* A call in flight, with the current micro-batch. The caller sets the fields up to `held`. */
struct TrainStep {
    Trainer *trainer;
    const Datums *datums;
    const Loss *loss;
    const Objective *objective;
    const Model *other;   /* another model that the call computes with, or NULL */
    float *result;        /* all log-probabilities, in the datums' order, or NULL */
    void *own;            /* the objective's */
    void *owned;          /* freed with the step */
    KeptForward *keeping; /* the trainer's, once a FORWARD_KEEP has succeeded */
    int goes_back;        /* from the trainer's kept forward */
    int part;             /* or WHOLE_CALL */
    int held; /* the first `held` micro-batches have activations that stay in the arena */
    Datums data;
    uint64_t stamp; /* of the weights when it began */
    Arenas need;    /* measured: the arenas */
    int done, finished;
    int leaf; /* the part in flight */
    PartSum sum;
    double loss_sum;
    int with_backward, rehearsing;
    int forwarded; /* the arena holds the current one's activations */
    int *keep;     /* each micro-batch's `keep` (acts.c); 0: no backward */
    Pack pack;
    const Micro *micro;
    Batch batch[STAGES_MOST]; /* these four: each stage's */
    Acts acts[STAGES_MOST];
    Grads grads[STAGES_MOST];
    Cache cache[STAGES_MOST];
    Head head;
    double *losses;           /* of each micro-batch */
    float *logp, *dlogp;      /* (targets), in the order of the head */
    double tokens, sequences; /* of the part in flight */
};

/* The memory of a step, before the step exists, in all stages. */
typedef struct StepNeeds {
    size_t scratch;      /* for the ops */
    size_t least, whole; /* in total, with the minimum and with everything kept */
    size_t bytes;        /* of its arenas with `keep`, the most that fits; or 0 */
    int keep;
    size_t stage_bytes[STAGES_MOST], stage_scratch[STAGES_MOST]; /* bytes and scratch of each */
} StepNeeds;

/* Begins a call with a copy of `given`; nothing is computed yet. */
Status step_start(TrainStep **step, const TrainStep *given, Pass pass);
/* Runs the next micro-batch. After the last one, the gradients are added to the adapter's. */
Status step_next(TrainStep *step);
/* Frees it. A call that is not finished is dropped. */
void step_close(TrainStep *step);
/* The sum of all parts is added to the adapter's gradients. If it is not finite, it is dropped. */
Status gradients_gather(Adapter *adapter, double *loss_sum);
/* The memory that the current micro-batch needs, with all rows live, within a limit in all, and
 * within each stage's part (NULL: any). */
void step_measure(TrainStep *step, size_t most, const size_t *part, StepNeeds *needs);

#endif
