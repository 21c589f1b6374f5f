/* cpu/ask.h - asks the caches for a frozen weight before it is read. */
#ifndef TINSMITH_CPU_ASK_H
#define TINSMITH_CPU_ASK_H

#include <stdint.h>

enum {
    PAGES = 8,            /* that are asked for in turns */
    AHEAD = PAGES * 4096, /* bytes from what is read to what is asked of memory */
    NEAR = 2048,          /* bytes to what is asked of L2 */
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

#endif
