/* cuda/weights/quantize.cu - packs weights of 8 and 4 bits on the card, once, on load: from wide
 * numbers, with the arithmetic and so the codes of cpu/weights/quantize.c; or from a file's blocks,
 * whose codes are reordered.
 *
 * A warp packs a block of 32 inputs of one output, one per lane, in the order of codes. Maxima and
 * sums are exact, so nothing depends on the order of lanes. Memory bound with many rows. */
#include "../../csrc/device/quantize.h"
#include "quantize.cuh"

enum { THREADS = 256, LANES = 32, TRIED = 4 };

static_assert((int)BLOCK == (int)LANES, "a lane for each input of a block");

/* The source: rows of `from` have a stride of `step` bytes. */
struct Made {
    Packed w; /* at the first row */
    const unsigned char *from;
    int64_t step;
    DType type;  /* of from */
    bool blocks; /* from has blocks */
    int rows, cols;
    int high[LEVELS];  /* sums of neighbouring levels, in 1/FINE */
    int level[LEVELS]; /* in 1/FINE */
    int tried[TRIED];  /* factors of shares, in 1/2^15 */
};

/* ---- wide numbers ---- */

/* Rounds to the nearest even f16, clamped to the largest. */
__device__ static __forceinline__ uint32_t half_of(float x)
{
    float magnitude = fminf(HALF_MOST, fabsf(x));
    uint32_t exponent = max(__float_as_uint(magnitude) >> 23, 113u), sign = x < 0.0f ? 0x8000 : 0;
    float large = __uint_as_float((exponent + 13) << 23); /* adding it keeps f16's digits */
    magnitude = (magnitude + large) - large;
    if (magnitude < 0x1p-14f) return sign | (uint32_t)(magnitude * 0x1p24f);
    return sign | ((__float_as_uint(magnitude) >> 13) - (112u << 10));
}

__device__ static __forceinline__ float wide_at(const Made &m, int row, int col)
{
    const unsigned char *at = m.from + row * m.step;
    if (m.type == DTYPE_F32) return reinterpret_cast<const float *>(at)[col];
    uint32_t half = reinterpret_cast<const uint16_t *>(at)[col];
    if (m.type == DTYPE_BF16) return __uint_as_float(half << 16);
    bool finite = (half & 0x7c00) != 0x7c00;
    return finite ? f32_of_half(half)
                  : __uint_as_float((half & 0x8000) << 16 | 0x7f800000u | half << 13);
}

__device__ static __forceinline__ float inverse(float scale)
{
    return scale == 0.0f ? 0.0f : 1.0f / scale;
}

/* The nearest integer of x clamped to ±most. */
__device__ static __forceinline__ int whole_of(float x, float most)
{
    return (int)rintf(fminf(most, fmaxf(-most, x)));
}

/* The code whose level is nearest to a number in steps of 1/UNIT of 1/FINE. */
__device__ static __forceinline__ int nearest(const Made &m, int number)
{
    int code = 0;
#pragma unroll
    for (int i = 0; i + 1 < LEVELS; i++) code += number > m.high[i] * (UNIT / 2);
    return code;
}

/* The best of a few scales, chosen like in cpu/weights/quantize.c. */
__device__ static __forceinline__ uint32_t best_scale(const Made &m, float w, bool live)
{
    float most = warp_max(fmaxf(w, 0.0f)), least = -warp_max(fmaxf(-w, 0.0f));
    float peak = -least > most ? least : most;
    float over = (float)WHOLE * inverse(fabsf(peak) < TINY ? 0.0f : peak);
    float one = peak * (1.0f / WHOLE), gain = 0.0f;
    int share = whole_of(w * over, (float)WHOLE);
    uint32_t best = 0;
#pragma unroll 1
    for (int i = 0; i < TRIED; i++) {
        int number = (share * m.tried[i] + (1 << 14)) >> 15;
        int y = live ? m.level[nearest(m, number)] : 0;
        float p = (float)warp_sum(y * share) * (1.0f / FINE);
        float q = (float)warp_sum(y * y) * (1.0f / (FINE * FINE));
        uint32_t half = half_of(p / q * one);
        float s = f32_of_half(half) * over, gained = s * fmaf(-s, q, 2.0f * p);
        if (!(gained > gain * (1.0f + GAIN))) continue;
        gain = gained;
        best = half;
    }
    return best;
}

/* ---- blocks ---- */

/* Stores a lane's code beside those of its neighbours. */
__device__ static __forceinline__ void code_store(unsigned char *codes, uint32_t code, int bits)
{
    int lane = threadIdx.x % LANES, many = 32 / bits;
    uint32_t word = code << bits * (lane % many);
    for (int bit = 1; bit < many; bit *= 2) word |= __shfl_xor_sync(~0u, word, bit);
    if (lane % many == 0) reinterpret_cast<uint32_t *>(codes)[lane / many] = word;
}

