/* cpu/weights/repack.c - reorders a file's blocks (dtype.c) to a panel's layout (packed.h).
 *
 * In a file an output's blocks are contiguous; a panel interleaves those of 32 outputs. Four bytes
 * of each of 32 rows are a vector of words, and a few shifts make related bits adjacent in all
 * words at once. Memory bound: a block is read and written once, with some ten instructions for
 * eight codes of VL rows. */
#include "repack.h"

#include "packed.h"

/* One block of each of `live` rows, at a stride of `step` bytes; missing rows are zeros. */
typedef struct FileRows {
    const unsigned char *from;
    size_t step;
    int live;
} FileRows;

typedef uint32_t Words[PANEL];

/* Four bytes of each row. */
static inline void words_read(Words to, FileRows rows, size_t at)
{
    for (int x = 0; x < PANEL; x++) {
        to[x] = 0;
        if (x < rows.live) memcpy(&to[x], rows.from + (size_t)x * rows.step + at, sizeof *to);
    }
}

/* Packs `bits` bits of each byte of a word, from bit `shift` on. */
static inline uint32_t squeeze(uint32_t word, int shift, int bits)
{
    uint32_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1;
    word = word >> shift & one * 0x01010101u;
    word = (word | word >> (8 - bits)) & two * 0x00010001u;
    return (word | word >> (16 - 2 * bits)) & ((1u << 4 * bits) - 1);
}

/* ---- codes ---- */

/* 8-bit codes: [k][output]. */
static void bytes_put(unsigned char *codes, FileRows rows, size_t at)
{
    for (int k = 0; k < BLOCK; k += 4) {
        Words words;
        words_read(words, rows, at + (size_t)k);
        for (int i = 0; i < 4; i++)
            for (int x = 0; x < PANEL; x++)
                codes[(k + i) * PANEL + x] = (unsigned char)(words[x] >> 8 * i);
    }
}

/* 4-bit codes: inputs k and k + 1 share a byte. */
static void pairs_put(unsigned char *codes, FileRows rows, size_t at)
{
    for (int word = 0; word < BLOCK / NIBBLES; word++) {
        Words words;
        words_read(words, rows, at + 4 * (size_t)word);
        memcpy(codes + 4 * word * PANEL, words, sizeof words);
    }
}

/* 4-bit codes: input k's is in byte k % count, at bit shift + 4·(k / count). */
static void nibbles_put(unsigned char *codes, FileRows rows, size_t at, int count, int shift)
{
    for (int word = 0; word < BLOCK / NIBBLES; word++) {
        Words first, second;
        int k = word * NIBBLES, s = shift + k / count * 4;
        words_read(first, rows, at + (size_t)(k % count));
        words_read(second, rows, at + (size_t)(k % count) + 4);
        for (int x = 0; x < PANEL; x++)
            first[x] = squeeze(first[x], s, 4) | squeeze(second[x], s, 4) << 16;
        memcpy(codes + 4 * word * PANEL, first, sizeof first);
    }
}

/* Higher bits: input k's are in byte k, from bit `shift` on. */
static void higher_put(unsigned char *to, FileRows rows, size_t at, int shift, int bits)
{
    for (int word = 0; word < bits; word++) {
        Words all = {0};
        for (int part = 0; part < 8 / bits; part++) {
            Words words;
            words_read(words, rows, at + (size_t)(word * 32 / bits + 4 * part));
            for (int x = 0; x < PANEL; x++)
                all[x] |= squeeze(words[x], shift, bits) << (4 * bits * part);
        }
        memcpy(to + 4 * word * PANEL, all, sizeof all);
    }
}

/* ---- scales ---- */

/* An f16 of each row. */
static void halves_put(unsigned char *to, FileRows rows, size_t at)
{
    memset(to, 0, 2 * PANEL);
    for (int x = 0; x < rows.live; x++)
        memcpy(to + 2 * x, rows.from + (size_t)x * rows.step + at, 2);
}

/* An f32 of each row. */
static void floats_put(unsigned char *to, FileRows rows)
{
    Words words;
    words_read(words, rows, 0);
    memcpy(to, words, sizeof words);
}

