/* cuda/emulator/emulator.h - runs the kernels of this folder on the CPU, so that every test run
 * executes them.
 *
 * The same .cu files are compiled as C++ with -DCUDA_EMULATED. Each CUDA thread is a fiber; blocks
 * run one after another. Scheduling is warp-greedy: a warp runs until all its lanes wait, and only
 * then the next one. Warps and blocks run forward, in reverse or in random order. That is the
 * largest possible skew, which shows a missing barrier. A warp's collective (shuffle, mma,
 * ldmatrix) runs once, when its last lane arrives, on the operands of all lanes. Shared memory is
 * new and poisoned in every block, and its bounds are checked. A cp.async completes when its group
 * is waited for; until then its target is poisoned. Launches of several streams may alternate,
 * block by block (cuda_runtime.h).
 *
 * Faults end the launch with a sentence: divergent barriers and collectives, exited lanes, indices
 * outside of shared memory, misaligned vectors, copies without a wait. Not detected: races inside a
 * warp between collectives, memory order between blocks, bank conflicts, speed. */
#ifndef TINSMITH_CUDA_EMULATOR_EMULATOR_H
#define TINSMITH_CUDA_EMULATOR_EMULATOR_H

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __grid_constant__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
    {
    }
};

namespace emulate {

enum { LANES = 32, ALIGN = 128, GUARD = 1024, STACK = 256 << 10, PAGE = 4096 };
enum { POISON = 0xFF, GUARD_BYTE = 0xA5 }; /* poison is NaN as bf16, f32 and f64, and -1 */
enum Order { FORWARD, REVERSE, RANDOM, ROTATE /* one of the three, by launch and block */ };
enum State { READY, AT_COLLECTIVE, AT_BARRIER, DONE };

struct Copy {
    void *to;
    const void *from;
    int bytes, filled; /* `bytes` of the `filled` bytes are copied, the rest is zero */
    int group;
};

struct Context {
    void *stack_pointer;
    char *stack;
    size_t stack_bytes;
    void *fake_stack; /* the address sanitizer's */
};

struct Fiber : Context {
    dim3 thread;
    int index, line; /* line: of the barrier it waits at */
    State state;
    int groups; /* cp.async groups committed so far */
    std::vector<Copy> copies;
};

struct Warp {
    uint32_t ready; /* lanes that can run */
    int arrived;
    void *operands[LANES];
    const char *what[LANES];
};

/* A region of shared memory between two guards. */
struct Region {
    const char *name;
    std::vector<unsigned char> memory;
    unsigned char *base;
    size_t bytes;
    uint64_t block; /* the last block that used it */
};

struct Gpu {
    std::mutex mutex;
    Order order = ROTATE, order_now = FORWARD;
    uint64_t blocks = 0, launches = 0, random = 88172645463325252u;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Region *> regions; /* of this block; the dynamic one is first */
    Region dynamic{"dynamic shared memory", {}, nullptr, 0, 0};
    std::function<void()> body;
    const char *kernel = "";
    dim3 grid, block, block_index;
    size_t shared_most = 0; /* bytes per block on this card */
    bool truncates = false; /* tensor cores truncate their sums (stream.h) */
    Context scheduler{};
    Fiber *now = nullptr; /* the running thread, or NULL: the scheduler */
    bool failed = false;
    char text[400] = "";
};

inline Gpu gpu;

inline uint64_t random_next()
{
    gpu.random ^= gpu.random << 13;
    gpu.random ^= gpu.random >> 7;
    return gpu.random ^= gpu.random << 17;
}

/* Sets the order of everything run from now on; a seed always gives the same one. */
inline void order_begin(Order order, uint64_t seed)
{
    gpu.order = order;
    gpu.launches = 0;
    gpu.random = seed * 0x9E3779B97F4A7C15u ^ 88172645463325252u; /* never 0, for 32 bits */
    for (int i = 0; i < 8; i++) random_next();
}

/* ---- fibers ---- */

__attribute__((naked, noinline)) inline void stack_switch(void **, void *)
{
    asm("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        "mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
        "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

inline void jump(Context *from, Context *to, bool forever = false)
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(forever ? nullptr : &from->fake_stack, to->stack,
                                   to->stack_bytes);
#endif
    (void)forever;
    stack_switch(&from->stack_pointer, to->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(from->fake_stack, nullptr, nullptr);
#endif
}

__attribute__((format(printf, 1, 2))) inline void complain(const char *format, ...)
{
    if (gpu.failed) return;
    gpu.failed = true;
    dim3 b = gpu.block_index;
    int n = snprintf(gpu.text, sizeof gpu.text, "%s, block (%u,%u,%u)", gpu.kernel, b.x, b.y, b.z);
    if (gpu.now) n += snprintf(gpu.text + n, sizeof gpu.text - n, ", thread %d", gpu.now->index);
    n += snprintf(gpu.text + n, sizeof gpu.text - n, ": ");
    va_list args;
    va_start(args, format);
    vsnprintf(gpu.text + n, sizeof gpu.text - n, format, args);
    va_end(args);
}

/* Ends the launch, from a thread. */
template <class... A> [[noreturn]] inline void fault(const char *format, A... args)
{
    complain(format, args...);
    jump(gpu.now, &gpu.scheduler, true);
    __builtin_unreachable();
}

/* Another lane of the warp that can run, or the scheduler. */
inline Context *next_of(int warp)
{
    uint32_t ready = gpu.warps[warp].ready;
    if (!ready) {
        gpu.now = nullptr;
        return &gpu.scheduler;
    }
    int lane = gpu.order_now == REVERSE ? 31 - __builtin_clz(ready) : __builtin_ctz(ready);
    if (gpu.order_now == RANDOM) {
        int turn = random_next() % LANES;
        uint32_t turned = ready >> turn | (turn ? ready << (LANES - turn) : 0);
        lane = (__builtin_ctz(turned) + turn) % LANES;
    }
    gpu.warps[warp].ready &= ~(1u << lane);
    return gpu.now = &gpu.fibers[warp * LANES + lane];
}

inline void wait_as(State state)
{
    Fiber *self = gpu.now;
    self->state = state;
    jump(self, next_of(self->index / LANES));
}

inline void fiber_main()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    gpu.body();
    Fiber *self = gpu.now;
    if (!self->copies.empty()) fault("returned, and never waited for its cp.async");
    self->state = DONE;
    jump(self, next_of(self->index / LANES), true);
    __builtin_unreachable();
}

inline void fiber_reset(Fiber *fiber, int index)
{
    if (!fiber->stack) {
        fiber->stack_bytes = STACK;
        fiber->stack = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        mprotect(fiber->stack, PAGE, PROT_NONE);
    }
    dim3 b = gpu.block;
    fiber->index = index;
    fiber->thread = dim3(index % b.x, index / b.x % b.y, index / (b.x * b.y));
    fiber->state = READY;
    fiber->groups = 0;
    fiber->copies.clear();
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber->stack + STACK - PAGE, PAGE); /* fiber_main never returns */
#endif
    void **top = (void **)(fiber->stack + STACK - 56); /* 8 off a multiple of 16, as after a call */
    *top = nullptr;                                    /* where fiber_main would return to */
    *--top = (void *)fiber_main;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    fiber->stack_pointer = top;
}

/* After a failure the fibers' stacks hold frames that will never return. */
inline void fibers_drop()
{
    for (Fiber &fiber : gpu.fibers) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(fiber.stack, STACK);
#endif
        munmap(fiber.stack, STACK);
    }
    gpu.fibers.clear();
}

