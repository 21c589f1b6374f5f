/* cpu/product/gemm_quantized.h - products with codes of 8 to 4 bits, whose sums are scaled. */
#ifndef TINSMITH_CPU_PRODUCT_GEMM_QUANTIZED_H
#define TINSMITH_CPU_PRODUCT_GEMM_QUANTIZED_H

#include "product.h"

/* Runs a product with any number of rows and a weight whose codes' values fit exactly into 16 bits
 * (packed.h lists the types). a is rounded. */
void CPU(product_scaled)(Device *dev, const Product *p);

/* For a type whose sums are scaled: the values of the codes of `count` blocks, from block `first`
 * of a panel on, as pairs of inputs k and k + 4 of eight (APART), PANEL lanes a row: bf16, or
 * 16-bit integers (code_pairs.h). */
void CPU(codes_find)(float *to, const frozen *w, int panel, int first, int count);

#endif
