/* distill.c - generalized_jsd: a student's rows of logits against a teacher's, over the whole
 * vocabulary.
 *
 *   loss = Σ_t weight_t · JSD_β(softmax(teacher's row / τ), softmax(student's row / τ))
 *
 * A datum is two sequences: the student's, and the teacher's, which reads another prompt and then
 * the same completion. Rows that predict the same token are compared: where a weight is not 0,
 * student row t (of N) with teacher row t + M − 1 − N, for the M tokens of the teacher's sequence
 * end with the same targets; that they do is checked. The teacher may be any adapter or none, on
 * this base model or another one of the same vocabulary, and gets no gradient.
 *
 * For each micro-batch the teacher's forward comes first and leaves only the hidden rows that will
 * be compared; the student's takes its memory. The head then sees the pairs in chunks: two
 * products, their divergence, whose gradient takes the place of the student's logits, and the
 * head's backward. So nothing of N×V exists, and a pair's numbers do not depend on the others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* One of the two sequences of every datum, packed for forward. */
typedef struct Side {
    const Model *model;
    const Adapter *adapter; /* NULL: none */
    int T, S, pages;
    Batch batch;
    Segment segment;
    Acts acts;
    Cache cache;
    int32_t *tokens, *pos, *slot, *page; /* host */
    Span *spans;                         /* host */
} Side;

/* A call under way. Rows are in the order of the head: the `live` ones, which are compared, first.
 */
typedef struct Distill {
    Adapter *adapter;
    const Datums *datums;
    const Lesson *lesson;
    const Loss *loss;
    int with_backward;
    Jsd how;
    int first, last, live, chunk; /* of this micro-batch */
    int64_t token0, teacher0;     /* where its datums begin in the flat arrays */
    Side student, teacher;
    Grads grads;
    real *taught;                               /* (live, D): the teacher's hidden rows */
    real *x, *s, *dx, *ds;                      /* (C,D), (C,R) */
    real *teacher_s;                            /* (C,R) */
    float *logits, *teacher_logits;             /* (C,V) */
    float *lse, *logp, *value, *scale;          /* (C), (T), (live), (live) */
    int32_t *rows, *teacher_rows, *start, *ids; /* (T), (live), (T+1), (T) */
    struct {
        float *logp, *value, *scale;
        int32_t *rows, *teacher_rows, *start, *ids;
    } host;
    double loss_sum, tokens, sequences;
} Distill;

enum { BETA, TEMPERATURE, TOP_K, TOKEN_CLIP }; /* of the loss's keys */

/* ---- checks ---- */

static Status keys_check(const Loss *loss, const double *key, int vocab)
{
    if (!(key[BETA] >= 0.0 && key[BETA] <= 1.0))
        return fail(STATUS_INVALID, "%s: beta must be in [0, 1], not %g", loss->name, key[BETA]);
    if (!(key[TEMPERATURE] > 0.0))
        return fail(STATUS_INVALID, "%s: temperature must be more than 0, not %g", loss->name,
                    key[TEMPERATURE]);
    if (!(key[TOP_K] >= 0.0 && key[TOP_K] <= vocab) || key[TOP_K] != floor(key[TOP_K]))
        return fail(STATUS_INVALID,
                    "%s: top_k must be a whole number from 0 (the whole vocabulary) to %d, not %g",
                    loss->name, vocab, key[TOP_K]);
    if (!(key[TOKEN_CLIP] > 0.0))
        return fail(STATUS_INVALID, "%s: token_clip must be more than 0, not %g", loss->name,
                    key[TOKEN_CLIP]);
    return STATUS_OK;
}

static Status teacher_check(const Lesson *lesson, const Model *student)
{
    const Model *m = lesson->model;
    if (m->shape.vocab != student->shape.vocab)
        return fail(STATUS_INVALID,
                    "the teacher's model has a vocabulary of %d, the student's of %d: they must "
                    "have the same",
                    m->shape.vocab, student->shape.vocab);
    if (strcmp(m->dev->name, student->dev->name) != 0)
        return fail(STATUS_INVALID, "the teacher's model is on device %s, the student's on %s",
                    m->dev->name, student->dev->name);
    if (lesson->adapter && lesson->adapter->model != m)
        return fail(STATUS_INVALID, "the teacher's adapter belongs to another model than its own");
    return STATUS_OK;
}

/* The first position of a datum with a weight, or its length. */
static int completion_start(const float *weights, int length)
{
    int t = 0;
    while (t < length && weights[t] == 0.0f) t++;
    return t;
}