/* ---- shared memory ---- */

/* The region in this block: the first use in a block poisons it. */
inline unsigned char *region_of_block(Region *region, const char *name, size_t bytes)
{
    if (region->block == gpu.blocks) return region->base;
    region->name = name;
    region->bytes = bytes;
    region->block = gpu.blocks;
    region->memory.resize(bytes + 2 * GUARD + ALIGN);
    uintptr_t from = (uintptr_t)region->memory.data() + GUARD;
    region->base = (unsigned char *)((from + ALIGN - 1) / ALIGN * ALIGN);
    memset(region->memory.data(), GUARD_BYTE, region->memory.size());
    memset(region->base, POISON, bytes);
    gpu.regions.push_back(region);
    size_t total = 0;
    for (Region *other : gpu.regions) total += other->bytes;
    if (total > gpu.shared_most)
        complain("%zu bytes of shared memory, a block of this card has %zu", total,
                 gpu.shared_most);
    return region->base;
}

inline void regions_check()
{
    for (Region *region : gpu.regions) {
        const unsigned char *data = region->memory.data();
        size_t from = region->base - data;
        for (size_t i = 0; i < region->memory.size(); i++)
            if ((i < from || i >= from + region->bytes) && data[i] != GUARD_BYTE)
                complain("byte %zd of %s was written, which has %zu", (ssize_t)(i - from),
                         region->name, region->bytes);
    }
    gpu.regions.clear();
}

