/* cpu/runtime/cpu.c - keeps the CPU device's first failure. */
#include "cpu.h"

#include <stdarg.h>
#include <stdio.h>

void cpu_fail(Device *dev, Status status, const char *format, ...)
{
    CpuDevice *cpu = (CpuDevice *)dev;
    if (cpu->status) return;
    va_list args;
    va_start(args, format);
    vsnprintf(cpu->text, sizeof cpu->text, format, args);
    va_end(args);
    cpu->status = status;
}
