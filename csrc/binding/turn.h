/* binding/turn.h - the models' turns, and calls without the GIL.
 *
 * Long work runs without the GIL, so other Python threads run meanwhile. Calls on a model, its
 * adapters and its samplers take turns: one at a time is in the engine. Numeric attributes can be
 * read at any time, and interrupt() stops another thread's turn. A thread releases the GIL before
 * it waits for a turn, so the thread with the turn can take the GIL and they can't deadlock. A
 * forked child starts without any turn; a model that was in a call at the fork is refused there.
 * The thread that drops an object's last reference closes it, without a turn: the engine frees
 * memory in any thread (device/device.h). */
#ifndef TINSMITH_BINDING_TURN_H
#define TINSMITH_BINDING_TURN_H

#include "types.h"

/* Creates a model's turn; waits for it; ends it. */
void turn_open(PyModel *model);
void turn_take(PyModel *model);
void turn_give(PyModel *model);
/* Refuses a model that was in a call at a fork. */
Status turn_check(const PyModel *model);

/* Calls without the GIL, and without taking a turn. */
#define NO_GIL(call)            \
    do {                        \
        Py_BEGIN_ALLOW_THREADS; \
        call;                   \
        Py_END_ALLOW_THREADS;   \
    } while (0)
/* The same in a turn. Sets the variable `status`, as each such call does. */
#define ON_TURN(model, call)        \
    do {                            \
        turn_take(model);           \
        status = turn_check(model); \
        if (!status) NO_GIL(call);  \
        turn_give(model);           \
    } while (0)

#endif
