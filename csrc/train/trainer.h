/* train/trainer.h - forward_backward: how a call of datums adds its gradients to an adapter, with
 * the memory and the limits of an adapter's training calls. */
#ifndef TINSMITH_TRAIN_TRAINER_H
#define TINSMITH_TRAIN_TRAINER_H

#include <stdatomic.h>

#include "../model/adapter.h"
#include "datums.h"

typedef struct KeptForward KeptForward;

typedef struct TrainerLimits {
    int step_tokens;    /* rows of a micro-batch */
    size_t step_bytes;  /* the most that a step may take, 0: the default's; */
    size_t datum_bytes; /* one whose datum needs more, even with the least kept; 0: the same */
    size_t keep_bytes;  /* the most that a kept forward may hold; one micro-batch in any case */
} TrainerLimits;

/* Others' work between two micro-batches of a call: with the same device, even the same model, but
 * not with the call's adapter. `done` of `count` micro-batches are. A failure ends the call. */
typedef Status Between(void *context, int done, int count);

/* The state of an adapter's training calls. */
typedef struct Trainer {
    Adapter *adapter;
    TrainerLimits limits;
    Arena arena;            /* of a step */
    KeptForward *kept;      /* the forward that backward may follow, or NULL */
    int held, held_keep;    /* micro-batches of it whose activations are still in the arena, and how
                               much is kept of each */
    Between *between;       /* of the call; NULL: nothing happens there */
    void *context;          /* its argument */
    int64_t *routed;        /* (L,X): rows of the last call that went to each expert; NULL: the
                               model has none */
    int busy;               /* a call is under way, and has its step in the arena */
    atomic_int interrupted; /* set from outside: the step under way stops */
} Trainer;

/* For an adapter, which may be a snapshot or have no memory, and must live longer. A limit of 0
 * rows means as many as make the device faster, if it has the memory. A limit of 0 bytes means the
 * default. */
Status trainer_open(Trainer **trainer, Adapter *adapter, const TrainerLimits *limits);
void trainer_close(Trainer *trainer);
/* Sets what a step may take (TrainerLimits); 0: the default. */
void trainer_limit(Trainer *trainer, size_t step_bytes, size_t datum_bytes);
/* Gives the memory of its steps back until the next one, unless one is under way. A kept forward is
 * then computed again. */
void trainer_trim(Trainer *trainer);

/* How far a call goes: FORWARD_KEEP leaves what backward needs. */
typedef enum Pass { FORWARD, FORWARD_KEEP, FORWARD_BACKWARD } Pass;

/* logp (target_total) and loss are the results; FORWARD_BACKWARD adds to the gradients. On an error
 * nothing was added. */
Status trainer_forward_backward(Trainer *trainer, const Datums *datums, const Loss *loss, Pass pass,
                                float *logp, double *loss_sum);
/* Adds to the gradients the same as FORWARD_BACKWARD of the kept forward's datums, for a loss with
 * this dlogp (count numbers, like targets); loss is Σ dlogp·logp. It uses up the kept forward.
 * After an error the kept forward stays, to be computed again. */
Status trainer_backward(Trainer *trainer, const float *dlogp, int64_t count, double *loss_sum);

#endif
