/* train/objective_divergence.c - generalized_jsd: a student's rows of logits against a teacher's,
 * over the whole vocabulary.
 *
 *   loss = Σ_t weight_t · JSD_β(softmax(teacher's row / τ), softmax(student's row / τ))
 *
 * A datum is two sequences: the student's and the teacher's, with different prompts and the same
 * completion. Rows that predict the same token are compared if the weight is not 0: student row t
 * (of N) with teacher row t + M − 1 − N. M is the length of the teacher's sequence. It is checked
 * that both end with the same targets, and that these are the student's tokens. The teacher is any
 * adapter or none, on this base model or another with the same vocabulary. It gets no gradient.
 *
 * For each micro-batch the teacher's forward runs first, in parts if its prompts are long. Only the
 * hidden rows to compare are kept; the student's forward reuses the other memory. The head handles
 * pairs in chunks: two products, their divergence, whose gradient overwrites the student's logits,
 * and the head's backward. So no N×V array exists, and a pair does not depend on other pairs. */
#include "objective_divergence.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../model/layers/forward.h"
#include "../model/stages.h"
#include "micro_work.h"

/* The teacher's sequences, packed for forward, as many at a time as fit. */
typedef struct Side {
    int room;                 /* rows */
    Batch batch[STAGES_MOST]; /* these three: each stage's */
    Acts acts[STAGES_MOST];
    Cache cache[STAGES_MOST];
    BatchHost host;
    int32_t *tokens; /* host's */
} Side;

