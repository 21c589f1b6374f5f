/* cpu/pool.c - a parallel for over a few worker threads.
 *
 * One job at a time. Threads draw indices from one atomic counter, so uneven pieces even out;
 * nothing that is computed depends on who drew what. Workers that wait spin briefly, then sleep,
 * because a decoding step is some hundred short jobs in a row while an idle server must cost
 * nothing. A child process that was forked has no workers: there the caller does all the work
 * itself. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { THREADS_MAX = 256, SPINS = 2000 };

struct Pool {
    int threads;
    pid_t owner;
    pthread_t workers[THREADS_MAX];
    pthread_mutex_t lock;
    pthread_cond_t wake, idle;

    atomic_uint_fast64_t ticket; /* number of the newest job; workers wait for it to change */
    atomic_int running;          /* workers that have not finished the newest job */
    atomic_int_fast64_t next;    /* next index to draw */
    int64_t count;
    void (*work)(void *context, int64_t i);
    void *context;
    int stop;
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void draw(Pool *pool)
{
    for (;;) {
        int64_t i = atomic_fetch_add(&pool->next, 1);
        if (i >= pool->count) return;
        pool->work(pool->context, i);
    }
}

static void *worker_main(void *argument)
{
    Pool *pool = argument;
    uint_fast64_t seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool->ticket) == seen; i++) relax();
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->ticket) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
        seen = atomic_load(&pool->ticket);
        int stop = pool->stop;
        pthread_mutex_unlock(&pool->lock);
        if (stop) return NULL;
        draw(pool);
        if (atomic_fetch_sub(&pool->running, 1) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->idle);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return 1;
}

static void publish(Pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->ticket, 1);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

Status pool_open(Pool **out, int threads)
{
    if (threads < 0 || threads > THREADS_MAX)
        return fail(STATUS_INVALID, "threads must be 0 (all cores) to %d, not %d", THREADS_MAX,
                    threads);
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return fail(STATUS_MEMORY, "no memory for the CPU device's threads");
    pool->owner = getpid();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->idle, NULL);
    int wanted = threads ? threads : cores();
    if (wanted > THREADS_MAX) wanted = THREADS_MAX;
    pool->threads = 1;
    while (pool->threads < wanted) {
        if (pthread_create(&pool->workers[pool->threads], NULL, worker_main, pool) != 0) break;
        pool->threads++;
    }
    *out = pool;
    return STATUS_OK;
}

void pool_close(Pool *pool)
{
    if (!pool) return;
    if (pool->owner == getpid()) {
        pool->stop = 1;
        publish(pool);
        for (int i = 1; i < pool->threads; i++) pthread_join(pool->workers[i], NULL);
        pthread_mutex_destroy(&pool->lock);
        pthread_cond_destroy(&pool->wake);
        pthread_cond_destroy(&pool->idle);
    }
    free(pool);
}

int pool_threads(const Pool *pool)
{
    return pool->threads;
}

void pool_run(Pool *pool, int64_t count, void (*work)(void *context, int64_t i), void *context)
{
    if (count <= 0) return;
    if (count == 1 || pool->threads == 1 || pool->owner != getpid()) {
        for (int64_t i = 0; i < count; i++) work(context, i);
        return;
    }
    pool->work = work;
    pool->context = context;
    pool->count = count;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->running, pool->threads - 1);
    publish(pool);
    draw(pool);
    for (int i = 0; i < SPINS && atomic_load(&pool->running) > 0; i++) relax();
    if (atomic_load(&pool->running) == 0) return;
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->running) > 0) pthread_cond_wait(&pool->idle, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
