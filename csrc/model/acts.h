/* model/acts.h - the arrays that forward and backward write (acts.inc), and how many layers keep
 * them. */
#ifndef TINSMITH_MODEL_ACTS_H
#define TINSMITH_MODEL_ACTS_H

#include "model.h"

/* How many layers keep the activations of each kind for backward (acts.inc, acts.c). */
typedef enum Keep { ALWAYS, DEAR, CHEAP, KEEPS } Keep;

typedef struct LayerActs {
#define KEPT(keep, type, name, width, has) type *name;
#define FIXED(type, name, count, has) type *name;
#include "acts.inc"
} LayerActs;

typedef struct Acts {
    LayerActs *layer; /* host array of L; a stage's are all alike when nothing is kept */
    int again[KEEPS]; /* this layer and all below share one set; those below it are recomputed */
#define SCRATCH(type, name, width, has) type *name;
#include "acts.inc"
} Acts;

/* The `keep` that keeps everything; 0 keeps nothing, 1 the minimum for backward. */
int keep_all(const Model *model);
/* How many layers keep the rows of this kind at that `keep`. */
int keep_layers(const Model *model, Keep kind, int keep);
/* Places (or measures) each stage's Acts. acts->layer must have room for L entries, which all
 * stages share. */
void acts_place(Acts *acts, Arenas *arenas, const Model *model, int T, int R, int keep);

/* Adds to counts (L,X) the rows per expert of the last forward pass. */
void acts_count(const Model *model, const Acts *acts, int64_t *counts);

typedef struct Grads {
    real *dxn; /* (T,D): of the hidden rows (from the head), then of the norms' outputs */
#define GRADIENT(type, name, width, has) type *name;
#include "acts.inc"
} Grads;

/* Places each stage's Grads. Returns where the last one's dxn ends; the memory after it belongs to
 * the head until backward begins. */
size_t grads_place(Grads *grads, Arenas *arenas, const Model *model, int T, int R);

#endif
