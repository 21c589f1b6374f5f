/* cpu/product/prefetch.h - asks the caches for a frozen weight before it is read. */
#ifndef TINSMITH_CPU_PRODUCT_PREFETCH_H
#define TINSMITH_CPU_PRODUCT_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

enum {
    PAGES = 8,            /* that are asked for in turns */
    AHEAD = PAGES * 4096, /* bytes from what is read to what is asked of memory */
    NEAR = 2048,          /* bytes to what is asked of L2 */
    STEADY = 4096,        /* bytes to what is asked steadily */
};

/* Asks memory for two lines of the weight that will be read about AHEAD bytes after those at `at`.
 * Each PAGES pages are asked for two lines of a page in turn: the processor, whose own prefetching
 * stops at the end of a page, then has several at work at once. */
static inline __attribute__((always_inline)) void far_ask(const void *at)
{
    uintptr_t pair = ((uintptr_t)at + AHEAD) / 128;
    uintptr_t turn = pair % (AHEAD / 128), first = pair - turn;
    pair = first + turn % PAGES * (4096 / 128) + turn / PAGES;
    __builtin_prefetch((const void *)(pair * 128), 0, 2);
    __builtin_prefetch((const void *)(pair * 128 + 64), 0, 2);
}

/* Asks L2 for two lines that will be read soon. */
static inline __attribute__((always_inline)) void near_ask(const void *at)
{
    __builtin_prefetch((const char *)at + NEAR, 0, 3);
    __builtin_prefetch((const char *)at + NEAR + 64, 0, 3);
}

/* Whether the processor's own prefetching follows a stream at the memory's speed: AMD's does, if
 * the loop runs ahead of it. On a Zen 4, where a plain loop reads 31 GB/s, what a core asks for
 * itself comes at 22, and taken in turns at 25. So up to STEADY_ROWS rows of bf16 are read at 32
 * GB/s when L1 alone is asked for the lines in order, and one row at the same speed when nothing
 * is. From six rows on the products leave no time to run ahead: 21 GB/s without turns, 28 with. */
static inline int processor_follows(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* Asks L1 alone for two lines, in the order in which they are read. */
static inline __attribute__((always_inline)) void steady_ask(const void *at)
{
    __builtin_prefetch((const char *)at + STEADY, 0, 0);
    __builtin_prefetch((const char *)at + STEADY + 64, 0, 0);
}

/* Asks for as many lines as a block has. Where the processor follows a stream, few instructions
 * count more: the block takes longer to widen than to read. */
static inline __attribute__((always_inline)) void block_ask(const unsigned char *block,
                                                            size_t bytes, int steady)
{
#pragma GCC unroll 1
    for (size_t line = 0; line < bytes; line += 128) {
        if (!steady) far_ask(block + line);
        near_ask(block + line);
    }
}

#endif
