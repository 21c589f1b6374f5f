/* tools/card/smoke/memory.c - arrays on the host and where the device has them, all inputs of one
 * random block; and work spread over threads.
 *
 * The block has a prime number of elements, so no two rows of an array are alike. It is made and
 * uploaded once for each scale and kind; an input is copied from it, in pieces. That costs the
 * device's bandwidth, and not the bus's. */
#include "smoke.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    HELD_MOST = 256,
    BLOCK = 4194301, /* a prime */
    BLOCKS = 24,
    POISON_BYTES = 1 << 22,
    THREADS_MOST = 64,
};

typedef struct Block {
    float scale;
    Kind kind;
    float *x;
    uint16_t *half; /* x as bf16, where that is what it is */
    void *at;
} Block;

Device *dev;
Sizes shape;
unsigned block_seed = 1;
int stop_code = 2;

static void *held[HELD_MOST], *placed[HELD_MOST];
static size_t placed_bytes[HELD_MOST];
static int helds, placeds, blocks;
static Block made[BLOCKS];
static float *random_block;
static void *poison;

void stop(const char *what)
{
    printf("{\"op\": \"%s\", \"wrong\": \"%s\"}\n", quoted(what), quoted(status_text()));
    fflush(stdout);
    _exit(stop_code); /* a device that failed may not close */
}

const char *quoted(const char *text)
{
    static char kept[2][1024];
    static int which;
    char *to = kept[which ^= 1];
    snprintf(to, sizeof kept[0], "%s", text);
    for (char *c = to; *c; c++)
        if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = ' ';
    return to;
}

static void *memory_of(size_t bytes)
{
    void *x = malloc(bytes ? bytes : 1);
    if (!x) {
        printf("the host has no %zu bytes\n", bytes);
        exit(2);
    }
    return x;
}

void *host(size_t bytes)
{
    if (helds == HELD_MOST) abort();
    return held[helds++] = memory_of(bytes);
}

/* Memory that forget() leaves. */
static void *device_kept(size_t bytes)
{
    void *memory;
    if (dev->alloc(dev, &memory, bytes ? bytes : 1)) stop("alloc");
    return memory;
}

void *device_bytes(size_t bytes)
{
    if (placeds == HELD_MOST) abort();
    placed_bytes[placeds] = bytes ? bytes : 1;
    return placed[placeds++] = device_kept(bytes);
}

void forget(void)
{
    if (dev->sync(dev)) stop("sync");
    while (placeds) placeds--, dev->release(dev, placed[placeds], placed_bytes[placeds]);
    while (helds) free(held[--helds]);
}

uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float of_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

size_t kind_bytes(Kind kind)
{
    return kind == REAL ? dev->real_bytes : kind == F64 ? 8 : 4;
}

void *put(const void *from, size_t bytes)
{
    void *memory = device_bytes(bytes);
    dev->upload(dev, memory, from, bytes);
    return memory;
}

void *get(const void *from, size_t bytes)
{
    void *x = host(bytes);
    dev->download(dev, x, from, bytes);
    return x;
}

float *fetched(const void *from, size_t n, Kind kind)
{
    float *x = get(from, n * kind_bytes(kind));
    if (kind_bytes(kind) == 4) return x;
    float *wide = host(n * 4);
    for (size_t i = 0; i < n; i++) wide[i] = of_bf16(((const uint16_t *)x)[i]);
    return wide;
}

/* ---- the block ---- */

static const float *block_numbers(void)
{
    if (random_block) return random_block;
    uint64_t state = 0x9E3779B97F4A7C15u * (block_seed + 1);
    random_block = memory_of(BLOCK * sizeof *random_block);
    for (int i = 0; i < BLOCK; i++) {
        float sum = 0;
        for (int j = 0; j < 3; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) / (1 << 23) - 1;
        }
        random_block[i] = sum;
    }
    return random_block;
}

