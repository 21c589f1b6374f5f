/* tensor_ops.c - log-probabilities and divergences of one's own tensors, chunk by chunk.
 *
 * A chunk is as many rows as have CHUNK_BYTES of logits. Hidden states meet the weight where it
 * lies (matmul); the logits turn into their own gradient in place, from which the chunk's rows of
 * d hidden and its part of d weight are made before the next chunk takes the memory. Logits in f32
 * are read where they lie, and their gradient is written where it belongs: no chunk at all. bf16
 * is widened on the way in and rounded to the nearest on the way out; sums are f32.
 *
 * This runs on the CPU device, whose memory is the host's and whose `real` is f32. */
#include "tensor_ops.h"

#include <assert.h>
#include <string.h>

enum {
    CHUNK_BYTES = 128 << 20,
    ROWS_MOST = 4096, /* of a chunk that needs no memory */
};

/* A chunk's memory. */
typedef struct Chunk {
    Device *dev;
    void *memory;
    size_t bytes;
    int most;       /* rows */
    float *logits;  /* (most,V), where rows need it */
    float *other;   /* the teacher's */
    float *x, *dx;  /* (most,D) in f32 */
    float *lse;     /* (most) */
    int32_t *start; /* (most + 1): K targets a row */
} Chunk;

static int in_place(const Rows *rows)
{
    return !rows->weight && rows->type == DTYPE_F32;
}

static Status chunk_open(Chunk *chunk, Device *dev, const Rows *rows, const Rows *other, int K)
{
    assert(dev->real_bytes == sizeof(float));
    int64_t fit = CHUNK_BYTES / ((int64_t)rows->V * 4), N = rows->N;
    int most = (int)(fit < 1 ? 1 : fit < N ? fit : N);
    if (in_place(rows) && (!other || in_place(other))) most = (int)(N < ROWS_MOST ? N : ROWS_MOST);
    size_t V = (size_t)rows->V, D = (size_t)(rows->weight ? rows->D : 0);
    if (other && other->weight && other->D > rows->D) D = (size_t)other->D;
    size_t n = (size_t)(most ? most : 1);
    size_t floats[] = {
        in_place(rows) ? 0 : n * V, other && !in_place(other) ? n * V : 0, n * D, n * D, n, n + 1};
    enum { PARTS = sizeof floats / sizeof *floats };
    *chunk = (Chunk){.dev = dev, .most = (int)n};
    for (int i = 0; i < PARTS; i++) chunk->bytes += (floats[i] * 4 + 63) / 64 * 64;
    TRY(dev->alloc(dev, &chunk->memory, chunk->bytes));
    char *at = chunk->memory;
    void *part[PARTS];
    for (int i = 0; i < PARTS; i++) {
        part[i] = at;
        at += (floats[i] * 4 + 63) / 64 * 64;
    }
    chunk->logits = part[0];
    chunk->other = part[1];
    chunk->x = part[2];
    chunk->dx = part[3];
    chunk->lse = part[4];
    chunk->start = part[5];
    for (int i = 0; i <= (int)n; i++) chunk->start[i] = i * K;
    return STATUS_OK;
}

static Status chunk_close(Chunk *chunk)
{
    Status status = chunk->dev->sync(chunk->dev);
    chunk->dev->release(chunk->dev, chunk->memory, chunk->bytes);
    return status;
}

/* ---- bf16 ---- */