/* Datum i's sequence for the teacher: its length, its ids, and its end, the completion. */
static Status sequence_check(const Lesson *lesson, const Datums *d, int i, int64_t token,
                             const int32_t *taught)
{
    const Shape *s = &lesson->model->shape;
    int N = d->lengths[i], M = lesson->lengths[i];
    int from = completion_start(d->input[0] + token, N), completion = N - from;
    for (int t = 0; t < M; t++)
        if (taught[t] < 0 || taught[t] >= s->vocab)
            return fail(STATUS_INDEX,
                        "datum %d: teacher_tokens at position %d is %d; ids are 0 to %d", i, t,
                        taught[t], s->vocab - 1);
    if (M - 1 > s->context)
        return fail(STATUS_INVALID,
                    "datum %d: teacher_tokens has %d tokens; the teacher's context is %d", i, M,
                    s->context);
    if (M < completion + 1)
        return fail(STATUS_INVALID,
                    "datum %d: teacher_tokens has %d tokens; it must be the teacher's prompt and "
                    "then the %d of the completion (target_tokens from position %d on, the first "
                    "whose weight is not 0)",
                    i, M, completion, from);
    for (int t = from; t < N; t++)
        if (d->targets[token + t] != taught[M - N + t])
            return fail(STATUS_INVALID,
                        "datum %d: teacher_tokens must end with the completion, target_tokens from "
                        "position %d on, but at position %d the target is %d and the teacher reads "
                        "%d",
                        i, from, t, d->targets[token + t], taught[M - N + t]);
    return STATUS_OK;
}

static Status lesson_check(const Lesson *lesson, const Datums *d, const Model *student)
{
    TRY(teacher_check(lesson, student));
    if (lesson->count != d->count)
        return fail(STATUS_INVALID, "teacher_tokens came for %lld datums of %d",
                    (long long)lesson->count, d->count);
    int64_t total = 0, token = 0;
    for (int i = 0; i < d->count; i++) {
        if (lesson->lengths[i] < 1)
            return fail(STATUS_INVALID, "datum %d: teacher_tokens is empty", i);
        total += lesson->lengths[i];
    }
    if (total != lesson->token_total)
        return fail(STATUS_INVALID, "the teacher's lengths add up to %lld tokens, but %lld came",
                    (long long)total, (long long)lesson->token_total);
    total = 0;
    for (int i = 0; i < d->count; i++) {
        TRY(sequence_check(lesson, d, i, token, lesson->tokens + total));
        token += d->lengths[i];
        total += lesson->lengths[i];
    }
    return STATUS_OK;
}

/* ---- memory ---- */

static void side_place(Side *side, Arena *arena, int keep)
{
    const Shape *s = &side->model->shape;
    size_t page = (size_t)KV_PAGE * (size_t)s->kv_heads * (size_t)s->head_width;
    size_t bytes = (size_t)side->pages * page * side->model->dev->real_bytes;
    batch_place(&side->batch, arena, side->T, side->S, side->pages);
    side->cache = (Cache){arena_take(arena, bytes), arena_take(arena, bytes), 0};
    acts_place(&side->acts, arena, side->model, side->T, side->adapter ? side->adapter->rank : 0,
               keep);
}

/* What both sides' rows need, then each side's own: the student's lies where the teacher's was. */
static void distill_place(Distill *c, Arena *arena)
{
    const Model *m = c->adapter->model, *tm = c->lesson->model;
    size_t size = m->dev->real_bytes, C = (size_t)c->chunk, T = (size_t)c->student.T,
           live = (size_t)c->live, D = (size_t)m->shape.width, V = (size_t)m->shape.vocab;
    int rank = c->adapter->rank, other = c->lesson->adapter ? c->lesson->adapter->rank : 0;
    size_t R = (size_t)rank;
    c->taught = arena_take(arena, live * (size_t)tm->shape.width * size);
    c->x = arena_take(arena, C * D * size);
    c->dx = arena_take(arena, C * D * size);
    c->s = arena_take(arena, C * R * size);
    c->ds = arena_take(arena, C * R * size);
    c->teacher_s = arena_take(arena, C * (size_t)other * size);
    c->logits = arena_take(arena, C * V * sizeof(float));
    c->teacher_logits = arena_take(arena, C * V * sizeof(float));
    c->lse = arena_take(arena, C * sizeof(float));
    c->logp = arena_take(arena, T * sizeof(float));
    c->value = arena_take(arena, live * sizeof(float));
    c->scale = arena_take(arena, live * sizeof(float));
    c->rows = arena_take(arena, T * sizeof(int32_t));
    c->teacher_rows = arena_take(arena, live * sizeof(int32_t));
    c->start = arena_take(arena, (T + 1) * sizeof(int32_t));
    c->ids = arena_take(arena, T * sizeof(int32_t));
    size_t shared = arena->used;
    side_place(&c->teacher, arena, 0);
    size_t end = arena->used;
    arena->used = shared;
    side_place(&c->student, arena, c->with_backward);
    if (c->with_backward) grads_place(&c->grads, arena, m, c->student.T, rank);
    if (arena->used < end) arena->used = end;
}

