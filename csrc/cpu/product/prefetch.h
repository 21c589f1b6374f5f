/* cpu/product/prefetch.h - prefetches a frozen weight. */
#ifndef TINSMITH_CPU_PRODUCT_PREFETCH_H
#define TINSMITH_CPU_PRODUCT_PREFETCH_H

#include <stddef.h>
#include <stdint.h>

enum {
    PAGES = 8,            /* prefetched in turns */
    AHEAD = PAGES * 4096, /* prefetch distance from memory, in bytes */
    NEAR = 2048,          /* the same from L2 */
    STEADY = 4096,        /* the same of steady_ask */
};

/* Prefetches two lines of the weight from memory, about AHEAD bytes after `at`. Each PAGES pages
 * are prefetched in turns, two lines of a page at a time. The hardware prefetcher, which stops at
 * the end of a page, then works on several pages at once. */
static inline __attribute__((always_inline)) void far_ask(const void *at)
{
    uintptr_t pair = ((uintptr_t)at + AHEAD) / 128;
    uintptr_t turn = pair % (AHEAD / 128), first = pair - turn;
    pair = first + turn % PAGES * (4096 / 128) + turn / PAGES;
    __builtin_prefetch((const void *)(pair * 128), 0, 2);
    __builtin_prefetch((const void *)(pair * 128 + 64), 0, 2);
}

/* Prefetches two lines from L2 that will be read soon. */
static inline __attribute__((always_inline)) void near_ask(const void *at)
{
    __builtin_prefetch((const char *)at + NEAR, 0, 3);
    __builtin_prefetch((const char *)at + NEAR + 64, 0, 3);
}

/* Whether the hardware prefetcher follows a stream at the memory's speed: AMD's does, if the loop
 * runs ahead of it. On a Zen 4, where a plain loop reads 31 GB/s, software prefetch reaches 22, and
 * in turns 25. So up to STEADY_ROWS rows of bf16 are read at 32 GB/s with prefetch into L1 only, in
 * order, and one row at the same speed without any. From six rows on the products leave no time to
 * run ahead: 21 GB/s without turns, 28 with. */
static inline int processor_follows(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return 0;
#endif
}

/* Prefetches two lines into L1 only, in the order in which they are read. */
static inline __attribute__((always_inline)) void steady_ask(const void *at)
{
    __builtin_prefetch((const char *)at + STEADY, 0, 0);
    __builtin_prefetch((const char *)at + STEADY + 64, 0, 0);
}

/* Prefetches as many lines as a block has. If the hardware prefetcher follows a stream, few
 * instructions matter more: widening a block takes longer than reading it. */
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
