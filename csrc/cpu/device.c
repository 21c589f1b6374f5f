/* cpu/device.c - opens the CPU: threads, memory services, and the widest instruction set it has.
 *
 * Memory is the host's own, so upload and download are copies. Large blocks come from mmap: the
 * pages of an arena cost nothing until they are touched, and go back to the system when it is
 * released. */
#define _GNU_SOURCE
#include "device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cpu.h"

void cpu_generic_table(Device *dev);
#if defined(__x86_64__)
void cpu_avx2_table(Device *dev);
void cpu_avx512_table(Device *dev);
void cpu_avx512bf16_table(Device *dev);
#endif

enum { SLACK = 256 }; /* readable bytes past each block: a product may load a whole tile there */

enum { STEP_ROWS_MAX = 512 }; /* enough for products at full speed, and few enough for the caches */

enum { BYTES_OF_JOB = 1 << 18 }; /* of a copy */

#define NS 0.04 /* of a byte (cpu.h) */

/* mmap would promise more memory than there is, and the system would kill a process that uses
 * it. */
static void cpu_memory(Device *dev, size_t *free_bytes, size_t *all_bytes)
{
    (void)dev;
    host_memory("", free_bytes, all_bytes);
}

static Status cpu_alloc(Device *dev, void **memory, size_t bytes)
{
    (void)dev;
    void *block = mmap(NULL, bytes + SLACK, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED)
        return fail(STATUS_MEMORY, "the CPU has no %.1f MiB of memory to give", bytes / 1048576.0);
#if defined(MADV_HUGEPAGE)
    madvise(block, bytes + SLACK, MADV_HUGEPAGE); /* fewer faults and TLB misses; may be refused */
#endif
    *memory = block;
    return STATUS_OK;
}

static void cpu_release(Device *dev, void *memory, size_t bytes)
{
    (void)dev;
    if (memory) munmap(memory, bytes + SLACK);
}

typedef struct Bytes {
    char *to;
    const char *from; /* NULL: zeros */
    size_t bytes;
} Bytes;

static void bytes_job(void *context, int64_t job)
{
    const Bytes *b = context;
    size_t at = (size_t)job * BYTES_OF_JOB;
    size_t bytes = b->bytes - at < BYTES_OF_JOB ? b->bytes - at : BYTES_OF_JOB;
    if (b->from)
        memcpy(b->to + at, b->from + at, bytes);
    else
        memset(b->to + at, 0, bytes);
}

static void bytes_run(Device *dev, void *to, const void *from, size_t bytes)
{
    Bytes b = {to, from, bytes};
    cpu_run_of(dev, NS * (double)bytes, (int64_t)((bytes + BYTES_OF_JOB - 1) / BYTES_OF_JOB),
               bytes_job, &b);
}

static void cpu_copy(Device *dev, void *to, const void *from, size_t bytes)
{
    bytes_run(dev, to, from, bytes);
}

static void cpu_zero(Device *dev, void *memory, size_t bytes)
{
    bytes_run(dev, memory, NULL, bytes);
}

static size_t cpu_frozen_bytes(Device *dev, DType type, int rows, int cols)
{
    (void)dev;
    size_t panels = ((size_t)rows + PANEL - 1) / PANEL;
    size_t column = type == DTYPE_BF16 ? 2 : 4;
    if (type == DTYPE_BF16) cols += cols % 2;
    return sizeof(struct frozen) + panels * PANEL * (size_t)cols * column;
}

void cpu_fail(Device *dev, Status status, const char *format, ...)
{
    CpuDevice *cpu = (CpuDevice *)dev;
    if (cpu->status) return;
    va_list args;
    va_start(args, format);
    vsnprintf(cpu->text, sizeof cpu->text, format, args);
    va_end(args);
    cpu->status = status;
}

static Status cpu_sync(Device *dev)
{
    CpuDevice *cpu = (CpuDevice *)dev;
    Status status = cpu->status;
    cpu->status = STATUS_OK;
    return status ? fail(status, "%s", cpu->text) : STATUS_OK;
}

/* No download is ever under way here. */
static Status cpu_await(Device *dev, int behind)
{
    (void)behind;
    return cpu_sync(dev);
}

static void cpu_close(Device *dev)
{
    CpuDevice *cpu = (CpuDevice *)dev;
    pool_close(cpu->pool);
    free(cpu);
}

/* Whether the bf16 set can run here: it holds both sides of a product with a bf16 weight in bf16.
 */
static int has_bf16(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#else
    return 0;
#endif
}

int cpu_bf16_is_fast(void)
{
#if defined(__x86_64__)
    return has_bf16() && __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

static void choose_table(Device *dev, int bf16)
{
#if defined(__x86_64__)
    if (bf16) {
        cpu_avx512bf16_table(dev);
        return;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        cpu_avx512_table(dev);
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        cpu_avx2_table(dev);
        return;
    }
#endif
    (void)bf16;
    cpu_generic_table(dev);
}

Status cpu_open(Device **dev, int threads, int bf16)
{
    if (bf16 && !has_bf16())
        return fail(STATUS_DEVICE, "cpu-bf16: this processor has no AVX512_BF16; the device cpu "
                                   "does the same in f32");
    CpuDevice *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return fail(STATUS_MEMORY, "no memory for the CPU device");
    Status status = pool_open(&cpu->pool, threads);
    if (status) {
        free(cpu);
        return status;
    }
    cpu->base = (Device){
        .name = bf16 ? "cpu-bf16" : "cpu",
        .real_bytes = sizeof(struct real),
        .step_rows = STEP_ROWS_MAX,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .memory = cpu_memory,
        .upload = cpu_copy,
        .download = cpu_copy,
        .copy = cpu_copy,
        .zero = cpu_zero,
        .frozen_bytes = cpu_frozen_bytes,
        .sync = cpu_sync,
        .fetch = cpu_copy,
        .await = cpu_await,
        .close = cpu_close,
    };
    choose_table(&cpu->base, bf16);
    *dev = &cpu->base;
    return STATUS_OK;
}
