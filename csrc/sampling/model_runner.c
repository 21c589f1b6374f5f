/* sampling/model_runner.c - one forward for all sequences of a step, then the draws and scores of
 * its rows.
 *
 * Rows run the same ops as in the trainer's forward, and the ops are batch-invariant. So a token's
 * log-probability equals the trainer's, bit for bit, under any load. Logits exist for one chunk of
 * rows at a time, even for a prompt's log-probabilities. */
#include <stdlib.h>
#include <string.h>

#include "../model/stages.h"
#include "model_runner.h"
#include "page_table.h"
#include "prompt_scores.h"

/* ---- a step's memory ---- */

/* One row of the head, which draws or is scored. */
typedef struct LogitRow {
    int row; /* index among the rows read */
    Sequence *sequence;
    int position; /* in its sequence */
} LogitRow;

/* A chunk's results, on the host. Row i's ids are [start[i], start[i + 1]). */
typedef struct ChunkResults {
    int32_t start[STEP_ROWS + 1], *ids;
    float *logp;
    int32_t *top_ids; /* (rows, top) */
    float *top_logp;
} ChunkResults;

typedef struct SampleStep {
    ModelRunner *runner;
    Device *dev; /* the last stage's */
    const ScheduledRows *runs;
    int count, V;
    int rehearsing; /* the device computes nothing, so no result is kept */
    int T, lists, pages, chunk, top, rank;
    size_t ids_capacity;      /* the most ids that a chunk scores */
    Batch batch[STAGES_MOST]; /* these two: each stage's */
    Acts acts[STAGES_MOST];
    real *x, *s;
    float *logits, *lse, *logp, *top_logp;
    int32_t *rows, *start, *ids, *top_ids;
    Draw *draws;
    Segment segments[STEP_SEQUENCES], read_segments[STEP_SEQUENCES];
    Batch read; /* the rows whose logits are needed */
    int32_t read_rows[STEP_ROWS];
    LogitRow draw_rows[STEP_SEQUENCES], score_rows[STEP_ROWS];
    int draw_count, score_count;
    ImageRows image[STEP_ROWS];
    int images;
    Span *spans; /* host, like the next two and the results: (lists,count) */
    int32_t *slot, *page;
    ChunkResults results;
    int32_t drawn[STEP_SEQUENCES];
    float drawn_logp[STEP_SEQUENCES];
} SampleStep;

static void sample_place(SampleStep *step, Arenas *arenas)
{
    const Model *m = step->runner->model;
    Arena *arena = &arenas->of[m->stages - 1];
    size_t C = (size_t)step->chunk, size = m->dev->real_bytes, top = C * (size_t)step->top;
    batch_place(step->batch, arenas, m, step->T, step->count, step->lists, step->pages);
    acts_place(step->acts, arenas, m, step->T, step->rank, 0);
    step->read.rows = arena_take(arena, (size_t)step->T * sizeof(int32_t));
    step->x = arena_take(arena, C * (size_t)m->shape.width * size);
    step->s = arena_take(arena, C * (size_t)step->rank * size);
    step->logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    step->lse = arena_take(arena, 2 * C * sizeof(float));
    step->logp = arena_take(arena, step->ids_capacity * sizeof(float));
    step->ids = arena_take(arena, step->ids_capacity * sizeof(int32_t));
    step->rows = arena_take(arena, C * sizeof(int32_t));
    step->start = arena_take(arena, (C + 1) * sizeof(int32_t));
    step->draws = arena_take(arena, C * sizeof(Draw));
    step->top_ids = arena_take(arena, top * sizeof(int32_t));
    step->top_logp = arena_take(arena, top * sizeof(float));
}

/* The host's memory, one block that begins with the spans. */
static Status sample_host(SampleStep *step)
{
    ChunkResults *results = &step->results;
    size_t pages = (size_t)step->pages, ids = step->ids_capacity, lists = (size_t)step->lists,
           top = (size_t)step->chunk * (size_t)step->top, slots = lists * (size_t)step->T,
           spans = lists * (size_t)step->count;
    step->spans = malloc(spans * sizeof *step->spans +
                         (slots + pages + 2 * (ids + top)) * sizeof *step->page);
    if (!step->spans)
        return fail(STATUS_MEMORY,
                    "no memory for a sampling step's %zu pages, %zu log-probabilities and %zu best",
                    pages, ids, top);
    step->slot = (int32_t *)(void *)(step->spans + spans);
    step->page = step->slot + slots;
    results->ids = step->page + pages;
    results->logp = (float *)(results->ids + ids);
    results->top_ids = (int32_t *)(results->logp + ids);
    results->top_logp = (float *)(results->top_ids + top);
    return STATUS_OK;
}

