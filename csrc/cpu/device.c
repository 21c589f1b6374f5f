/* cpu/device.c - opens the CPU: threads, memory services, and the widest instruction set it
 * has.
 *
 * Memory is the host's own, so upload and download are copies. Large blocks come from mmap: an
 * arena's pages cost nothing until they are touched, and are unmapped when it is released. */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/memory.h"
#include "table.h"
#include "weights/packed.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "runtime/cpu.h"
#include "weights/packed.h"

void cpu_generic_table(Device *dev);
#if defined(__x86_64__)
void cpu_avx2_table(Device *dev);
void cpu_avx512_table(Device *dev);
void cpu_avx512vnni_table(Device *dev);
void cpu_avx512bf16_table(Device *dev);
void cpu_amx_table(Device *dev);
#endif

enum { SLACK = 256 }; /* readable bytes past each block: a product may load a whole tile there */

enum { STEP_ROWS_MAX = 512 }; /* products run at full speed, and the caches suffice */

enum {
    BYTES_OF_JOB = 1 << 18, /* of a copy */
    BLANK_LEAST = 1 << 20,  /* zeroing less is faster than madvise */
};

#define NS 0.04 /* of a byte (cpu.h) */

/* mmap overcommits memory, and the system kills a process that uses too much. */
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

static Status cpu_map(Device *dev, void **memory, int file, size_t at, size_t bytes)
{
    (void)dev;
    void *block = mmap(NULL, bytes + SLACK, PROT_READ, MAP_SHARED, file, (off_t)at);
    if (block == MAP_FAILED)
        return fail(STATUS_MEMORY, "%.1f MiB of a file can't be mapped: %s", bytes / 1048576.0,
                    strerror(errno));
#if defined(MADV_HUGEPAGE)
    madvise(block, bytes + SLACK, MADV_HUGEPAGE); /* as above, if the file system can */
#endif
    *memory = block;
    return STATUS_OK;
}

/* Huge pages would also read the surrounding rows. Dropped pages stay in the system's file
 * cache. */
static void cpu_rarely(Device *dev, void *memory, size_t bytes)
{
    (void)dev;
#if defined(MADV_NOHUGEPAGE)
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = (uintptr_t)memory % page;
    madvise((char *)memory - before, before + bytes, MADV_NOHUGEPAGE);
    madvise((char *)memory - before, before + bytes, MADV_DONTNEED);
#else
    (void)memory, (void)bytes;
#endif
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

static void cpu_receive(Device *dev, void *to, Device *other, const void *from, size_t bytes)
{
    (void)other;
    cpu_copy(dev, to, from, bytes);
}

static void cpu_zero(Device *dev, void *memory, size_t bytes)
{
    bytes_run(dev, memory, NULL, bytes);
}

/* Whole pages are dropped; the system zeroes them at their next touch. */
static void cpu_blank(Device *dev, void *memory, size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), before = -(uintptr_t)memory % page, whole = 0;
    char *first = (char *)memory + before;
    if (bytes >= BLANK_LEAST && bytes > before) whole = (bytes - before) / page * page;
    if (!whole || madvise(first, whole, MADV_DONTNEED)) {
        cpu_zero(dev, memory, bytes);
        return;
    }
    memset(memory, 0, before);
    memset(first + whole, 0, bytes - before - whole);
}

static size_t cpu_frozen_bytes(Device *dev, DType kept, int rows, int cols)
{
    (void)dev;
    size_t panels = ((size_t)rows + PANEL - 1) / PANEL, row = (size_t)cols * 4; /* of a panel */
    if (kept == DTYPE_F16 || kept == DTYPE_MXFP4_PAIRS) return 0;
    if (kept == DTYPE_BF16) row = ((size_t)cols + 1) / 2 * 4;
    if (dtype_packed(kept))
        return sizeof(struct frozen) +
               blocks_bytes(kept, panels * (((size_t)cols + BLOCK - 1) / BLOCK));
    return sizeof(struct frozen) + panels * PANEL * row;
}

static Status cpu_sync(Device *dev)
{
    CpuDevice *cpu = (CpuDevice *)dev;
    Status status = cpu->status;
    cpu->status = STATUS_OK;
    return status ? fail(status, "%s", cpu->text) : STATUS_OK;
}

/* No download is ever in flight here. */
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

/* ---- instruction sets ---- */

static int has_generic(void)
{
    return 1;
}

#if defined(__x86_64__)
static int has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static int has_avx512vnni(void)
{
    return has_avx512() && __builtin_cpu_supports("avx512vnni");
}

static int has_avx512bf16(void)
{
    return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("avx512vbmi");
}

/* The system must save 8 KB more of registers for the matrix unit, so it requires a request. It
 * refuses if a thread's signal stack is too small for them. */
static int has_amx(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d & bit_AMX_TILE) || !(d & bit_AMX_BF16)) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}
#endif

