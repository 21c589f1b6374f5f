/* cpu/runtime/cpu.h - shared declarations of the CPU's op files.
 *
 * On the CPU `real` is float and everything is computed in f32. Each op file is compiled once per
 * instruction set, and CPU(rmsnorm) is the set's name of the op: cpu_avx512_rmsnorm,
 * cpu_avx2_rmsnorm, cpu_generic_rmsnorm. cpu/device.c picks a whole set when the device is opened.
 * For avx512vnni only the product of codes is compiled; the rest is avx512's (table.c). */
#ifndef TINSMITH_CPU_RUNTIME_CPU_H
#define TINSMITH_CPU_RUNTIME_CPU_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "../../device/device.h"
#include "pool.h"

#ifndef CPU_ISA
#define CPU_ISA generic
#endif
#define CPU_PASTE2(isa, name) cpu_##isa##_##name
#define CPU_PASTE(isa, name) CPU_PASTE2(isa, name)
#define CPU(name) CPU_PASTE(CPU_ISA, name)

/* Marks a function that the compiler must neither inline nor clone for constant arguments. */
#if defined(__clang__)
#define ALONE __attribute__((noinline))
#else
#define ALONE __attribute__((noinline, noclone))
#endif

struct real {
    float value;
};

struct Product;

typedef struct CpuDevice {
    Device base; /* first: a Device* is a CpuDevice* */
    Pool *pool;
    int int16; /* it is cpu-int16 (cpu/device.h) */
    void (*product_scaled)(Device *dev, const struct Product *p); /* of codes (gemm_quantized.c) */
    Status status;
    char text[256];
} CpuDevice;

/* real is float here: these two are the only conversions. */
static inline float *f32(real *x)
{
    return (float *)x;
}

static inline const float *f32c(const real *x)
{
    return (const float *)x;
}

/* The calling thread's scratch (pool.h): for an op's jobs, or for its caller if the jobs use
 * none. */
static inline void *cpu_scratch(const Device *dev)
{
    return pool_scratch(((const CpuDevice *)dev)->pool);
}

/* Runs work(context, i) for i in [0, count) on the device's threads: for jobs that are long even
 * with only two pieces. */
static inline void cpu_run(Device *dev, int64_t count, void (*work)(void *, int64_t), void *context)
{
    pool_run(((CpuDevice *)dev)->pool, count, 1, work, context);
}

/* Nanoseconds of one thread's work that make a second thread worthwhile. Sharing a job costs 0.3 µs
 * while the workers are awake, and then its results are in two caches. An op's time per element,
 * its NS, was measured on one Zen 5 core with operands in L2. A factor of two is good enough. */
#define CPU_SHARED_NS 2.5e3
#define CPU_PRODUCT_NS 0.01 /* of a multiply-add of a product */
#define CPU_BYTE_NS 0.018   /* of a byte of a weight in L3; twice that from memory */

/* The same, but the caller works alone if the work, `ns` in total for one thread, is too little to
 * share. */
static inline void cpu_run_of(Device *dev, double ns, int64_t count, void (*work)(void *, int64_t),
                              void *context)
{
    if (ns < CPU_SHARED_NS)
        for (int64_t i = 0; i < count; i++) work(context, i);
    else
        cpu_run(dev, count, work, context);
}

/* The same for pieces of very different lengths. */
static inline void cpu_run_uneven(Device *dev, double ns, int64_t count,
                                  void (*work)(void *, int64_t), void *context)
{
    if (ns < CPU_SHARED_NS)
        for (int64_t i = 0; i < count; i++) work(context, i);
    else
        pool_run(((CpuDevice *)dev)->pool, count, 0, work, context);
}

/* How many rows of `width` elements make a job of about `grain` elements; at least one. */
static inline int cpu_rows_of_job(int grain, int width)
{
    return width < grain ? grain / (width > 0 ? width : 1) : 1;
}

/* The size of a piece of `all` units of work: a multiple of `unit`, at most about `most`. Each
 * thread then has a few pieces of equal size, so a thread that finishes early waits less than a
 * piece. */
static inline int cpu_size_of_piece(Device *dev, int all, int most, int unit)
{
    int threads = pool_threads(((CpuDevice *)dev)->pool), pieces = (all + most - 1) / most;
    if (threads > 1 && pieces < 4 * threads) pieces = 4 * threads;
    int units = pieces ? ((all + pieces - 1) / pieces + unit - 1) / unit : 0;
    return unit * (units > 0 ? units : 1);
}

/* Keeps a failure on the device until sync() returns it; the first one wins. */
void cpu_fail(Device *dev, Status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define OP(name, args) void CPU(name) args;
#include "../../device/ops.inc"
#undef OP

#endif
