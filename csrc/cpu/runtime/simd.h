/* cpu/runtime/simd.h - the vector of floats that kernels use.
 *
 * Op files are compiled once per instruction set (cpu.h), and `vf` is as wide as its registers: 16
 * lanes with AVX-512, 8 with AVX2, 4 elsewhere. GCC and clang compile + − × on it to instructions.
 * They must not contract a·b + c (-ffp-contract=off): a compiler may fuse the copy of a loop for 8
 * rows and not the one for 3, and a row's last bit would then depend on the number of rows. v_fma
 * fuses explicitly. */
#ifndef TINSMITH_CPU_RUNTIME_SIMD_H
#define TINSMITH_CPU_RUNTIME_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VL = 16 };
#elif defined(__AVX2__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef int8_t vc __attribute__((vector_size(VL)));

static inline vf v_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void v_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

/* x in every lane. x − 0 is x, but 0 + x is not for x = −0: so the compiler makes x − 0 one
 * broadcast from memory, and 0 + x an addition and a shuffle for each of a product's factors. */
static inline vf v_set(float x)
{
    return x - (vf){0};
}

/* a·b + c, rounded once if the instruction set can. */
static inline vf v_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The n < VL floats at p, the other lanes filled with `rest`. */
static inline vf v_load_part(const float *p, int n, float rest)
{
#if defined(__AVX512F__)
    return (vf)_mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16)((1u << n) - 1), p);
#endif
    float lane[VL];
    for (int i = 0; i < VL; i++) lane[i] = i < n ? p[i] : rest;
    return v_load(lane);
}

static inline void v_store_part(float *p, vf v, int n)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
    return;
#endif
    float lane[VL];
    v_store(lane, v);
    for (int i = 0; i < n; i++) p[i] = lane[i];
}

/* The first n floats, which may be VL or more, the other lanes zero. */
static inline vf v_load_upto(const float *p, int n)
{
    return n >= VL ? v_load(p) : v_load_part(p, n, 0.0f);
}

static inline void v_store_upto(float *p, vf v, int n)
{
    if (n >= VL)
        v_store(p, v);
    else
        v_store_part(p, v, n);
}

/* One bf16, widened. */
static inline float f_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* VL of bf16, widened. */
static inline vf v_load_bf16(const void *p)
{
    vh h;
    memcpy(&h, p, sizeof h);
    vu u = __builtin_convertvector(h, vu) << 16;
    vf v;
    memcpy(&v, &u, sizeof v);
    return v;
}

/* VL numbers of E4M3 (sign, 4 exponent bits, 3 mantissa bits), divided by E4M3_SCALE: their bits
 * move to an f16's places, whose exponent bias is 8 more. The code of NaN gives 480. */
#define E4M3_SCALE 256.0f
static inline vf v_load_half(const void *p);
static inline vf v_load_e4m3(const void *p)
{
#if defined(__AVX512F__)
    __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16((short)0xbfff)));
#elif defined(__F16C__) && defined(__AVX2__)
    __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(h, _mm_set1_epi16((short)0xbfff)));
#else
    const unsigned char *at = p;
    uint16_t h[VL];
    for (int i = 0; i < VL; i++) h[i] = (uint16_t)((at[i] & 128) << 8 | (at[i] & 127) << 7);
    return v_load_half(h);
#endif
}

/* VL signed bytes, widened. */
static inline vf v_load_bytes(const void *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
#else
    const int8_t *at = p;
    vf v;
    for (int i = 0; i < VL; i++) v[i] = at[i];
    return v;
#endif
}

/* VL of f16, widened. */
static inline vf v_load_half(const void *p)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#else
    /* The bits move to a float's places, whose exponent bias is 112 more. Infinity's exponent gets
     * another 112; a subnormal gets a leading one, which is then subtracted. */
    vh h;
    memcpy(&h, p, sizeof h);
    vu u = __builtin_convertvector(h, vu), exponent = u & 0x7c00, bits = (u & 0x7fff) << 13;
    vu tiny = (vu)(exponent == 0), huge = (vu)(exponent == 0x7c00);
    bits += (112u << 23) + (tiny & (1u << 23)) + (huge & (112u << 23));
    vf rest = (vf)bits - (vf)(tiny & (113u << 23));
    return (vf)((vu)rest | (u & 0x8000) << 16);
#endif
}