/* The number of ids that a prompt's row scores: the next token, the request's targets, and the
 * drawn ids. */
static int scored_ids(const LogitRow *row)
{
    const RequestSpec *spec = sequence_spec(row->sequence);
    return 1 + row_targets(spec, row->position) + spec->draws;
}

/* Appends `rows` rows of an adapter. */
static int segment_add(Segment *segment, int segments, const Adapter *adapter, int row, int rows)
{
    if (!rows) return segments;
    if (!segments || segment[segments - 1].adapter != adapter)
        segment[segments++] = (Segment){adapter, row, 0};
    segment[segments - 1].rows += rows;
    return segments;
}

/* Plans a step: the head's rows, the number of pages, and the segments. */
static void sample_plan(SampleStep *step)
{
    Batch *read = &step->read;
    int row = 0, segments = 0, most = head_rows(step->runner->model);
    const PagePool *pool = &step->runner->pool;
    step->lists = pool->lists.full + pool->lists.windowed;
    step->rank = 1;
    for (int i = 0; i < step->count; i++) {
        const ScheduledRows *run = &step->runs[i];
        Sequence *s = run->sequence;
        const RequestSpec *spec = sequence_spec(s);
        step->pages += page_table_size(pool, &s->pages);
        int first = read->T;
        segments = segment_add(step->segments, segments, spec->adapter, row, run->rows);
        for (int j = 0; j < run->rows; j++, row++) {
            LogitRow one = {read->T, s, run->from + j};
            int scores = s->sample == 0 && row_pending(s->request, one.position),
                draws = run->draws && j + 1 == run->rows;
            if (scores) step->score_rows[step->score_count++] = one;
            if (scores) step->ids_capacity += (size_t)scored_ids(&one);
            if (draws) step->draw_rows[step->draw_count++] = one;
            if (scores || draws) step->read_rows[read->T++] = row;
        }
        read->segments =
            segment_add(step->read_segments, read->segments, spec->adapter, first, read->T - first);
        if (spec->topk_prompt > step->top) step->top = spec->topk_prompt;
        if (spec->topk_sample > step->top) step->top = spec->topk_sample;
        if (spec->adapter && spec->adapter->rank > step->rank) step->rank = spec->adapter->rank;
    }
    step->T = row;
    for (int k = 0; k < step->runner->model->stages; k++) {
        step->batch[k].segment = step->segments;
        step->batch[k].segments = segments;
    }
    read->segment = step->read_segments;
    int chunk = step->draw_count > step->score_count ? step->draw_count : step->score_count;
    step->chunk = chunk < most ? chunk : most;
    if (step->ids_capacity < (size_t)step->chunk) step->ids_capacity = (size_t)step->chunk;
}

/* ---- running the transformer ---- */

/* Fills the spans, slots and pages of each list of layers. */
static void sample_tables(SampleStep *step)
{
    const PagePool *pool = &step->runner->pool;
    Span *span = step->spans;
    int32_t *slot = step->slot;
    int used = 0;
    for (int list = 0; list < step->lists; list++)
        for (int i = 0, row = 0; i < step->count; row += step->runs[i++].rows, span++) {
            const ScheduledRows *run = &step->runs[i];
            const Sequence *s = run->sequence;
            *span = (Span){row, run->rows, run->from, 0, s->state.slot};
            used = page_table_write(pool, &s->pages, list, step->page, used, &span->first);
            for (int j = 0; j < run->rows; j++)
                *slot++ = page_table_slot(pool, &s->pages, list, run->from + j);
        }
}

