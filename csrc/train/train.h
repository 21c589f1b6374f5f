/* train/train.h - forward_backward: datums, losses, and how a call adds their gradients to an
 * adapter.
 *
 *   Trainer  the memory and the limits of an adapter's training calls (trainer.c)
 *   Datums   a call's sequences, targets and the loss's inputs, as flat arrays
 *   Loss     how target log-probabilities become a loss (losses.c)
 *   Lesson   the sequences of the teacher in a distillation (objective_divergence.c)
 *   Plan     the memory of all of it, before anything is allocated (memory_plan.c) */
#ifndef TINSMITH_TRAIN_TRAIN_H
#define TINSMITH_TRAIN_TRAIN_H

#include "../model/core.h"

/* ---- losses.c ---- */

enum { JSD_BETA, JSD_TEMPERATURE, JSD_TOP_K, JSD_TOKEN_CLIP }; /* generalized_jsd's keys */

enum { LOSS_INPUTS = 5, LOSS_KEYS = 4, UNGATED = -1 };

/* One piece of a batch, as flat arrays over targets: any piece, or one datum if the loss is whole.
 */
typedef struct LossCall {
    int64_t count;
    const float *logp;
    const float *input[LOSS_INPUTS]; /* in the order of the loss's row */
    const double *key;               /* configuration, likewise */
    int rows;
    const int32_t *start; /* (rows + 1): where each row's targets begin, plus start[0]; NULL if the
                             loss is whole */
    float *dlogp;         /* out */
} LossCall;

typedef struct Datums Datums;

typedef struct Loss Loss;

struct Loss {
    const char *name;
    int multi;    /* targets may be (N, K) */
    int whole;    /* evaluate needs all targets of a datum in one call */
    int taught;   /* compares whole rows with a teacher's: objective_divergence.c; or, where this
                     input is there, a row's targets with the teacher's log-probabilities of them:
                     evaluate */
    int recorded; /* its first input is what was recorded when the targets were sampled: a server
                     reads it from its own records, not from the datum */
    int linear;   /* dlogp does not depend on logp: it is known before the forward */
    struct {
        const char *name;
        int required;
        const char *from; /* the key or the earlier input that stands in for an optional one */
        float missing;    /* or, where `from` is NULL, this number for every element */
    } input[LOSS_INPUTS];
    struct {
        const char *name;
        double initial; /* NAN: there is none, it must come; INFINITY: no bound */
    } key[LOSS_KEYS];
    int gate; /* input whose zeros mean: no gradient here; or UNGATED */
    /* Checks beyond this table; NULL: none. */
    Status (*check)(const Loss *loss, const Datums *datums);
    double (*evaluate)(const LossCall *call); /* returns the loss, writes dlogp */
};

const Loss *loss_find(const char *name);
const Loss *loss_at(int index); /* NULL past the end */
/* Not in the table: its one input is d loss / d logp itself. */
extern const Loss loss_given;

struct Datums {
    int count;
    const int32_t *tokens, *lengths, *targets, *counts;
    int64_t token_total, target_total; /* lengths of the flat arrays, as they came */
    const float *input[LOSS_INPUTS];   /* NULL: missing */
    int64_t input_total[LOSS_INPUTS];
    double key[LOSS_KEYS];
};

/* Number `target` of the loss's input j, or its default. */
float loss_input(const Loss *loss, const Datums *datums, int j, int64_t target);

/* ---- datums.c ---- */

/* Checks lengths, ids and numbers, against the model and the loss; an error names the datum. */
Status datums_check(const Datums *datums, const Model *model, const Loss *loss);

/* ---- trainer.c ---- */

typedef struct KeptForward KeptForward; /* trainer.c */

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

/* ---- objective_divergence.c: a loss between two distributions over the vocabulary ---- */

/* The teacher's sequences: one for each datum, its own prompt and then the datum's completion. */
typedef struct Lesson {
    const Model *model;     /* of the student's vocabulary */
    const Adapter *adapter; /* on that model; NULL: none */
    const int32_t *tokens, *lengths;
    int64_t token_total, count; /* lengths of the two arrays, as they came */
} Lesson;

/* As trainer_forward_backward, for a taught loss. Also gives the divergence of each row,
 * (token_total), 0 where its weight is. */
Status trainer_distill(Trainer *trainer, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, int with_backward, float *logp, float *divergence,
                       double *loss_sum);

/* ---- memory_plan.c: the memory that is planned by default ---- */

/* All memory in bytes, before anything is allocated. */
typedef struct Plan {
    size_t weights, adapter, step, own, free, all;
    size_t held; /* of the weights, all but a mapped embedding that is looked up */
    size_t cache, cache_tokens, kv_token;  /* a sampler's cache: its tokens, one token's bytes */
    size_t kv_window;                      /* what one sequence keeps of its window, at most */
    size_t states, kv_sequence;            /* in it, of how many sequences the states, and one's */
    size_t scratch, step_most, datum_most; /* of `own` the ops' scratch of a step; what a step, and
                                              one of a long datum, may take, which includes it */
    int step_tokens, keep;
    int longest; /* tokens of the longest datum that a step can train */
} Plan;

/* `tokens` of a training step; 0: the trainer's own. */
Status plan_make(Plan *plan, Model *model, const AdapterSpec *layout, const TrainerLimits *limits,
                 int tokens);
/* Bytes of a step of one datum of so many tokens, scratch included, with the least kept. */
Status plan_least(size_t *bytes, Trainer *trainer, int tokens);

#endif
