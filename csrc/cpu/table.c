/* cpu/table.c - this instruction set's row of function pointers: the ops of ops.inc, the function
 * that repacks weights for them, and the product of codes. */
#include "table.h"

#include "attention/attention.h"
#include "product/gemm_quantized.h"
#include "weights/weight_load.h"

#if defined(__AVX512BF16__)
/* The ops whose files use bf16 or the matrix unit; the others are AVX-512's (setup.py, PLAIN;
 * tests/device/test_ops.py compares the two lists). */
void cpu_avx512_table(Device *dev);
#endif

void CPU(table)(Device *dev)
{
#if defined(__AVX512BF16__)
#define OWN(name) dev->name = CPU(name)
    cpu_avx512_table(dev);
    OWN(attention);
    OWN(attention_backward);
    OWN(kv_write);
    OWN(kv_copy);
    OWN(linear);
    OWN(linear_backward);
    OWN(head);
    OWN(matmul);
    OWN(grouped_linear);
    OWN(grouped_linear_backward);
    OWN(grouped_matmul);
    OWN(grouped_gradient);
#else
#define OP(name, args) dev->name = CPU(name);
#include "../device/ops.inc"
#undef OP
#endif
    dev->cached_bytes = CACHED_BYTES;
    dev->frozen_load = CPU(frozen_load);
#if defined(__AVX2__) && !defined(__AMX_BF16__)
    ((CpuDevice *)dev)->product_scaled = CPU(product_scaled);
#endif
}

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
/* AVX512_VNNI multiplies pairs of integers and adds them in one instruction. The rest of the set is
 * AVX-512's. */
void cpu_avx512vnni_product_scaled(Device *dev, const Product *p);

void cpu_avx512vnni_table(Device *dev)
{
    CPU(table)(dev);
    ((CpuDevice *)dev)->product_scaled = cpu_avx512vnni_product_scaled;
}
#endif
