/* cpu/table.c - this instruction set's row of function pointers, from ops.inc. */
#include "cpu.h"

void CPU(table)(Device *dev)
{
#define OP(name, args) dev->name = CPU(name);
#include "../ops.inc"
#undef OP
}
