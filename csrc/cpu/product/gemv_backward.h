/* cpu/product/gemv_backward.h - a few rows times a frozen weight in backward. */
#ifndef TINSMITH_CPU_PRODUCT_GEMV_BACKWARD_H
#define TINSMITH_CPU_PRODUCT_GEMV_BACKWARD_H

#include "product.h"

/* Whether a product has a frozen weight in PANELS_T and so few rows that transposing its panels
 * costs more than empty lanes; and the product, with product_run's bits. */
int CPU(streams_back)(const Product *p);
void CPU(product_stream_back)(Device *dev, const Product *p);

#endif
