/* benchmarks/roofline.c - the most that one core can do: multiply-adds in registers, memory read.
 *
 * Enough sums are in flight to hide the latency of a multiply-add (four to six cycles, two begun in
 * each: twelve gave 474 GFLOP/s in bf16 on a Zen 5, 24 give 500); they begin differently, or the
 * compiler would keep one; no operand comes from memory, so nothing but the units is measured. The
 * read takes a buffer far larger than any cache, once, in order. machine.py builds this for the
 * processor at hand, and takes the time. Where there is a matrix unit (AMX), what it makes of bf16
 * counts: four sums are in flight, of tiles that stay in its registers. */
#include <stddef.h>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include "../csrc/cpu/product/amx.h"
#endif

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 64
#define SUMS 24
#elif defined(__AVX__)
#define WIDTH 32
#define SUMS 12
#else
#define WIDTH 16
#define SUMS 12
#endif

enum { LANES = WIDTH / sizeof(float), AHEAD = 2048 /* bytes */ };

typedef float vf __attribute__((vector_size(WIDTH)));

static volatile float half = 0.5f, sink;

static void keep(const vf *sum)
{
    float total = 0;
    for (int i = 0; i < SUMS; i++)
        for (size_t j = 0; j < LANES; j++) total += sum[i][j];
    sink = total;
}

/* Flops of `times` rounds of multiply-adds in f32. */
double f32_flops(long times)
{
    vf sum[SUMS], factor = half + (vf){0}, term = half + (vf){0};
    for (int i = 0; i < SUMS; i++) sum[i] = (float)i + (vf){0};
    for (long n = 0; n < times; n++)
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) sum[i] = sum[i] * factor + term;
    keep(sum);
    return 2.0 * SUMS * LANES * (double)times;
}

/* The same of the matrix unit, or 0 where there is none or the system keeps it. */
static double unit_flops(long times)
{
#if defined(__AMX_BF16__) && defined(__linux__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    static const float zeros[TILE_LANES];
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return 0;
    tiles_begin(TILE);
    TILE_LOAD(4, zeros, 64);
    TILE_LOAD(6, zeros, 64);
    for (long n = 0; n < times; n++) {
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 6);
        TILE_DOT(2, 4, 6);
        TILE_DOT(3, 4, 6);
    }
    tiles_end();
    return 4.0 * 2 * TILE_LANES * TILE_DEPTH * (double)times;
#else
    (void)times;
    return 0;
#endif
}

/* The same with products of bf16, pairs or tiles of them, or 0 where the processor has none. */
double bf16_flops(long times)
{
    double flops = unit_flops(times);
    if (flops) return flops;
#if defined(__AVX512BF16__)
    __m512 sum[SUMS];
    __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_set1_ps(half), _mm512_set1_ps(half));
    for (int i = 0; i < SUMS; i++) sum[i] = _mm512_set1_ps((float)i);
    for (long n = 0; n < times; n++)
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; i++) sum[i] = _mm512_dpbf16_ps(sum[i], pair, pair);
    keep((const vf *)sum);
    return 4.0 * SUMS * LANES * (double)times;
#else
    (void)times;
    return 0;
#endif
}

/* Reads `bytes` of memory, a multiple of a page. */
void read_bytes(const char *memory, size_t bytes)
{
    vf sum[SUMS] = {0};
    for (size_t at = 0; at < bytes; at += 8 * WIDTH)
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __builtin_prefetch(memory + at + AHEAD + i * WIDTH);
            sum[i] += *(const vf *)(memory + at + i * WIDTH);
        }
    keep(sum);
}