/* Checks an address that a primitive uses as `bytes` bytes of shared memory. */
inline void check_shared(const void *address, int bytes, const char *what)
{
    if ((uintptr_t)address % bytes) fault("%s: the address is not a multiple of %d", what, bytes);
    const unsigned char *p = (const unsigned char *)address;
    for (Region *region : gpu.regions)
        if (p >= region->base && p + bytes <= region->base + region->bytes) return;
    fault("%s: the address is outside of shared memory", what);
}

/* ---- a block, a launch ---- */

inline void run_warp(int warp)
{
    if (gpu.warps[warp].ready) jump(&gpu.scheduler, next_of(warp));
}

/* Reports why no thread can run: each waits or is done. */
inline void stuck()
{
    int done = 0, barrier = 0, lines[2] = {0, 0};
    for (Fiber &f : gpu.fibers) {
        if (f.index < 0) continue;
        done += f.state == DONE;
        if (f.state == AT_BARRIER && !barrier++) lines[0] = f.line;
        if (f.state == AT_BARRIER && f.line != lines[0]) lines[1] = f.line;
        if (f.state != AT_COLLECTIVE) continue;
        const Warp &w = gpu.warps[f.index / LANES];
        complain("%d lanes of warp %d wait at %s, and the others never come", w.arrived,
                 f.index / LANES, w.what[f.index % LANES]);
        return;
    }
    if (lines[1])
        complain("threads wait at the __syncthreads of line %d, others at that of line %d",
                 lines[0], lines[1]);
    else
        complain("%d threads wait at the __syncthreads of line %d, and %d have returned", barrier,
                 lines[0], done);
}

inline void run_block(int threads)
{
    gpu.blocks++;
    region_of_block(&gpu.dynamic, gpu.dynamic.name, gpu.dynamic.bytes);
    int count = threads / LANES;
    gpu.warps.assign(count, Warp{~0u, 0, {}, {}});
    if ((int)gpu.fibers.size() < threads) gpu.fibers.resize(threads);
    for (int i = 0; i < (int)gpu.fibers.size(); i++)
        i < threads ? fiber_reset(&gpu.fibers[i], i) : (void)(gpu.fibers[i].index = -1);
    for (;;) {
        std::vector<int> order(count);
        for (int i = 0; i < count; i++) order[i] = gpu.order_now == REVERSE ? count - 1 - i : i;
        for (int i = count - 1; i > 0 && gpu.order_now == RANDOM; i--)
            std::swap(order[i], order[random_next() % (i + 1)]);
        for (int warp : order) {
            run_warp(warp);
            if (gpu.failed) return;
        }
        int done = 0, together = 0;
        for (int i = 0; i < threads; i++) {
            Fiber &f = gpu.fibers[i];
            done += f.state == DONE;
            together += f.state == AT_BARRIER && f.line == gpu.fibers[0].line;
        }
        if (done == threads) break;
        if (together != threads) return stuck();
        for (int i = 0; i < threads; i++) gpu.fibers[i].state = READY;
        for (Warp &warp : gpu.warps) warp.ready = ~0u;
    }
    regions_check();
}

/* The calling thread's stack, for the address sanitizer. Looked up once per thread, because libc
 * reads /proc for the first thread. */
inline void stack_of_host(Context *host)
{
    static thread_local void *stack;
    static thread_local size_t bytes;
    if (!stack) {
        pthread_attr_t attr;
        pthread_getattr_np(pthread_self(), &attr);
        pthread_attr_getstack(&attr, &stack, &bytes);
        pthread_attr_destroy(&attr);
    }
    host->stack = (char *)stack;
    host->stack_bytes = bytes;
}

/* A kernel with its arguments, and the receiver of its fault. */
struct Launch {
    const char *kernel;
    dim3 grid, block;
    size_t shared_bytes, shared_most;
    std::function<void()> body;
    std::function<void(const char *)> failed;
};

/* A launch in flight: its blocks in order. */
struct Course {
    const Launch *launch;
    uint64_t number;
    std::vector<unsigned> blocks;
    size_t next;
    bool failed;
};

