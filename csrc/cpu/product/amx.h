/* cpu/product/amx.h - Intel's matrix unit: eight registers of 16 rows of 64 bytes, a tile each.
 *
 * One instruction adds a tile of a (16 rows of 16 pairs of bf16) times a tile of b (16 pairs by 16
 * columns) to a tile of f32. It sums the first numbers of the 16 pairs in order, and the second
 * ones, each with fused multiply-adds from zero, then adds the two, then adds that to the tile. So
 * a row's sum does not depend on the other rows or their number.
 *
 * GCC's intrinsics do not declare that they read memory, so these do not use them. */
#ifndef TINSMITH_CPU_PRODUCT_AMX_H
#define TINSMITH_CPU_PRODUCT_AMX_H

#if defined(__AMX_BF16__)

#include <stdint.h>

#include "product.h"

enum {
    TILE = 16,                /* rows, and lanes of a row */
    TILE_LANES = TILE * TILE, /* of 32 bits */
    TILE_DEPTH = 2 * TILE,    /* inputs of a sum in one tile */
};

/* The processor's format of tile sizes. */
typedef struct TileSizes {
    _Alignas(64) uint8_t palette;
    uint8_t rest[15];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileSizes;

_Static_assert(sizeof(TileSizes) == 64, "as the processor takes it");

/* Sets tiles 0 to 5 (sums and a) to `rows` ≤ TILE rows; 6 and 7 (b) have all. */
static inline void tiles_begin(int rows)
{
    TileSizes sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        sizes.row_bytes[i] = 64;
        sizes.rows[i] = (uint8_t)(i < 6 ? rows : TILE);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
}

/* A thread without tiles has a faster context switch. */
static inline void tiles_end(void)
{
    __asm__ volatile("tilerelease" : : : "memory");
}

/* Register t: zero it; load rows at stride `step` (bytes) from `at`; store them there; += a·b. */
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define TILE_LOAD(t, at, step)                                       \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t                 \
                     : /* none */                                    \
                     : "r"((const void *)(at)), "r"((int64_t)(step)) \
                     : "memory")
#define TILE_STORE(t, at, step)                                \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)"       \
                     : /* none */                              \
                     : "r"((void *)(at)), "r"((int64_t)(step)) \
                     : "memory")
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)

/* Runs a product with any number of rows and a weight that is not f32, on the matrix unit. */
void CPU(product_amx)(Device *dev, const Product *p);

#endif
#endif
