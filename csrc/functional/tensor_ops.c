/* functional/tensor_ops.c - log-probabilities and divergences of a caller's tensors, chunk by
 * chunk.
 *
 * A chunk is the rows whose logits take the device's chunk_bytes. The product of hidden states and
 * weight (matmul) reads the weight in place. The gradient of the logits overwrites them. From it
 * the chunk's rows of d hidden and its part of d weight are computed, before the next chunk reuses
 * the memory. Logits in f32 are read in place, and a gradient of type `real` is written directly to
 * its result. If both hold (f32 on the CPU) there is no chunk at all. Data of the other type are
 * widened or rounded; sums are f32.
 *
 * If each row's lse is already known, softmax needs no whole row. tensor_gather_backward then also
 * splits the vocabulary into stretches: thousands of rows use a stretch of the weight while it is
 * in a cache, and its gradient's sum over them is written once.
 *
 * Each operation is a walk over the rows. A device whose ops need scratch rehearses it first. */
#include "tensor_ops.h"

#include <stdlib.h>

#include "../device/arena.h"

enum {
    ROWS_MOST = 4096,  /* per chunk that needs no memory */
    STRETCH = 9 * 384, /* ids. The same for any number of rows, and a multiple of the CPU's block of
                          sums, so that the split changes no bit of a row's gradient. No multiple of
                          1024, whose rows would share cache sets */
};

/* A chunk's memory; arrays that the operation does not need are absent. */
typedef struct Chunk {
    Device *dev;
    Arena memory;
    int most;       /* rows */
    int width;      /* V, or the ids of a stretch */
    float *logits;  /* (most,width) */
    float *other;   /* the teacher's */
    real *dlogits;  /* (most,width): in the logits' memory, unless that is the caller's */
    real *x;        /* (most,D) */
    float *dx;      /* (most,D) */
    float *dweight; /* (V,D) */
    int begun;      /* dweight holds the part of some rows */
    float *lse;     /* (most,2) */
    int32_t *start; /* (most + 1): K targets a row */
} Chunk;

static size_t type_bytes(DType type)
{
    return type == DTYPE_F32 ? 4 : 2;
}

static int is_real(const Device *dev, DType type)
{
    return type_bytes(type) == dev->real_bytes;
}

static int width_of(const TensorRows *rows)
{
    return rows->weight ? rows->D : rows->V;
}

/* Whether the logits are read in place. */
static int are_there(const TensorRows *rows)
{
    return !rows->weight && rows->type == DTYPE_F32;
}

/* Whether the rows' gradient is the logits', which is written directly to the result. */
static int gets_dlogits(const Device *dev, const TensorRows *rows)
{
    return !rows->weight && is_real(dev, rows->type);
}

static int64_t rows_bytes(const TensorRows *rows, int64_t count)
{
    return count * width_of(rows) * (int64_t)type_bytes(rows->type);
}

/* Places (or measures) the arrays of an operation on these rows with these gradients. */
static void chunk_place(Chunk *chunk, const TensorRows *rows, const TensorRows *other,
                        RowsGradient gradient)
{
    Arena *arena = &chunk->memory;
    const Device *dev = chunk->dev;
    size_t n = (size_t)chunk->most, real_bytes = dev->real_bytes, D = 0;
    size_t logits = n * (size_t)chunk->width;
    int backward = gradient.rows || gradient.weight;
    arena->used = 0;
    if (!are_there(rows)) chunk->logits = arena_take(arena, logits * sizeof(float));
    if (other && !are_there(other)) chunk->other = arena_take(arena, logits * sizeof(float));
    chunk->dlogits = (real *)chunk->logits;
    if (backward && are_there(rows) && !gets_dlogits(dev, rows))
        chunk->dlogits = arena_take(arena, logits * real_bytes);
    if (rows->weight && !is_real(dev, rows->type)) D = (size_t)rows->D;
    if (other && other->weight && !is_real(dev, other->type) && (size_t)other->D > D)
        D = (size_t)other->D;
    chunk->x = arena_take(arena, n * D * real_bytes);
    D = rows->weight ? (size_t)rows->D : 0;
    if (gradient.rows && rows->type == DTYPE_BF16)
        chunk->dx = arena_take(arena, n * D * sizeof(float));
    if (gradient.weight)
        chunk->dweight = rows->weight_type == DTYPE_F32
                             ? gradient.weight
                             : arena_take(arena, (size_t)rows->V * D * sizeof(float));
    chunk->lse = arena_take(arena, 2 * n * sizeof(float));
    chunk->start = arena_take(arena, (n + 1) * sizeof(int32_t));
}