static void widen(float *to, const uint16_t *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

/* To the nearest, ties to even; a NaN stays one. */
static void narrow(uint16_t *to, const float *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits, nan;
        memcpy(&bits, from + i, 4);
        nan = (bits & 0x7fffffff) > 0x7f800000;
        to[i] = (uint16_t)(nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* ---- a chunk of rows ---- */

/* `n` rows from `row` on in f32: where they lie, or in `buffer`. */
static const float *rows_f32(const Rows *rows, float *buffer, int64_t row, int n, int width)
{
    if (rows->type == DTYPE_F32) return (const float *)rows->rows + row * width;
    widen(buffer, (const uint16_t *)rows->rows + row * width, (int64_t)n * width);
    return buffer;
}

/* The logits of `n` rows from `row` on; what they were made of stays in chunk->x, or in *x. */
static const float *logits_of(Chunk *chunk, const Rows *rows, float *buffer, int64_t row, int n,
                              const float **x)
{
    if (!rows->weight) return rows_f32(rows, buffer, row, n, rows->V);
    *x = rows_f32(rows, chunk->x, row, n, rows->D);
    chunk->dev->matmul(chunk->dev, buffer, *x, rows->weight, 0, 1, rows->weight_type == DTYPE_BF16,
                       n, rows->V, rows->D, 0);
    return buffer;
}

/* Where the gradient of the chunk's logits is to be written: over them, or where it belongs. */
static float *dlogits_at(Chunk *chunk, const Rows *rows, RowsGradient gradient, int64_t row)
{
    return in_place(rows) ? (float *)gradient.rows + row * rows->V : chunk->logits;
}

/* From the chunk's dlogits to the gradients that are wanted. */
static void rows_backward(Chunk *chunk, const Rows *rows, RowsGradient gradient,
                          const float *dlogits, const float *x, int64_t row, int n)
{
    Device *dev = chunk->dev;
    int V = rows->V, D = rows->weight ? rows->D : V, half = rows->type == DTYPE_BF16;
    const float *out = dlogits;
    if (in_place(rows)) return;
    if (rows->weight && gradient.weight)
        dev->matmul(dev, gradient.weight, dlogits, x, 1, 0, 0, V, D, n, 1);
    if (!gradient.rows) return;
    if (rows->weight) {
        float *dx = half ? chunk->dx : (float *)gradient.rows + row * D;
        dev->matmul(dev, dx, dlogits, rows->weight, 0, 0, rows->weight_type == DTYPE_BF16, n, D, V,
                    0);
        out = dx;
    }
    if (half) narrow((uint16_t *)gradient.rows + row * D, out, (int64_t)n * D);
}

/* ---- the operations ---- */

Status tensor_topk(Device *dev, int32_t *ids, float *logp, const Rows *rows, int K)
{
    Chunk chunk;
    TRY(chunk_open(&chunk, dev, rows, NULL, 0));
    const float *x;
    for (int64_t row = 0; row < rows->N; row += chunk.most) {
        int n = (int)(rows->N - row < chunk.most ? rows->N - row : chunk.most);
        const float *logits = logits_of(&chunk, rows, chunk.logits, row, n, &x);
        dev->logprob(dev, chunk.lse, logp, logits, ids, chunk.start, n, rows->V);
        dev->topk_logprob(dev, ids + row * K, logp + row * K, logits, chunk.lse, n, rows->V, K);
    }
    return chunk_close(&chunk);
}

Status tensor_gather(Device *dev, float *logp, RowsGradient gradient, const Rows *rows,
                     const int32_t *ids, const float *dlogp, int K)
{
    for (int64_t i = 0; i < rows->N * K; i++)
        if (ids[i] < 0 || ids[i] >= rows->V)
            return fail(STATUS_INDEX, "ids[%lld] is %d, the vocabulary has %d ids", (long long)i,
                        (int)ids[i], rows->V);
    Chunk chunk;
    TRY(chunk_open(&chunk, dev, rows, NULL, K));
    const float *x = NULL;
    for (int64_t row = 0; row < rows->N; row += chunk.most) {
        int n = (int)(rows->N - row < chunk.most ? rows->N - row : chunk.most);
        const int32_t *own = ids + row * K;
        const float *logits = logits_of(&chunk, rows, chunk.logits, row, n, &x);
        dev->logprob(dev, chunk.lse, logp + row * K, logits, own, chunk.start, n, rows->V);
        if (!dlogp) continue;
        float *dlogits = dlogits_at(&chunk, rows, gradient, row);
        dev->logprob_backward(dev, (real *)dlogits, logits, chunk.lse, dlogp + row * K, own,
                              chunk.start, n, rows->V);
        rows_backward(&chunk, rows, gradient, dlogits, x, row, n);
    }
    return chunk_close(&chunk);
}

/* How many rows from `row` on, at most `most`, are kept. */
static int run_of(const unsigned char *keep, int64_t row, int64_t N, int most)
{
    int n = 0;
    while (n < most && row + n < N && (!keep || keep[row + n])) n++;
    return n;
}

Status tensor_jsd(Device *dev, float *loss, RowsGradient gradient, const Rows *student,
                  const Rows *teacher, const unsigned char *keep, const float *scale, Jsd how)
{
    Chunk chunk;
    TRY(chunk_open(&chunk, dev, student, teacher, 0));
    int64_t each = !how.each ? 1 : how.top_k ? how.top_k : student->V;
    size_t width = (size_t)(student->weight ? student->D : student->V);
    size_t row_bytes = width * (student->type == DTYPE_BF16 ? 2 : 4);
    const float *x = NULL, *other_x;
    for (int64_t row = 0; row < student->N;) {
        int n = run_of(keep, row, student->N, chunk.most);
        if (!n) {
            if (gradient.rows)
                memset((char *)gradient.rows + (size_t)row * row_bytes, 0, row_bytes);
            row++;
            continue;
        }
        const float *q = logits_of(&chunk, teacher, chunk.other, row, n, &other_x);
        const float *p = logits_of(&chunk, student, chunk.logits, row, n, &x);
        float *dlogits = scale ? dlogits_at(&chunk, student, gradient, row) : NULL;
        dev->jsd(dev, loss + row * each, (real *)dlogits, p, q, scale ? scale + row * each : NULL,
                 how, n, student->V);
        if (scale) rows_backward(&chunk, student, gradient, dlogits, x, row, n);
        row += n;
    }
    return chunk_close(&chunk);
}
