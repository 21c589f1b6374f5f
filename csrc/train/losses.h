/* train/losses.h - how target log-probabilities become a loss. */
#ifndef TINSMITH_TRAIN_LOSSES_H
#define TINSMITH_TRAIN_LOSSES_H

#include <stdint.h>

#include "../device/status.h"

enum { JSD_BETA, JSD_TEMPERATURE, JSD_TOP_K, JSD_TOKEN_CLIP }; /* generalized_jsd's keys */

enum { LOSS_INPUTS = 5, LOSS_KEYS = 4, UNGATED = -1 };

/* A piece of a batch, as flat arrays over targets: any piece, or one datum for a whole loss. */
typedef struct LossCall {
    int64_t count;
    const float *logp;
    const float *input[LOSS_INPUTS]; /* in the order of the loss's row */
    const double *key;               /* configuration, likewise */
    int rows;
    const int32_t *start; /* (rows + 1): the start of each row's targets, plus start[0]; NULL if the
                             loss is whole */
    float *dlogp;         /* out */
} LossCall;

typedef struct Datums Datums;

typedef struct Loss Loss;

struct Loss {
    const char *name;
    int multi;  /* targets may be (N, K) */
    int whole;  /* evaluate needs all targets of a datum in one call */
    int taught; /* has a teacher: the index of the input of its log-probabilities. With that input,
                   evaluate compares targets; without, objective_divergence.c compares whole rows */
    int recorded; /* its first input was recorded when the targets were sampled: a server reads it
                     from its own records, not from the datum */
    int linear;   /* dlogp does not depend on logp: it is known before forward */
    struct {
        const char *name;
        int required;
        const char *from; /* the key or earlier input that is an optional one's default */
        float missing;    /* or, if `from` is NULL, this number for every element */
    } input[LOSS_INPUTS];
    struct {
        const char *name;
        double initial; /* NAN: none, it is required; INFINITY: no bound */
    } key[LOSS_KEYS];
    int gate; /* input whose zeros mean "no gradient"; or UNGATED */
    /* Checks beyond this table; NULL: none. */
    Status (*check)(const Loss *loss, const Datums *datums);
    double (*evaluate)(const LossCall *call); /* returns the loss, writes dlogp */
};

const Loss *loss_find(const char *name);
const Loss *loss_at(int index); /* NULL past the end */
/* Not in the table: its only input is d loss / d logp. */
extern const Loss loss_given;

/* Number `target` of the loss's input j, or its default. */
float loss_input(const Loss *loss, const Datums *datums, int j, int64_t target);

#endif
