/* cpu/table.c - this instruction set's row of function pointers: the ops, from ops.inc, and the
 * function that copies weights to the order that the ops read. */
#include "cpu.h"

void CPU(table)(Device *dev)
{
    dev->cached_bytes = CACHED_BYTES;
    dev->frozen_load = CPU(frozen_load);
#define OP(name, args) dev->name = CPU(name);
#include "../device/ops.inc"
#undef OP
}