/* The sets of this build, the widest last, and their types of inputs. */
enum { F32 = 1 << CPU_F32, BF16 = 1 << CPU_BF16, INT16 = 1 << CPU_INT16 };
static const struct {
    const char *name;
    int (*here)(void);
    void (*table)(Device *dev);
    int inputs;
} sets[] = {
    {"generic", has_generic, cpu_generic_table, F32},
#if defined(__x86_64__)
    {"avx2", has_avx2, cpu_avx2_table, F32 | INT16},
    {"avx512", has_avx512, cpu_avx512_table, F32 | INT16},
    {"avx512vnni", has_avx512vnni, cpu_avx512vnni_table, INT16},
    {"avx512bf16", has_avx512bf16, cpu_avx512bf16_table, BF16},
    {"amx", has_amx, cpu_amx_table, BF16},
#endif
};

/* The devices' names, their products, and the instructions that these need. */
const char *const cpu_names[] = {"cpu", "cpu-bf16", "cpu-int16"};
static const char *const products[] = {"f32", "bf16", "int16"};
static const char *const lacks[] = {"", "AVX512_BF16, AVX512_VNNI or AVX512_VBMI", "AVX2"};

enum { SETS = sizeof sets / sizeof *sets, WIDEST_BYTES = 80 };

static char widest[WIDEST_BYTES]; /* the widest set that may be used; "": any */

void cpu_widest(const char *name)
{
    snprintf(widest, sizeof widest, "%s", name);
}

/* How many sets may be used; 0, with a sentence, if the widest is unknown or missing here. */
static int sets_allowed(void)
{
    if (!widest[0]) return SETS;
    for (int i = 0; i < SETS; i++) {
        if (strcmp(widest, sets[i].name) != 0) continue;
        if (sets[i].here()) return i + 1;
        fail(STATUS_DEVICE,
             "TINSMITH_ISA is %s, which this processor has not: leave it unset, or "
             "choose a narrower set",
             widest);
        return 0;
    }
    char names[WIDEST_BYTES] = "";
    for (int i = 0; i < SETS; i++) {
        size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "", sets[i].name);
    }
    fail(STATUS_DEVICE, "TINSMITH_ISA is '%s', but must be one of: %s", widest, names);
    return 0;
}

/* The widest set that is allowed, supported here, and takes such inputs; -1: none. */
static int choose_set(int allowed, CpuInputs inputs)
{
    int i = allowed - 1;
    while (i >= 0 && (!(sets[i].inputs >> inputs & 1) || !sets[i].here())) i--;
    return i;
}

int cpu_bf16_is_fast(void)
{
#if defined(__x86_64__)
    int set = choose_set(sets_allowed(), CPU_BF16);
    return set >= 0 && (widest[0] || sets[set].here == has_amx || __builtin_cpu_is("amd"));
#else
    return 0;
#endif
}

const char *cpu_instructions(CpuInputs inputs)
{
    int set = choose_set(sets_allowed(), inputs);
    return set < 0 ? "" : sets[set].name;
}

Status cpu_open(Device **dev, int threads, CpuInputs inputs)
{
    const char *name = cpu_names[inputs];
    int allowed = sets_allowed();
    if (!allowed) return STATUS_DEVICE;
    int set = choose_set(allowed, inputs);
    if (set < 0 && widest[0])
        return fail(
            STATUS_DEVICE,
            "%s: TINSMITH_ISA is %s, which has no %s products; the device cpu does the same "
            "in f32",
            name, widest, products[inputs]);
    if (set < 0)
        return fail(STATUS_DEVICE,
                    "%s: this processor lacks %s; the device cpu does the same in f32", name,
                    lacks[inputs]);
    CpuDevice *cpu = calloc(1, sizeof *cpu);
    if (!cpu) return fail(STATUS_MEMORY, "no memory for the CPU device");
    Status status = pool_open(&cpu->pool, threads);
    if (status) {
        free(cpu);
        return status;
    }
    cpu->base = (Device){
        .name = name,
        .real_bytes = sizeof(struct real),
        .step_rows = STEP_ROWS_MAX,
        .chunk_bytes = (size_t)128 << 20,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .map = cpu_map,
        .rarely = cpu_rarely,
        .memory = cpu_memory,
        .upload = cpu_copy,
        .download = cpu_copy,
        .copy = cpu_copy,
        .receive = cpu_receive,
        .zero = cpu_zero,
        .blank = cpu_blank,
        .frozen_bytes = cpu_frozen_bytes,
        .sync = cpu_sync,
        .fetch = cpu_copy,
        .await = cpu_await,
        .close = cpu_close,
    };
    cpu->int16 = inputs == CPU_INT16;
    sets[set].table(&cpu->base);
    *dev = &cpu->base;
    return STATUS_OK;
}
