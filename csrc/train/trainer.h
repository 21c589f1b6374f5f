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

/* Others' work between two micro-batches of a call. It may use the device and the model, but not
 * the call's adapter. `done` of `count` micro-batches are done. A failure ends the call. */
typedef Status Between(void *context, int done, int count);

/* The state of an adapter's training calls. */
typedef struct Trainer {
    Adapter *adapter;
    TrainerLimits limits;
    Arena arena;            /* of a step */
    KeptForward *kept;      /* a forward to which backward may follow, or NULL */
    int held, held_keep;    /* its micro-batches whose activations are still in the arena, and their
                               `keep` */
    Between *between;       /* of the call, or NULL */
    void *context;          /* its argument */
    int64_t *routed;        /* (L,X): rows of the last call per expert; NULL: no experts */
    int busy;               /* a call is in flight, its step in the arena */
    atomic_int interrupted; /* set from outside to stop the step in flight */
} Trainer;

/* The adapter may be a snapshot or have no memory, and must outlive the trainer. A limit of 0 rows
 * means as many as make the device faster, if its memory allows. 0 bytes means the default. */
Status trainer_open(Trainer **trainer, Adapter *adapter, const TrainerLimits *limits);
void trainer_close(Trainer *trainer);
/* Sets the limits of a step's bytes (TrainerLimits); 0: the default. */
void trainer_limit(Trainer *trainer, size_t step_bytes, size_t datum_bytes);
/* Frees the memory of its steps until the next one, unless one is in flight. A kept forward is then
 * recomputed. */
void trainer_trim(Trainer *trainer);

/* FORWARD_KEEP leaves what backward needs. */
typedef enum Pass { FORWARD, FORWARD_KEEP, FORWARD_BACKWARD } Pass;

/* logp (target_total) and loss are the results; FORWARD_BACKWARD adds to the gradients. On an error
 * nothing was added. */
Status trainer_forward_backward(Trainer *trainer, const Datums *datums, const Loss *loss, Pass pass,
                                float *logp, double *loss_sum);
/* Adds the same gradients as FORWARD_BACKWARD of the kept forward's datums, for a loss with this
 * dlogp (count numbers, like targets); loss is Σ dlogp·logp. It consumes the kept forward; after an
 * error the kept forward stays and is recomputed. */
Status trainer_backward(Trainer *trainer, const float *dlogp, int64_t count, double *loss_sum);

#endif