/* VL pairs of bf16, stored in float arrays as 32-bit lanes. bf16 is the upper half of a float, so
 * widening is exact: a shift for the first of a pair, a mask for the second. */
static inline vu v_load_pairs(const float *p)
{
    vu u;
    memcpy(&u, p, sizeof u);
    return u;
}

/* The pair at p in every lane. */
static inline vu v_set_pair(const float *p)
{
    uint32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (vu){0} + pair;
}

static inline vf v_first(vu pairs)
{
    return (vf)(pairs << 16);
}

static inline vf v_second(vu pairs)
{
    return (vf)(pairs & 0xffff0000u);
}

/* v, rounded to the nearest bf16, as floats. */
static inline vf v_round_bf16(vf v)
{
    vu u = (vu)v;
    return (vf)((u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u);
}

#if defined(__AVX512BF16__)
/* c + a.first·b.first + a.second·b.second, in f32. */
static inline vf v_dot_pairs(vu a, vu b, vf c)
{
    return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}

/* 2·VL floats, rounded to the nearest bf16. */
static inline vu v_round_pairs(vf low, vf high)
{
    return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

/* Regroups each eight numbers (four lanes of two) to the pairs of numbers i and i + 4. */
static inline vu v_pairs_apart(vu pairs)
{
    const __m128i place = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return (vu)_mm512_shuffle_epi8((__m512i)pairs, _mm512_broadcast_i32x4(place));
}

/* A mask of the first n of VL lanes. */
static inline __mmask16 v_mask(int n)
{
    return n >= VL ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0;
}

/* The first n floats at p, up to VL, then zeros; memory past n is not read. */
static inline vf v_load_masked(const float *p, int n)
{
    return (vf)_mm512_maskz_loadu_ps(v_mask(n), p);
}

#define EACH_PAIR(l) (l), (l) + 16

/* Interleaves both into pairs, rounded to the nearest bf16. */
static inline vu v_join_pairs(vf first, vf second)
{
    const uint16_t place[] = {EACH_PAIR(0),  EACH_PAIR(1),  EACH_PAIR(2),  EACH_PAIR(3),
                              EACH_PAIR(4),  EACH_PAIR(5),  EACH_PAIR(6),  EACH_PAIR(7),
                              EACH_PAIR(8),  EACH_PAIR(9),  EACH_PAIR(10), EACH_PAIR(11),
                              EACH_PAIR(12), EACH_PAIR(13), EACH_PAIR(14), EACH_PAIR(15)};
    return (vu)_mm512_permutexvar_epi16(_mm512_loadu_si512(place),
                                        (__m512i)v_round_pairs(first, second));
}
#endif

/* A table of 16 floats in registers, for lookup by shuffle. */
typedef struct Lookup {
#if defined(__AVX512F__)
    __m512 all;
#elif defined(__AVX2__)
    __m256 low, high;
#else
    const float *at;
#endif
} Lookup;

static inline Lookup v_table(const float *at)
{
#if defined(__AVX512F__)
    return (Lookup){_mm512_loadu_ps(at)};
#elif defined(__AVX2__)
    return (Lookup){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
#else
    return (Lookup){at};
#endif
}

/* Looks up each lane's lowest four bits; the other bits are ignored. */
static inline vf v_lookup(Lookup table, vu index)
{
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)index, table.all);
#elif defined(__AVX2__)
    __m256i i = (__m256i)index;
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, i),
                                _mm256_permutevar8x32_ps(table.high, i),
                                (__m256)_mm256_slli_epi32(i, 28)); /* bit 3 chooses */
#else
    vf v;
    for (int i = 0; i < VL; i++) v[i] = table.at[index[i] & 15u];
    return v;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
#define LOOKS_UP_BYTES
/* A table of 16 integers from −128 to 127: unit·at[i] as bytes. A shuffle of floats looks up 8
 * codes in half a table; a shuffle of bytes looks up 32 codes. */
static inline __m256i v_table_bytes(const float *at, float unit)
{
    __m256i low = _mm256_cvtps_epi32((__m256)(v_load(at) * unit));
    __m256i high = _mm256_cvtps_epi32((__m256)(v_load(at + 8) * unit));
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    return _mm256_broadcastsi128_si256(bytes);
}

/* Looks up the four bits number `place` of each lane, into the lane's highest byte; other bytes are
 * zero. All eight places share two lookup shuffles; each takes one more to move it. */
