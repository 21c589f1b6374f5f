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
#include <unistd.h>

#include "cpu.h"

void cpu_generic_table(Device *dev);
#if defined(__x86_64__)
void cpu_avx2_table(Device *dev);
void cpu_avx512_table(Device *dev);
void cpu_avx512bf16_table(Device *dev);
#endif

enum { SLACK = 256 }; /* readable bytes past each block: a product may load a whole tile there */

enum { STEP_ROWS_MAX = 2048 }; /* enough rows for products at full speed */

/* What the machine has. mmap would promise more, and the system kill the process that takes it at
 * its word; what is free just now is no limit, for pages that are never touched cost nothing. */
static void cpu_memory(Device *dev, size_t *free_bytes, size_t *all_bytes)
{
    (void)dev;
    *free_bytes = *all_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
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

static void cpu_copy(Device *dev, void *to, const void *from, size_t bytes)
{
    (void)dev;
    if (bytes) memmove(to, from, bytes);
}

static void cpu_zero(Device *dev, void *memory, size_t bytes)
{
    (void)dev;
    if (bytes) memset(memory, 0, bytes);
}

static size_t cpu_frozen_bytes(Device *dev, DType type, int rows, int cols)
{
    (void)dev;
    size_t panels = ((size_t)rows + PANEL - 1) / PANEL;
    size_t column = type == DTYPE_BF16 ? 2 : 4;
    if (type == DTYPE_BF16) cols += cols % 2;
    return sizeof(struct frozen) + panels * PANEL * (size_t)cols * column;
}

/* f16 has no cheap widening on older processors, so such weights are kept as f32. */
static float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
        float small = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

typedef struct Load {
    frozen *to;
    const void *from;
    DType type;
} Load;

/* One panel: its 32 rows side by side, read as 32 streams and written in order. */
static void load_panel(void *context, int64_t panel)
{
    const Load *load = context;
    frozen *w = load->to;
    size_t cols = (size_t)w->cols, first = (size_t)panel * PANEL;
    size_t live = (size_t)w->rows - first < PANEL ? (size_t)w->rows - first : PANEL;
    for (size_t lane = 0; lane < PANEL && load->type == DTYPE_BF16 && cols % 2; lane++)
        ((uint16_t *)w->data)[frozen_bf16_at(w, (int)(first + lane), (int)cols)] = 0;
    for (size_t k = 0; k < cols; k++)
        for (size_t lane = 0; lane < PANEL; lane++) {
            size_t at = ((size_t)panel * cols + k) * PANEL + lane, in = (first + lane) * cols + k;
            if (load->type == DTYPE_BF16)
                ((uint16_t *)w->data)[frozen_bf16_at(w, (int)(first + lane), (int)k)] =
                    lane < live ? ((const uint16_t *)load->from)[in] : 0;
            else if (load->type == DTYPE_F16)
                ((float *)w->data)[at] =
                    lane < live ? half_to_float(((const uint16_t *)load->from)[in]) : 0;
            else
                ((float *)w->data)[at] = lane < live ? ((const float *)load->from)[in] : 0;
        }
}

static void cpu_frozen_load(Device *dev, frozen *to, const void *from, DType type, int rows,
                            int cols)
{
    to->type = type == DTYPE_BF16 ? DTYPE_BF16 : DTYPE_F32;
    to->rows = rows;
    to->cols = cols;
    Load load = {to, from, type};
    cpu_run(dev, (rows + PANEL - 1) / PANEL, load_panel, &load);
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

/* Nothing is ever under way here. */
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
        .frozen_load = cpu_frozen_load,
        .sync = cpu_sync,
        .fetch = cpu_copy,
        .await = cpu_await,
        .close = cpu_close,
    };
    choose_table(&cpu->base, bf16);
    *dev = &cpu->base;
    return STATUS_OK;
}
