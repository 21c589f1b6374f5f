/* cpu/product/code_pairs.h - pairs of codes' values, pairs of x, and their products, by instruction
 * set (gemm_quantized.c).
 *
 * With AVX512_BF16 both sides of a product are bf16, and a block's sum is f32. With AVX2 and other
 * AVX-512 both are 16-bit integers, and a block's sum is exact:
 *
 *   x[r,k] = size(r, block)·q[r,k],  q = round(x / size),  size = max |x| of the block / MOST
 *
 * The lookup then gives unsigned bytes, each value plus LIFTED, because an unsigned byte becomes 16
 * bits by a mask or a shift. The sum starts at −LIFTED·Σ q to compensate. */
#ifndef TINSMITH_CPU_PRODUCT_CODE_PAIRS_H
#define TINSMITH_CPU_PRODUCT_CODE_PAIRS_H

#include "gemm_tiled.h"
#include "../weights/packed.h"

#if defined(__AVX2__)

/* A panel's 8-bit codes of the input at `row`, and of the input paired with it. */
static inline void rows_of_bytes(__m256i *one, __m256i *other, const unsigned char *row)
{
    memcpy(one, row, sizeof *one);
    memcpy(other, row + NIBBLES / 2 * PANEL, sizeof *other);
}

#endif

#if defined(__AVX512BF16__)

/* ---- bf16 ---- */

typedef vf Sum;

enum { HEADS = 0, BEGIN = 0, HALF = 0, INPUTS = 0 }; /* lanes before those of a row's block: none */

/* bf16 of 1 to 128, indexed by the lowest seven bits: 128 has index 0. */
#define EXPONENT(m) (((m) > 1) + ((m) > 3) + ((m) > 7) + ((m) > 15) + ((m) > 31) + ((m) > 63))
#define MAGNITUDE(m) ((127 + EXPONENT(m)) << 7 | ((m) - (1 << EXPONENT(m))) << (7 - EXPONENT(m)))
#define LOW_BYTE(m) ((m) ? MAGNITUDE(m) & 0xff : 0)
#define HIGH_BYTE(m) ((m) ? MAGNITUDE(m) >> 8 : 0x43)
#define FOUR(X, m) X(m), X((m) + 1), X((m) + 2), X((m) + 3)
#define SIXTEEN(X, m) FOUR(X, m), FOUR(X, (m) + 4), FOUR(X, (m) + 8), FOUR(X, (m) + 12)
#define SIXTY_FOUR(X, m) \
    SIXTEEN(X, m), SIXTEEN(X, (m) + 16), SIXTEEN(X, (m) + 32), SIXTEEN(X, (m) + 48)
/* For two adjacent rows of PANEL bytes, the source of place b, such that interleaving their
 * looked-up low and high bytes gives pairs of both rows' numbers. */
#define WOVEN(b) ((b) / 8 % 2 * 16 + (b) / 16 * 4 + (b) % 8 / 2 + (b) % 2 * PANEL)

static const uint8_t low_bytes[] = {SIXTY_FOUR(LOW_BYTE, 0), SIXTY_FOUR(LOW_BYTE, 64)};
static const uint8_t high_bytes[] = {SIXTY_FOUR(HIGH_BYTE, 0), SIXTY_FOUR(HIGH_BYTE, 64)};
static const uint8_t woven[] = {SIXTY_FOUR(WOVEN, 0)};

/* The lookup tables of codes. */
typedef struct Known {
    __m512i levels, low[2], high[2], order;
} Known;

/* Levels are stored twice: an index has five bits, whose highest belongs to another code. */
static inline Known known_of(DType type, DType kind)
{
    (void)kind;
    vf once = v_load(CPU(levels)[type]);
    return (Known){(__m512i)v_round_pairs(once, once),
                   {_mm512_loadu_si512(low_bytes), _mm512_loadu_si512(low_bytes + 64)},
                   {_mm512_loadu_si512(high_bytes), _mm512_loadu_si512(high_bytes + 64)},
                   _mm512_loadu_si512(woven)};
}