/* A lane's code, and the block's scale and offset. */
struct Code {
    uint32_t code, scale, offset;
};

__device__ static __forceinline__ Code code_of_wide(const Made &m, int row, int block, int input)
{
    int col = block * BLOCK + input;
    bool live = col < m.cols;
    float w = live ? wide_at(m, row, col) : 0.0f;
    if (m.w.bits == 8) {
        uint32_t scale = half_of(warp_max(fabsf(w)) * (1.0f / 127.0f));
        int code = whole_of(w * inverse(f32_of_half(scale)), 127.0f);
        return {(uint32_t)code & 255, scale, 0};
    }
    uint32_t scale = best_scale(m, w, live);
    float over = (float)(FINE * UNIT) * inverse(f32_of_half(scale));
    return {(uint32_t)nearest(m, whole_of(w * over, (float)WHOLE)), scale, 0};
}

/* From a file's block: its head, then 32 codes of 8 bits, or 16 bytes with two codes each. */
__device__ static __forceinline__ Code code_of_block(const Made &m, int row, int block, int input)
{
    bool is_mx = m.w.type == DTYPE_MXFP4, pairs = m.type == DTYPE_MXFP4_PAIRS;
    int head = is_mx ? 1 : m.w.head / 8;
    const unsigned char *from =
        m.from + row * m.step + (int64_t)block * (head + BLOCK * m.w.bits / 8);
    const unsigned char *codes = from + head;
    uint32_t scale = from[0], offset = 0;
    if (is_mx)
        scale = scale ? scale << 7 : 0x40; /* bf16; the smallest is 2^−127 */
    else
        scale |= (uint32_t)from[1] << 8;
    if (head == 4) offset = from[2] | (uint32_t)from[3] << 8;
    if (m.w.bits == 8) return {codes[input], scale, offset};
    bool high = pairs ? input % 2 : input >= BLOCK / 2;
    uint32_t byte = codes[pairs ? input / 2 : input % (BLOCK / 2)];
    return {byte >> 4 * high & 15, scale, offset};
}

/* Packs a block; a row's last one also zeroes the scales after its own. */
static __global__ void __launch_bounds__(THREADS) packed_make_kernel(__grid_constant__ const Made m)
{
    int64_t number = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES;
    int across = (m.cols + BLOCK - 1) / BLOCK, lane = threadIdx.x % LANES;
    if (number >= (int64_t)m.rows * across) return;
    int row = (int)(number / across), block = (int)(number % across), place = block % 8;
    unsigned char *group = const_cast<unsigned char *>(m.w.data) + row * m.w.row +
                           group_at(m.w.head, m.w.bits, block * BLOCK);
    int input = input_of(m.w.bits, lane);
    Code c = m.blocks ? code_of_block(m, row, block, input) : code_of_wide(m, row, block, input);
    uint32_t code = m.w.bits == 8 ? c.code ^ 0x80 : rotated_code(c.code);
    code_store(group + m.w.head + place * BLOCK / 8 * m.w.bits, code, m.w.bits);
    bool last = block == across - 1;
    if (lane != place && !(last && lane > place && lane < 8)) return;
    uint16_t *heads = reinterpret_cast<uint16_t *>(group);
    heads[lane] = (uint16_t)(lane == place ? c.scale : 0);
    if (m.w.head > 16) heads[8 + lane] = (uint16_t)(lane == place ? c.offset : 0);
}

/* The factor of shares that maps the largest one to `level` / `part`. */
static int level_at(float level, float part)
{
    float c = level * (float)(FINE * UNIT) / part * ((float)(1 << 15) / WHOLE);
    return (int)(c + (c > 0.0f ? 0.5f : -0.5f));
}

void packed_make(CudaDevice *cuda, const Packed &w, const void *from, DType type, int first,
                 int rows, int cols)
{
    Made m = {};
    m.w = w;
    m.w.data += first * w.row;
    m.from = (const unsigned char *)from;
    m.step = packed_source_row(type, cols);
    m.type = type;
    m.blocks = dtype_packed(type);
    m.rows = rows;
    m.cols = cols;
    for (int i = 0; i < LEVELS; i++) m.level[i] = (int)(w.levels[rotated_code((uint32_t)i)] * FINE);
    for (int i = 0; i + 1 < LEVELS; i++) m.high[i] = m.level[i] + m.level[i + 1];
    float least = (float)m.level[0] / FINE, most = (float)m.level[LEVELS - 1] / FINE;
    m.tried[0] = level_at(least, 1.0f);
    m.tried[1] = level_at(most, 1.0f);
    m.tried[2] = level_at(least, 1.0f + STEP);
    m.tried[3] = level_at(least, 1.0f - STEP);
    int64_t blocks = (int64_t)rows * cuda_blocks(cols, BLOCK);
    LAUNCH(cuda, packed_make_kernel, cuda_blocks(blocks, THREADS / LANES), THREADS, 0, m);
}
