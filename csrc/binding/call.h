/* binding/call.h - the arguments of a training call: borrowed arrays and options as the engine's
 * Datums. */
#ifndef TINSMITH_BINDING_CALL_H
#define TINSMITH_BINDING_CALL_H

#include "arrays.h"
#include "turn.h"

/* The arrays are copies: every value that a call uses as an index or in a condition is checked
 * before the call begins. */
typedef struct Call {
    Borrowed tokens, lengths, targets, counts, input[LOSS_INPUTS];
    Datums datums;
    const Loss *loss;
} Call;

void call_release(Call *call);
/* The loss's inputs and keys, from dicts that may have no others. */
int call_options(Call *call, PyObject *inputs, PyObject *config);
int call_arrays(Call *call, PyObject *tokens, PyObject *lengths, PyObject *targets,
                PyObject *counts);
/* The loss of that name, or ValueError with the valid names. */
int call_loss(Call *call, const char *name);

#endif
