/* train/trainer.h - forward_backward: adds the gradients of a call's datums to an adapter; the
 * memory and limits of an adapter's training calls. */
#ifndef TINSMITH_TRAIN_TRAINER_H
#define TINSMITH_TRAIN_TRAINER_H

#include <stdatomic.h>

#include "../model/adapter.h"
#include "datums.h"

typedef struct KeptForward KeptForward;

typedef struct TrainerLimits {
    int step_tokens;    /* rows of a micro-batch */
    size_t step_bytes;  /* the most that a step may take; 0: the default */
    size_t datum_bytes; /* the same for a datum that needs more even with the minimum kept; 0:
                           step_bytes */
    size_t keep_bytes;  /* the most that a kept forward may hold; one micro-batch always may */
} TrainerLimits;

/* The state of an adapter's training calls. */
typedef struct Trainer {
    Adapter *adapter;
    uint64_t number; /* from 1; unique in this process */
    TrainerLimits limits;
    KeptForward *kept;      /* a forward to which backward may follow, or NULL */
    int held, held_keep;    /* its micro-batches whose activations were left in the arena, and their
                               `keep` */
    int64_t *routed;        /* (L,X): rows of the last call per expert; NULL: no experts */
    int busy;               /* a call is in flight */
    atomic_int interrupted; /* set from outside to stop the step in flight */
} Trainer;

/* The adapter may be a snapshot or have no memory, and must outlive the trainer. A limit of 0 rows
 * means as many as make the device faster, if its memory allows. 0 bytes means the default. */
Status trainer_open(Trainer **trainer, Adapter *adapter, const TrainerLimits *limits);
void trainer_close(Trainer *trainer);
/* Sets the limits of a step's bytes (TrainerLimits); 0: the default. */
void trainer_limit(Trainer *trainer, size_t step_bytes, size_t datum_bytes);

/* FORWARD_KEEP leaves what backward needs. */
typedef enum Pass { FORWARD, FORWARD_KEEP, FORWARD_BACKWARD } Pass;

/* A call in flight (step.h). Between its micro-batches others may use the device and the model, but
 * not the adapter. */
typedef struct TrainStep TrainStep;

enum { WHOLE_CALL = -1 }; /* not one part of it */

/* Each begins a call, whose arrays must stay as they are until it is closed. Its gradients are
 * added after its last micro-batch. If it fails or is closed before, nothing was added. logp
 * (target_total) is a result. `part`: the datums are that part of a larger call, whose gradients
 * wait as its leaf (gradient_parts.h). A snapshot can compute parts. */
Status trainer_forward_backward(TrainStep **step, Trainer *trainer, const Datums *datums,
                                const Loss *loss, Pass pass, int part, float *logp);
/* The same gradients as FORWARD_BACKWARD of the kept forward's datums, for a loss with this dlogp
 * (count numbers, like targets); the loss is Σ dlogp·logp. It consumes the kept forward; after an
 * error the kept forward stays and is recomputed. */
Status trainer_backward(TrainStep **step, Trainer *trainer, const float *dlogp, int64_t count);
/* Runs a micro-batch; *done of *count are done. */
Status trainer_next(TrainStep *step, int *done, int *count);
/* The loss's sum, after the last one. */
double trainer_loss(const TrainStep *step);
void trainer_end(TrainStep *step);

#endif
