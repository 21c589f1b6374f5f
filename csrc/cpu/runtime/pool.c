/* cpu/runtime/pool.c - a parallel for over the process's thread pool.
 *
 * A process has one crew of workers for all devices: enough for the device with the most threads,
 * less one for its caller. A device's jobs use no more threads than it asked for. If the crew is
 * busy with another caller's job, a caller works alone, so there are never more busy threads than
 * callers and workers.
 *
 * A job is one word, the gate: its number, whether it is open, and how many workers are inside.
 * Threads take indices from one atomic counter. Even pieces are taken in batches of half a thread's
 * share of the rest. So one thread mostly gets neighbours, in order, and a weight is read in a few
 * long stretches; the last pieces are taken one by one, which balances the load. The results do not
 * depend on which thread takes which piece. A worker that wakes late skips finished jobs, so a
 * caller never waits for a sleeping thread.
 *
 * Idle workers stay awake for AWAKE, then sleep. A decoding step is about a hundred short jobs in a
 * row, with the caller's own work between them, and waking a thread takes as long as many of them
 * (50 µs and more on a virtual machine). An idle server must cost nothing, so workers sleep in the
 * end. While awake they yield in a loop. A spinning worker would use up its time slice; if another
 * program wants the core, the system would then preempt the worker inside a job, and the caller
 * would wait for it. A forked child has no workers until it opens a device: until then the caller
 * does all the work. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { THREADS_MAX = 256, SPINS = 64 /* between two looks at the clock */ };

#define AWAKE INT64_C(500000) /* ns from the last job to sleep */

/* The gate's fields: a job's number, OPEN, and the workers inside. */
#define INSIDE UINT64_C(0xffff)
#define OPEN UINT64_C(0x10000)
#define NUMBER UINT64_C(0x20000)

struct Pool {
    int threads; /* the most of a job of this device */
    pid_t owner;
    void *scratch; /* the caller's */
};

typedef struct Crew {
    pid_t owner; /* the process that the threads are in; 0: none yet */
    int pools, workers;
    pthread_t worker[THREADS_MAX];
    void *scratch[THREADS_MAX]; /* each worker's */
    pthread_mutex_t lock;       /* of sleeping and waking */
    pthread_cond_t wake, idle;

    atomic_int busy;     /* a job is running */
    atomic_int sleepers; /* sleeping workers, which a new job must wake */
    atomic_int waiting;  /* the caller sleeps until no worker is inside */
    atomic_int stop;
    atomic_int limit; /* the first `limit` workers may enter */
    _Alignas(64) atomic_uint_fast64_t gate;
    _Alignas(64) atomic_int_fast64_t next; /* next index to draw */
    int64_t count, shares;
    void (*work)(void *context, int64_t i);
    void *context;
} Crew;

static Crew crew;
static _Thread_local void *workers_scratch;                   /* NULL: this thread is no worker */
static pthread_mutex_t crew_lock = PTHREAD_MUTEX_INITIALIZER; /* of opening and closing */
static pthread_once_t forks_watched = PTHREAD_ONCE_INIT;

/* On one huge page if the system has them: a product on the matrix unit, which rereads a megabyte
 * of packed rows from L2, then takes 1 to 4 % less time. */
static void *scratch_new(void)
{
    void *scratch = aligned_alloc(POOL_SCRATCH, POOL_SCRATCH);
#if defined(MADV_HUGEPAGE)
    if (scratch) madvise(scratch, POOL_SCRATCH, MADV_HUGEPAGE);
#endif
    return scratch;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void draw(void)
{
    int64_t i = atomic_load_explicit(&crew.next, memory_order_relaxed);
    for (;;) {
        int64_t left = crew.count - i, take = left / crew.shares + (left % crew.shares != 0);
        if (left <= 0) return;
        if (!atomic_compare_exchange_weak_explicit(&crew.next, &i, i + take, memory_order_relaxed,
                                                   memory_order_relaxed))
            continue;
        for (int64_t end = i + take; i < end; i++) crew.work(crew.context, i);
        i = atomic_load_explicit(&crew.next, memory_order_relaxed);
    }
}

/* ---- a worker ---- */

/* Whether something has happened since `seen`: a job that is open to this worker, or the end. */
static int called(int index, uint64_t seen)
{
    uint64_t gate = atomic_load(&crew.gate);
    return ((gate & OPEN) && gate / NUMBER != seen && index < atomic_load(&crew.limit)) ||
           atomic_load(&crew.stop);
}

/* Waits for the same as long as a worker stays awake. */
static int called_awake(int index, uint64_t seen)
{
    int64_t end = now() + AWAKE;
    do {
        for (int i = 0; i < SPINS; i++) {
            if (called(index, seen)) return 1;
            relax();
        }
        sched_yield();
    } while (now() < end);
    return 0;
}

/* Enters the open job, unless it is shut meanwhile. The limit is the entered job's. */
static int enter(int index, uint64_t *seen)
{
    uint64_t gate = atomic_load(&crew.gate);
    while ((gate & OPEN) && index < atomic_load(&crew.limit))
        if (atomic_compare_exchange_weak(&crew.gate, &gate, gate + 1)) {
            *seen = gate / NUMBER;
            return 1;
        }
    return 0;
}

static void leave(void)
{
    uint64_t gate = atomic_fetch_sub(&crew.gate, 1) - 1;
    if (gate & (OPEN | INSIDE) || !atomic_load(&crew.waiting)) return;
    pthread_mutex_lock(&crew.lock);
    pthread_cond_signal(&crew.idle);
    pthread_mutex_unlock(&crew.lock);
}

static void *worker_main(void *argument)
{
    int index = (int)(intptr_t)argument;
    uint64_t seen = 0;
    workers_scratch = crew.scratch[index];
    for (;;) {
        if (!called_awake(index, seen)) {
            pthread_mutex_lock(&crew.lock);
            atomic_fetch_add(&crew.sleepers, 1);
            while (!called(index, seen)) pthread_cond_wait(&crew.wake, &crew.lock);
            atomic_fetch_sub(&crew.sleepers, 1);
            pthread_mutex_unlock(&crew.lock);
        }
        if (atomic_load(&crew.stop)) return NULL;
        if (!enter(index, &seen)) continue;
        draw();
        leave();
    }
}

static void wake_all(void)
{
    if (!atomic_load(&crew.sleepers)) return;
    pthread_mutex_lock(&crew.lock);
    pthread_cond_broadcast(&crew.wake);
    pthread_mutex_unlock(&crew.lock);
}

/* ---- opening and closing ---- */

static int cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    return 1;
}

