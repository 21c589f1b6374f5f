/* cpu/table.c - this instruction set's row of function pointers: the ops, from ops.inc, the
 * function that copies weights to the order that the ops read, and the product of codes. */
#include "cpu.h"
#include "matmul.h"

void CPU(table)(Device *dev)
{
    dev->cached_bytes = CACHED_BYTES;
    dev->frozen_load = CPU(frozen_load);
#if defined(__AVX2__) && !defined(__AMX_BF16__)
    ((CpuDevice *)dev)->product_scaled = CPU(product_scaled);
#endif
#define OP(name, args) dev->name = CPU(name);
#include "../device/ops.inc"
#undef OP
}

#if defined(__AVX512F__) && !defined(__AVX512BF16__)
/* AVX512_VNNI multiplies pairs of whole numbers and adds them in one instruction. The rest of the
 * set is that of AVX-512. */
void cpu_avx512vnni_product_scaled(Device *dev, const Product *p);

void cpu_avx512vnni_table(Device *dev)
{
    CPU(table)(dev);
    ((CpuDevice *)dev)->product_scaled = cpu_avx512vnni_product_scaled;
}
#endif
