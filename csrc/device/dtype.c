/* device/dtype.c - the element types by name: a table.
 *
 *   type    a number is                   a block's bytes in an array
 *   int8    code·scale                    f16 scale, 32 codes (ggml's Q8_0)
 *   int4    level[code]·scale             none: quantized on load (levels.h)
 *   q4_0    (code − 8)·scale              f16 scale, 16 bytes: numbers i and i + 16 share byte i
 *   q4_1    code·scale + offset           f16 scale, f16 offset, 16 bytes as q4_0's
 *   mxfp4   e2m1[code]·2^(scale − 127)    8-bit scale, 16 bytes as q4_0's (ggml's order)
 *   mxfp4_pairs                           the same, but numbers 2i and 2i + 1 share byte i
 *   fp8     e4m3(code)·scale              f32 scale, 32 codes
 *   nf4     nf4[code]·scale               f32 scale, 16 bytes as mxfp4_pairs'
 *   q4_k    code·(d·scale) − dmin·least   f16 d, f16 dmin, 12 bytes of scales and leasts, codes
 *   q5_k    the same                      32 bytes before the codes: their fifth bits
 *   q6_k    (code − 32)·(d·scale)         low bits, 64 bytes of high bits, 16 scales, f16 d
 *
 * The last three have 256 numbers. Of q4_k and q5_k, 32 share a scale and a least of 6 bits each;
 * of q6_k, 16 share a scale of 8 bits. The low four bits of codes are 128 bytes: in q4_k and q5_k
 * numbers i and i + 32 of each 64 share byte i, in q6_k i and i + 64 of each 128.
 *
 * d·scale, dmin·least and code·(d·scale) have no more digits than f32 has, so a number of the last
 * three types is rounded once at most, in whatever order it is made. */
#include "dtype.h"

#include <string.h>

static const TypeInfo types[DTYPES] = {
    [DTYPE_F32] = {"f32", 0, 0, 32, 0},
    [DTYPE_BF16] = {"bf16", 0, 0, 16, 0},
    [DTYPE_F16] = {"f16", 0, 0, 16, 0},
    [DTYPE_INT8] = {"int8", 32, 2 + 32, 8, 1},
    [DTYPE_INT4] = {"int4", 32, 0, 4, 1},
    [DTYPE_Q4_0] = {"q4_0", 32, 2 + 16, 4, 0},
    [DTYPE_Q4_1] = {"q4_1", 32, 4 + 16, 4, 0},
    [DTYPE_MXFP4] = {"mxfp4", 32, 1 + 16, 4, 0},
    [DTYPE_MXFP4_PAIRS] = {"mxfp4_pairs", 32, 1 + 16, 4, 0},
    [DTYPE_FP8] = {"fp8", 32, 4 + 32, 8, 0},
    [DTYPE_NF4] = {"nf4", 32, 4 + 16, 4, 0},
    [DTYPE_Q4_K] = {"q4_k", 256, 4 + 12 + 128, 4, 0},
    [DTYPE_Q5_K] = {"q5_k", 256, 4 + 12 + 32 + 128, 5, 0},
    [DTYPE_Q6_K] = {"q6_k", 256, 128 + 64 + 16 + 2, 6, 0},
};

TypeInfo dtype_info(DType type)
{
    return type < DTYPES ? types[type] : (TypeInfo){0};
}

DType dtype_find(const char *name)
{
    DType type = 0;
    while (type < DTYPES && strcmp(types[type].name, name) != 0) type++;
    return type;
}

int dtype_loads(DType kept, DType from)
{
    if (!dtype_packed(kept)) return !dtype_packed(from) && kept != DTYPE_F16;
    if (kept == DTYPE_MXFP4_PAIRS) return 0;
    if (from == kept && types[from].block_bytes) return 1;
    if (from == DTYPE_MXFP4_PAIRS) return kept == DTYPE_MXFP4;
    return types[kept].made && !dtype_packed(from);
}