static inline vi v_lookup_byte(__m256i table, vu index, int place)
{
    const vu to_top = {0x00808080, 0x04808080, 0x08808080, 0x0c808080,
                       0x00808080, 0x04808080, 0x08808080, 0x0c808080};
    vu four = (place % 2 ? index >> 4 : index) & 0x0f0f0f0fu;
    vu numbers = (vu)_mm256_shuffle_epi8(table, (__m256i)four);
    if (place / 2 == 3) return (vi)(numbers & 0xff000000u);
    vu order = to_top + ((uint32_t)(place / 2) << 24);
    return (vi)_mm256_shuffle_epi8((__m256i)numbers, (__m256i)order);
}
#endif

/* `yes` where the mask's lane is −1, `no` where it is 0. */
static inline vf v_select(vi mask, vf yes, vf no)
{
#if defined(__AVX512F__)
    return (vf)_mm512_mask_mov_ps((__m512)no, _mm512_movepi32_mask((__m512i)mask), (__m512)yes);
#else
    vi a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    vi c = (mask & a) | (~mask & b);
    vf v;
    memcpy(&v, &c, sizeof v);
    return v;
#endif
}

/* a > b ? a : b, so b if one is NaN */
static inline vf v_max(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return v_select(a > b, a, b);
#endif
}

/* a < b ? a : b, so b if one is NaN */
static inline vf v_min(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return v_select(a < b, a, b);
#endif
}

/* x < bound ? 0 : y, so y if x is NaN */
static inline vf v_zero_below(vf y, vf x, vf bound)
{
#if defined(__AVX512F__)
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)bound, _CMP_NLT_UQ);
    return (vf)_mm512_maskz_mov_ps(kept, (__m512)y);
#else
    return v_select(x < bound, v_set(0.0f), y);
#endif
}

/* p·2ⁿ for whole n in [−126, 128] and p in [½, 2] */
static inline vf v_times_power(vf p, vf n)
{
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi half = __builtin_convertvector(n, vi) / 2; /* in two factors: n may be 128 */
    vi rest = __builtin_convertvector(n, vi) - half;
    vi bits_half = (half + 127) << 23, bits_rest = (rest + 127) << 23;
    vf f, g;
    memcpy(&f, &bits_half, sizeof f);
    memcpy(&g, &bits_rest, sizeof g);
    return p * f * g;
#endif
}

static inline float v_sum(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v); /* the same tree */
#endif
    float lane[VL], total = 0.0f;
    v_store(lane, v);
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) lane[i] += lane[i + step];
    total = lane[0];
    return total;
}

static inline float v_top(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float lane[VL];
    v_store(lane, v);
    float top = lane[0];
    for (int i = 1; i < VL; i++) top = lane[i] > top ? lane[i] : top;
    return top;
}

#if defined(__AVX512F__)
#define LANES(f)                                          \
    {f(0), f(1), f(2),  f(3),  f(4),  f(5),  f(6),  f(7), \
     f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)}
#elif defined(__AVX2__)
#define LANES(f) {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}
#else
#define LANES(f) {f(0), f(1), f(2), f(3)}
#endif

/* Swaps the off-diagonal halves of each 2·step × 2·step block: log2(VL) of these transpose a
 * square. */
