/* binding/call.h - the arguments of a training call: borrowed arrays and options as the engine's
 * Datums; and the call, which may call a Python function between its micro-batches. */
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

/* A trainer's `between` function and its context. */
typedef struct Outer {
    Between *run;
    void *context;
} Outer;

/* Sets a trainer's; returns the old one. */
Outer call_between(Trainer *trainer, PyObject *function);

/* A statement that calls the trainer without the GIL, in the caller's turn. `function`, unless it
 * is None, is called between two micro-batches in this thread, which may take the turn again. A
 * call of the same trainer there is refused without effect. */
#define TRAINED(trainer, function, call)                   \
    do {                                                   \
        Outer outer = call_between((trainer), (function)); \
        call;                                              \
        (trainer)->between = outer.run;                    \
        (trainer)->context = outer.context;                \
    } while (0)

/* Returns NULL with the exception of a failed call: the function's, or the status's. */
PyObject *call_failed(Status status);

#endif
