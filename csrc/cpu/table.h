/* cpu/table.h - an instruction set's row of function pointers. */
#ifndef TINSMITH_CPU_TABLE_H
#define TINSMITH_CPU_TABLE_H

#include "runtime/cpu.h"

/* Fills in the function pointers of this instruction set; tests also call narrower sets'. */
TINSMITH_EXPORT void CPU(table)(Device *dev);
TINSMITH_EXPORT void cpu_avx512vnni_table(Device *dev); /* AVX-512's, except a few */

#endif
