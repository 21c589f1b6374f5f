/* cpu/runtime/pool.h - the CPU device's thread pool: one for the process, of which a device may use
 * some threads. */
#ifndef TINSMITH_CPU_RUNTIME_POOL_H
#define TINSMITH_CPU_RUNTIME_POOL_H

#include <stdint.h>

#include "../../device/status.h"

typedef struct Pool Pool;

enum { POOL_SCRATCH = 2 << 20 }; /* bytes: more than a stack is sure to have, and a large page */

/* threads = 0: one for each core that this process may use. */
Status pool_open(Pool **pool, int threads);
void pool_close(Pool *pool);
int pool_threads(const Pool *pool);
/* POOL_SCRATCH bytes for the calling thread's current job, 64-byte aligned, their content
 * undefined. A worker has its own, and a pool has one for its caller, because it has one caller at
 * a time. */
void *pool_scratch(const Pool *pool);

/* Calls work(context, i) once for each i in [0, count) and returns when all are done, on those of
 * the pool's threads that are not busy with another caller's job. Which thread takes which i is
 * undefined, so work(i) must write only what belongs to i. Even pieces, which take about the same
 * time, are taken several neighbours at once while many are left, others one by one. */
void pool_run(Pool *pool, int64_t count, int even, void (*work)(void *context, int64_t i),
              void *context);

#endif
