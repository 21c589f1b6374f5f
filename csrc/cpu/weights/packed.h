/* cpu/weights/packed.h - base weights of 8 to 4 bits: the layout of their blocks in a panel, and
 * their codes.
 *
 *   w[n,k] = value(code)·scale(n, k/BLOCK) + offset(n, k/BLOCK)
 *
 * A panel is contiguous blocks of BLOCK inputs, so that one stream reads all of it. A block is
 *
 *   scales (PANEL) of 16 bits, or 32 in fp8 and nf4, then offsets (PANEL) of 16 if the type has
 *   them
 *   codes: 8 bits as [k][output]; 4 bits as words [k / 8][output], whose nibble i is that of
 *   k % 8 = i. So a vector of words has eight inputs of as many outputs as it has lanes.
 *
 * In ggml's q4_k, q5_k and q6_k, scales of 8 bits multiply an f16 shared by GROUPED blocks, and the
 * higher bits of 5- and 6-bit codes are stored separately. Each GROUPED blocks are preceded by
 * their f16 of the scales (PANEL), then of the offsets (PANEL) if the type has them. A block is
 *
 *   scales (PANEL) of 8 bits, then offsets (PANEL), or in q6_k the scales of its second 16 inputs
 *   higher bits of the codes, as words [k·bits / 32][output], those of the first k lowest
 *   lower bits of the codes, as codes of 4 bits
 *
 * A 4-bit code is an index into a table; one shuffle looks up any table. Widening gives the same
 * float everywhere: values have few bits, so value·scale is exact (except for fp8 and nf4, which
 * have no offset), and there is at most one rounding. Weights are widened in registers or in L1 and
 * multiplied like f32 weights, in the same order. So a product has the bits of the widened weight's
 * product; on cpu-bf16, which rounds both operands, those of the widened weight in bf16. In
 * forward, if 16 bits hold the codes' values exactly (scales_sums below), sums of codes are scaled
 * instead, and only x is rounded: to bf16, or on cpu-int16 to 16-bit integers scaled by the largest
 * of 32 (gemm_quantized.c).
 *
 * Error of a Gaussian weight, as a share of the standard deviation: int8 0.54 %; int4 7.35 % in 4.5
 * bits. Other codes in blocks of 32, each with an f16 scale: NF4 7.61, integers 8.09, both with the
 * best scale of 34; llama.cpp's q4_0 8.59, and q4_1, in 5 bits, 7.82; bitsandbytes' NF4 in blocks
 * of 64 9.19; MXFP4 11.16. (SmolLM2's embedding, from the package's 8 bits: int4 8.1 %, q4_0 10.0,
 * q4_1 8.4, MXFP4 11.8.) */
#ifndef TINSMITH_CPU_WEIGHTS_PACKED_H
#define TINSMITH_CPU_WEIGHTS_PACKED_H

#include "../../device/dtype.h"
#include "../../device/levels.h"
#include "../runtime/simd.h"
#include "frozen.h"

enum {
    BLOCK = FROZEN_BLOCK,
    NIBBLES = 8, /* of a word */
    GROUPED = 8, /* blocks that share an f16 */
    HIGHER = 2,  /* the most higher bits of a code */
};

_Static_assert((int)BLOCK == (int)PANEL, "a block of a panel is square");

/* levels: the values of the lowest four bits of each type's codes (int8 has none). higher[n]: the
 * values of n higher bits, which are the lowest bits of the index (packed.c). */
extern const float CPU(levels)[DTYPES][LEVELS];
extern const float CPU(higher)[HIGHER + 1][LEVELS];

/* The type whose kernels this one uses: q4_0 is int4 with other levels. */
static inline DType block_kind(DType type)
{
    return type == DTYPE_Q4_0 ? DTYPE_INT4 : type;
}

/* Those types. */
#define EACH_KIND(X) \
    X(DTYPE_INT8);   \
    X(DTYPE_INT4);   \
    X(DTYPE_Q4_1);   \
    X(DTYPE_MXFP4);  \
    X(DTYPE_FP8);    \
    X(DTYPE_NF4);    \
    X(DTYPE_Q4_K);   \
    X(DTYPE_Q5_K);   \
    X(DTYPE_Q6_K)

/* Whether a type has an f16 for each group. */
static inline int has_groups(DType type)
{
    return type >= DTYPE_Q4_K;
}