typedef struct Distill {
    Lesson lesson;
    Jsd how;
    Side side;
    real *taught, *teacher_s;              /* (live,D): the teacher's hidden rows; (chunk,R) */
    float *teacher_logits, *value, *scale; /* (chunk,V), (live), (live) */
    int32_t *teacher_rows;                 /* (live) */
    float *host_value;
    int32_t *host_rows;
    float *divergence; /* the result, in the datums' order */
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
    if (strcmp(m->device, student->device) != 0)
        return fail(STATUS_INVALID, "the teacher's model is on device %s, the student's on %s",
                    m->device, student->device);
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

/* Checks the teacher's sequence of datum i: its length, its ids, and that it ends with the
 * completion. */
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

static const float *weights_of(const TrainStep *step, const Micro *micro)
{
    return step->datums->input[0] + micro->token0;
}

/* Rows of datum i that the teacher runs: all but the last token, or none if nothing is compared. */
static int rows_read(const TrainStep *step, int i, const float *weights)
{
    const Distill *c = step->own;
    int N = step->datums->lengths[i];
    return completion_start(weights, N) < N ? c->lesson.lengths[i] - 1 : 0;
}

/* The rows per forward of the teacher: all, but at most a step's or the longest sequence's. */
static int room_of(const TrainStep *step, const Micro *micro)
{
    const float *weights = weights_of(step, micro);
    int64_t total = 0;
    int longest = step->trainer->limits.step_tokens;
    for (int i = micro->first; i < micro->last; i++) {
        int rows = rows_read(step, i, weights);
        total += rows;
        longest = rows > longest ? rows : longest;
        weights += step->datums->lengths[i];
    }
    return total < longest ? (int)total : longest;
}

static void distill_arrays(TrainStep *step, Arena *host)
{
    Distill *c = step->own;
    Side *side = &c->side;
    size_t M = (size_t)c->lesson.model->shape.layers, T = (size_t)step->pack.most.T,
           S = (size_t)step->pack.most.S, U = 0;
    for (int i = 0; i < step->pack.count; i++) {
        size_t room = (size_t)room_of(step, &step->pack.micro[i]);
        if (room > U) U = room;
    }
    side->acts[0].layer = arena_take(host, M * sizeof *side->acts[0].layer);
    side->host.tokens = side->tokens = arena_take(host, U * sizeof(int32_t));
    side->host.pos = arena_take(host, U * (size_t)c->lesson.model->shape.axes * sizeof(int32_t));
    side->host.slot = arena_take(host, U * sizeof(int32_t));
    side->host.pages = arena_take(host, (U / KV_PAGE + S) * sizeof(int32_t));
    side->host.spans = arena_take(host, S * sizeof(Span));
    c->host_rows = arena_take(host, T * sizeof(int32_t));
    c->host_value = arena_take(host, T * sizeof(float));
}

/* Places the rows to compare, then the teacher's arrays, which the student's will overwrite. */
static void distill_place(TrainStep *step, Arenas *arenas, size_t *end)
{
    Distill *c = step->own;
    Side *side = &c->side;
    const Model *m = step->trainer->adapter->model, *tm = c->lesson.model;
    const Micro *micro = step->micro;
    int other = c->lesson.adapter ? c->lesson.adapter->rank : 0;
    size_t T = (size_t)micro->T, size = m->dev->real_bytes, shared[STAGES_MOST];
    Arena *arena = &arenas->of[m->stages - 1];
    head_place(&step->head, arena, m, micro->T, micro->targets);
    c->taught = arena_take(arena, T * (size_t)tm->shape.width * size);
    c->value = arena_take(arena, T * sizeof(float));
    c->scale = arena_take(arena, T * sizeof(float));
    c->teacher_rows = arena_take(arena, T * sizeof(int32_t));
    for (int k = 0; k < tm->stages; k++) shared[k] = arenas->of[k].used;
    side->room = room_of(step, micro);
    int pages = side->room / KV_PAGE + micro->S;
    batch_place(side->batch, arenas, tm, side->room, micro->S, 1, pages);
    cache_place(side->cache, arenas, tm, pages);
    acts_place(side->acts, arenas, tm, side->room, other, 0);
    for (int k = 0; k < tm->stages; k++) {
        end[k] = arenas->of[k].used;
        arenas->of[k].used = shared[k];
    }
}

static void distill_chunk(TrainStep *step, Arena *arena)
{
    Distill *c = step->own;
    const Model *m = step->trainer->adapter->model;
    size_t C = (size_t)step->head.chunk, size = m->dev->real_bytes;
    size_t other = c->lesson.adapter ? (size_t)c->lesson.adapter->rank : 0;
    head_place_chunk(&step->head, arena, m, step->trainer->adapter->rank);
    c->teacher_s = arena_take(arena, C * other * size);
    c->teacher_logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
}

/* ---- the teacher ---- */

/* Runs the packed sequences, and keeps rows [from, to) of those to compare. */
static void side_run(TrainStep *step, int from, int to)
{
    Distill *c = step->own;
    Side *side = &c->side;
    const Model *m = c->lesson.model;
    Device *dev = m->dev;
    BatchHost *host = &side->host;
    for (int k = 0; k < m->stages; k++) {
        side->batch[k].T = host->T;
        side->batch[k].S = host->S;
    }
    batch_whole(side->batch, m, c->lesson.adapter, host->T, step->batch[0].stop);
    batch_upload(side->batch, m, host);
    forward(m, side->batch, side->acts, side->cache);
    dev->upload(dev, c->teacher_rows, c->host_rows + from, (size_t)(to - from) * sizeof(int32_t));
    dev->gather(dev, real_at(dev, c->taught, (size_t)from * (size_t)m->shape.width),
                side->acts[m->stages - 1].hidden, c->teacher_rows, to - from, m->shape.width);
    host->T = host->S = host->page_count = 0;
}

/* The teacher's hidden rows to compare, in the order of the head, and their weights. */
static Status teacher_run(TrainStep *step)
{
    Distill *c = step->own;
    BatchHost *host = &c->side.host;
    const Lesson *lesson = &c->lesson;
    const int32_t *tokens = lesson->tokens;
    const float *weights = weights_of(step, step->micro);
    Device *dev = step_device(step), *own = lesson->model->dev;
    int begin = 0, at = 0;
    host->lists = 1;
    for (int i = 0; i < step->micro->first; i++) tokens += lesson->lengths[i];
    for (int i = step->micro->first; i < step->micro->last; i++) {
        int N = step->datums->lengths[i], M = lesson->lengths[i],
            rows = rows_read(step, i, weights);
        if (rows && host->T > 0 && host->T + rows > c->side.room) {
            side_run(step, begin, at);
            begin = at;
        }
        for (int t = 0; t < N; t++) {
            if (weights[t] == 0.0f) continue;
            c->host_rows[at] = host->T + M - 1 - N + t;
            step->dlogp[at++] = weights[t];
        }
        memcpy(c->side.tokens + host->T, tokens, (size_t)rows * sizeof *tokens);
        if (rows) batch_add(host, NULL, 0, rows, lesson->model->shape.axes);
        tokens += M;
        weights += N;
    }
    if (host->T > 0) side_run(step, begin, at);
    dev->upload(dev, c->scale, step->dlogp, (size_t)at * sizeof(float));
    return own == dev ? STATUS_OK : model_sync(lesson->model);
}

/* ---- both heads ---- */

/* The divergence of rows [row, row + rows). Its gradient overwrites their logits. */
static Status chunk_compare(TrainStep *step, int row, int rows)
{
    Distill *c = step->own;
    const Model *m = c->lesson.model;
    Device *dev = step_device(step), *own = m->dev;
    float *logits = step->head.logits;
    if (own != dev) TRY(dev->sync(dev)); /* it may still read the teacher's logits */
    rows_logits(m, c->lesson.adapter, c->teacher_logits, c->teacher_s,
                real_at(own, c->taught, (size_t)row * (size_t)m->shape.width), rows);
    if (own != dev) TRY(own->sync(own));
    dev->jsd(dev, c->value + row, step->with_backward ? (real *)logits : NULL, logits,
             c->teacher_logits, step->with_backward ? c->scale + row : NULL, c->how, rows,
             m->shape.vocab);
    return STATUS_OK;
}

static Status distill_head(TrainStep *step)
{
    Adapter *adapter = step->trainer->adapter;
    Distill *c = step->own;
    Device *dev = step_device(step);
    const Head *h = &step->head;
    int live = step->pack.live;
    for (int row = 0, rows; row < h->T; row += rows) {
        rows = head_chunk(h, row);
        if (row < live && live - row < rows) rows = live - row;
        TRY(step_going(step));
        head_logits(h, adapter, step_hidden(step), row, rows);
        head_logprob(h, adapter->model, row, rows);
        if (row >= live) continue;
        TRY(chunk_compare(step, row, rows));
        if (step->with_backward)
            head_logits_backward(h, adapter, step_last_grads(step)->dxn, row, rows);
    }
    dev->fetch(dev, step->logp, h->logp, (size_t)h->T * sizeof(float));
    dev->fetch(dev, c->host_value, c->value, (size_t)live * sizeof(float));
    return STATUS_OK;
}

static Status distill_tell(TrainStep *step, int from, int to)
{
    Distill *c = step->own;
    double loss = 0.0;
    for (int i = from; i < to; i++) {
        int live = i < step->pack.live;
        c->divergence[step->micro->token0 + step->pack.rows[i]] = live ? c->host_value[i] : 0.0f;
        if (live) loss += (double)step->dlogp[i] * (double)c->host_value[i];
    }
    return step_loss(step, loss);
}

/* ---- the call ---- */

static const Objective divergences = {"a distillation step", distill_arrays, distill_place,
                                      distill_chunk,         teacher_run,    distill_head,
                                      distill_tell};

Status trainer_distill(TrainStep **out, Trainer *trainer, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, Pass pass, int part, float *logp, float *divergence)
{
    const Model *m = trainer->adapter->model;
    const double *key = datums->key;
    if (!loss->taught)
        return fail(STATUS_INVALID, "%s is a loss without a teacher: use forward_backward",
                    loss->name);
    if (datums->input[loss->taught])
        return fail(STATUS_INVALID, "%s has either the teacher's tokens or its %s, not both",
                    loss->name, loss->input[loss->taught].name);
    TRY(datums_check(datums, m, loss));
    TRY(top_k_check(loss, key[JSD_TOP_K], m->shape.vocab));
    TRY(lesson_check(lesson, datums, m));
    if (pass == FORWARD_BACKWARD && part == WHOLE_CALL) TRY(adapter_trainable(trainer->adapter));
    Distill *own = malloc(sizeof *own);
    if (!own) return fail(STATUS_MEMORY, "no memory for a call");
    *own = (Distill){.lesson = *lesson,
                     .how = {.beta = (float)key[JSD_BETA],
                             .temperature = (float)key[JSD_TEMPERATURE],
                             .clip = (float)key[JSD_TOKEN_CLIP],
                             .top_k = (int32_t)key[JSD_TOP_K]},
                     .divergence = divergence};
    TrainStep step = {.trainer = trainer,
                      .datums = datums,
                      .loss = loss,
                      .objective = &divergences,
                      .own = own,
                      .owned = own,
                      .other = lesson->model == m ? NULL : lesson->model,
                      .part = part,
                      .result = logp};
    Status status = step_start(out, &step, pass);
    if (status) free(own);
    return status;
}
