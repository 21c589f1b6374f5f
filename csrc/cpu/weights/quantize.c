/* cpu/weights/quantize.c - quantizes wide weights to 8- and 4-bit blocks, once, on load.
 *
 *   int8   scale = max |w| / 127;  code = round(w / scale)
 *   int4   scale = the one of a few candidates with the least Σ (w − level·scale)²
 *
 * An int4 scale may be negative, because the levels are asymmetric: the largest weight may map to
 * either end. Four scales are tried: at each end, and STEP beyond and before the first one, which
 * is farther out (7.35 % for Gaussian weights; around the better one 7.36). For the levels nearest
 * to w / scale the best scale is Σ level·w / Σ level², in f16, and the codes are chosen again for
 * it. Weights that int4 can represent stay exact: the first scale tried does that. 32 outputs of a
 * block are side by side, so nothing crosses lanes.
 *
 * Scales are tried with 16-bit integers, two inputs to a lane: a weight as a share of the largest,
 * and w / scale in steps of 1/UNIT of a sixteenth. The highest five bits of that are its cell,
 * which has at most one bound between two levels. All scales are tried in one pass over the
 * weights. Compute bound: some 10 instructions per 2·VL weights and scale tried (8 with
 * AVX512_VNNI), and as many more per VL weights. */
#include "quantize.h"

#include "../../device/quantize.h"
#include "packed.h"

/* ---- f16 ---- */

/* Each lane rounded to the nearest even f16, clamped to the largest. */
static inline vf half_round(vf x)
{
    vf most = v_set(HALF_MOST);
    x = v_min(most, v_max(-most, x));
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    /* Adding and subtracting 2^(e + 13) rounds a number of exponent e ≥ −14 to f16's digits. */
    vu sign = (vu)x & 0x80000000u, exponent = (vu)x & 0x7f800000u, least = (vu){0} + (113u << 23);
    exponent = (vu)v_max((vf)exponent, (vf)least);
    vf large = (vf)((exponent + (13u << 23)) | sign);
    vf rounded = (x + large) - large;
    return (vf)((vu)rounded | sign);
#endif
}

/* Stores two bytes per lane: the f16 of a rounded float. */
static inline void half_store(unsigned char *to, vf x)
{
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)(void *)to,
                        _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)(void *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < VL; i++) {
        float lane = x[i], tiny = 0x1p-14f;
        uint32_t bits, rest;
        memcpy(&bits, &lane, sizeof bits);
        float magnitude = lane < 0 ? -lane : lane;
        rest = magnitude < tiny ? (uint32_t)(magnitude * 0x1p24f)
                                : ((bits & 0x7fffffffu) >> 13) - (112u << 10);
        uint16_t half = (uint16_t)((bits >> 16 & 0x8000u) | rest);
        memcpy(to + 2 * i, &half, sizeof half);
    }
#endif
}

/* ---- the nearest level, for two 16-bit numbers per lane ---- */

/* The code of a number in steps of 1/UNIT. */
static int code_of(const float *level, int number)
{
    int code = 0;
    while (code + 1 < LEVELS && number > (level[code] + level[code + 1]) * (FINE * UNIT / 2))
        code++;
    return code;
}

/* The factor of shares, over 2^15, that maps the largest one to `level` / `part`. */
static int16_t level_at(float level, float part)
{
    float c = level * (float)(FINE * UNIT) / part * ((float)(1 << 15) / WHOLE);
    return (int16_t)(c + (c > 0.0f ? 0.5f : -0.5f));
}

Cells CPU(cells_make)(DType type)
{
    const float *level = CPU(levels)[type];
    Cells cells = {.type = type};
    for (int i = 0; i < CELLS; i++) {
        int begin = (i < CELLS / 2 ? i : i - CELLS) * (1 << 11), code = code_of(level, begin);
        cells.code[i] = (int8_t)code;
        cells.low[i] = (int8_t)(level[code] * FINE);
        cells.high[i] = (int8_t)(level[code_of(level, begin + (1 << 11) - 1)] * FINE);
        int bound = (cells.low[i] + cells.high[i]) * (UNIT / 2);
        cells.bound[i] = (int16_t)(cells.low[i] == cells.high[i] ? BOUNDLESS : bound);
    }
    cells.tried[0] = level_at(level[0], 1.0f);
    cells.tried[1] = level_at(level[LEVELS - 1], 1.0f);
    cells.tried[2] = level_at(level[0], 1.0f + STEP);
    cells.tried[3] = level_at(level[0], 1.0f - STEP);
    return cells;
}

/* The nearest integer; |x| < 2²². */
static inline vi whole_round(vf x)
{
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    vf shift = v_set(12582912.0f); /* 1.5·2²³: adding it rounds */
    return __builtin_convertvector((x + shift) - shift, vi);
#endif
}

/* Two numbers, each in 16 bits, in a lane. */
static inline vi pair_join(vi low, vi high)
{
    return (low & 0xffff) | high << 16;
}

