/* train/losses.h - how target log-probabilities become a loss. */
#ifndef TINSMITH_TRAIN_LOSSES_H
#define TINSMITH_TRAIN_LOSSES_H

#include <stdint.h>

#include "../device/status.h"

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

/* Number `target` of the loss's input j, or its default. */
float loss_input(const Loss *loss, const Datums *datums, int j, int64_t target);

#endif