/* 2^(scale − 127) of each row, in bf16. */
static void powers_put(unsigned char *to, FileRows rows)
{
    memset(to, 0, 2 * PANEL);
    for (int x = 0; x < rows.live; x++) {
        int scale = rows.from[(size_t)x * rows.step];
        uint16_t bits = scale ? (uint16_t)(scale << 7) : 0x40;
        memcpy(to + 2 * x, &bits, 2);
    }
}

/* Scale and least number `part` of the 8 in each row's 12 bytes. The first four have a byte each,
 * whose two highest bits belong to the other four. */
static void sixes_put(unsigned char *to, FileRows rows, size_t at, int part)
{
    memset(to, 0, 2 * PANEL);
    for (int x = 0; x < rows.live; x++) {
        const unsigned char *s = rows.from + (size_t)x * rows.step + at;
        int scale = s[part % 4], least = s[4 + part % 4], rest = s[8 + part % 4];
        to[x] = (unsigned char)(part < 4 ? scale & 63 : (rest & 15) | scale >> 6 << 4);
        to[PANEL + x] = (unsigned char)(part < 4 ? least & 63 : rest >> 4 | least >> 6 << 4);
    }
}

/* ---- blocks of 256 ---- */

/* Part number `part` of 8. */
static void part_put(unsigned char *block, FileRows rows, DType type, int part)
{
    Blocks b = blocks_of(type);
    unsigned char *higher = block + b.higher, *codes = block + b.codes;
    size_t pair = (size_t)(part / 2) * 32;
    if (type == DTYPE_Q6_K) {
        size_t half = (size_t)(part / 4);
        int quarter = part % 4;
        nibbles_put(codes, rows, half * 64 + (size_t)(quarter % 2) * 32, BLOCK, quarter / 2 * 4);
        higher_put(higher, rows, 128 + half * 32, quarter * 2, 2);
        for (int i = 0; i < 2; i++)
            for (int x = 0; x < PANEL; x++)
                block[i * PANEL + x] =
                    x < rows.live ? rows.from[(size_t)x * rows.step + 192 + (size_t)(2 * part + i)]
                                  : 0;
        return;
    }
    sixes_put(block, rows, 4, part);
    if (type == DTYPE_Q5_K) higher_put(higher, rows, 16, part, 1);
    nibbles_put(codes, rows, (type == DTYPE_Q5_K ? 48 : 16) + pair, BLOCK, part % 2 * 4);
}

static void group_put(unsigned char *group, FileRows rows, DType type)
{
    halves_put(group, rows, type == DTYPE_Q6_K ? 208 : 0);
    if (has_offset(type)) halves_put(group + 2 * PANEL, rows, 2);
}

void CPU(block_arrange)(frozen *to, int panel, int number, const unsigned char *rows, size_t step,
                        int live, DType from)
{
    Square s = square_at(to, to->type, panel, number);
    unsigned char *block = (unsigned char *)s.block, *codes = block + blocks_of(to->type).codes;
    TypeInfo info = dtype_info(from);
    int parts = info.block / BLOCK;
    FileRows r = {rows + (size_t)(number / parts) * info.block_bytes, step, live};
    if (has_groups(from)) {
        if (number % parts == 0) group_put((unsigned char *)s.group, r, from);
        part_put(block, r, from, number % parts);
    } else if (from == DTYPE_MXFP4 || from == DTYPE_MXFP4_PAIRS) {
        powers_put(block, r);
        if (from == DTYPE_MXFP4)
            nibbles_put(codes, r, 1, BLOCK / 2, 0);
        else
            pairs_put(codes, r, 1);
    } else if (scale_bytes(from) == 4) {
        floats_put(block, r);
        if (has_bytes(from))
            bytes_put(codes, r, 4);
        else
            pairs_put(codes, r, 4);
    } else {
        halves_put(block, r, 0);
        if (from == DTYPE_Q4_1) halves_put(block + 2 * PANEL, r, 2);
        if (has_bytes(from))
            bytes_put(codes, r, 2);
        else
            nibbles_put(codes, r, from == DTYPE_Q4_1 ? 4 : 2, BLOCK / 2, 0);
    }
}
