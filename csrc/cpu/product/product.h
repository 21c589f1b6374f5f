/* cpu/product/product.h - a product of two matrices, and its operands' layouts. */
#ifndef TINSMITH_CPU_PRODUCT_PRODUCT_H
#define TINSMITH_CPU_PRODUCT_PRODUCT_H

#include "../runtime/cpu.h"

enum {
    DEPTH = 384,      /* k of one block: a panel of b is 48 KB */
    STREAM_ROWS = 64, /* the most rows that stream a frozen weight from memory */
    BACK_ROWS = 64,   /* the same for PANELS_T */
};

/* The layout of b's element (k, n). */
typedef enum Order {
    BY_ROW,    /* b[k·ldb + n] */
    BY_COLUMN, /* b[n·ldb + k] */
    PANELS,    /* frozen w (N,D), k over its D columns */
    PANELS_T,  /* frozen w (N,D), k over its N rows */
} Order;

typedef struct Product {
    float *c;
    int64_t ldc;
    const float *a;
    int64_t a_row, a_col;
    const void *b;
    int64_t ldb;
    Order order;
    int m, n, k;
    float scale;
    const float *bias;
    const float *plus; /* (m,n), row stride ldc; may be c; NULL: none */
    int rows, panels;  /* of one piece of work */
    int bf16;          /* b, BY_ROW or BY_COLUMN, is bf16 */
    const Device *dev;
} Product;

/* c (m,n) = a·b with row-major c and a; set other options in the result. */
static inline Product product_of(float *c, const float *a, int64_t a_row, const void *b,
                                 int64_t ldb, Order order, int m, int n, int k)
{
    return (Product){.c = c,
                     .ldc = n,
                     .a = a,
                     .a_row = a_row,
                     .a_col = 1,
                     .b = b,
                     .ldb = ldb,
                     .order = order,
                     .m = m,
                     .n = n,
                     .k = k,
                     .scale = 1.0f};
}

#endif
