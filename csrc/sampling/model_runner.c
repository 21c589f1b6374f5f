/* sampling/model_runner.c - one forward for all sequences of a step, and what is drawn and scored
 * in its rows.
 *
 * The rows are those of the trainer's forward, op for op, and the ops are batch-invariant. So a
 * token's log-probability equals the trainer's, bit for bit, under any load. Logits exist for a
 * chunk of rows at a time, also for the log-probabilities of a prompt. */
#include <stdlib.h>
#include <string.h>

#include "model_runner.h"
#include "page_table.h"
#include "prompt_scores.h"

/* ---- a step's memory ---- */

/* One row of the head, and the results that are wanted from it. */
typedef struct Ask {
    int row; /* among those that are read */
    const Turn *turn;
    int position; /* of the row in its sequence */
} Ask;

/* A chunk's results, on the host. A row's own ids are [start[i], start[i + 1]). */
typedef struct Told {
    int32_t start[STEP_ROWS + 1], *ids;
    float *logp;
    int32_t *top_ids; /* (rows, top) */
    float *top_logp;
} Told;

typedef struct SampleStep {
    ModelRunner *runner;
    const Turn *turns;
    int count;
    int rehearsing; /* the device computes nothing, so no result is kept */
    int T, lists, pages, chunk, top;
    size_t ids_room; /* ids that a chunk may score */
    Batch batch;
    Acts acts;
    real *x, *s;
    float *logits, *lse, *logp, *top_logp;
    int32_t *rows, *start, *ids, *top_ids;
    Draw *draws;
    Segment segments[STEP_SEQUENCES], read_segments[STEP_SEQUENCES];
    Batch read; /* the rows that some ask is for */
    int32_t read_rows[STEP_ROWS];
    Ask draw_asks[STEP_SEQUENCES], score_asks[STEP_ROWS];
    int draw_count, score_count;
    Span *spans; /* host, as told's arrays and the next two are: (lists,count) */
    int32_t *slot, *page;
    Told told;
    int32_t drawn[STEP_SEQUENCES];
    float drawn_logp[STEP_SEQUENCES];
} SampleStep;

static void sample_place(SampleStep *step, Arena *arena, int rank)
{
    const Model *m = step->runner->model;
    size_t C = (size_t)step->chunk, size = m->dev->real_bytes, top = C * (size_t)step->top;
    batch_place(&step->batch, arena, step->T, step->count, step->lists, step->pages);
    acts_place(&step->acts, arena, m, step->T, rank, 0);
    step->read.rows = arena_take(arena, (size_t)step->T * sizeof(int32_t));
    step->x = arena_take(arena, C * (size_t)m->shape.width * size);
    step->s = arena_take(arena, C * (size_t)rank * size);
    step->logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    step->lse = arena_take(arena, 2 * C * sizeof(float));
    step->logp = arena_take(arena, step->ids_room * sizeof(float));
    step->ids = arena_take(arena, step->ids_room * sizeof(int32_t));
    step->rows = arena_take(arena, C * sizeof(int32_t));
    step->start = arena_take(arena, (C + 1) * sizeof(int32_t));
    step->draws = arena_take(arena, C * sizeof(Draw));
    step->top_ids = arena_take(arena, top * sizeof(int32_t));
    step->top_logp = arena_take(arena, top * sizeof(float));
}

/* The host's memory, in one block that begins with the spans. */
static Status sample_host(SampleStep *step)
{
    Told *told = &step->told;
    size_t pages = (size_t)step->pages, ids = step->ids_room, lists = (size_t)step->lists,
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
    told->ids = step->page + pages;
    told->logp = (float *)(told->ids + ids);
    told->top_ids = (int32_t *)(told->logp + ids);
    told->top_logp = (float *)(told->top_ids + top);
    return STATUS_OK;
}

/* Ids whose log-probabilities a prompt's row gives: the next token, the ids in the request's lists,
 * and the drawn ids. */
static int ask_ids(const Ask *ask)
{
    const RequestSpec *spec = &ask->turn->request->spec;
    return 1 + row_targets(spec, ask->position) + spec->draws;
}

/* `rows` more rows of an adapter. */
static int segment_add(Segment *segment, int segments, const Adapter *adapter, int row, int rows)
{
    if (!rows) return segments;
    if (!segments || segment[segments - 1].adapter != adapter)
        segment[segments++] = (Segment){adapter, row, 0};
    segment[segments - 1].rows += rows;
    return segments;
}