/* Host arrays for any micro-batch, in one block. */
static Status distill_host(Distill *c, void **block)
{
    const Datums *d = c->datums;
    size_t T = (size_t)d->token_total, U = (size_t)c->lesson->token_total, S = (size_t)d->count;
    size_t L = (size_t)c->adapter->model->shape.layers, M = (size_t)c->lesson->model->shape.layers;
    size_t pages = T / KV_PAGE + S, teacher_pages = U / KV_PAGE + S;
    size_t words = 10 * T + 1 + 3 * U + pages + teacher_pages;
    char *memory = malloc((L + M) * sizeof(LayerActs) + 2 * S * sizeof(Span) + 4 * words);
    if (!memory) return fail(STATUS_MEMORY, "no memory for a batch of %zu tokens", T + U);
    *block = memory;
    c->student.acts.layer = (LayerActs *)memory;
    c->teacher.acts.layer = c->student.acts.layer + L;
    c->student.spans = (Span *)(c->teacher.acts.layer + M);
    c->teacher.spans = c->student.spans + S;
    int32_t *next = (int32_t *)(c->teacher.spans + S);
    c->student.tokens = next;
    c->student.pos = next + T;
    c->student.slot = next + 2 * T;
    c->host.rows = next + 3 * T;
    c->host.teacher_rows = next + 4 * T;
    c->host.ids = next + 5 * T;
    c->host.logp = (float *)(next + 6 * T);
    c->host.value = c->host.logp + T;
    c->host.scale = c->host.logp + 2 * T;
    c->host.start = next + 9 * T;
    c->teacher.tokens = c->host.start + T + 1;
    c->teacher.pos = c->teacher.tokens + U;
    c->teacher.slot = c->teacher.pos + U;
    c->student.page = c->teacher.slot + U;
    c->teacher.page = c->student.page + pages;
    return STATUS_OK;
}

/* ---- packing ---- */

static void side_clear(Side *side)
{
    side->T = side->S = side->pages = 0;
}

/* Puts a sequence behind the others. */
static void side_add(Side *side, const int32_t *tokens, int length)
{
    side->spans[side->S++] = (Span){side->T, length, 0, side->pages};
    for (int t = 0; t < length; t++, side->T++) {
        side->tokens[side->T] = tokens[t];
        side->pos[side->T] = t;
        side->slot[side->T] = side->pages * KV_PAGE + t;
    }
    for (int t = 0; t < length; t += KV_PAGE, side->pages++) side->page[side->pages] = side->pages;
}

static void side_forward(Side *side)
{
    BatchHost host = {side->T,   side->S,    side->pages, side->tokens,
                      side->pos, side->slot, side->page,  side->spans};
    batch_upload(&side->batch, side->model->dev, &host);
    side->segment = (Segment){side->adapter, 0, side->T};
    side->batch.segment = &side->segment;
    side->batch.segments = 1;
    forward(side->model, &side->batch, &side->acts, &side->cache);
}

/* Takes datums from `first` on until one side's rows are full, and packs both. A datum without
 * weights has nothing for the teacher to read. */