static Status sample_forward(SampleStep *step)
{
    ModelRunner *runner = step->runner;
    const Model *m = runner->model;
    int axes = m->shape.axes;
    int32_t tokens[STEP_ROWS] = {0}, pos[STEP_ROWS * AXES_MOST] = {0};
    for (int i = 0, row = 0; i < step->count; i++) {
        const ScheduledRows *run = &step->runs[i];
        for (int j = 0; j < run->rows; j++, row++) {
            int32_t token = run->sequence->tokens.ids[run->from + j];
            tokens[row] = token < 0 ? 0 : token;
            sequence_position(pos + row * axes, run->sequence, run->from + j, axes);
        }
    }
    sample_tables(step);
    BatchHost host = {step->T, step->count, step->lists, step->pages, tokens,
                      pos,     step->slot,  step->page,  step->spans};
    batch_upload(step->batch, m, &host);
    for (int k = 0; k < m->stages; k++) step->batch[k].stop = &runner->interrupted;
    batch_images(step->batch, m, step->image, step->images);
    if (step->read.T < step->T) {
        Device *d = step->dev;
        d->upload(d, step->read.rows, step->read_rows, (size_t)step->read.T * sizeof(int32_t));
        step->batch[m->stages - 1].read = &step->read;
    }
    forward(m, step->batch, step->acts, runner->pool.cache);
    if (runner->interrupted) return fail(STATUS_INTERRUPTED, "sampling was interrupted");
    return STATUS_OK;
}

/* ---- the head ---- */

/* Logits of a chunk's rows: the base product, then each row's own adapter. */
static void chunk_logits(SampleStep *step, const LogitRow *chunk, int count)
{
    const Model *m = step->runner->model;
    Device *d = step->dev;
    int D = m->shape.width, V = step->V;
    int32_t rows[STEP_ROWS] = {0};
    for (int i = 0; i < count; i++) rows[i] = chunk[i].row;
    d->upload(d, step->rows, rows, (size_t)count * sizeof *rows);
    const Stage *last = stage_last(m);
    d->gather(d, step->x, step->acts[m->stages - 1].hidden, step->rows, count, D);
    d->head(d, step->logits, step->x, last->head, count, V, D);
    for (int i = 0, next; i < count; i = next) {
        const Adapter *adapter = sequence_spec(chunk[i].sequence)->adapter;
        for (next = i + 1; next < count && sequence_spec(chunk[next].sequence)->adapter == adapter;
             next++) {
        }
        if (!adapter || adapter->head.a < 0) continue;
        d->head_lora(d, step->logits + (size_t)i * (size_t)V,
                     real_at(d, step->s, (size_t)i * (size_t)adapter->rank),
                     real_at(d, step->x, (size_t)i * (size_t)D),
                     vector_at(adapter, WEIGHTS, last, adapter->head.a),
                     vector_at(adapter, WEIGHTS, last, adapter->head.b), next - i, V, D,
                     adapter->rank, adapter->scale);
    }
}

/* Logits of the rows at their draws' temperatures, and each row's lse. */
static void temper_logits(SampleStep *step, const LogitRow *chunk, const Draw *draws, int count)
{
    Device *d = step->dev;
    int32_t start[STEP_ROWS + 1] = {0}; /* no row scores an id */
    chunk_logits(step, chunk, count);
    d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
    d->upload(d, step->start, start, (size_t)(count + 1) * sizeof *start);
    d->temper(d, step->logits, step->draws, count, step->V);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count, step->V);
}

/* Copies the `top` best of the chunk's rows to the host. Some rows need fewer. */
static void tops_fetch(SampleStep *step, int count)
{
    Device *d = step->dev;
    size_t n = (size_t)count * (size_t)step->top;
    d->topk_logprob(d, step->top_ids, step->top_logp, step->logits, step->lse, count, step->V,
                    step->top);
    d->download(d, step->results.top_ids, step->top_ids, n * sizeof(int32_t));
    d->download(d, step->results.top_logp, step->top_logp, n * sizeof(float));
}

/* ---- scores of prompts ---- */

/* The ids that a chunk of prompt rows scores. Drawn ids are added later. */
static void score_ids(SampleStep *step, const LogitRow *chunk, int count)
{
    ChunkResults *results = &step->results;
    results->start[0] = 0;
    for (int i = 0; i < count; i++) {
        const Sequence *s = chunk[i].sequence;
        const RequestSpec *spec = sequence_spec(s);
        int32_t *ids = results->ids + results->start[i];
        int at = chunk[i].position, targets = row_targets(spec, at);
        int32_t next = s->tokens.ids[at + 1];
        ids[0] = next < 0 ? 0 : next;
        if (targets)
            memcpy(ids + 1, spec->targets + spec->starts[at], (size_t)targets * sizeof *ids);
        results->start[i + 1] = results->start[i] + scored_ids(&chunk[i]);
    }
}