/* The rows of the head that the step's turns need, how many pages they have, and their segments. */
static void sample_plan(SampleStep *step)
{
    Batch *all = &step->batch, *read = &step->read;
    int row = 0, most = head_rows(step->runner->model);
    const Kv *kv = &step->runner->kv;
    step->T = step->pages = step->draw_count = step->score_count = step->top = 0;
    step->ids_room = 0;
    step->lists = kv->lists.full + kv->lists.windowed;
    for (int i = 0; i < step->count; i++) {
        const Turn *turn = &step->turns[i];
        const RequestSpec *spec = &turn->request->spec;
        step->pages += table_size(kv, &turn_sequence(turn)->pages);
        int first = read->T;
        all->segments = segment_add(step->segments, all->segments, spec->adapter, row, turn->rows);
        for (int j = 0; j < turn->rows; j++, row++) {
            int position = turn->from + j, last = j + 1 == turn->rows;
            int scores = turn->sample == 0 && row_asked(turn->request, position);
            if (scores) {
                step->score_asks[step->score_count++] = (Ask){read->T, turn, position};
                step->ids_room += (size_t)ask_ids(&step->score_asks[step->score_count - 1]);
            }
            if (last && turn->draws)
                step->draw_asks[step->draw_count++] = (Ask){read->T, turn, position};
            if (scores || (last && turn->draws)) step->read_rows[read->T++] = row;
        }
        read->segments =
            segment_add(step->read_segments, read->segments, spec->adapter, first, read->T - first);
        if (spec->topk_prompt > step->top) step->top = spec->topk_prompt;
        if (spec->topk_sample > step->top) step->top = spec->topk_sample;
    }
    step->T = row;
    all->segment = step->segments;
    read->segment = step->read_segments;
    int asks = step->draw_count > step->score_count ? step->draw_count : step->score_count;
    step->chunk = asks < most ? asks : most;
    if (step->ids_room < (size_t)step->chunk) step->ids_room = (size_t)step->chunk;
}

/* ---- running the transformer ---- */

/* Where each list of layers finds the rows' pages. */
static void sample_tables(SampleStep *step)
{
    const Kv *kv = &step->runner->kv;
    Span *span = step->spans;
    int32_t *slot = step->slot;
    int used = 0;
    for (int list = 0; list < step->lists; list++)
        for (int i = 0, row = 0; i < step->count; row += step->turns[i++].rows, span++) {
            const Turn *turn = &step->turns[i];
            const Sequence *s = turn_sequence(turn);
            *span = (Span){row, turn->rows, turn->from, 0, s->state.slot};
            used = table_add(kv, &s->pages, list, step->page, used, &span->first);
            for (int j = 0; j < turn->rows; j++)
                *slot++ = table_slot(kv, &s->pages, list, turn->from + j);
        }
}

static Status sample_forward(SampleStep *step)
{
    ModelRunner *runner = step->runner;
    int32_t tokens[STEP_ROWS] = {0}, pos[STEP_ROWS] = {0};
    for (int i = 0, row = 0; i < step->count; i++) {
        const Turn *turn = &step->turns[i];
        for (int j = 0; j < turn->rows; j++, row++) {
            tokens[row] = turn_sequence(turn)->tokens.ids[turn->from + j];
            pos[row] = turn->from + j;
        }
    }
    sample_tables(step);
    BatchHost host = {step->T, step->count, step->lists, step->pages, tokens,
                      pos,     step->slot,  step->page,  step->spans};
    batch_upload(&step->batch, runner->model->dev, &host);
    step->batch.stop = &runner->interrupted;
    if (step->read.T < step->T) {
        Device *d = runner->model->dev;
        d->upload(d, step->read.rows, step->read_rows, (size_t)step->read.T * sizeof(int32_t));
        step->batch.read = &step->read;
    }
    forward(runner->model, &step->batch, &step->acts, &runner->kv.cache);
    if (runner->interrupted) return fail(STATUS_INTERRUPTED, "sampling was interrupted");
    return STATUS_OK;
}

/* ---- the head ---- */

/* Logits of the rows that need them: each row's base product, then its own adapter's. */
static void ask_logits(SampleStep *step, const Ask *asks, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    int D = m->shape.width, V = m->shape.vocab;
    int32_t rows[STEP_ROWS] = {0};
    for (int i = 0; i < count; i++) rows[i] = asks[i].row;
    d->upload(d, step->rows, rows, (size_t)count * sizeof *rows);
    d->gather(d, step->x, step->acts.hidden, step->rows, count, D);
    d->head(d, step->logits, step->x, m->head, count, V, D);
    for (int i = 0, next; i < count; i = next) {
        const Adapter *adapter = asks[i].turn->request->spec.adapter;
        for (next = i + 1; next < count && asks[next].turn->request->spec.adapter == adapter;
             next++) {
        }
        if (!adapter || adapter->head.a < 0) continue;
        d->head_lora(d, step->logits + (size_t)i * (size_t)V,
                     real_at(d, step->s, (size_t)i * (size_t)adapter->rank),
                     real_at(d, step->x, (size_t)i * (size_t)D),
                     adapter->vector[WEIGHTS] + adapter->head.a,
                     adapter->vector[WEIGHTS] + adapter->head.b, next - i, V, D, adapter->rank,
                     adapter->scale);
    }
}