static void distill_take(Distill *c, int first)
{
    const Datums *d = c->datums;
    int room = c->adapter->step_tokens;
    const int32_t *tokens = d->tokens + c->token0, *taught = c->lesson->tokens + c->teacher0;
    const float *weights = d->input[0] + c->token0;
    c->first = c->last = first;
    c->live = 0;
    side_clear(&c->student);
    side_clear(&c->teacher);
    for (; c->last < d->count; c->last++) {
        int N = d->lengths[c->last], M = c->lesson->lengths[c->last], row = c->student.T;
        int from = completion_start(weights, N), read = from < N ? M - 1 : 0;
        if (row > 0 && (row + N > room || c->teacher.T + read > room)) break;
        for (int t = from; t < N; t++) {
            if (weights[t] == 0.0f) continue;
            c->host.rows[c->live] = row + t;
            c->host.teacher_rows[c->live] = c->teacher.T + M - 1 - N + t;
            c->host.scale[c->live++] = weights[t];
        }
        side_add(&c->student, tokens, N);
        if (read) side_add(&c->teacher, taught, read);
        tokens += N;
        weights += N;
        taught += M;
    }
    int most = head_rows(c->adapter->model) / 2; /* for there are two sets of logits */
    c->chunk = c->student.T < most ? c->student.T : most;
}

/* The rest of the order of the head: the rows that are not compared, and all rows' targets. */
static void distill_order(Distill *c)
{
    const float *weights = c->datums->input[0] + c->token0;
    int at = c->live;
    for (int row = 0; row < c->student.T; row++)
        if (weights[row] == 0.0f) c->host.rows[at++] = row;
    for (int i = 0; i < c->student.T; i++) {
        c->host.start[i] = i;
        c->host.ids[i] = c->datums->targets[c->token0 + c->host.rows[i]];
    }
    c->host.start[c->student.T] = c->student.T;
    Device *dev = c->adapter->model->dev;
    size_t T = (size_t)c->student.T * 4, live = (size_t)c->live * 4;
    dev->upload(dev, c->rows, c->host.rows, T);
    dev->upload(dev, c->start, c->host.start, T + 4);
    dev->upload(dev, c->ids, c->host.ids, T);
    dev->upload(dev, c->scale, c->host.scale, live);
}

/* ---- running ---- */

/* The teacher's hidden rows that are compared, in the order of the head. */
static Status teacher_run(Distill *c)
{
    if (!c->live) return STATUS_OK;
    const Model *m = c->lesson->model;
    Device *dev = m->dev;
    dev->upload(dev, c->teacher_rows, c->host.teacher_rows, (size_t)c->live * 4);
    side_forward(&c->teacher);
    dev->gather(dev, c->taught, c->teacher.acts.hidden, c->teacher_rows, c->live, m->shape.width);
    return m == c->adapter->model ? STATUS_OK : dev->sync(dev);
}

/* The divergence of rows [row, row + rows), and in place of their logits its gradient. */
static Status chunk_compare(Distill *c, int row, int rows)
{
    const Model *m = c->lesson->model;
    Device *dev = c->adapter->model->dev, *own = m->dev;
    if (m != c->adapter->model) TRY(dev->sync(dev)); /* its stream may still read these logits */
    head_logits(m, c->lesson->adapter, c->teacher_logits, c->teacher_s,
                real_at(own, c->taught, (size_t)row * (size_t)m->shape.width), rows);
    if (m != c->adapter->model) TRY(own->sync(own));
    dev->jsd(dev, c->value + row, c->with_backward ? (real *)c->logits : NULL, c->logits,
             c->teacher_logits, c->with_backward ? c->scale + row : NULL, c->how, rows,
             m->shape.vocab);
    return STATUS_OK;
}

static Status head_run(Distill *c)
{
    Adapter *adapter = c->adapter;
    const Model *m = adapter->model;
    Device *dev = m->dev;
    int D = m->shape.width;
    for (int row = 0, rows; row < c->student.T; row += rows) {
        int end = row < c->live ? c->live : c->student.T;
        rows = end - row < c->chunk ? end - row : c->chunk;
        dev->gather(dev, c->x, c->student.acts.hidden, c->rows + row, rows, D);
        head_logits(m, adapter, c->logits, c->s, c->x, rows);
        dev->logprob(dev, c->lse, c->logp, c->logits, c->ids, c->start + row, rows, m->shape.vocab);
        if (row >= c->live) continue;
        TRY(chunk_compare(c, row, rows));
        if (!c->with_backward) continue;
        head_backward(m, adapter, c->dx, c->ds, (real *)c->logits, c->x, c->s, rows);
        dev->scatter(dev, c->grads.dxn, c->dx, c->rows + row, rows, D);
    }
    return dev->sync(dev);
}

