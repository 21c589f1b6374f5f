/* cpu/product/gemm_quantized.h - products with codes of 8 to 4 bits, whose sums are scaled. */
#ifndef TINSMITH_CPU_PRODUCT_GEMM_QUANTIZED_H
#define TINSMITH_CPU_PRODUCT_GEMM_QUANTIZED_H

#include "product.h"

/* Runs a product with any number of rows and a weight whose codes 16 bits hold exactly;
 * packed.h says of which types. a is rounded. */
void CPU(product_scaled)(Device *dev, const Product *p);

/* Of a type whose sums are scaled: the values of `count` blocks' codes from number `first` of a
 * panel on, as pairs of inputs k and k + 4 of eight (APART), PANEL lanes a row: in bf16, or whole
 * numbers of 16 bits as code_pairs.h has them. */
void CPU(codes_find)(float *to, const frozen *w, int panel, int first, int count);

#endif