/* Logits of the rows at their draws' temperatures, and each row's lse. */
static void temper_logits(SampleStep *step, const Ask *asks, const Draw *draws, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    int32_t start[STEP_ROWS + 1] = {0}; /* no row scores an id */
    ask_logits(step, asks, count);
    d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
    d->upload(d, step->start, start, (size_t)(count + 1) * sizeof *start);
    d->temper(d, step->logits, step->draws, count, m->shape.vocab);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count,
               m->shape.vocab);
}

/* Copies the `top` best of the chunk's rows to the host. Some rows want fewer. */
static void tops_fetch(SampleStep *step, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    size_t n = (size_t)count * (size_t)step->top;
    d->topk_logprob(d, step->top_ids, step->top_logp, step->logits, step->lse, count,
                    m->shape.vocab, step->top);
    d->download(d, step->told.top_ids, step->top_ids, n * sizeof(int32_t));
    d->download(d, step->told.top_logp, step->top_logp, n * sizeof(float));
}

/* ---- scores of prompts ---- */

/* The ids that a chunk of prompt rows scores. Drawn ids are added later. */
static void score_ids(SampleStep *step, const Ask *asks, int count)
{
    Told *told = &step->told;
    told->start[0] = 0;
    for (int i = 0; i < count; i++) {
        const Turn *turn = asks[i].turn;
        const RequestSpec *spec = &turn->request->spec;
        int32_t *ids = told->ids + told->start[i];
        int targets = row_targets(spec, asks[i].position);
        ids[0] = turn_sequence(turn)->tokens.ids[asks[i].position + 1];
        if (targets)
            memcpy(ids + 1, spec->targets + spec->starts[asks[i].position],
                   (size_t)targets * sizeof *ids);
        told->start[i + 1] = told->start[i] + ask_ids(&asks[i]);
    }
}

/* Draws the tokens that are wanted at prompt positions, at the requests' temperatures, into the
 * ends of their rows' ids. */
static Status draw_prompt(SampleStep *step, const Ask *asks, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    int32_t ids[STEP_ROWS] = {0};
    Draw draws[STEP_ROWS] = {0};
    int most = 0;
    for (int i = 0; i < count; i++) {
        const RequestSpec *spec = &asks[i].turn->request->spec;
        draws[i] = (Draw){.seed = spec->seed,
                          .pos = (uint32_t)asks[i].position,
                          .temperature = spec->temperature,
                          .top_p = 1.0f,
                          .top_k = -1};
        if (spec->draws > most) most = spec->draws;
    }
    if (!most) return STATUS_OK;
    temper_logits(step, asks, draws, count);
    for (int j = 0; j < most; j++) {
        for (int i = 0; i < count; i++) draws[i].sample = (uint32_t)j;
        d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
        d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count,
                  m->shape.vocab);
        d->download(d, ids, step->ids, (size_t)count * sizeof *ids);
        TRY(d->sync(d));
        for (int i = 0; i < count; i++) {
            int k = asks[i].turn->request->spec.draws;
            if (j < k) step->told.ids[step->told.start[i + 1] - k + j] = ids[i];
        }
    }
    return STATUS_OK;
}

/* Copies a chunk's log-probabilities into the arrays of their requests. */
static void keep_scores(const SampleStep *step, const Ask *asks, int count)
{
    const Told *told = &step->told;
    for (int i = 0; i < count; i++) {
        Request *r = asks[i].turn->request;
        int at = asks[i].position, targets = row_targets(&r->spec, at), k = r->spec.draws;
        size_t drawn = (size_t)at * (size_t)k, best = (size_t)r->spec.topk_prompt;
        scores_look(r, told->logp + told->start[i], (size_t)(told->start[i + 1] - told->start[i]));
        const int32_t *ids = told->ids + told->start[i] + 1;
        const float *logp = told->logp + told->start[i] + 1;
        r->prompt_logprobs[at + 1] = logp[-1];
        r->scored = at + 1;
        if (targets)
            memcpy(r->target_logprobs + r->spec.starts[at], logp, (size_t)targets * sizeof *logp);
        memcpy(r->drawn_ids + drawn, ids + targets, (size_t)k * sizeof *ids);
        memcpy(r->drawn_logprobs + drawn, logp + targets, (size_t)k * sizeof *logp);
        size_t row = (size_t)i * (size_t)step->top, to = ((size_t)at + 1) * best;
        memcpy(r->top_ids + to, told->top_ids + row, best * sizeof *told->top_ids);
        memcpy(r->top_logprobs + to, told->top_logp + row, best * sizeof *told->top_logp);
    }
}

