/* cpu/device.h - how the CPU device is opened; everything else about it stays in this folder. */
#ifndef TINSMITH_CPU_DEVICE_H
#define TINSMITH_CPU_DEVICE_H

#include "../device/device.h"

/* What a product's inputs are where a frozen weight has not f32: f32; bf16; with weights of 8 to 4
 * bits, 16 bits of the largest of a block (gemm_quantized.c). Each is a device of its own. */
typedef enum CpuInputs { CPU_F32, CPU_BF16, CPU_INT16, CPU_KINDS } CpuInputs;
extern const char *const cpu_names[CPU_KINDS];

/* Opens the CPU with the widest instruction set it has for such inputs; an error where the
 * processor has no instructions for them. threads = 0: one for each core it may use. */
Status cpu_open(Device **dev, int threads, CpuInputs inputs);

/* Names the widest instruction set that cpu_open may choose: generic, avx2, avx512, avx512vnni,
 * avx512bf16 or amx; "" leaves the choice open. A name that is unknown or not of this processor is
 * refused there. */
void cpu_widest(const char *name);

/* Whether products with bf16 weights are faster in bf16 than in f32 here. AMD's cores make twice as
 * many multiply-adds of bf16 pairs as of f32, Intel's half as many, its matrix unit 16 times as
 * many. A set that was named decides instead. */
int cpu_bf16_is_fast(void);

/* The name of the instruction set that cpu_open takes, "" where it fails. */
const char *cpu_instructions(CpuInputs inputs);

#endif