static const Block *block_of(float scale, Kind kind)
{
    for (int i = 0; i < blocks; i++)
        if (made[i].scale == scale && made[i].kind == kind) return &made[i];
    if (blocks == BLOCKS) abort();
    const float *from = block_numbers();
    Block *block = &made[blocks++];
    *block = (Block){scale, kind, memory_of(BLOCK * 4), memory_of(BLOCK * 2), NULL};
    for (int i = 0; i < BLOCK; i++) {
        block->half[i] = to_bf16(from[i] * scale);
        block->x[i] = kind == F32 ? from[i] * scale : of_bf16(block->half[i]);
    }
    block->at = device_kept(BLOCK * kind_bytes(kind));
    const void *data = kind_bytes(kind) == 2 ? (void *)block->half : block->x;
    dev->upload(dev, block->at, data, BLOCK * kind_bytes(kind));
    return block;
}

/* n elements from place `at` of a block on, which is followed by itself; on the host or device. */
static void block_copy(char *to, const char *from, size_t at, size_t n, size_t bytes, int on_device)
{
    while (n) {
        size_t count = n < BLOCK - at ? n : BLOCK - at;
        if (on_device)
            dev->copy(dev, to, from + at * bytes, count * bytes);
        else
            memcpy(to, from + at * bytes, count * bytes);
        to += count * bytes, n -= count, at = 0;
    }
}

static size_t begin_of(int seed)
{
    return (size_t)((uint64_t)seed * 1299709 % BLOCK);
}

Input input(size_t n, int seed, float scale, Kind kind)
{
    const Block *block = block_of(scale, kind);
    size_t bytes = kind_bytes(kind);
    float *x = host(n * 4);
    void *at = device_bytes(n * bytes);
    block_copy((char *)x, (const char *)block->x, begin_of(seed), n, 4, 0);
    block_copy(at, block->at, begin_of(seed), n, bytes, 1);
    return (Input){x, at};
}

const float *weight_load(frozen *to, int rows, int cols, int seed, float scale)
{
    const Block *block = block_of(scale, F32_HALF);
    size_t n = (size_t)rows * (size_t)cols;
    float *x = host(n * 4);
    uint16_t *half = memory_of(n * 2);
    block_copy((char *)x, (const char *)block->x, begin_of(seed), n, 4, 0);
    block_copy((char *)half, (const char *)block->half, begin_of(seed), n, 2, 0);
    if (!dev->frozen_load(dev, to, DTYPE_BF16, half, DTYPE_BF16, rows, cols)) stop("frozen_load");
    free(half);
    return x;
}

Input weight(int rows, int cols, int seed, float scale)
{
    void *at = device_bytes(dev->frozen_bytes(dev, DTYPE_BF16, rows, cols));
    return (Input){weight_load(at, rows, cols, seed, scale), at};
}

void *room(size_t n, Kind kind)
{
    size_t bytes = n * kind_bytes(kind);
    char *memory = device_bytes(bytes);
    if (!poison) {
        char *ones = memory_of(POISON_BYTES);
        memset(ones, 0xFF, POISON_BYTES);
        poison = device_kept(POISON_BYTES);
        dev->upload(dev, poison, ones, POISON_BYTES);
        free(ones);
    }
    for (size_t at = 0; at < bytes; at += POISON_BYTES)
        dev->copy(dev, memory + at, poison, bytes - at < POISON_BYTES ? bytes - at : POISON_BYTES);
    return memory;
}

void release(void)
{
    for (int i = 0; i < blocks; i++) {
        dev->release(dev, made[i].at, BLOCK * kind_bytes(made[i].kind));
        free(made[i].x), free(made[i].half);
    }
    if (poison) dev->release(dev, poison, POISON_BYTES);
    free(random_block);
}

/* ---- threads ---- */

typedef struct Crew {
    atomic_int next;
    int n;
    void (*work)(int i, const void *of);
    const void *of;
} Crew;

static void *crew_work(void *of)
{
    Crew *crew = of;
    for (int i; (i = atomic_fetch_add(&crew->next, 1)) < crew->n;) crew->work(i, crew->of);
    return NULL;
}

void each(int n, void (*work)(int i, const void *of), const void *of)
{
    Crew crew = {0, n, work, of};
    pthread_t threads[THREADS_MOST];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int count = 0, wanted = (int)(cores < THREADS_MOST ? cores : THREADS_MOST) - 1;
    while (count < wanted && count < n - 1 &&
           !pthread_create(&threads[count], NULL, crew_work, &crew))
        count++;
    crew_work(&crew);
    while (count) pthread_join(threads[--count], NULL);
}
