/* cpu/product/gemv_backward.h - a few rows against a frozen weight the other way. */
#ifndef TINSMITH_CPU_PRODUCT_GEMV_BACKWARD_H
#define TINSMITH_CPU_PRODUCT_GEMV_BACKWARD_H

#include "product.h"

/* Whether a product has a frozen weight in PANELS_T and so few rows that turning its panels costs
 * more than the lanes that these rows leave empty; and the product, to the bits of
 * product_run. */
int CPU(streams_back)(const Product *p);
void CPU(product_stream_back)(Device *dev, const Product *p);

#endif