/* start[i] = i·K */
static Status chunk_starts(Chunk *chunk, int K)
{
    Device *dev = chunk->dev;
    size_t bytes = ((size_t)chunk->most + 1) * sizeof(int32_t);
    int32_t *start = malloc(bytes);
    if (!start) return fail(STATUS_MEMORY, "no memory for %d rows", chunk->most);
    for (int i = 0; i <= chunk->most; i++) start[i] = i * K;
    dev->upload(dev, chunk->start, start, bytes);
    free(start);
    return STATUS_OK;
}

static Status chunk_open(Chunk *chunk, Device *dev, const TensorRows *rows, const TensorRows *other,
                         RowsGradient gradient, int width, int K)
{
    int64_t fit = (int64_t)dev->chunk_bytes / ((int64_t)width * 4), N = rows->N;
    int backward = gradient.rows || gradient.weight;
    if (are_there(rows) && (!other || are_there(other)) && (!backward || gets_dlogits(dev, rows)))
        fit = ROWS_MOST;
    int64_t most = fit < N ? fit : N;
    *chunk = (Chunk){
        .dev = dev, .memory = {.dev = dev}, .most = most < 1 ? 1 : (int)most, .width = width};
    chunk_place(chunk, rows, other, gradient);
    TRY(arena_reserve(&chunk->memory, chunk->memory.used, "a chunk of logits"));
    chunk_place(chunk, rows, other, gradient);
    Status status = chunk_starts(chunk, K);
    if (status) arena_release(&chunk->memory);
    return status;
}

/* Reserves the scratch of the walk's ops, walks, and waits. */
static Status chunk_walk(Chunk *chunk, void (*walk)(void *), void *context)
{
    Status status = device_prepare(chunk->dev, walk, context);
    if (!status) walk(context);
    Status first = chunk->dev->sync(chunk->dev);
    arena_release(&chunk->memory);
    return status ? status : first;
}

/* ---- a chunk of rows ---- */

static const void *rows_at(const TensorRows *rows, int64_t row)
{
    return (const char *)rows->rows + rows_bytes(rows, row);
}

/* `n` hidden states from `row` on: in place, or converted in the chunk. */
static const real *hidden_of(Chunk *chunk, const TensorRows *rows, int64_t row, int n)
{
    Device *dev = chunk->dev;
    const void *at = rows_at(rows, row);
    int64_t count = (int64_t)n * rows->D;
    if (is_real(dev, rows->type)) return at;
    if (rows->type == DTYPE_BF16)
        dev->widen(dev, (float *)chunk->x, at, count);
    else
        dev->narrow(dev, chunk->x, at, count);
    return chunk->x;
}

/* The logits of `n` rows from `row` on, and in *x their hidden states. */
static const float *logits_of(Chunk *chunk, const TensorRows *rows, float *buffer, int64_t row,
                              int n, const real **x)
{
    Device *dev = chunk->dev;
    if (are_there(rows)) return rows_at(rows, row);
    if (!rows->weight) {
        dev->widen(dev, buffer, rows_at(rows, row), (int64_t)n * rows->V);
        return buffer;
    }
    *x = hidden_of(chunk, rows, row, n);
    dev->matmul(dev, buffer, *x, rows->weight, 0, 1, rows->weight_type == DTYPE_BF16, n, rows->V,
                rows->D, 0);
    return buffer;
}

/* The destination of the chunk's logits' gradient. */
static real *dlogits_at(Chunk *chunk, const TensorRows *rows, RowsGradient gradient, int64_t row)
{
    if (!gets_dlogits(chunk->dev, rows)) return chunk->dlogits;
    return (real *)((char *)gradient.rows + rows_bytes(rows, row));
}

/* The rows with the part of the weight for the logits of `V` ids from `first` on. */
static TensorRows stretch_of(const TensorRows *rows, int first, int V)
{
    TensorRows part = *rows;
    part.V = V;
    if (rows->weight)
        part.weight = (const char *)rows->weight +
                      (int64_t)first * rows->D * (int64_t)type_bytes(rows->weight_type);
    return part;
}

/* From the dlogits of a stretch of ids to its part of the hidden states' and weight's gradients. */
static void stretch_backward(Chunk *chunk, const TensorRows *part, RowsGradient gradient,
                             const real *dlogits, const real *x, int64_t row, int n, int first)
{
    Device *dev = chunk->dev;
    int V = part->V, D = part->D, half = part->type == DTYPE_BF16;
    if (gradient.weight)
        dev->matmul(dev, chunk->dweight + (int64_t)first * D, dlogits, x, 1, 0,
                    dev->real_bytes == 2, V, D, n, chunk->begun);
    if (!gradient.rows) return;
    void *to = (char *)gradient.rows + rows_bytes(part, row);
    dev->matmul(dev, half ? chunk->dx : to, dlogits, part->weight, 0, 0,
                part->weight_type == DTYPE_BF16, n, D, V, first > 0);
}

