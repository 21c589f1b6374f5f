/* The CPU device's crew (csrc/cpu/runtime/pool.c) as several callers use it at once, for the thread
 * sanitizer: each opens pools, runs jobs of even and uneven pieces on them, looks at what came of
 * each piece, and closes them, so that the crew begins and ends many times. test_races.py compiles
 * this with -fsanitize=thread and runs it:
 *
 *     crew CALLERS THREADS SECONDS [race]
 *
 * It prints how many jobs were right, and ends at the first that was not. With `race` the pieces of
 * a job share a number, which the sanitizer must tell. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/runtime/pool.h"

enum { PIECES = 300, JOBS = 40 /* between opening a pool and closing it */ };

typedef struct Job {
    Pool *pool;
    int64_t result[PIECES]; /* each piece's own */
    int64_t first;          /* what the caller wrote before the job */
    int64_t shared;         /* written by all pieces where a race is wanted */
} Job;

typedef struct Caller {
    pthread_t thread;
    int number;
    int64_t jobs;
} Caller;

static int threads, with_race;
static double end;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Leaves a stretch of its thread's scratch as another job's piece would. */
static void piece(void *context, int64_t i)
{
    Job *job = context;
    int64_t *scratch = pool_scratch(job->pool);
    for (int k = 0; k < 64; k++) scratch[k] = job->first + i * k;
    int64_t sum = 0;
    for (int k = 0; k < 64; k++) sum += scratch[k];
    job->result[i] = sum;
    if (with_race) job->shared += sum;
}

static int is_right(const Job *job, int64_t count)
{
    for (int64_t i = 0; i < PIECES; i++) {
        int64_t right = i < count ? 64 * job->first + i * (63 * 64 / 2) : -1;
        if (job->result[i] != right) return 0;
    }
    return 1;
}

static void *call(void *argument)
{
    Caller *caller = argument;
    Job job = {0};
    while (now() < end) {
        int wanted = 1 + (caller->number + (int)(caller->jobs / JOBS)) % threads;
        if (pool_open(&job.pool, wanted)) {
            printf("%s\n", status_text());
            exit(1);
        }
        for (int n = 0; n < JOBS; n++, caller->jobs++) {
            int64_t count = 1 + (caller->jobs * 37 + caller->number) % PIECES;
            job.first = caller->jobs;
            memset(job.result, 0xff, sizeof job.result);
            pool_run(job.pool, count, n % 2, piece, &job);
            if (!is_right(&job, count)) {
                printf("caller %d: job %" PRId64 " is wrong\n", caller->number, caller->jobs);
                exit(1);
            }
            /* Now and then long enough for the workers to fall asleep. */
            if (n % 16 == 15) nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        pool_close(job.pool);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 4) return 2;
    int callers = atoi(argv[1]);
    threads = atoi(argv[2]);
    end = now() + atof(argv[3]);
    with_race = argc > 4;
    Caller *caller = calloc((size_t)callers, sizeof *caller);
    int64_t jobs = 0;
    for (int i = 0; i < callers; i++) {
        caller[i].number = i;
        if (!caller || pthread_create(&caller[i].thread, NULL, call, &caller[i])) return 2;
    }
    for (int i = 0; i < callers; i++) {
        pthread_join(caller[i].thread, NULL);
        jobs += caller[i].jobs;
    }
    free(caller);
    printf("%" PRId64 " jobs are right\n", jobs);
    return 0;
}