static inline int has_offset(DType type)
{
    return type == DTYPE_Q4_1 || type == DTYPE_Q4_K || type == DTYPE_Q5_K;
}

/* Whether a code is a byte, which needs no table. */
static inline int has_bytes(DType type)
{
    return type == DTYPE_INT8 || type == DTYPE_FP8;
}

/* Whether an instruction set is only for cpu-bf16, where every product uses pairs. */
#if defined(__AVX512BF16__)
enum { PAIRS_ALONE = 1 };
#else
enum { PAIRS_ALONE = 0 };
#endif

/* Whether devices that round x scale sums of codes instead of weights: if 16 bits hold each code's
 * value (gemm_quantized.c), and with bf16 pairs if a block has one scale. */
static inline int scales_sums(DType type)
{
#if defined(__AVX512BF16__)
    return type == DTYPE_INT8 || block_kind(type) == DTYPE_INT4 || type == DTYPE_MXFP4;
#elif defined(__AVX2__)
    return dtype_packed(type) && type != DTYPE_FP8 && type != DTYPE_NF4;
#else
    (void)type;
    return 0;
#endif
}

/* Bytes of a scale. */
static inline size_t scale_bytes(DType type)
{
    return type == DTYPE_FP8 || type == DTYPE_NF4 ? 4 : 2;
}

/* The number of a code's bits above the fourth, which are stored separately. */
static inline int higher_bits(DType type)
{
    return type == DTYPE_Q6_K ? 2 : type == DTYPE_Q5_K;
}

/* Inputs of a block that share a scale. */
static inline int scale_span(DType type)
{
    return type == DTYPE_Q6_K ? BLOCK / 2 : BLOCK;
}

/* Offsets in a block of the codes' higher bits and of the codes; a block's bytes; the bytes before
 * each group. */
typedef struct Blocks {
    size_t higher, codes, bytes, group;
} Blocks;

static inline Blocks blocks_of(DType type)
{
    size_t heads = (has_offset(type) ? 2 : 1) * scale_bytes(type) * PANEL;
    size_t higher = has_groups(type) ? 2 * PANEL : heads;
    size_t codes = higher + (size_t)higher_bits(type) * BLOCK / 8 * PANEL;
    size_t bytes = codes + (has_bytes(type) ? BLOCK : BLOCK / 2) * PANEL;
    return (Blocks){higher, codes, bytes, has_groups(type) ? heads : 0};
}

/* Bytes of `count` blocks; whole groups if the type has them. */
static inline size_t blocks_bytes(DType type, size_t count)
{
    return count * blocks_of(type).bytes + count / GROUPED * blocks_of(type).group;
}

/* Blocks of one panel. */
static inline size_t blocks_across(const frozen *w)
{
    return ((size_t)w->cols + BLOCK - 1) / BLOCK;
}

/* A block's bytes, and those of its group. */
typedef struct Square {
    const unsigned char *block, *group;
} Square;

/* Block number `block` of panel number `panel`; `kind` is the weight's type or has its layout. */
static inline Square square_at(const frozen *w, DType kind, int panel, int block)
{
    Blocks b = blocks_of(kind);
    size_t number = (size_t)panel * blocks_across(w) + (size_t)block;
    const unsigned char *group = w->data + number / GROUPED * (GROUPED * b.bytes + b.group);
    return (Square){group + b.group + number % GROUPED * b.bytes, group};
}

/* ---- a block's vectors: outputs [x, x + VL) ---- */

/* The scale of inputs from k on, a multiple of scale_span(); in fp8 the scale of v_load_e4m3's
 * numbers. */
static inline vf square_scale(Square s, DType type, int k, int x)
{
    if (has_groups(type))
        return v_load_half(s.group + 2 * x) *
               v_load_bytes(s.block + k / scale_span(type) * PANEL + x);
    if (type == DTYPE_FP8) return v_load((const float *)s.block + x) * E4M3_SCALE;
    if (type == DTYPE_NF4) return v_load((const float *)s.block + x);
    return type == DTYPE_MXFP4 ? v_load_bf16(s.block + 2 * x) : v_load_half(s.block + 2 * x);
}

static inline vf square_offset(Square s, DType type, int x)
{
    if (!has_offset(type)) return v_set(0.0f);
    if (!has_groups(type)) return v_load_half(s.block + 2 * (PANEL + x));
    return -(v_load_half(s.group + 2 * (PANEL + x)) * v_load_bytes(s.block + PANEL + x));
}