/* Finishes the chunk's rows after all their dlogits are computed. */
static void rows_end(Chunk *chunk, const TensorRows *rows, RowsGradient gradient,
                     const real *dlogits, int64_t row, int n)
{
    Device *dev = chunk->dev;
    int half = rows->type == DTYPE_BF16;
    chunk->begun = 1;
    if (!gradient.rows || gets_dlogits(dev, rows)) return;
    void *to = (char *)gradient.rows + rows_bytes(rows, row);
    int64_t count = (int64_t)n * width_of(rows);
    if (rows->weight) {
        if (half) dev->narrow(dev, to, chunk->dx, count);
    } else if (half) {
        dev->narrow(dev, to, (const float *)dlogits, count);
    } else {
        dev->widen(dev, to, dlogits, count);
    }
}

/* From the chunk's dlogits to the requested gradients. */
static void rows_backward(Chunk *chunk, const TensorRows *rows, RowsGradient gradient,
                          const real *dlogits, const real *x, int64_t row, int n)
{
    if (rows->weight) stretch_backward(chunk, rows, gradient, dlogits, x, row, n, 0);
    rows_end(chunk, rows, gradient, dlogits, row, n);
}

/* Finishes d weight: sums are f32, and rounded once for a bf16 weight. Without rows they are
 * zero. */
static void weight_end(const Chunk *chunk, const TensorRows *rows, RowsGradient gradient)
{
    Device *dev = chunk->dev;
    int64_t count = (int64_t)rows->V * rows->D;
    if (!chunk->dweight) return;
    if (!chunk->begun) dev->zero(dev, chunk->dweight, (size_t)count * sizeof(float));
    if (rows->weight_type == DTYPE_BF16) dev->narrow(dev, gradient.weight, chunk->dweight, count);
}

static int rows_left(const Chunk *chunk, const TensorRows *rows, int64_t row)
{
    return (int)(rows->N - row < chunk->most ? rows->N - row : chunk->most);
}

/* ---- the operations ---- */

typedef struct Gather {
    Chunk chunk;
    float *logp, *lse;
    RowsGradient gradient;
    const TensorRows *rows;
    const int32_t *ids;
    int32_t *best;              /* topk: the ids are the result */
    const float *dlogp, *known; /* the rows' lse */
    int K;
} Gather;

static void topk_walk(void *context)
{
    Gather *call = context;
    Chunk *chunk = &call->chunk;
    Device *dev = chunk->dev;
    const TensorRows *rows = call->rows;
    const real *x;
    for (int64_t row = 0; row < rows->N; row += chunk->most) {
        int n = rows_left(chunk, rows, row), K = call->K;
        const float *logits = logits_of(chunk, rows, chunk->logits, row, n, &x);
        dev->logprob(dev, chunk->lse, call->logp, logits, call->best, chunk->start, n, rows->V);
        dev->topk_logprob(dev, call->best + row * K, call->logp + row * K, logits, chunk->lse, n,
                          rows->V, K);
    }
}

Status tensor_topk(Device *dev, int32_t *ids, float *logp, const TensorRows *rows, int K)
{
    Gather call = {.logp = logp, .rows = rows, .best = ids, .K = K};
    TRY(chunk_open(&call.chunk, dev, rows, NULL, call.gradient, rows->V, 0));
    return chunk_walk(&call.chunk, topk_walk, &call);
}

static void gather_walk(void *context)
{
    Gather *call = context;
    Chunk *chunk = &call->chunk;
    Device *dev = chunk->dev;
    const TensorRows *rows = call->rows;
    const real *x = NULL;
    chunk->begun = 0;
    for (int64_t row = 0; row < rows->N; row += chunk->most) {
        int n = rows_left(chunk, rows, row);
        int64_t at = row * call->K;
        const float *logits = logits_of(chunk, rows, chunk->logits, row, n, &x);
        float *lse = call->lse + 2 * row;
        dev->logprob(dev, lse, call->logp + at, logits, call->ids + at, chunk->start, n, rows->V);
        if (!call->dlogp) continue;
        real *dlogits = dlogits_at(chunk, rows, call->gradient, row);
        dev->logprob_backward(dev, dlogits, logits, lse, call->dlogp + at, call->ids + at,
                              chunk->start, n, rows->V, 0);
        rows_backward(chunk, rows, call->gradient, dlogits, x, row, n);
    }
    weight_end(chunk, rows, call->gradient);
}

