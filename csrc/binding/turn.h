/* binding/turn.h - the models' turns, and calls without the GIL.
 *
 * Long work is done without the GIL, so any thread may run meanwhile. Calls on a model, its
 * adapters and its samplers take turns: one of them at a time is in the engine. Attributes that are
 * a number can be read at any time, and interrupt() is for another thread's turn. A thread that
 * waits for a turn has released the GIL, so the thread with the turn can take the GIL; never the
 * other way round. A forked child has no turns but its own; a model that was in the middle of a
 * call at the fork is refused there. An object without references is closed by the thread that
 * drops the last one, without a turn: the engine frees memory in any thread (device/device.h). */
#ifndef TINSMITH_BINDING_TURN_H
#define TINSMITH_BINDING_TURN_H

#include "types.h"

/* A model's turn: made with the model, waited for, ended. */
void turn_open(PyModel *model);
void turn_take(PyModel *model);
void turn_give(PyModel *model);
/* Refuses a model that a fork has torn. */
Status turn_check(const PyModel *model);

/* Makes a call without the GIL, and without a turn or on one. */
#define NO_GIL(call)            \
    do {                        \
        Py_BEGIN_ALLOW_THREADS; \
        call;                   \
        Py_END_ALLOW_THREADS;   \
    } while (0)
/* Sets the variable `status`, as each such call does. */
#define ON_TURN(model, call)        \
    do {                            \
        turn_take(model);           \
        status = turn_check(model); \
        if (!status) NO_GIL(call);  \
        turn_give(model);           \
    } while (0)

#endif
