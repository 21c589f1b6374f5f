/* train/distill.c - generalized_jsd: a student's rows of logits against a teacher's, over the whole
 * vocabulary.
 *
 *   loss = Σ_t weight_t · JSD_β(softmax(teacher's row / τ), softmax(student's row / τ))
 *
 * A datum is two sequences: the student's, and the teacher's, which reads another prompt and then
 * the same completion. Rows that predict the same token are compared: where a weight is not 0,
 * student row t (of N) with teacher row t + M − 1 − N, for the M tokens of the teacher's sequence
 * end with the same targets; that they do, and that these are the student's tokens, is checked. The
 * teacher may be any adapter or none, on this base model or another one of the same vocabulary, and
 * gets no gradient.
 *
 * For each micro-batch the teacher's forward comes first, in parts if its prompts are long, and
 * leaves only the hidden rows that will be compared; the student's takes its memory. The head then
 * sees the pairs in chunks: two products, their divergence, whose gradient takes the place of the
 * student's logits, and the head's backward. So nothing of N×V exists, and a pair's numbers do not
 * depend on the others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

/* The teacher's sequences, packed for forward, as many at a time as there is room for. */
typedef struct Side {
    int room, most; /* rows and sequences of one forward */
    int T, S, pages;
    Batch batch;
    Acts acts;
    Cache cache;
    int32_t *tokens, *pos, *slot, *page; /* host */
    Span *spans;                         /* host */
} Side;

/* A call under way, with the micro-batch at hand. */
typedef struct Distill {
    Adapter *adapter;
    const Datums *datums;
    const Lesson *lesson;
    const Loss *loss;
    int with_backward;
    int *keep; /* of each micro-batch, what the student's forward keeps */
    Jsd how;
    int64_t teacher0; /* where this micro-batch begins in the teacher's tokens */
    const Micro *micro;
    Pack pack;
    Batch batch;
    Acts acts;
    Grads grads;
    Cache cache;
    Head head;
    Side side;
    real *taught, *teacher_s;              /* (live,D): the teacher's hidden rows; (chunk,R) */
    float *teacher_logits, *value, *scale; /* (chunk,V), (live), (live) */
    int32_t *teacher_rows;                 /* (live) */
    float *host_logp, *host_value, *host_scale;
    int32_t *host_rows;
    double loss_sum, tokens, sequences;
} Distill;

/* ---- checks ---- */

