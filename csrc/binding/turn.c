/* binding/turn.c - the models' turns: one call at a time is in the engine, and forks are
 * detected. */
#include "turn.h"

/* The number of forks between this process and the one that loaded the module. A thread that forks
 * holds the GIL and no turn. */
static unsigned forks;

static void child_begin(void)
{
    forks++;
}

static void forks_watch(void)
{
    pthread_atfork(NULL, NULL, child_begin);
}

void turn_open(PyModel *model)
{
    static pthread_once_t watched = PTHREAD_ONCE_INIT;
    pthread_once(&watched, forks_watch);
    model->forks = forks;
    pthread_mutexattr_t again;
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&model->turn, &again);
    pthread_mutexattr_destroy(&again);
}

void turn_take(PyModel *model)
{
    if (model->forks != forks) {
        model->torn |= model->inside > 0;
        model->inside = 0;
        turn_open(model);
    }
    if (pthread_mutex_trylock(&model->turn) != 0) NO_GIL(pthread_mutex_lock(&model->turn));
    model->inside++;
}

void turn_give(PyModel *model)
{
    model->inside--;
    pthread_mutex_unlock(&model->turn);
}

Status turn_check(const PyModel *model)
{
    if (!model->torn) return STATUS_OK;
    return fail(STATUS_DEVICE, "another thread was in a call of this model when the process was "
                               "forked: load the model again in the child");
}