inline Course course_of(const Launch &launch)
{
    const dim3 &grid = launch.grid;
    Course course = {&launch, gpu.launches++, {}, 0, false};
    std::vector<unsigned> &blocks = course.blocks;
    blocks.resize((size_t)grid.x * grid.y * grid.z);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = (unsigned)i;
    Order order = gpu.order == ROTATE ? (Order)(course.number % ROTATE) : gpu.order;
    if (order == REVERSE) std::reverse(blocks.begin(), blocks.end());
    for (size_t i = blocks.size(); order == RANDOM && i > 1; i--)
        std::swap(blocks[i - 1], blocks[random_next() % i]);
    return course;
}

/* Runs the next block; a fault is reported and ends the launch. */
inline void run_next(Course *course)
{
    const Launch &launch = *course->launch;
    const dim3 &grid = launch.grid, &block = launch.block;
    unsigned i = course->blocks[course->next++];
    gpu.kernel = launch.kernel;
    gpu.body = launch.body;
    gpu.grid = grid;
    gpu.block = block;
    gpu.block_index = dim3(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
    gpu.now = nullptr;
    gpu.failed = false;
    gpu.dynamic.bytes = launch.shared_bytes;
    gpu.shared_most = launch.shared_most;
    gpu.order_now = gpu.order == ROTATE ? (Order)((course->number + i) % ROTATE) : gpu.order;
    unsigned threads = block.x * block.y * block.z;
    if (threads == 0 || threads > 1024 || threads % LANES)
        complain("blocks of %u threads: whole warps, at most 1024", threads);
    else if (grid.y > 65535 || grid.z > 65535)
        complain("a grid's y and z reach to 65535");
    else
        run_block((int)threads);
    gpu.now = nullptr;
    gpu.regions.clear();
    if (!gpu.failed) return;
    fibers_drop();
    course->failed = true;
    launch.failed(gpu.text);
}

/* Runs a whole launch, or two with alternating blocks. */
inline void run(const Launch &launch, const Launch *beside = nullptr)
{
    std::lock_guard<std::mutex> lock(gpu.mutex);
    stack_of_host(&gpu.scheduler);
    std::vector<Course> courses = {course_of(launch)};
    if (beside) courses.push_back(course_of(*beside));
    for (bool more = true; more;) {
        more = false;
        for (Course &course : courses) {
            if (course.failed || course.next == course.blocks.size()) continue;
            run_next(&course);
            more = true;
        }
    }
}

/* ---- barriers and collectives ---- */

inline void barrier(int line)
{
    gpu.now->line = line;
    wait_as(AT_BARRIER);
}

/* Each lane passes its operand; the last to arrive runs `all` on the whole warp's. */
template <class T, class F> inline void collective(const char *what, T *operand, F all)
{
    int index = gpu.now->index, lane = index % LANES;
    Warp *warp = &gpu.warps[index / LANES];
    warp->operands[lane] = operand;
    warp->what[lane] = what;
    if (++warp->arrived < LANES) return wait_as(AT_COLLECTIVE);
    for (int i = 0; i < LANES; i++)
        if (strcmp(warp->what[i], what))
            fault("lanes of a warp meet at %s and at %s", warp->what[i], what);
    all((T **)warp->operands);
    warp->arrived = 0;
    warp->ready = ~(1u << lane);
    for (int i = 0; i < LANES; i++) gpu.fibers[index - lane + i].state = READY;
}

inline void check_mask(unsigned mask)
{
    if (mask != ~0u) fault("a collective of part of a warp (mask %08x)", mask);
}

template <class T> struct Exchange {
    T mine, theirs;
    int from; /* lane; outside of the warp: the own one */
};

template <class T> inline T exchange(const char *what, unsigned mask, T value, int from)
{
    check_mask(mask);
    Exchange<T> e = {value, value, from};
    collective(what, &e, [](Exchange<T> **all) {
        for (int i = 0; i < LANES; i++)
            if (all[i]->from >= 0 && all[i]->from < LANES) all[i]->theirs = all[all[i]->from]->mine;
    });
    return e.theirs;
}

inline unsigned ballot(const char *what, unsigned mask, bool mine)
{
    struct Vote {
        bool mine;
        unsigned all;
    } vote = {mine, 0};
    check_mask(mask);
    collective(what, &vote, [](Vote **all) {
        unsigned bits = 0;
        for (int i = 0; i < LANES; i++) bits |= (unsigned)all[i]->mine << i;
        for (int i = 0; i < LANES; i++) all[i]->all = bits;
    });
    return vote.all;
}

} // namespace emulate

#include "cuda_names.h"

#endif
