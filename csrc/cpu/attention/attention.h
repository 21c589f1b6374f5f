/* cpu/attention/attention.h - shared by attention.c, attention_backward.c and kv.c.
 *
 * A layer's pages are [page][G], keys (E, KV_PAGE) and values (KV_PAGE, E): the orders in which the
 * two products read them. In bf16 a 32-bit lane holds two adjacent numbers of the sum, so keys are
 * (E/2, KV_PAGE) lanes and values (KV_PAGE/2, E). */
#ifndef TINSMITH_CPU_ATTENTION_ATTENTION_H
#define TINSMITH_CPU_ATTENTION_ATTENTION_H

#include "../product/amx.h"
#include "../product/pairs.h"

/* Bytes of an element of cached keys and values: bf16 in the set with pairs, else f32. */
#if defined(__AVX512BF16__)
enum { CACHED_BYTES = 2 };
#else
enum { CACHED_BYTES = 4 };
#endif

enum { JOINED = 4 / CACHED_BYTES }; /* numbers of a lane */

/* The lanes of one head's page. */
static inline float *page_lanes(cached *pages, int64_t page, int g, int G, int E)
{
    return (float *)(void *)pages + (page * G + g) * (KV_PAGE / JOINED) * E;
}

static inline const float *page_lanes_of(const cached *pages, int64_t page, int g, int G, int E)
{
    return (const float *)(const void *)pages + (page * G + g) * (KV_PAGE / JOINED) * E;
}

/* Whether heads of that width have whole lanes; fails if not. */
static inline int page_takes(Device *dev, int E)
{
    if (E % JOINED == 0) return 1;
    cpu_fail(dev, STATUS_INVALID, "head width %d: attention in bf16 takes even ones", E);
    return 0;
}

/* The same for attention, whose heads are at most `most` wide. */
static inline int head_takes(Device *dev, int E, int most)
{
    if (E <= most) return page_takes(dev, E);
    cpu_fail(dev, STATUS_INVALID, "head width %d is more than the CPU's attention takes (%d)", E,
             most);
    return 0;
}

/* Whether products of pairs with heads of that width are whole tiles of the matrix unit. This
 * depends only on the width, so a row's sums are the same in training and in decoding. */
static inline int in_tiles(int E)
{
#if defined(__AMX_BF16__)
    return E % TILE_DEPTH == 0;
#else
    (void)E;
    return 0;
#endif
}

#if defined(__AVX512BF16__)
/* c (rows, n) = scale·a·b, or c += that, with heads of width E. The matrix unit computes whole
 * tiles: the last tile of a sum must be zero-padded, and c must have room for all its rows and
 * columns. */
static inline void page_multiply(float *c, int64_t c_row, Pairs p, int rows, int n, float scale,
                                 int add, int E)
{
#if defined(__AMX_BF16__)
    if (in_tiles(E)) {
        p.steps = (p.steps + TILE - 1) / TILE * TILE;
        CPU(tiles_product)(c, c_row, p, rows, (n + TILE - 1) / TILE * TILE, scale, add);
        return;
    }
#endif
    (void)E;
    CPU(pairs_product)(c, c_row, p, rows, n, scale, add);
}
#endif

/* Called before and after a thread's products on the unit. */
static inline void unit_begin(void)
{
#if defined(__AMX_BF16__)
    tiles_begin(TILE);
#endif
}

static inline void unit_end(void)
{
#if defined(__AMX_BF16__)
    tiles_end();
#endif
}

/* Nanoseconds per element of a query-key pair, for a decoding step's products and softmax
 * (cpu.h). */
#define ATTENTION_NS 0.15

/* An op's window, where 0 means none. */
static inline int window_of(int window)
{
    return window ? window : 1 << 30;
}

/* The most query-key pairs: the first queries of a long span have fewer. */
static inline double pairs_of(const Span *spans, int S, int window)
{
    double pairs = 0;
    for (int s = 0; s < S; s++) {
        int seen = spans[s].pos + spans[s].rows;
        pairs += (double)spans[s].rows * (seen < window ? seen : window);
    }
    return pairs;
}

#endif
