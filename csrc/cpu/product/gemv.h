/* cpu/product/gemv.h - a few rows times a frozen weight. */
#ifndef TINSMITH_CPU_PRODUCT_GEMV_H
#define TINSMITH_CPU_PRODUCT_GEMV_H

#include "product.h"

/* Runs a product with a frozen weight in PANELS and m ≤ STREAM_ROWS rows, with the bits of
 * product_run. */
void CPU(product_stream)(Device *dev, const Product *p);

#endif