/* The unit of a looked-up value. */
static inline float known_unit(DType kind)
{
    (void)kind;
    return 1.0f;
}

/* A panel's vectors: the pairs of rows_of_bytes(). */
static inline void pairs_of_bytes(vu *pairs, const unsigned char *row, const Known *known)
{
    __m256i one, other;
    rows_of_bytes(&one, &other, row);
    __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(one), other, 1);
    codes = _mm512_permutexvar_epi8(known->order, codes);
    __m512i m = _mm512_abs_epi8(codes), sign = _mm512_set1_epi8((char)0x80);
    __m512i low = _mm512_permutex2var_epi8(known->low[0], m, known->low[1]);
    __m512i high = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(codes, codes),
                                                  known->high[0], m, known->high[1]);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8); /* high | (codes & sign) */
    pairs[0] = (vu)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (vu)_mm512_unpackhi_epi8(low, high);
}

/* The eight 4-bit codes of each lane, prepared for pairs_of_word. */
typedef vu Found;

static inline Found codes_of_word(vu word, vu higher, const int bits, const Known *known)
{
    (void)higher, (void)bits, (void)known;
    return word;
}

/* The pairs of inputs k + i and k + i + 4, i < 4. */
static inline vu pairs_of_word(Found found, int i, const int bits, const Known *known)
{
    (void)bits;
    return (vu)_mm512_permutexvar_epi16((__m512i)(found >> (4 * i)), known->levels);
}

/* A row's sum of a block: its start, from one of its heads; adding a pair; its f32. */
static inline Sum sum_begin(const float *begin)
{
    (void)begin;
    return v_set(0.0f);
}

static inline Sum sum_add(Sum sum, vu x, vu pairs)
{
    return v_dot_pairs(x, pairs, sum);
}

static inline vf sum_end(Sum sum, const float *size)
{
    (void)size;
    return sum;
}

/* Lanes of a block of which `live` inputs exist; and of a row. */
static inline int block_lanes(int live)
{
    return packed_lanes(live, APART);
}

static inline int row_lanes(int depth)
{
    return packed_lanes(depth, APART);
}

/* Packs a tile of rows: each lane or head of a block is next to the other rows'. */
static inline void rows_pack(float *to, const float *a, int64_t a_row, int rows, int depth)
{
    CPU(tile_pack)(to, rows, a, a_row, rows, depth, APART);
}

#elif defined(__AVX2__)

/* ---- integers ---- */

typedef vi Sum;

/* The heads before a row's block: its size, the start values of its sum and its halves' sums, and
 * its sum of inputs in f32. */
enum { SIZE, BEGIN, HALF, INPUTS = HALF + 2, HEADS, MOST = 32767 };

/* The levels as integers: lifted bytes, or with AVX-512 words without a lift. */
typedef struct Known {
#if defined(__AVX512F__)
    __m512i levels;
#else
    __m256i levels;
#endif
} Known;

static inline float known_unit(DType kind)
{
    return 1.0f / whole_unit(kind);
}

#if defined(__AVX512F__)

enum { LIFTED = 0 };

static inline Known known_of(DType type, DType kind)
{
    __m512 levels = (__m512)(v_load(CPU(levels)[type]) * whole_unit(kind));
    return (Known){_mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_cvtps_epi32(levels)))};
}

static inline void pairs_of_bytes(vu *pairs, const unsigned char *row, const Known *known)
{
    __m256i one, other;
    (void)known;
    rows_of_bytes(&one, &other, row);
    __m256i low = _mm256_unpacklo_epi8(one, other), high = _mm256_unpackhi_epi8(one, other);
    pairs[0] = (vu)_mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x20));
    pairs[1] = (vu)_mm512_cvtepi8_epi16(_mm256_permute2x128_si256(low, high, 0x31));
}