/* Draws the requested tokens at prompt positions, at the requests' temperatures, and puts them at
 * the end of their rows' ids. */
static Status draw_prompt(SampleStep *step, const LogitRow *chunk, int count)
{
    Device *d = step->dev;
    int32_t ids[STEP_ROWS] = {0};
    Draw draws[STEP_ROWS] = {0};
    int most = 0;
    for (int i = 0; i < count; i++) {
        const RequestSpec *spec = sequence_spec(chunk[i].sequence);
        draws[i] = (Draw){.seed = spec->seed,
                          .pos = (uint32_t)chunk[i].position,
                          .temperature = spec->temperature,
                          .top_p = 1.0f,
                          .top_k = -1};
        if (spec->draws > most) most = spec->draws;
    }
    if (!most) return STATUS_OK;
    temper_logits(step, chunk, draws, count);
    for (int j = 0; j < most; j++) {
        for (int i = 0; i < count; i++) draws[i].sample = (uint32_t)j;
        d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
        d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count, step->V);
        d->download(d, ids, step->ids, (size_t)count * sizeof *ids);
        TRY(d->sync(d));
        for (int i = 0; i < count; i++) {
            int k = sequence_spec(chunk[i].sequence)->draws;
            if (j < k) step->results.ids[step->results.start[i + 1] - k + j] = ids[i];
        }
    }
    return STATUS_OK;
}

/* Copies a chunk's log-probabilities into the arrays of their requests. */
static void store_scores(const SampleStep *step, const LogitRow *chunk, int count)
{
    const ChunkResults *results = &step->results;
    for (int i = 0; i < count; i++) {
        Request *r = chunk[i].sequence->request;
        int at = chunk[i].position, targets = row_targets(&r->spec, at), k = r->spec.draws;
        size_t drawn = (size_t)at * (size_t)k, best = (size_t)r->spec.topk_prompt;
        scores_mark_nan(r, results->logp + results->start[i],
                        (size_t)(results->start[i + 1] - results->start[i]));
        const int32_t *ids = results->ids + results->start[i] + 1;
        const float *logp = results->logp + results->start[i] + 1;
        int is_text = r->spec.prompt[at + 1] >= 0;
        if (is_text) r->prompt_logprobs[at + 1] = logp[-1];
        scores_done(r, at + 1);
        if (targets)
            memcpy(r->target_logprobs + r->spec.starts[at], logp, (size_t)targets * sizeof *logp);
        memcpy(r->drawn_ids + drawn, ids + targets, (size_t)k * sizeof *ids);
        memcpy(r->drawn_logprobs + drawn, logp + targets, (size_t)k * sizeof *logp);
        size_t row = (size_t)i * (size_t)step->top, to = ((size_t)at + 1) * best;
        if (!is_text) continue;
        memcpy(r->top_ids + to, results->top_ids + row, best * sizeof *results->top_ids);
        memcpy(r->top_logprobs + to, results->top_logp + row, best * sizeof *results->top_logp);
    }
}

/* Log-probabilities of prompts' rows at temperature 1. After draws the logits are recomputed,
 * because a draw scales them by its temperature. */
static Status score_chunk(SampleStep *step, const LogitRow *chunk, int count)
{
    Device *d = step->dev;
    ChunkResults *results = &step->results;
    int wanted = 0;
    for (int i = 0; i < count; i++) wanted |= sequence_spec(chunk[i].sequence)->topk_prompt;
    score_ids(step, chunk, count);
    TRY(draw_prompt(step, chunk, count));
    size_t total = (size_t)results->start[count];
    chunk_logits(step, chunk, count);
    d->upload(d, step->ids, results->ids, total * sizeof *results->ids);
    d->upload(d, step->start, results->start, (size_t)(count + 1) * sizeof *results->start);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count, step->V);
    d->download(d, results->logp, step->logp, total * sizeof *results->logp);
    if (wanted) tops_fetch(step, count);
    TRY(d->sync(d));
    if (!step->rehearsing) store_scores(step, chunk, count);
    return STATUS_OK;
}

/* ---- the next tokens ---- */