/* At a fork another thread of the parent, which the child lacks, may hold the lock. */
static void child_begin(void)
{
    pthread_mutex_init(&crew_lock, NULL);
}

static void forks_watch(void)
{
    pthread_atfork(NULL, NULL, child_begin);
}

/* In a forked child, the parent's crew state here is invalid. */
static void crew_begin(void)
{
    if (crew.owner == getpid()) return;
    crew = (Crew){.owner = getpid()};
    pthread_mutex_init(&crew.lock, NULL);
    pthread_cond_init(&crew.wake, NULL);
    pthread_cond_init(&crew.idle, NULL);
}

static void crew_end(void)
{
    atomic_store(&crew.stop, 1);
    wake_all();
    for (int i = 0; i < crew.workers; i++) {
        pthread_join(crew.worker[i], NULL);
        free(crew.scratch[i]);
    }
    pthread_mutex_destroy(&crew.lock);
    pthread_cond_destroy(&crew.wake);
    pthread_cond_destroy(&crew.idle);
    crew.owner = 0;
}

/* Starts one more worker; 0 if the system has none. */
static int crew_grow(void)
{
    int index = crew.workers;
    crew.scratch[index] = scratch_new();
    if (!crew.scratch[index]) return 0;
    if (pthread_create(&crew.worker[index], NULL, worker_main, (void *)(intptr_t)index) != 0) {
        free(crew.scratch[index]);
        return 0;
    }
    return ++crew.workers;
}

Status pool_open(Pool **out, int threads)
{
    if (threads < 0 || threads > THREADS_MAX)
        return fail(STATUS_INVALID, "threads must be 0 (all cores) to %d, not %d", THREADS_MAX,
                    threads);
    Pool *pool = calloc(1, sizeof *pool);
    if (pool) pool->scratch = scratch_new();
    if (!pool || !pool->scratch) {
        free(pool);
        return fail(STATUS_MEMORY, "no memory for the CPU device's threads");
    }
    pthread_once(&forks_watched, forks_watch);
    int wanted = threads ? threads : cores();
    if (wanted > THREADS_MAX) wanted = THREADS_MAX;
    pthread_mutex_lock(&crew_lock);
    crew_begin();
    while (crew.workers < wanted - 1 && crew_grow()) {
    }
    crew.pools++;
    pool->threads = crew.workers + 1 < wanted ? crew.workers + 1 : wanted;
    pool->owner = getpid();
    pthread_mutex_unlock(&crew_lock);
    *out = pool;
    return STATUS_OK;
}

void pool_close(Pool *pool)
{
    if (!pool) return;
    pthread_mutex_lock(&crew_lock);
    if (pool->owner == getpid() && --crew.pools == 0) crew_end();
    pthread_mutex_unlock(&crew_lock);
    free(pool->scratch);
    free(pool);
}

int pool_threads(const Pool *pool)
{
    return pool->threads;
}

void *pool_scratch(const Pool *pool)
{
    return workers_scratch ? workers_scratch : pool->scratch;
}

/* ---- a job ---- */

/* Waits until no worker is inside a job that is shut. */
static void wait_for_workers(void)
{
    for (int64_t end = now() + AWAKE;;) {
        for (int i = 0; i < SPINS; i++) {
            if (!(atomic_load(&crew.gate) & INSIDE)) return;
            relax();
        }
        if (now() >= end) break;
    }
    pthread_mutex_lock(&crew.lock);
    atomic_store(&crew.waiting, 1);
    while (atomic_load(&crew.gate) & INSIDE) pthread_cond_wait(&crew.idle, &crew.lock);
    atomic_store(&crew.waiting, 0);
    pthread_mutex_unlock(&crew.lock);
}

void pool_run(Pool *pool, int64_t count, int even, void (*work)(void *context, int64_t i),
              void *context)
{
    if (count <= 0) return;
    if (count == 1 || pool->threads == 1 || pool->owner != getpid() ||
        atomic_exchange(&crew.busy, 1)) {
        for (int64_t i = 0; i < count; i++) work(context, i);
        return;
    }
    crew.work = work;
    crew.context = context;
    crew.count = count;
    crew.shares = even ? 2 * pool->threads : count;
    atomic_store(&crew.limit, pool->threads - 1);
    atomic_store(&crew.next, 0);
    uint64_t gate = atomic_load(&crew.gate); /* shut, with no worker inside */
    atomic_store(&crew.gate, gate / NUMBER * NUMBER + NUMBER + OPEN);
    wake_all();
    draw();
    atomic_fetch_and(&crew.gate, ~OPEN);
    wait_for_workers();
    atomic_store(&crew.busy, 0);
}