#define BUTTERFLY(v, step)                                           \
    do {                                                             \
        const vi low = LANES(LOW_##step), high = LANES(HIGH_##step); \
        _Pragma("GCC unroll 16") for (int i = 0; i < VL; i++)        \
        {                                                            \
            if (i & step) continue;                                  \
            vf x = v[i], y = v[i + step];                            \
            v[i] = __builtin_shuffle(x, y, low);                     \
            v[i + step] = __builtin_shuffle(x, y, high);             \
        }                                                            \
    } while (0)
#define LOW(l, step) ((l) & step ? VL + (l) - step : (l))
#define HIGH(l, step) ((l) & step ? VL + (l) : (l) + step)
#define LOW_1(l) LOW(l, 1)
#define LOW_2(l) LOW(l, 2)
#define LOW_4(l) LOW(l, 4)
#define LOW_8(l) LOW(l, 8)
#define HIGH_1(l) HIGH(l, 1)
#define HIGH_2(l) HIGH(l, 2)
#define HIGH_4(l) HIGH(l, 4)
#define HIGH_8(l) HIGH(l, 8)

/* Transposes a square of lanes in place: v[i]'s lane j becomes v[j]'s lane i. */
static inline __attribute__((always_inline)) void square_turn(vf v[VL])
{
    BUTTERFLY(v, 1);
    BUTTERFLY(v, 2);
#if defined(__AVX2__)
    BUTTERFLY(v, 4);
#endif
#if defined(__AVX512F__)
    BUTTERFLY(v, 8);
#endif
}

/* (e^r − 1 − r) / r² for |r| ≤ ln2/2, by Taylor's series of e^r to r⁷, whose remainder is under
 * 2⁻²⁷. */
static inline vf v_exp_rest(vf r)
{
    vf p = v_set(1.0f / 5040.0f);
    p = v_fma(p, r, v_set(1.0f / 720.0f));
    p = v_fma(p, r, v_set(1.0f / 120.0f));
    p = v_fma(p, r, v_set(1.0f / 24.0f));
    p = v_fma(p, r, v_set(1.0f / 6.0f));
    return v_fma(p, r, v_set(0.5f));
}

/* eˣ within 2 ulp; 0 below −87.3, inf above 88.7. x = n·ln2 + r, |r| ≤ ln2/2. */
static inline vf v_exp(vf x)
{
    const vf shift = v_set(12582912.0f); /* 1.5·2²³: adding it rounds to an integer */
    vf clamped = v_min(v_set(89.0f), v_max(v_set(-87.33654f), x)); /* NaN stays NaN; e⁸⁹ is inf */
    vf n = v_fma(clamped, v_set(1.44269504f), shift) - shift;
    vf r = v_fma(n, v_set(-0.693359375f), clamped);
    r = v_fma(n, v_set(2.12194440e-4f), r);
    vf p = 1.0f + v_fma(v_exp_rest(r), r * r, r);
    vf y = v_times_power(p, n);
    return v_zero_below(y, x, v_set(-87.33654f));
}

/* 1 / (1 + e⁻ˣ). */
static inline vf v_sigmoid(vf x)
{
    return 1.0f / (1.0f + v_exp(-x));
}

/* The same for a scalar, with the C library's exponential. */
static inline float f_sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* (f − log(1 + f)) / f² for √½ ≤ 1 + f ≤ √2, by the polynomial of Cephes' logf. */
static inline vf v_log_rest(vf f)
{
    vf p = v_set(7.0376836292e-2f);
    p = v_fma(p, f, v_set(-1.1514610310e-1f));
    p = v_fma(p, f, v_set(1.1676998740e-1f));
    p = v_fma(p, f, v_set(-1.2420140846e-1f));
    p = v_fma(p, f, v_set(1.4249322787e-1f));
    p = v_fma(p, f, v_set(-1.6668057665e-1f));
    p = v_fma(p, f, v_set(2.0000714765e-1f));
    p = v_fma(p, f, v_set(-2.4999993993e-1f));
    p = v_fma(p, f, v_set(3.3333331174e-1f));
    return v_fma(-p, f, v_set(0.5f));
}

/* log x within 2 ulp for normal x; −inf for 0 and subnormals. x = 2ⁿ·(1 + f). */
static inline vf v_log(vf x)
{
    vi bits;
    memcpy(&bits, &x, sizeof bits);
    vi from_root = bits - 0x3f3504f3; /* √½: n is the exponent of x / √½ */
    vi n = from_root >> 23, mantissa = (from_root & 0x7fffff) + 0x3f3504f3;
    vf m, e = __builtin_convertvector(n, vf);
    memcpy(&m, &mantissa, sizeof m);
    vf f = m - 1.0f;
    vf y = v_fma(e, v_set(-2.12194440e-4f), -(f * f * v_log_rest(f)));
    y = v_fma(e, v_set(0.693359375f), f + y);
    y = v_select(x < 1.17549435e-38f, v_set(-INFINITY), y);
    y = v_select(x > 3.40282347e+38f, x, y);
    return v_select(x >= 0.0f, y, v_set(NAN)); /* NaN stays NaN */
}

/* The scalar twin: the same number as a lane of v_exp. */
static inline float f_exp(float x)
{
    float lane[VL];
    v_store(lane, v_exp(v_set(x)));
    return lane[0];
}

#endif