/* Draws tokens for draw_rows [first, first + count). */
static void draw_chunk(SampleStep *step, int first, int count)
{
    Device *d = step->dev;
    const LogitRow *chunk = step->draw_rows + first;
    Draw draws[STEP_ROWS] = {0};
    int wanted = 0;
    for (int i = 0; i < count; i++) {
        draws[i] = sequence_draw(chunk[i].sequence, chunk[i].position);
        wanted |= sequence_spec(chunk[i].sequence)->topk_sample;
    }
    temper_logits(step, chunk, draws, count);
    d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count, step->V);
    d->download(d, step->drawn + first, step->ids, (size_t)count * sizeof *step->drawn);
    d->download(d, step->drawn_logp + first, step->logp, (size_t)count * sizeof(float));
    if (wanted) tops_fetch(step, count);
    for (int i = 0; i < count && wanted && !step->rehearsing; i++) {
        int k = sequence_spec(chunk[i].sequence)->topk_sample;
        size_t from = (size_t)i * (size_t)step->top;
        sequence_set_top(chunk[i].sequence, k, step->results.top_ids + from,
                         step->results.top_logp + from);
    }
}

/* ---- a step ---- */

static int chunk_at(const SampleStep *step, int first, int count)
{
    return count - first < step->chunk ? count - first : step->chunk;
}

static Status sample_work(SampleStep *step)
{
    TRY(sample_forward(step));
    for (int i = 0; i < step->score_count; i += step->chunk)
        TRY(score_chunk(step, step->score_rows + i, chunk_at(step, i, step->score_count)));
    for (int i = 0; i < step->draw_count; i += step->chunk)
        draw_chunk(step, i, chunk_at(step, i, step->draw_count));
    return model_sync(step->runner->model);
}

/* The same on a rehearsing device. If the rehearsal is interrupted, the real step is too. */
static void sample_rehearse(void *context)
{
    SampleStep *step = context;
    step->rehearsing = 1;
    sample_work(step);
    step->rehearsing = 0;
}

/* Computes the features of the images whose rows run. The scheduler has said that it is a step of
 * the features, and keeps those that are there. */
static Status sample_images(SampleStep *step)
{
    Tower *tower = step->runner->model->tower;
    for (int i = 0, row = 0; i < step->count; row += step->runs[i++].rows) {
        const ScheduledRows *run = &step->runs[i];
        const Request *r = run->sequence->request;
        for (const ImageRun *one = r->runs; one < r->runs + r->images; one++) {
            int from = run->from - one->at, to = from + run->rows, rows = image_rows(one->image);
            if (from < 0) from = 0;
            if (to > rows) to = rows;
            if (from >= to) continue;
            ImageRows *place = &step->image[step->images++];
            *place = (ImageRows){
                .row = row + one->at + from - run->from, .from = from, .rows = to - from};
            TRY(features_want(&place->features, tower, one->image, &step->runner->interrupted));
        }
    }
    return STATUS_OK;
}

static Status sample_all(SampleStep *step)
{
    ModelRunner *runner = step->runner;
    TRY(sample_images(step));
    sample_plan(step);
    TRY(sample_host(step));
    Arenas measured = {0};
    step->acts[0].layer = runner->layers;
    sample_place(step, &measured);
    TRY(arenas_reserve(runner->model, &runner->arenas, &measured, "a sampling step"));
    sample_place(step, &runner->arenas);
    TRY(model_prepare(runner->model, sample_rehearse, step));
    return sample_work(step);
}

/* The sequences do not change until all of a step's work is done. */
Status model_runner_step(ModelRunner *runner, const ScheduledRows *runs, int count,
                         StepResult *result)
{
    SampleStep *step = malloc(sizeof *step);
    if (!step) return fail(STATUS_MEMORY, "no memory for a sampling step");
    *step = (SampleStep){.runner = runner, .dev = runner->model->dev, .runs = runs, .count = count};
    step->V = runner->model->shape.vocab;
    Status status = sample_all(step);
    if (!status) sequences_advance(&runner->pool, runs, count);
    for (int i = 0; i < step->draw_count && !status; i++)
        sequence_append(&runner->pool, result, step->draw_rows[i].sequence, step->drawn[i],
                        step->drawn_logp[i]);
    free(step->spans);
    free(step);
    return status;
}
