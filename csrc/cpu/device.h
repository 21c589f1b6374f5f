/* cpu/device.h - opens the CPU device; its other headers are private to this folder. */
#ifndef TINSMITH_CPU_DEVICE_H
#define TINSMITH_CPU_DEVICE_H

#include "../device/device.h"

/* The inputs of products with weights that are not f32: f32; bf16; or, with weights of 8 to 4 bits,
 * integers of 16 bits scaled per block (gemm_quantized.c). Each is a separate device. */
typedef enum CpuInputs { CPU_F32, CPU_BF16, CPU_INT16, CPU_KINDS } CpuInputs;
extern const char *const cpu_names[CPU_KINDS];

/* Opens the CPU with its widest instruction set for such inputs; fails if it has none. threads = 0:
 * one per core that it may use. */
Status cpu_open(Device **dev, int threads, CpuInputs inputs);

/* Names the widest instruction set that cpu_open may choose: generic, avx2, avx512, avx512vnni,
 * avx512bf16 or amx; "" leaves the choice open. cpu_open refuses a name that is unknown or not
 * supported here. */
void cpu_widest(const char *name);

/* Whether products with bf16 weights are faster in bf16 than in f32 here. AMD's cores do twice as
 * many multiply-adds of bf16 pairs as of f32, Intel's half as many, its matrix unit 16 times as
 * many. If cpu_widest named a set, that decides. */
int cpu_bf16_is_fast(void);

/* The name of the instruction set that cpu_open takes; "" if it fails. */
const char *cpu_instructions(CpuInputs inputs);

#endif