Status tensor_gather(Device *dev, float *logp, float *lse, RowsGradient gradient,
                     const TensorRows *rows, const int32_t *ids, const float *dlogp, int K)
{
    Gather call = {.logp = logp,
                   .lse = lse,
                   .gradient = gradient,
                   .rows = rows,
                   .ids = ids,
                   .dlogp = gradient.rows || gradient.weight ? dlogp : NULL,
                   .K = K};
    TRY(chunk_open(&call.chunk, dev, rows, NULL, gradient, rows->V, K));
    return chunk_walk(&call.chunk, gather_walk, &call);
}

static void gather_backward_walk(void *context)
{
    Gather *call = context;
    Chunk *chunk = &call->chunk;
    Device *dev = chunk->dev;
    const TensorRows *rows = call->rows;
    const real *x = NULL;
    chunk->begun = 0;
    for (int64_t row = 0; row < rows->N; row += chunk->most) {
        int n = rows_left(chunk, rows, row);
        int64_t at = row * call->K;
        real *dlogits = dlogits_at(chunk, rows, call->gradient, row);
        for (int first = 0; first < rows->V; first += chunk->width) {
            int V = rows->V - first < chunk->width ? rows->V - first : chunk->width;
            TensorRows part = stretch_of(rows, first, V);
            const float *logits = logits_of(chunk, &part, chunk->logits, row, n, &x);
            dev->logprob_backward(dev, dlogits, logits, call->known + 2 * row, call->dlogp + at,
                                  call->ids + at, chunk->start, n, V, first);
            if (rows->weight)
                stretch_backward(chunk, &part, call->gradient, dlogits, x, row, n, first);
        }
        rows_end(chunk, rows, call->gradient, dlogits, row, n);
    }
    weight_end(chunk, rows, call->gradient);
}

Status tensor_gather_backward(Device *dev, RowsGradient gradient, const TensorRows *rows,
                              const int32_t *ids, const float *dlogp, const float *lse, int K)
{
    int width = rows->weight && STRETCH < rows->V ? STRETCH : rows->V;
    Gather call = {
        .gradient = gradient, .rows = rows, .ids = ids, .dlogp = dlogp, .known = lse, .K = K};
    if (!gradient.rows && !gradient.weight) return STATUS_OK;
    TRY(chunk_open(&call.chunk, dev, rows, NULL, gradient, width, K));
    return chunk_walk(&call.chunk, gather_backward_walk, &call);
}

typedef struct Diverge {
    Chunk chunk;
    float *loss;
    RowsGradient gradient;
    const TensorRows *student, *teacher;
    const unsigned char *keep;
    const float *scale;
    Jsd how;
} Diverge;

/* How many rows from `row` on, at most `most`, are kept (or, with kept = 0, not kept). */
static int run_of(const unsigned char *keep, int kept, int64_t row, int64_t N, int most)
{
    int n = 0;
    while (n < most && row + n < N && (!keep || keep[row + n]) == kept) n++;
    return n;
}

static void jsd_walk(void *context)
{
    Diverge *call = context;
    Chunk *chunk = &call->chunk;
    Device *dev = chunk->dev;
    const TensorRows *student = call->student, *teacher = call->teacher;
    RowsGradient gradient = call->gradient;
    int64_t each = !call->how.each ? 1 : call->how.top_k ? call->how.top_k : student->V, at = 0;
    const real *x = NULL, *other_x;
    chunk->begun = 0;
    for (int64_t row = 0; row < student->N;) {
        int n = run_of(call->keep, 0, row, student->N, chunk->most);
        if (n && gradient.rows)
            dev->zero(dev, (char *)gradient.rows + rows_bytes(student, row),
                      (size_t)rows_bytes(student, n));
        row += n;
        if (n) continue;
        n = run_of(call->keep, 1, row, student->N, chunk->most);
        const float *q = logits_of(chunk, teacher, chunk->other, row, n, &other_x);
        const float *p = logits_of(chunk, student, chunk->logits, row, n, &x);
        real *dlogits = call->scale ? dlogits_at(chunk, student, gradient, row) : NULL;
        dev->jsd(dev, call->loss + at, dlogits, p, q, call->scale ? call->scale + at : NULL,
                 call->how, n, student->V);
        if (call->scale) rows_backward(chunk, student, gradient, dlogits, x, row, n);
        row += n;
        at += n * each;
    }
    weight_end(chunk, student, gradient);
}

Status tensor_jsd(Device *dev, float *loss, RowsGradient gradient, const TensorRows *student,
                  const TensorRows *teacher, const unsigned char *keep, const float *scale, Jsd how)
{
    Diverge call = {.loss = loss,
                    .gradient = gradient,
                    .student = student,
                    .teacher = teacher,
                    .keep = keep,
                    .scale = gradient.rows || gradient.weight ? scale : NULL,
                    .how = how};
    TRY(chunk_open(&call.chunk, dev, student, teacher, gradient, student->V, 0));
    return chunk_walk(&call.chunk, jsd_walk, &call);
}
