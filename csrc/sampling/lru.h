/* sampling/lru.h - a doubly linked list of indices, the least recently used first. */
#ifndef TINSMITH_SAMPLING_LRU_H
#define TINSMITH_SAMPLING_LRU_H

#include <stdint.h>
#include <stdlib.h>

enum { LRU_END = -1, LRU_OUT = -2 }; /* a link past the list's end; not in the list */

typedef struct LruLink {
    int32_t older, newer;
} LruLink;

typedef struct Lru {
    LruLink *link;          /* [count] */
    int32_t oldest, newest; /* LRU_END: the list is empty */
} Lru;

/* An empty list for indices below `count`; 0 if there is no memory. */
static inline int lru_open(Lru *lru, int count)
{
    *lru = (Lru){malloc((size_t)count * sizeof *lru->link), LRU_END, LRU_END};
    for (int i = 0; lru->link && i < count; i++) lru->link[i] = (LruLink){LRU_OUT, LRU_OUT};
    return lru->link != NULL;
}

static inline void lru_close(Lru *lru)
{
    free(lru->link);
    *lru = (Lru){NULL, LRU_END, LRU_END};
}

static inline void lru_insert(Lru *lru, int32_t at, int32_t older, int32_t newer)
{
    lru->link[at] = (LruLink){older, newer};
    *(older < 0 ? &lru->oldest : &lru->link[older].newer) = at;
    *(newer < 0 ? &lru->newest : &lru->link[newer].older) = at;
}

/* Inserts an index as the most recently used, or as the first to be evicted. */
static inline void lru_append(Lru *lru, int32_t at)
{
    lru_insert(lru, at, lru->newest, LRU_END);
}

static inline void lru_prepend(Lru *lru, int32_t at)
{
    lru_insert(lru, at, LRU_END, lru->oldest);
}

/* Does nothing if the index is not in the list. */
static inline void lru_remove(Lru *lru, int32_t at)
{
    LruLink link = lru->link[at];
    if (link.older == LRU_OUT) return;
    *(link.older < 0 ? &lru->oldest : &lru->link[link.older].newer) = link.newer;
    *(link.newer < 0 ? &lru->newest : &lru->link[link.newer].older) = link.older;
    lru->link[at] = (LruLink){LRU_OUT, LRU_OUT};
}

#endif