/* Log-probabilities at temperature 1 in prompts' rows. After draws the logits are computed again,
 * because a draw scales them by its temperature. */
static Status score_chunk(SampleStep *step, const Ask *asks, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    Told *told = &step->told;
    int wanted = 0;
    for (int i = 0; i < count; i++) wanted |= asks[i].turn->request->spec.topk_prompt;
    score_ids(step, asks, count);
    TRY(draw_prompt(step, asks, count));
    size_t total = (size_t)told->start[count];
    ask_logits(step, asks, count);
    d->upload(d, step->ids, told->ids, total * sizeof *told->ids);
    d->upload(d, step->start, told->start, (size_t)(count + 1) * sizeof *told->start);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count,
               m->shape.vocab);
    d->download(d, told->logp, step->logp, total * sizeof *told->logp);
    if (wanted) tops_fetch(step, count);
    TRY(d->sync(d));
    if (!step->rehearsing) keep_scores(step, asks, count);
    return STATUS_OK;
}

/* ---- the next tokens ---- */

/* Draws the tokens of the asks [first, first + count). */
static void draw_chunk(SampleStep *step, int first, int count)
{
    const Model *m = step->runner->model;
    Device *d = m->dev;
    const Ask *asks = step->draw_asks + first;
    Draw draws[STEP_ROWS] = {0};
    int wanted = 0;
    for (int i = 0; i < count; i++) {
        draws[i] = sequence_draw(asks[i].turn);
        wanted |= asks[i].turn->request->spec.topk_sample;
    }
    temper_logits(step, asks, draws, count);
    d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count,
              m->shape.vocab);
    d->download(d, step->drawn + first, step->ids, (size_t)count * sizeof *step->drawn);
    d->download(d, step->drawn_logp + first, step->logp, (size_t)count * sizeof(float));
    if (wanted) tops_fetch(step, count);
    for (int i = 0; i < count && wanted && !step->rehearsing; i++) {
        const RequestSpec *spec = &asks[i].turn->request->spec;
        size_t from = (size_t)i * (size_t)step->top;
        sequence_take_top(turn_sequence(asks[i].turn), spec->topk_sample, step->told.top_ids + from,
                          step->told.top_logp + from);
    }
}

/* ---- a step ---- */

static int chunk_at(const SampleStep *step, int first, int count)
{
    return count - first < step->chunk ? count - first : step->chunk;
}

static Status sample_work(SampleStep *step)
{
    Device *dev = step->runner->model->dev;
    TRY(sample_forward(step));
    for (int i = 0; i < step->score_count; i += step->chunk)
        TRY(score_chunk(step, step->score_asks + i, chunk_at(step, i, step->score_count)));
    for (int i = 0; i < step->draw_count; i += step->chunk)
        draw_chunk(step, i, chunk_at(step, i, step->draw_count));
    return dev->sync(dev);
}

/* The same on a device that rehearses. Where the rehearsal is interrupted, the real step is too. */
static void sample_rehearse(void *context)
{
    SampleStep *step = context;
    step->rehearsing = 1;
    sample_work(step);
    step->rehearsing = 0;
}

static Status sample_all(SampleStep *step)
{
    ModelRunner *runner = step->runner;
    int rank = 1;
    for (int i = 0; i < step->count; i++) {
        const Adapter *adapter = step->turns[i].request->spec.adapter;
        if (adapter && adapter->rank > rank) rank = adapter->rank;
    }
    sample_plan(step);
    TRY(sample_host(step));
    Arena measure = {.dev = runner->model->dev};
    step->acts.layer = runner->layers;
    sample_place(step, &measure, rank);
    TRY(arena_reserve(&runner->arena, measure.used, "a sampling step"));
    sample_place(step, &runner->arena, rank);
    TRY(device_prepare(runner->model->dev, sample_rehearse, step));
    return sample_work(step);
}

/* The sequences do not change until all of a step's work is done. */
Status model_runner_step(ModelRunner *runner, const Turn *turns, int count, StepResult *result)
{
    SampleStep *step = malloc(sizeof *step);
    if (!step) return fail(STATUS_MEMORY, "no memory for a sampling step");
    *step = (SampleStep){.runner = runner, .turns = turns, .count = count};
    Status status = sample_all(step);
    if (!status) turns_cached(&runner->kv, turns, count);
    for (int i = 0; i < step->draw_count && !status; i++)
        sequence_take_token(&runner->kv, result, step->draw_asks[i].turn, step->drawn[i],
                            step->drawn_logp[i]);
    free(step->spans);
    free(step);
    return status;
}
