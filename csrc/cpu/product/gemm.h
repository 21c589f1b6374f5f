/* cpu/product/gemm.h - runs a product of two matrices. */
#ifndef TINSMITH_CPU_PRODUCT_GEMM_H
#define TINSMITH_CPU_PRODUCT_GEMM_H

#include "product.h"

/* Runs c (m,n) = scale·a·b [+ bias] [+ plus] on the device's threads; it sets `rows`, `panels` and
 * `dev` itself. */
void CPU(product_run)(Device *dev, Product *p);

/* One product of two matrices, on the calling thread only: c (m,n) = scale·a·b, or c += when
 * accumulate. a's element (i,k) is a[i·a_row + k·a_col]; b's (k,j) is b[k·b_row + j]; n is padded
 * to a multiple of 2·VL when b is read, so b must be readable there. Every element is summed over k
 * in the same order, whatever m and n are. */
void CPU(product)(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_col,
                  const float *b, int64_t b_row, int m, int n, int k, float scale, int accumulate);

#endif