/* Both numbers times those of c / 2^15, rounded. */
static inline vi pair_scale(vi a, vi c)
{
#if defined(__AVX512BW__)
    return (vi)_mm512_mulhrs_epi16((__m512i)a, (__m512i)c);
#elif defined(__AVX2__)
    return (vi)_mm256_mulhrs_epi16((__m256i)a, (__m256i)c);
#else
    return pair_join((((a << 16) >> 16) * ((c << 16) >> 16) + (1 << 14)) >> 15,
                     ((a >> 16) * (c >> 16) + (1 << 14)) >> 15);
#endif
}

/* sum + both products. */
static inline vi pair_dot(vi sum, vi a, vi b)
{
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__AVX512BW__)
/* The cells in registers. */
typedef struct Near {
    __m512i bound, low, high, code;
} Near;

static inline __m512i cells_load(const int8_t *table)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)table));
}

static inline Near near_of(const Cells *cells)
{
    return (Near){_mm512_loadu_si512(cells->bound), cells_load(cells->low), cells_load(cells->high),
                  cells_load(cells->code)};
}
#else
typedef const Cells *Near;

static inline Near near_of(const Cells *cells)
{
    return cells;
}
#endif

#if defined(__AVX2__) && !defined(__AVX512BW__)
/* A table's entries for 16-bit cells, in the upper halves: a shuffle looks up 16 of its bytes. */
static inline __m256i cells_look(const int8_t *table, __m256i cell)
{
    const __m128i *half = (const __m128i *)(const void *)table;
    __m256i at = _mm256_or_si256(_mm256_slli_epi16(cell, 8), _mm256_set1_epi16(0x80));
    __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128(half));
    __m256i second = _mm256_broadcastsi128_si256(_mm_loadu_si128(half + 1));
    __m256i found =
        _mm256_blendv_epi8(_mm256_shuffle_epi8(first, at), _mm256_shuffle_epi8(second, at),
                           _mm256_slli_epi16(cell, 11));
    return _mm256_srai_epi16(found, 8);
}
#endif

/* The levels (in 1/FINE) nearest to numbers in steps of 1/UNIT, or their codes. */
static inline __attribute__((always_inline)) vi pair_nearest(Near near, vi v, const int codes)
{
#if defined(__AVX512BW__)
    __m512i cell = _mm512_srli_epi16((__m512i)v, 11);
    __m512i bound = _mm512_permutexvar_epi16(cell, near.bound);
    __m512i least = _mm512_permutexvar_epi16(cell, codes ? near.code : near.low);
    __mmask32 above = _mm512_cmpgt_epi16_mask((__m512i)v, bound);
    if (!codes) return (vi)_mm512_mask_permutexvar_epi16(least, above, cell, near.high);
    return (vi)_mm512_mask_add_epi16(least, above, least, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i cell = _mm256_srli_epi16((__m256i)v, 11);
    __m256i low = cells_look(near->low, cell), high = cells_look(near->high, cell);
    __m256i twice = _mm256_mullo_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(UNIT / 2));
    __m256i above = _mm256_cmpgt_epi16((__m256i)v, twice);
    if (!codes) return (vi)_mm256_blendv_epi8(low, high, above);
    above = _mm256_andnot_si256(_mm256_cmpeq_epi16(low, high), above); /* else no bound */
    return (vi)_mm256_sub_epi16(cells_look(near->code, cell), above);
#else
    int16_t number[2 * VL];
    memcpy(number, &v, sizeof number);
    for (int i = 0; i < 2 * VL; i++) {
        int cell = (uint16_t)number[i] >> 11, above = number[i] > near->bound[cell];
        number[i] = (int16_t)(codes   ? near->code[cell] + above
                              : above ? near->high[cell]
                                      : near->low[cell]);
    }
    memcpy(&v, number, sizeof number);
    return v;
#endif
}

/* ---- blocks: outputs [x, x + VL) ---- */

static inline vf magnitude(vf x)
{
    return (vf)((vu)x & 0x7fffffffu);
}

/* x clamped to ±most. */
static inline vf within(vf x, vf most)
{
#if defined(__AVX512DQ__)
    return (vf)_mm512_range_ps((__m512)x, (__m512)most, 2); /* the lesser magnitude, x's sign */
#else
    return v_min(most, v_max(-most, x));
#endif
}

/* 1 / scale, or 0 if the scale is 0. */
static inline vf inverse(vf scale)
{
    vi none = (vi)(scale == v_set(0.0f));
    return v_select(none, v_set(0.0f), 1.0f / v_select(none, v_set(1.0f), scale));
}

static inline vf weight_at(const float *from, int k, int x)
{
    return v_load(from + k * PANEL + x);
}