static Status top_k_check(const Loss *loss, double top_k, int vocab)
{
    if (top_k >= 0.0 && top_k <= vocab && top_k == floor(top_k)) return STATUS_OK;
    return fail(STATUS_INVALID,
                "%s: top_k must be a whole number from 0 (the whole vocabulary) to %d, not %g",
                loss->name, vocab, top_k);
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
    for (int t = from + 1; t < N; t++)
        if (d->tokens[token + t] != d->targets[token + t - 1])
            return fail(STATUS_INVALID,
                        "datum %d: over the completion target_tokens must be model_input one "
                        "position on, but the token at position %d is %d and the target before it "
                        "%d",
                        i, t, d->tokens[token + t], d->targets[token + t - 1]);
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
        if (d->counts[i] > 1)
            return fail(STATUS_INVALID,
                        "datum %d has %d targets a position; with teacher_tokens it has one", i,
                        d->counts[i]);
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

static const float *weights_of(const Distill *c)
{
    return c->datums->input[0] + c->micro->token0;
}

/* Rows that the teacher runs of datum i: all but the last token, or none if nothing is compared. */
static int rows_read(const Distill *c, int i, const float *weights)
{
    int N = c->datums->lengths[i];
    return completion_start(weights, N) < N ? c->lesson->lengths[i] - 1 : 0;
}

/* Sets the room of a micro-batch's teacher: all its rows, or those of a training step. */
static void side_size(Distill *c)
{
    const float *weights = weights_of(c);
    int64_t total = 0;
    int longest = c->adapter->step_tokens;
    for (int i = c->micro->first; i < c->micro->last; i++) {
        int rows = rows_read(c, i, weights);
        total += rows;
        longest = rows > longest ? rows : longest;
        weights += c->datums->lengths[i];
    }
    c->side.room = total < longest ? (int)total : longest;
    c->side.most = c->micro->S;
}

static int side_pages(const Side *side)
{
    return side->room / KV_PAGE + side->most;
}

static Cache cache_place(Arena *arena, const Model *m, int pages)
{
    size_t page = (size_t)KV_PAGE * (size_t)m->shape.kv_heads * (size_t)m->shape.head_width;
    size_t bytes = (size_t)pages * page * m->dev->real_bytes;
    real *k = arena_take(arena, bytes), *v = arena_take(arena, bytes);
    return (Cache){k, v, 0};
}

/* What is compared, then each side's own: the student's lies where the teacher's was. */
static void distill_place(Distill *c, Arena *arena, int keep)
{
    const Model *m = c->adapter->model, *tm = c->lesson->model;
    const Micro *micro = c->micro;
    Side *side = &c->side;
    int R = c->adapter->rank, other = c->lesson->adapter ? c->lesson->adapter->rank : 0;
    size_t T = (size_t)micro->T, size = m->dev->real_bytes;
    head_place(&c->head, arena, m, micro->T, R, micro->targets);
    size_t C = (size_t)c->head.chunk;
    c->taught = arena_take(arena, T * (size_t)tm->shape.width * size);
    c->teacher_s = arena_take(arena, C * (size_t)other * size);
    c->teacher_logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    c->value = arena_take(arena, T * sizeof(float));
    c->scale = arena_take(arena, T * sizeof(float));
    c->teacher_rows = arena_take(arena, T * sizeof(int32_t));
    size_t shared = arena->used;
    batch_place(&side->batch, arena, side->room, side->most, side_pages(side));
    side->cache = cache_place(arena, tm, side_pages(side));
    acts_place(&side->acts, arena, tm, side->room, other, 0);
    size_t end = arena->used;
    arena->used = shared;
    batch_place(&c->batch, arena, micro->T, micro->S, micro->pages);
    c->cache = cache_place(arena, m, micro->pages);
    acts_place(&c->acts, arena, m, micro->T, R, keep);
    if (keep) grads_place(&c->grads, arena, m, micro->T, R);
    if (arena->used < end) arena->used = end;
}

/* Host arrays for any micro-batch, in one block that begins with the layers. */
static Status distill_open(Distill *c)
{
    TRY(pack_open(&c->pack, c->datums, c->adapter->step_tokens));
    size_t L = (size_t)c->adapter->model->shape.layers, M = (size_t)c->lesson->model->shape.layers,
           T = (size_t)c->pack.most.T, S = (size_t)c->pack.most.S, U = 0;
    for (int i = 0; i < c->pack.count; i++) {
        c->micro = &c->pack.micro[i];
        side_size(c);
        if ((size_t)c->side.room > U) U = (size_t)c->side.room;
    }
    size_t words = (size_t)c->pack.count + 4 * T + 3 * U + U / KV_PAGE + S;
    char *memory = calloc(1, (L + M) * sizeof(LayerActs) + S * sizeof(Span) + words * 4);
    if (!memory) {
        pack_close(&c->pack);
        return fail(STATUS_MEMORY, "no memory for a batch of %zu tokens", T + U);
    }
    c->acts.layer = (LayerActs *)memory;
    c->side.acts.layer = c->acts.layer + L;
    c->side.spans = (Span *)(c->side.acts.layer + M);
    c->keep = (int *)(c->side.spans + S);
    c->side.tokens = c->keep + c->pack.count;
    c->side.pos = c->side.tokens + U;
    c->side.slot = c->side.pos + U;
    c->side.page = c->side.slot + U;
    c->host_rows = c->side.page + U / KV_PAGE + S;
    c->host_logp = (float *)(c->host_rows + T);
    c->host_value = c->host_logp + T;
    c->host_scale = c->host_value + T;
    return STATUS_OK;
}

static void distill_close(Distill *c)
{
    pack_close(&c->pack);
    free(c->acts.layer);
}

/* ---- the teacher ---- */

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

/* Runs the sequences that are there, and keeps rows [from, to) of those that are compared. */
static void side_run(Distill *c, int from, int to)
{
    const Model *m = c->lesson->model;
    Device *dev = m->dev;
    Side *side = &c->side;
    size_t D = (size_t)m->shape.width;
    BatchHost host = {side->T,   side->S,    side->pages, side->tokens,
                      side->pos, side->slot, side->page,  side->spans};
    side->batch.T = side->T;
    side->batch.S = side->S;
    batch_whole(&side->batch, c->lesson->adapter, side->T);
    side->batch.stop = &c->adapter->interrupted;
    batch_upload(&side->batch, dev, &host);
    forward(m, &side->batch, &side->acts, &side->cache);
    dev->upload(dev, c->teacher_rows, c->host_rows + from, (size_t)(to - from) * sizeof(int32_t));
    dev->gather(dev, real_at(dev, c->taught, (size_t)from * D), side->acts.hidden, c->teacher_rows,
                to - from, m->shape.width);
    side->T = side->S = side->pages = 0;
}

/* The teacher's hidden rows that are compared, in the order of the head. */
static Status teacher_run(Distill *c)
{
    const Pack *pack = &c->pack;
    const int32_t *tokens = c->lesson->tokens + c->teacher0;
    int begin = 0, at = 0, row = 0;
    for (int i = c->micro->first; i < c->micro->last; i++) {
        int N = c->datums->lengths[i], M = c->lesson->lengths[i], next = at;
        while (next < pack->live && pack->rows[next] < row + N) next++;
        if (next > at && c->side.T > 0 && c->side.T + M - 1 > c->side.room) {
            side_run(c, begin, at);
            begin = at;
        }
        for (int k = at; k < next; k++)
            c->host_rows[k] = c->side.T + M - 1 - N + pack->rows[k] - row;
        if (next > at) side_add(&c->side, tokens, M - 1);
        tokens += M;
        row += N;
        at = next;
    }
    if (c->side.T > 0) side_run(c, begin, at);
    const Model *m = c->lesson->model;
    return m == c->adapter->model ? STATUS_OK : m->dev->sync(m->dev);
}

/* ---- the student, and the head of both ---- */

static void student_run(Distill *c)
{
    Device *dev = c->adapter->model->dev;
    const Model *m = c->adapter->model;
    batch_whole(&c->batch, c->adapter, c->micro->T);
    c->batch.stop = &c->adapter->interrupted;
    pack_rows(&c->pack, c->micro, &c->batch, dev);
    forward(m, &c->batch, &c->acts, &c->cache);
    if (c->with_backward)
        dev->zero(dev, c->grads.dxn,
                  (size_t)c->micro->T * (size_t)m->shape.width * dev->real_bytes);
}

/* The divergence of rows [row, row + rows), and in place of their logits its gradient. */
static Status chunk_compare(Distill *c, int row, int rows)
{
    const Model *m = c->lesson->model;
    Device *dev = c->adapter->model->dev, *own = m->dev;
    float *logits = c->head.logits;
    if (own != dev) TRY(dev->sync(dev)); /* it may still read the teacher's logits */
    rows_logits(m, c->lesson->adapter, c->teacher_logits, c->teacher_s,
                real_at(own, c->taught, (size_t)row * (size_t)m->shape.width), rows);
    if (own != dev) TRY(own->sync(own));
    dev->jsd(dev, c->value + row, c->with_backward ? (real *)logits : NULL, logits,
             c->teacher_logits, c->with_backward ? c->scale + row : NULL, c->how, rows,
             m->shape.vocab);
    return STATUS_OK;
}

static Status head_run(Distill *c)
{
    const Model *m = c->adapter->model;
    const Head *h = &c->head;
    int live = c->pack.live;
    for (int row = 0, rows; row < h->T; row += rows) {
        rows = head_chunk(h, row);
        if (row < live && live - row < rows) rows = live - row;
        TRY(not_interrupted(c->adapter));
        head_logits(h, c->adapter, c->acts.hidden, row, rows);
        head_logprob(h, m, row, rows);
        if (row >= live) continue;
        TRY(chunk_compare(c, row, rows));
        if (c->with_backward) head_logits_backward(h, c->adapter, c->grads.dxn, row, rows);
    }
    return m->dev->sync(m->dev);
}

/* Reads a micro-batch's results, each to its place, and adds up its loss. */
static Status results_read(Distill *c, float *logp, float *divergence)
{
    Device *dev = c->adapter->model->dev;
    const Pack *pack = &c->pack;
    dev->download(dev, c->host_logp, c->head.logp, (size_t)c->micro->T * sizeof(float));
    dev->download(dev, c->host_value, c->value, (size_t)pack->live * sizeof(float));
    double loss = 0.0;
    int span = 0, counted = -1;
    for (int i = 0; i < c->micro->T; i++) {
        int64_t at = c->micro->token0 + pack->rows[i];
        logp[at] = c->host_logp[i];
        divergence[at] = i < pack->live ? c->host_value[i] : 0.0f;
        if (i >= pack->live) continue;
        loss += (double)c->host_scale[i] * (double)c->host_value[i];
        while (span + 1 < c->micro->S && pack->spans[span + 1].row <= pack->rows[i]) span++;
        c->sequences += span != counted;
        counted = span;
    }
    c->tokens += pack->live;
    c->loss_sum += loss;
    if (isfinite(loss)) return STATUS_OK;
    return fail(STATUS_NUMERIC,
                "%s is not finite (%g) on this batch; nothing was added to the gradients",
                c->loss->name, loss);
}

/* All ops of a micro-batch on the teacher's device and on the student's, for one that rehearses. */
static void teacher_rehearse(void *context)
{
    Distill *c = context;
    batch_whole(&c->side.batch, c->lesson->adapter, c->side.room);
    if (c->side.room) forward(c->lesson->model, &c->side.batch, &c->side.acts, &c->side.cache);
    for (int row = 0; row < c->head.T; row += c->head.chunk)
        rows_logits(c->lesson->model, c->lesson->adapter, c->teacher_logits, c->teacher_s,
                    c->taught, head_chunk(&c->head, row));
}

static void student_rehearse(void *context)
{
    Distill *c = context;
    const Model *m = c->adapter->model;
    batch_whole(&c->batch, c->adapter, c->micro->T);
    forward(m, &c->batch, &c->acts, &c->cache);
    for (int row = 0; row < c->head.T; row += c->head.chunk) {
        int rows = head_chunk(&c->head, row);
        head_logits(&c->head, c->adapter, c->acts.hidden, row, rows);
        head_logprob(&c->head, m, row, rows);
        m->dev->jsd(m->dev, c->value, c->with_backward ? (real *)c->head.logits : NULL,
                    c->head.logits, c->teacher_logits, c->with_backward ? c->scale : NULL, c->how,
                    rows, m->shape.vocab);
        if (c->with_backward) head_logits_backward(&c->head, c->adapter, c->grads.dxn, row, rows);
    }
    if (c->with_backward) backward(m, c->adapter, &c->batch, &c->acts, &c->cache, &c->grads);
}

/* Bytes of the micro-batch at hand. */
static size_t distill_bytes(void *context, int keep)
{
    Distill *c = context;
    Arena arena = {.dev = c->adapter->model->dev};
    distill_place(c, &arena, keep);
    return arena.used;
}

/* What the student's forward keeps of each micro-batch, and room for all that is done. */
static Status distill_reserve(Distill *c)
{
    Device *dev = c->adapter->model->dev, *other = c->lesson->model->dev;
    size_t bytes = 0;
    for (int i = 0; i < c->pack.count; i++) {
        c->micro = &c->pack.micro[i];
        side_size(c);
        if (c->with_backward) {
            distill_bytes(c, 1);
            size_t scratch = device_rehearse(dev, student_rehearse, c) +
                             device_rehearse(other, teacher_rehearse, c);
            TRY(step_keep(&c->keep[i], c->adapter, c->micro->T, scratch, distill_bytes, c));
        }
        size_t one = distill_bytes(c, c->keep[i]);
        if (one > bytes) bytes = one;
    }
    return arena_reserve(&c->adapter->arena, bytes, "a distillation step");
}

static Status micro_run(Distill *c, float *logp, float *divergence)
{
    Adapter *adapter = c->adapter;
    const Model *m = adapter->model;
    Device *dev = m->dev;
    Pack *pack = &c->pack;
    adapter->arena.used = 0;
    side_size(c);
    distill_place(c, &adapter->arena, c->keep[c->micro - pack->micro]);
    TRY(device_prepare(c->lesson->model->dev, teacher_rehearse, c));
    TRY(device_prepare(dev, student_rehearse, c));
    pack_order(pack, c->micro, c->datums->input[0]);
    head_upload(&c->head, dev, pack->rows, pack->start, pack->ids, c->micro->targets);
    for (int i = 0; i < pack->live; i++) c->host_scale[i] = weights_of(c)[pack->rows[i]];
    dev->upload(dev, c->scale, c->host_scale, (size_t)pack->live * sizeof(float));
    TRY(teacher_run(c));
    student_run(c);
    TRY(head_run(c));
    TRY(results_read(c, logp, divergence));
    if (c->with_backward && pack->live)
        backward(m, adapter, &c->batch, &c->acts, &c->cache, &c->grads);
    return dev->sync(dev);
}

/* ---- the call ---- */

static Status run_all(Distill *c, float *logp, float *divergence)
{
    TRY(distill_reserve(c));
    for (int i = 0; i < c->pack.count; i++) {
        c->micro = &c->pack.micro[i];
        TRY(micro_run(c, logp, divergence));
        for (int k = c->micro->first; k < c->micro->last; k++) c->teacher0 += c->lesson->lengths[k];
        TRY(not_interrupted(c->adapter));
    }
    return STATUS_OK;
}

Status adapter_distill(Adapter *adapter, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, int with_backward, float *logp, float *divergence,
                       double *loss_sum)
{
    const double *key = datums->key;
    if (!loss->taught)
        return fail(STATUS_INVALID, "%s is a loss without a teacher: use forward_backward",
                    loss->name);
    if (datums->input[loss->taught])
        return fail(STATUS_INVALID, "%s has either the teacher's tokens or its %s, not both",
                    loss->name, loss->input[loss->taught].name);
    TRY(datums_check(datums, adapter->model, loss));
    TRY(top_k_check(loss, key[JSD_TOP_K], adapter->model->shape.vocab));
    TRY(lesson_check(lesson, datums, adapter->model));
    if (with_backward) TRY(trainable(adapter));
    Distill call = {.adapter = adapter,
                    .datums = datums,
                    .lesson = lesson,
                    .loss = loss,
                    .with_backward = with_backward,
                    .how = {.beta = (float)key[JSD_BETA],
                            .temperature = (float)key[JSD_TEMPERATURE],
                            .clip = (float)key[JSD_TOKEN_CLIP],
                            .top_k = (int32_t)key[JSD_TOP_K]}};
    TRY(distill_open(&call));
    adapter->held = 0;
    adapter->interrupted = 0;
    Status status = run_all(&call, logp, divergence);
    distill_close(&call);
    *loss_sum = call.loss_sum;
    if (!with_backward) return status;
    return gradients_take(adapter, status, call.loss_sum, call.tokens, call.sequences);
}
