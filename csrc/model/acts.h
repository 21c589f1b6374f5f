/* model/acts.h - what a forward pass and its backward write (acts.inc), and of how many layers it
 * is kept. */
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
    LayerActs *layer; /* host array of L; all alike when nothing is kept */
    int again[KEEPS]; /* layers below this one share a set with it, and are recomputed */
#define SCRATCH(type, name, width, has) type *name;
#include "acts.inc"
} Acts;

/* The `keep` that keeps everything; 0 keeps nothing, and 1 the least that backward needs. */
int keep_all(const Model *model);
/* How many layers then keep the rows of this kind. */
int keep_layers(const Model *model, Keep kind, int keep);
/* acts->layer must have room for L entries. */
void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep);

/* Adds to counts (L,X) how many rows of the last forward pass went to each expert. */
void acts_count(const Model *model, const Acts *acts, int64_t *counts);

typedef struct Grads {
    real *dxn; /* (T,D): of the hidden rows, which the head computes, and of norms' outputs */
#define GRADIENT(type, name, width, has) type *name;
#include "acts.inc"
} Grads;

/* Returns where dxn ends; the memory behind it is the head's until backward begins. */
size_t grads_place(Grads *grads, Arena *arena, const Model *model, int T, int R);

#endif