static void bytes_quantize(unsigned char *to, const float *from, int x)
{
    Blocks b = blocks_of(DTYPE_INT8);
    vf most = v_set(0.0f);
    for (int k = 0; k < BLOCK; k++) most = v_max(most, magnitude(weight_at(from, k, x)));
    vf scale = half_round(most * (1.0f / 127.0f)), over = inverse(scale);
    half_store(to + 2 * x, scale);
    for (int k = 0; k < BLOCK; k++) {
        vf y = weight_at(from, k, x) * over;
        vc bytes = __builtin_convertvector(whole_round(within(y, v_set(127.0f))), vc);
        memcpy(to + b.codes + k * PANEL + x, &bytes, sizeof bytes);
    }
}

/* Inputs k and k + 1, times `over`, clamped to ±`most` and rounded. */
static inline vi weights_pair(const float *from, int k, int x, vf over, vf most)
{
    vf first = weight_at(from, k, x) * over, second = weight_at(from, k + 1, x) * over;
    return pair_join(whole_round(within(first, most)), whole_round(within(second, most)));
}

/* A candidate scale, and how much its codes reduce Σ w², in shares of the largest weight. */
typedef struct Tried {
    vf scale, gain;
} Tried;

/* The best scale for some levels, from the integer sums of their products with the shares and of
 * their squares. `one` is the weight of a share of 1. */
static inline Tried scale_of(vi product, vi square, vf one, vf over)
{
    vf p = __builtin_convertvector(product, vf) * (1.0f / FINE);
    vf q = __builtin_convertvector(square, vf) * (1.0f / (FINE * FINE)); /* no level is 0 */
    vf scale = half_round(p / q * one), s = scale * over;
    return (Tried){scale, s * v_fma(-s, q, 2.0f * p)};
}

/* The one that gains more; the first if the sums can't tell. */
static inline Tried better_of(Tried a, Tried b)
{
    vi second = (vi)(b.gain > a.gain * (1.0f + GAIN));
    return (Tried){v_select(second, b.scale, a.scale), v_select(second, b.gain, a.gain)};
}

/* A number in both halves of all lanes. */
static inline vi pair_set(int16_t x)
{
    return (vi){0} + (int)((uint32_t)(uint16_t)x << 16 | (uint16_t)x);
}

static inline __attribute__((always_inline)) vf best_scale(const float *from, int live,
                                                           const Cells *cells, Near near, int x)
{
    vf most = v_set(0.0f), least = v_set(0.0f), whole = v_set((float)WHOLE);
    for (int k = 0; k < live; k++) {
        most = v_max(weight_at(from, k, x), most);
        least = v_min(weight_at(from, k, x), least);
    }
    vf peak = v_select((vi)(-least > most), least, most);
    vf over = whole * inverse(v_select((vi)(magnitude(peak) < v_set(TINY)), v_set(0.0f), peak));
    vf one = peak * (1.0f / WHOLE);
    vi c[TRIED], product[TRIED] = {0}, square[TRIED] = {0};
    for (int i = 0; i < TRIED; i++) c[i] = pair_set(cells->tried[i]);
    for (int k = 0; k < live; k += 2) {
        /* None exceeds WHOLE, the largest one's share. */
        vi share = pair_join(whole_round(weight_at(from, k, x) * over),
                             whole_round(weight_at(from, k + 1, x) * over));
#pragma GCC unroll 4
        for (int i = 0; i < TRIED; i++) {
            vi y = pair_nearest(near, pair_scale(share, c[i]), 0);
            if (k + 1 == live) y &= 0xffff; /* its second input is missing */
            product[i] = pair_dot(product[i], y, share);
            square[i] = pair_dot(square[i], y, y);
        }
    }
    Tried best = {v_set(0.0f), v_set(0.0f)};
    for (int i = 0; i < TRIED; i++)
        best = better_of(best, scale_of(product[i], square[i], one, over));
    return best.scale;
}

static void nibbles_quantize(unsigned char *to, const float *from, int live, const Cells *cells,
                             int x)
{
    Blocks b = blocks_of(cells->type);
    Near near = near_of(cells);
    vf scale = live == BLOCK ? best_scale(from, BLOCK, cells, near, x)
                             : best_scale(from, live, cells, near, x);
    vf over = (float)(FINE * UNIT) * inverse(scale), most = v_set((float)WHOLE);
    half_store(to + 2 * x, scale);
    for (int k = 0; k < BLOCK; k += NIBBLES) {
        vu u = {0};
        for (int i = 0; i < NIBBLES; i += 2) {
            vu pair = (vu)pair_nearest(near, weights_pair(from, k + i, x, over, most), 1);
            u |= (pair | pair >> 12) << (4 * i) & 255u << (4 * i);
        }
        memcpy(to + b.codes + 4 * (k / NIBBLES * PANEL + x), &u, sizeof u);
    }
}

void CPU(block_quantize)(unsigned char *to, const Cells *cells, const float *from, int live)
{
    for (int x = 0; x < PANEL; x += VL)
        if (cells->type == DTYPE_INT8)
            bytes_quantize(to, from, x);
        else
            nibbles_quantize(to, from, live, cells, x);
}
