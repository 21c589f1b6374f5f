/* cuda/weights/weight_load.cu - loads base weights onto the card, in bf16 or in blocks of 8 and 4
 * bits.
 *
 * Wide numbers for bf16 are rounded on the host. Blocks are packed on the card (quantize.cu), from
 * numbers or a file's blocks, uploaded in parts. Ops get only a weight's address, so a table on the
 * host lists the addresses of weights with blocks; every other weight is bf16. Loading a weight and
 * releasing memory change the table. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/device/finite.h"
#include "weight_load.cuh"
#include "quantize.cuh"

enum {
    ENCODE_BYTES = 1 << 20,
    SOURCE_BYTES = 16 << 20, /* of an array on the card at once */
};

/* ---- the table ---- */

typedef struct Kept {
    uintptr_t at;
    DType type;
} Kept;

struct Keeping {
    pthread_mutex_t lock; /* any thread may release memory */
    Kept *kept;           /* sorted by address */
    int count, room;
};

Status frozen_open(CudaDevice *cuda)
{
    cuda->keeping = (Keeping *)calloc(1, sizeof *cuda->keeping);
    if (!cuda->keeping) return fail_in_core(STATUS_MEMORY, "no memory for the CUDA device");
    pthread_mutex_init(&cuda->keeping->lock, nullptr);
    return STATUS_OK;
}

void frozen_close(CudaDevice *cuda)
{
    if (!cuda->keeping) return;
    pthread_mutex_destroy(&cuda->keeping->lock);
    free(cuda->keeping->kept);
    free(cuda->keeping);
}

/* The index of the first entry at or after an address. */
static int kept_at(const Keeping *k, uintptr_t at)
{
    int low = 0, high = k->count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (k->kept[middle].at < at)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static DType kept_type(CudaDevice *cuda, const void *w)
{
    Keeping *k = cuda->keeping;
    pthread_mutex_lock(&k->lock);
    int i = kept_at(k, (uintptr_t)w);
    bool found = i < k->count && k->kept[i].at == (uintptr_t)w;
    DType type = found ? k->kept[i].type : DTYPE_BF16;
    pthread_mutex_unlock(&k->lock);
    return type;
}

/* Moves the entries from index `from` on to index `to`. */
static void kept_move(Keeping *k, int to, int from)
{
    if (from < k->count)
        memmove(k->kept + to, k->kept + from, (size_t)(k->count - from) * sizeof *k->kept);
    k->count += to - from;
}

static bool kept_grow(Keeping *k)
{
    if (k->count < k->room) return true;
    int room = k->room ? 2 * k->room : 64;
    Kept *kept = (Kept *)realloc(k->kept, (size_t)room * sizeof *kept);
    if (!kept) return false;
    k->kept = kept;
    k->room = room;
    return true;
}

/* Sets the type of the weight at an address. */
static void kept_set(CudaDevice *cuda, const void *w, DType type)
{
    Keeping *k = cuda->keeping;
    uintptr_t at = (uintptr_t)w;
    pthread_mutex_lock(&k->lock);
    int i = kept_at(k, at);
    kept_move(k, i, kept_at(k, at + 1));
    bool grown = !dtype_packed(type) || kept_grow(k);
    if (grown && dtype_packed(type)) {
        kept_move(k, i + 1, i);
        k->kept[i] = {at, type};
    }
    pthread_mutex_unlock(&k->lock);
    if (!grown) cuda_fail(cuda, STATUS_MEMORY, "%s: no memory for a weight's type", cuda->name);
}

void frozen_forget(CudaDevice *cuda, const void *memory, size_t bytes)
{
    Keeping *k = cuda->keeping;
    uintptr_t at = (uintptr_t)memory;
    pthread_mutex_lock(&k->lock);
    kept_move(k, kept_at(k, at), kept_at(k, at + bytes));
    pthread_mutex_unlock(&k->lock);
}

/* ---- weights with blocks ---- */

/* The types that kernels support, by their order of codes. */
static const struct {
    DType type;
    int head, bits, unit, bias;
    float levels[LEVELS];
} packed_types[] = {
    {DTYPE_INT8, 16, 8, 1, 128, {}},
    {DTYPE_INT4, 16, 4, 16, 128, {LEVELS_INT4}},
    {DTYPE_Q4_0, 16, 4, 1, 8, {LEVELS_Q4_0}},
    {DTYPE_Q4_1, 32, 4, 1, 0, {LEVELS_WHOLE}},
    {DTYPE_MXFP4, 16, 4, 2, 64, {LEVELS_MXFP4}},
};

bool packed_at(const void *data, DType type, int cols, Packed *made)
{
    for (const auto &one : packed_types) {
        if (one.type != type) continue;
        int64_t blocks = (cols + BLOCK - 1) / BLOCK, groups = (cols + GROUP - 1) / GROUP;
        *made = {(const unsigned char *)data,
                 groups * one.head + blocks * (BLOCK / 8) * one.bits,
                 type,
                 one.head,
                 one.bits,
                 one.unit,
                 one.bias,
                 {}};
        for (uint32_t code = 0; code < LEVELS; code++)
            made->levels[rotated_code(code)] = one.levels[code];
        return true;
    }
    return false;
}

bool packed_find(CudaDevice *cuda, const frozen *w, int cols, Packed *found)
{
    DType type = kept_type(cuda, w);
    return dtype_packed(type) && packed_at(w, type, cols, found);
}

/* Whether all of an array's numbers are finite. */
static bool source_finite(const void *from, DType type, int rows, int cols)
{
    if (!dtype_packed(type)) return first_bad(from, type, (int64_t)rows * cols) < 0;
    int64_t row = packed_source_row(type, cols), across = cols / BLOCK;
    return !across || blocks_finite(from, type, (size_t)(rows * across), (size_t)(row / across));
}

static void packed_load(CudaDevice *cuda, const Packed &to, const void *from, DType type, int rows,
                        int cols)
{
    int64_t row = packed_source_row(type, cols);
    int step = row < SOURCE_BYTES ? (int)(SOURCE_BYTES / (row ? row : 1)) : 1;
    if (step > rows) step = rows;
    void *part = nullptr;
    if (cuda_malloc(cuda, &part, (size_t)(step * row) + 1, "a weight that is quantised"))
        return cuda_fail(cuda, STATUS_MEMORY, "%s: no memory to quantise a weight in", cuda->name);
    for (int first = 0; first < rows; first += step) {
        int count = rows - first < step ? rows - first : step;
        cuda->base.upload(&cuda->base, part, (const char *)from + first * row,
                          (size_t)(count * row));
        packed_make(cuda, to, part, type, first, count, cols);
    }
    cuda_give_back(cuda, part, nullptr);
}

/* ---- weights in bf16 ---- */

static uint16_t bf16_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t bf16_of_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, bits;
    uint32_t mantissa = half & 1023;
    float value = (float)mantissa * 0x1p-24f;
    memcpy(&bits, &value, 4);
    if (exponent == 31)
        bits = 0x7f800000 | mantissa << 13;
    else if (exponent)
        bits = (exponent + 112) << 23 | mantissa << 13;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return bf16_of_f32(value);
}

