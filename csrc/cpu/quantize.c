/* cpu/quantize.c - makes 8- and 4-bit blocks of wide weights, once, when they are loaded.
 *
 *   int8   scale = max |w| / 127;  code = round(w / scale)
 *   int4   scale = the one of a few whose codes leave the least Σ (w − level·scale)²
 *
 * An int4 scale may be negative, because the levels are not symmetric: the largest weight may lie
 * at either end. Around each end TRIES scales are tried (3: an error of 7.33 % for Gaussian
 * weights; 5 would give 7.29, 1 7.55). For the levels nearest to w / scale the best scale is
 * Σ level·w / Σ level², in f16, and the codes are chosen again for it. What int4 can hold exactly
 * it holds: that is the first scale tried. Weights beyond ±WEIGHT_MOST, which no model has, count
 * as that. 32 outputs of a block stand side by side, so nothing crosses lanes. Compute bound: some
 * 20 instructions for VL weights and each scale that is tried. */
#include "packed.h"

enum { TRIES = 3 };

#define STEP 0.04f         /* between the scales that are tried */
#define HALF_MOST 65504.0f /* the largest f16 */
#define WEIGHT_MOST 5e5f   /* with the largest scale and level */

/* ---- f16 ---- */

/* The nearest f16 of each lane, of two the even one; what is too large is the largest. */
static inline vf half_round(vf x)
{
    vf most = v_set(HALF_MOST);
    x = v_min(most, v_max(-most, x));
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    /* Adding 2^(e + 13) keeps f16's digits of a number of the exponent e, which is −14 at least. */
    vu sign = (vu)x & 0x80000000u, exponent = (vu)x & 0x7f800000u, least = (vu){0} + (113u << 23);
    exponent = (vu)v_max((vf)exponent, (vf)least);
    vf large = (vf)((exponent + (13u << 23)) | sign);
    vf rounded = (x + large) - large;
    return (vf)((vu)rounded | sign);
#endif
}

/* Two bytes for each lane, which is an f16 or a bf16's float. */
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

/* ---- the nearest level ---- */

/* The middles between neighbouring levels: the code of x is how many of them lie below it. */
typedef struct Bounds {
    float middle;          /* the eighth */
    float next[3][LEVELS]; /* by the code so far, that which a binary search looks at next */
} Bounds;

static Bounds bounds_make(const float *level)
{
    Bounds b;
    float bound[LEVELS];
    for (int i = 0; i + 1 < LEVELS; i++) bound[i] = 0.5f * (level[i] + level[i + 1]);
    bound[LEVELS - 1] = INFINITY;
    b.middle = bound[7];
    for (int step = 0, ahead = 3; step < 3; step++, ahead /= 2)
        for (int i = 0; i < LEVELS; i++)
            b.next[step][i] = bound[i + ahead < LEVELS ? i + ahead : LEVELS - 1];
    return b;
}

static inline vu nearest(const Bounds *b, vf x)
{
    vu code = (vu)(x > v_set(b->middle)) & 8u;
    code |= (vu)(x > v_lookup(v_table(b->next[0]), code)) & 4u;
    code |= (vu)(x > v_lookup(v_table(b->next[1]), code)) & 2u;
    return code | ((vu)(x > v_lookup(v_table(b->next[2]), code)) & 1u);
}

/* ---- blocks: outputs [x, x + VL) ---- */

static inline vf magnitude(vf x)
{
    return (vf)((vu)x & 0x7fffffffu);
}

/* 1 / scale, and 0 where the scale is 0. */
static inline vf inverse(vf scale)
{
    vi none = (vi)(scale == v_set(0.0f));
    return v_select(none, v_set(0.0f), 1.0f / v_select(none, v_set(1.0f), scale));
}

static inline vf weight_at(const float *from, int k, int x)
{
    vf most = v_set(WEIGHT_MOST);
    return v_min(most, v_max(-most, v_load(from + k * PANEL + x)));
}

static void bytes_quantize(unsigned char *to, const float *from, int x)
{
    Blocks b = blocks_of(DTYPE_INT8);
    vf most = v_set(0.0f), shift = v_set(12582912.0f); /* 1.5·2²³: adding it rounds */
    for (int k = 0; k < BLOCK; k++) most = v_max(most, magnitude(weight_at(from, k, x)));
    vf scale = half_round(most * (1.0f / 127.0f)), over = inverse(scale);
    half_store(to + 2 * x, scale);
    for (int k = 0; k < BLOCK; k++) {
        vf y = weight_at(from, k, x) * over;
        y = v_min(v_set(127.0f), v_max(v_set(-127.0f), y));
        vc bytes = __builtin_convertvector(__builtin_convertvector((y + shift) - shift, vi), vc);
        memcpy(to + b.codes + k * PANEL + x, &bytes, sizeof bytes);
    }
}

/* The best scale of these levels for the first `live` inputs. */
static inline vf best_scale(const float *from, int live, const float *level, const Bounds *bounds,
                            int x)
{
    Lookup table = v_table(level);
    vf peak = v_set(0.0f), squares = v_set(0.0f);
    for (int k = 0; k < live; k++) {
        vf w = weight_at(from, k, x);
        peak = v_select(magnitude(w) > magnitude(peak), w, peak);
        squares = v_fma(w, w, squares);
    }
    vf best = v_set(0.0f), least = squares, digits = squares * 1e-6f; /* that the sums have */
    for (int t = 0; t < 2 * TRIES; t++) {
        int n = t / 2; /* 0, 1, −1, 2, −2, … steps from the end */
        float share = 1.0f + STEP * (float)(n % 2 ? (n + 1) / 2 : -(n / 2));
        vf over = inverse(peak * (share / level[t % 2 ? LEVELS - 1 : 0]));
        vf product = v_set(0.0f), square = v_set(0.0f);
        for (int k = 0; k < live; k++) {
            vf w = weight_at(from, k, x), y = v_lookup(table, nearest(bounds, w * over));
            product = v_fma(y, w, product);
            square = v_fma(y, y, square);
        }
        vf scale = half_round(product / square); /* no level is 0 */
        vf error = squares + scale * v_fma(scale, square, -2.0f * product);
        vi better = (vi)(error + digits < least);
        least = v_select(better, error, least);
        best = v_select(better, scale, best);
    }
    return best;
}

static void nibbles_quantize(unsigned char *to, DType type, const float *from, int live,
                             const Bounds *bounds, int x)
{
    Blocks b = blocks_of(type);
    vf scale = best_scale(from, live, CPU(levels)[type], bounds, x), over = inverse(scale);
    half_store(to + 2 * x, scale);
    for (int word = 0; word < BLOCK / NIBBLES; word++) {
        vu u = {0};
        for (int i = 0; i < NIBBLES; i++) {
            vf w = weight_at(from, word * NIBBLES + i, x);
            u |= nearest(bounds, w * over) << (4 * i);
        }
        memcpy(to + b.codes + 4 * (word * PANEL + x), &u, sizeof u);
    }
}

void CPU(block_quantize)(unsigned char *to, DType type, const float *from, int live)
{
    if (type == DTYPE_INT8) {
        for (int x = 0; x < PANEL; x += VL) bytes_quantize(to, from, x);
        return;
    }
    Bounds bounds = bounds_make(CPU(levels)[type]);
    for (int x = 0; x < PANEL; x += VL) nibbles_quantize(to, type, from, live, &bounds, x);
}
