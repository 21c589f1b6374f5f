/* cpu/runtime/pool.h - the CPU device's thread pool: one per process; a device may use some of its
 * threads. */
#ifndef TINSMITH_CPU_RUNTIME_POOL_H
#define TINSMITH_CPU_RUNTIME_POOL_H

#include <stdint.h>

#include "../../device/status.h"

typedef struct Pool Pool;

enum { POOL_SCRATCH = 2 << 20 }; /* bytes: too much for a stack, and one huge page */

/* threads = 0: one per core that this process may use. */
Status pool_open(Pool **pool, int threads);
void pool_close(Pool *pool);
int pool_threads(const Pool *pool);
/* POOL_SCRATCH bytes for the calling thread's current job, 64-byte aligned, uninitialized. Each
 * worker has its own. A pool has one caller at a time, so it has one for the caller. */
void *pool_scratch(const Pool *pool);

/* Calls work(context, i) once for each i in [0, count), on the pool's threads unless they are busy
 * with another caller's job, and returns when all are done. Any thread may take any i, so work(i)
 * must write only i's data. Even pieces, of about the same length, are taken several neighbours at
 * a time while many are left, others one by one. */
void pool_run(Pool *pool, int64_t count, int even, void (*work)(void *context, int64_t i),
              void *context);

#endif