/* Rows [first, first + count) of the host's array in the device's order. */
static void rows_encode(uint16_t *to, const void *from, DType type, int first, int count, int cols)
{
    int64_t stride = frozen_stride(cols);
    for (int row = 0; row < count; row++)
        for (int col = 0; col < stride; col++) {
            int64_t at = (int64_t)(first + row) * cols + col;
            uint16_t value = 0;
            if (col < cols && type == DTYPE_BF16) value = ((const uint16_t *)from)[at];
            if (col < cols && type == DTYPE_F16) value = bf16_of_f16(((const uint16_t *)from)[at]);
            if (col < cols && type == DTYPE_F32) value = bf16_of_f32(((const float *)from)[at]);
            to[row * stride + col] = value;
        }
}

/* Loads them; returns whether they are finite in bf16 too, where the largest float32 overflow. */
static bool wide_load(Device *dev, frozen *to, const void *from, DType type, int rows, int cols)
{
    char *data = (char *)to;
    size_t row_bytes = (size_t)frozen_stride(cols) * sizeof(real);
    if (type == DTYPE_BF16 && frozen_stride(cols) == cols) {
        dev->upload(dev, data, from, (size_t)rows * row_bytes);
        return true;
    }
    int step = row_bytes < ENCODE_BYTES ? (int)(ENCODE_BYTES / (row_bytes ? row_bytes : 1)) : 1;
    uint16_t *block = (uint16_t *)malloc((size_t)step * row_bytes + 1);
    bool finite = true;
    if (!block) cuda_fail(cuda_of(dev), STATUS_MEMORY, "no memory to convert a weight in");
    for (int first = 0; block && first < rows; first += step) {
        int count = rows - first < step ? rows - first : step;
        rows_encode(block, from, type, first, count, cols);
        finite = finite && first_bad(block, DTYPE_BF16, (int64_t)count * frozen_stride(cols)) < 0;
        dev->upload(dev, data + (size_t)first * row_bytes, block, (size_t)count * row_bytes);
    }
    free(block);
    return finite;
}

/* ---- the services ---- */

size_t device_frozen_bytes(Device *dev, DType kept, int rows, int cols)
{
    Packed packed;
    (void)dev;
    if (packed_at(nullptr, kept, cols, &packed)) return (size_t)rows * (size_t)packed.row;
    if (kept > DTYPE_F16) return 0;
    return (size_t)rows * (size_t)frozen_stride(cols) * sizeof(real);
}

int device_frozen_continues(Device *dev, const frozen *w, const frozen *next, int rows, int cols)
{
    DType type = kept_type(cuda_of(dev), w);
    return type == kept_type(cuda_of(dev), next) &&
           (const char *)next == (const char *)w + device_frozen_bytes(dev, type, rows, cols);
}

int device_frozen_load(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                       int cols)
{
    CudaDevice *cuda = cuda_of(dev);
    Packed packed;
    kept_set(cuda, to, kept);
    bool finite = source_finite(from, type, rows, cols);
    if (!packed_at(to, kept, cols, &packed))
        return wide_load(dev, to, from, type, rows, cols) && finite;
    packed_load(cuda, packed, from, type, rows, cols);
    return finite;
}