/* Each lane's codes split by halves: inputs k to k + 3 are in the lower half. */
typedef struct Found {
    vu low, high;
} Found;

static inline Found codes_of_word(vu word, vu higher, const int bits, const Known *known)
{
    (void)known;
    uint32_t half = bits == 2 ? 0xff : 0xf;
    return (Found){word, (higher & half) | (higher & half << 4 * bits) << (16 - 4 * bits)};
}

static inline vu pairs_of_word(Found found, int i, const int bits, const Known *known)
{
    vu low = (vu)_mm512_permutexvar_epi16((__m512i)(found.low >> (4 * i)), known->levels);
    if (!bits) return low;
    vu high = (found.high >> (bits * i) & (bits == 2 ? 0x00030003u : 0x00010001u)) << 4;
    return (vu)_mm512_add_epi16((__m512i)low, (__m512i)high);
}

#else

enum { LIFTED = 128 };

static inline Known known_of(DType type, DType kind)
{
    __m256i levels = v_table_bytes(CPU(levels)[type], whole_unit(kind));
    return (Known){_mm256_xor_si256(levels, _mm256_set1_epi8((char)LIFTED))};
}

/* A panel's vectors: the pairs of rows_of_bytes(). Groups of four are first moved to where
 * unpacking reads them. */
static inline void pairs_of_bytes(vu *pairs, const unsigned char *row, const Known *known)
{
    const __m256i fours = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), zero = {0};
    const __m256i lifted = _mm256_set1_epi8((char)LIFTED);
    __m256i one, other;
    (void)known;
    rows_of_bytes(&one, &other, row);
    one = _mm256_permutevar8x32_epi32(_mm256_xor_si256(one, lifted), fours);
    other = _mm256_permutevar8x32_epi32(_mm256_xor_si256(other, lifted), fours);
    __m256i low = _mm256_unpacklo_epi8(one, other), high = _mm256_unpackhi_epi8(one, other);
    pairs[0] = (vu)_mm256_unpacklo_epi8(low, zero);
    pairs[1] = (vu)_mm256_unpackhi_epi8(low, zero);
    pairs[2] = (vu)_mm256_unpacklo_epi8(high, zero);
    pairs[3] = (vu)_mm256_unpackhi_epi8(high, zero);
}

/* Each lane's values of the lower four bits of each byte, and of the upper four. */
typedef struct Found {
    vu half[2];
} Found;

static inline Found codes_of_word(vu word, vu higher, const int bits, const Known *known)
{
    Found found;
    /* The higher bits of inputs i and i + 1 move to byte i / 2. */
    vu high = higher & (bits == 2 ? 0xffffu : 0xffu);
    high = bits == 2 ? (high | high << 8) & 0x00ff00ffu : (high | high << 12) & 0x000f000fu;
    high = bits == 2 ? (high | high << 4) & 0x0f0f0f0fu : (high | high << 6) & 0x03030303u;
    for (int h = 0; h < 2; h++) {
        vu codes = word >> (4 * h) & 0x0f0f0f0fu;
        found.half[h] = (vu)_mm256_shuffle_epi8(known->levels, (__m256i)codes);
        vu more = high >> (bits * h) & (bits == 2 ? 0x03030303u : 0x01010101u);
        if (bits) found.half[h] += more << 4; /* no byte is more than 255 */
    }
    return found;
}

static inline vu pairs_of_word(Found found, int i, const int bits, const Known *known)
{
    (void)bits, (void)known;
    vu half = found.half[i % 2];
    return i < 2 ? half & 0x00ff00ffu : (vu)_mm256_srli_epi16((__m256i)half, 8);
}

#endif

/* Additions in order, each fused with its product if the set can. GCC may reorder integer
 * additions: it would first compute several rows' products, and run out of registers. */