/* The word with input k's code, or its lowest bits. */
static inline vu word_at(const unsigned char *codes, int k, int x)
{
    vu u;
    memcpy(&u, codes + 4 * (k / NIBBLES * PANEL + x), sizeof u);
    return u;
}

/* The words with input k's lowest bits, and its higher bits. */
static inline vu low_word(Square s, DType type, int k, int x)
{
    return word_at(s.block + blocks_of(type).codes, k, x);
}

static inline vu higher_word(Square s, DType type, int k, int x)
{
    vu u = {0};
    int word = k * higher_bits(type) / 32;
    if (higher_bits(type))
        memcpy(&u, s.block + blocks_of(type).higher + 4 * (word * PANEL + x), sizeof u);
    return u;
}

/* The factor that makes the values of a type's codes integers, if there is one. */
static inline float whole_unit(DType kind)
{
    return kind == DTYPE_INT4 ? 16.0f : kind == DTYPE_MXFP4 ? 2.0f : 1.0f;
}

/* code_value's unit. Byte lookup gives integers, in a lane's highest byte except for mxfp4, whose
 * scales may be too small for that. */
static inline float code_unit(DType kind)
{
#if defined(LOOKS_UP_BYTES)
    if (has_bytes(kind) || kind == DTYPE_NF4) return 1.0f;
    return 1.0f / whole_unit(kind) / (kind == DTYPE_MXFP4 ? 1.0f : 1 << 24);
#else
    (void)kind;
#endif
    return 1.0f;
}

/* A type's lookup tables, in registers. */
typedef struct Values {
#if defined(LOOKS_UP_BYTES)
    __m256i bytes;
#endif
    Lookup low, higher;
} Values;

static inline Values values_of(DType exact, DType kind)
{
    Values values;
    values.low = v_table(CPU(levels)[exact]);
    values.higher = v_table(CPU(higher)[higher_bits(kind)]);
#if defined(LOOKS_UP_BYTES)
    values.bytes = v_table_bytes(CPU(levels)[exact], whole_unit(kind));
#endif
    return values;
}

/* The value of input k's code from its words, in units of code_unit(). */
static inline vf code_value(Values values, vu low, vu higher, int k, DType kind)
{
    int bits = higher_bits(kind);
    vu upper = bits ? higher >> (k * bits % 32) : higher;
#if defined(LOOKS_UP_BYTES)
    if (kind != DTYPE_NF4) {
        vi top = v_lookup_byte(values.bytes, low, k % NIBBLES);
        if (bits) top += (vi)((upper & ((1u << bits) - 1)) << 28);
        return __builtin_convertvector(kind == DTYPE_MXFP4 ? top >> 24 : top, vf);
    }
#endif
    vf value = v_lookup(values.low, low >> (4 * (k % NIBBLES)));
    return bits ? value + v_lookup(values.higher, upper) : value;
}

/* The same for inputs in sequence: number `place` of what is left of the words `low` and
 * `higher`. */
static inline vf code_next(Values values, vu *low, vu *higher, int place, DType kind)
{
#if defined(LOOKS_UP_BYTES)
    return code_value(values, *low, *higher, place, kind);
#else
    (void)place;
    vf value = code_value(values, *low, *higher, 0, kind);
    *low >>= 4;
    *higher >>= higher_bits(kind);
    return value;
#endif
}

/* Input k of 8-bit codes. */
static inline vf byte_value(Square s, DType type, int k, int x)
{
    const unsigned char *at = s.block + blocks_of(type).codes + k * PANEL + x;
    return type == DTYPE_FP8 ? v_load_e4m3(at) : v_load_bytes(at);
}

/* A weight from its code's value. */
static inline vf weight_of(vf value, vf scale, vf offset, DType type)
{
    return has_offset(type) ? v_fma(value, scale, offset) : value * scale;
}

/* One block, widened and k-major like an f32 panel: to[k·PANEL + output]. */
void CPU(block_widen)(float *to, const frozen *w, int panel, int block);
/* The same in bf16 pairs, like a bf16 panel. */
void CPU(block_widen_pairs)(float *to, const frozen *w, int panel, int block);
/* Row `row` of the weight, its `cols` numbers. */
void CPU(row_widen)(float *to, const frozen *w, int row);

#endif