/* Reads a micro-batch's results, each to its place, and adds up its loss. */
static Status distill_results(Distill *c, float *logp, float *divergence)
{
    Device *dev = c->adapter->model->dev;
    dev->download(dev, c->host.logp, c->logp, (size_t)c->student.T * 4);
    dev->download(dev, c->host.value, c->value, (size_t)c->live * 4);
    double loss = 0.0;
    int span = -1, counted = -1;
    for (int i = 0; i < c->student.T; i++) {
        int64_t at = c->token0 + c->host.rows[i];
        logp[at] = c->host.logp[i];
        divergence[at] = i < c->live ? c->host.value[i] : 0.0f;
        if (i >= c->live) continue;
        loss += (double)c->host.scale[i] * (double)c->host.value[i];
        while (span + 1 < c->student.S && c->student.spans[span + 1].row <= c->host.rows[i]) span++;
        c->sequences += span != counted;
        counted = span;
    }
    c->tokens += c->live;
    c->loss_sum += loss;
    if (isfinite(loss)) return STATUS_OK;
    return fail(STATUS_NUMERIC,
                "%s is not finite (%g) on this batch; nothing was added to the gradients",
                c->loss->name, loss);
}

static Status micro_run(Distill *c, float *logp, float *divergence)
{
    Adapter *adapter = c->adapter;
    const Model *m = adapter->model;
    Device *dev = m->dev;
    Arena measure = {.dev = dev};
    distill_place(c, &measure);
    TRY(arena_reserve(&adapter->arena, measure.used, "a distillation step"));
    distill_place(c, &adapter->arena);
    distill_order(c);
    TRY(teacher_run(c));
    side_forward(&c->student);
    if (c->with_backward)
        dev->zero(dev, c->grads.dxn,
                  (size_t)c->student.T * (size_t)m->shape.width * dev->real_bytes);
    TRY(head_run(c));
    TRY(distill_results(c, logp, divergence));
    if (c->with_backward && c->live)
        backward(m, adapter, &c->student.batch, &c->student.acts, &c->grads);
    return dev->sync(dev);
}

static Status run_all(Distill *c, float *logp, float *divergence)
{
    for (int first = 0; first < c->datums->count; first = c->last) {
        distill_take(c, first);
        TRY(micro_run(c, logp, divergence));
        c->token0 += c->student.T;
        for (int i = c->first; i < c->last; i++) c->teacher0 += c->lesson->lengths[i];
        if (c->adapter->interrupted)
            return fail(STATUS_INTERRUPTED, "forward_backward was interrupted");
    }
    double norm = 0.0;
    if (c->with_backward) TRY(adapter_norm(c->adapter, FRESH, &norm));
    if (!isfinite(norm))
        return fail(STATUS_NUMERIC, "the gradient of this batch is not finite; it was dropped");
    return STATUS_OK;
}

Status adapter_distill(Adapter *adapter, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, int with_backward, float *logp, float *divergence,
                       double *loss_sum)
{
    if (!loss->taught)
        return fail(STATUS_INVALID, "%s is a loss without a teacher: use forward_backward",
                    loss->name);
    TRY(datums_check(datums, adapter->model, loss));
    TRY(keys_check(loss, datums->key, adapter->model->shape.vocab));
    TRY(lesson_check(lesson, datums, adapter->model));
    if (with_backward && !adapter->vector[GRADIENTS])
        return fail(STATUS_INVALID,
                    "this adapter is a snapshot: it can be sampled from, not trained");
    Distill call = {.adapter = adapter,
                    .datums = datums,
                    .lesson = lesson,
                    .loss = loss,
                    .with_backward = with_backward,
                    .how = {.beta = (float)datums->key[BETA],
                            .temperature = (float)datums->key[TEMPERATURE],
                            .clip = (float)datums->key[TOKEN_CLIP],
                            .top_k = (int)datums->key[TOP_K]},
                    .student = {.model = adapter->model, .adapter = adapter},
                    .teacher = {.model = lesson->model, .adapter = lesson->adapter}};
    Device *dev = adapter->model->dev;
    void *block = NULL;
    TRY(distill_host(&call, &block));
    adapter->interrupted = 0;
    Status status = run_all(&call, logp, divergence);
    free(block);
    if (status == STATUS_OK && with_backward) {
        dev->accumulate(dev, adapter->vector[GRADIENTS], adapter->vector[FRESH], adapter->size);
        adapter->loss += call.loss_sum;
        adapter->tokens += call.tokens;
        adapter->sequences += call.sequences;
    }
    if (with_backward)
        dev->zero(dev, adapter->vector[FRESH], (size_t)adapter->size * sizeof(float));
    *loss_sum = call.loss_sum;
    return status;
}