static inline Sum sum_add(Sum sum, vu x, vu pairs)
{
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)pairs);
#else
    vi products;
    __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
            : "+v"(sum), "=&v"(products)
            : "v"(x), "v"(pairs));
    return sum;
#endif
}

static inline Sum sum_begin(const float *begin)
{
    return LIFTED ? (vi)v_set_pair(begin) : (vi){0};
}

static inline vf sum_end(Sum sum, const float *size)
{
    return __builtin_convertvector(sum, vf) * v_set(*size);
}

static inline int block_lanes(int live)
{
    (void)live; /* the other inputs are zeros */
    return BLOCK / 2;
}

static inline int row_lanes(int depth)
{
    return (depth + BLOCK - 1) / BLOCK * (HEADS + BLOCK / 2);
}

static inline __m128i low_half(__m256i v)
{
    return _mm256_castsi256_si128(v);
}

static inline __m128i high_half(__m256i v)
{
    return _mm256_extracti128_si256(v, 1);
}

/* Rounds n ≤ BLOCK inputs of a row to integers; heads and lanes have the stride `step`. If an input
 * is a NaN, whose bits are the largest, or infinite, `size` is a NaN. */
static inline void block_round(float *to, int step, const float *x, int n)
{
    const float tiny = 0x1p-110f; /* a smaller block becomes zeros: 1 / size would overflow */
    float part[BLOCK] = {0}, lanes[BLOCK / 2], largest;
    if (n < BLOCK) x = memcpy(part, x, (size_t)n * sizeof *part);
    __m256i bits = {0}, sums[2] = {{0}}, magnitude = _mm256_set1_epi32(INT32_MAX);
    for (int k = 0; k < BLOCK; k += 8) {
        __m256i at = _mm256_castps_si256(_mm256_loadu_ps(x + k));
        bits = _mm256_max_epi32(bits, _mm256_and_si256(at, magnitude));
    }
    __m128i top = _mm_max_epi32(low_half(bits), high_half(bits));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0x4e));
    top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0xb1));
    memcpy(&largest, &top, sizeof largest);
    if (isinf(largest)) largest = NAN; /* inf and −inf have the same integer */
    __m256 each = _mm256_set1_ps(largest > tiny ? MOST / largest : 0.0f);
    for (int k = 0; k < BLOCK; k += 8) {
        __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), each));
        __m128i words = _mm_packs_epi32(low_half(q), high_half(q));
        words = _mm_unpacklo_epi16(words, _mm_unpackhi_epi64(words, words));
        memcpy(lanes + k / 2, &words, sizeof words);
        sums[k / (BLOCK / 2)] = _mm256_add_epi32(sums[k / (BLOCK / 2)], q);
    }
    __m256i both = _mm256_hadd_epi32(sums[0], sums[1]); /* a half's four sums, two per lane */
    both = _mm256_hadd_epi32(both, both);
    __m128i half = _mm_add_epi32(low_half(both), high_half(both));
    uint32_t first = (uint32_t)_mm_cvtsi128_si32(half),
             second = (uint32_t)_mm_extract_epi32(half, 1);
    uint32_t begin[] = {0u - LIFTED * (first + second), 0u - LIFTED * first, 0u - LIFTED * second};
    to[SIZE * step] = largest / MOST;
    to[INPUTS * step] = (float)(int32_t)(first + second) * (largest / MOST);
    for (int i = 0; i < 3; i++) memcpy(to + (BEGIN + i) * step, begin + i, sizeof *begin);
    for (int i = 0; i < BLOCK / 2; i++) to[(HEADS + i) * step] = lanes[i];
}

static inline void rows_pack(float *to, const float *a, int64_t a_row, int rows, int depth)
{
    for (int k = 0; k < depth; k += BLOCK, to += (HEADS + BLOCK / 2) * rows)
        for (int r = 0; r < rows; r++)
            block_round(to + r, rows, a + r * a_row + k, depth - k < BLOCK ? depth - k : BLOCK);
}

#endif
#endif
