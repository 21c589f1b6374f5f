/* sample/sampler.c - continuous batching: one forward a step for all sequences that want a token or
 * a prompt.
 *
 * The rows of a step are those of the trainer's forward, op for op, and no op lets a row see its
 * neighbours in the batch, so a token's log-probability is the trainer's, whoever else was decoded
 * with it. Logits exist for a chunk of rows at a time, also where a prompt's log-probabilities are
 * asked for. Steps that only decode are decode.c's, where the device records them. */
#include "sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening and closing ---- */

Status sampler_open(Sampler **out, Model *model, int64_t tokens, int limit_ids)
{
    if (!model->sealed)
        return fail(STATUS_INVALID, "the model is not sealed: load every slot, then seal it");
    if (tokens < 0 || tokens > CACHE_TOKENS_MAX)
        return fail(STATUS_INVALID, "the cache can hold 0 (the default) to %d tokens, not %lld",
                    CACHE_TOKENS_MAX, (long long)tokens);
    if (limit_ids < 0 || limit_ids > model->shape.vocab)
        return fail(STATUS_INVALID, "vocab_limit must be 0 (all) to %d, not %d", model->shape.vocab,
                    limit_ids);
    Sampler *sampler = calloc(1, sizeof *sampler);
    if (!sampler) return fail(STATUS_MEMORY, "no memory for a sampler");
    sampler->model = model;
    sampler->arena.dev = model->dev;
    sampler->graphs = model->dev->record != NULL;
    sampler->limit_ids = limit_ids ? limit_ids : model->shape.vocab;
    if (!tokens) tokens = budget_cache_tokens(model, 0, 0);
    sampler->layers = calloc((size_t)model->shape.layers, sizeof *sampler->layers);
    sampler->drawn = calloc(STEP_SEQUENCES, sizeof *sampler->drawn);
    Status status = sampler->layers && sampler->drawn
                        ? kv_open(&sampler->kv, model, tokens)
                        : fail(STATUS_MEMORY, "no memory for a sampler");
    if (status) {
        sampler_close(sampler);
        return status;
    }
    *out = sampler;
    return STATUS_OK;
}

void sampler_close(Sampler *sampler)
{
    if (!sampler) return;
    for (int i = 0; i < sampler->count; i++) request_close(sampler, sampler->request[i]);
    line_close(&sampler->line);
    decode_close(sampler);
    free(sampler->request);
    free(sampler->layers);
    free(sampler->drawn);
    arena_release(&sampler->arena);
    kv_close(&sampler->kv);
    free(sampler);
}

/* ---- a step's memory ---- */

/* One row of the head: what is asked of it. */
typedef struct Ask {
    int row; /* in the batch */
    const Turn *turn;
    int position; /* of the row in its sequence */
} Ask;

typedef struct Step {
    Sampler *sampler;
    Turn turns[STEP_SEQUENCES];
    int count, T, pages, chunk, top;
    size_t ids_room; /* ids that a chunk may score */
    Batch batch;
    Acts acts;
    real *x, *s;
    float *logits, *lse, *logp, *top_logp;
    int32_t *rows, *start, *ids, *top_ids;
    Draw *draws;
    Segment segments[STEP_SEQUENCES];
    Ask draw_asks[STEP_SEQUENCES], score_asks[STEP_ROWS];
    int draw_count, score_count;
} Step;

static void step_place(Step *step, Arena *arena, int rank)
{
    const Model *m = step->sampler->model;
    size_t C = (size_t)step->chunk, size = m->dev->real_bytes, top = C * (size_t)step->top;
    batch_place(&step->batch, arena, step->T, step->count, step->pages);
    acts_place(&step->acts, arena, m, step->T, rank, 0);
    step->x = arena_take(arena, C * (size_t)m->shape.width * size);
    step->s = arena_take(arena, C * (size_t)rank * size);
    step->logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    step->lse = arena_take(arena, C * sizeof(float));
    step->logp = arena_take(arena, step->ids_room * sizeof(float));
    step->ids = arena_take(arena, step->ids_room * sizeof(int32_t));
    step->rows = arena_take(arena, C * sizeof(int32_t));
    step->start = arena_take(arena, (C + 1) * sizeof(int32_t));
    step->draws = arena_take(arena, C * sizeof(Draw));
    step->top_ids = arena_take(arena, top * sizeof(int32_t));
    step->top_logp = arena_take(arena, top * sizeof(float));
}

/* Ids whose log-probabilities a prompt's row gives: its own next token's, those of the request's
 * lists, and those that are drawn. */
static int ask_ids(const Ask *ask)
{
    const RequestSpec *spec = &ask->turn->request->spec;
    return 1 + row_targets(spec, ask->position) + spec->draws;
}

/* What the step's turns ask of the head, how many pages they have, and their segments. */
static void step_plan(Step *step)
{
    int row = 0, segments = 0, most = head_rows(step->sampler->model);
    step->T = step->pages = step->draw_count = step->score_count = step->top = 0;
    step->ids_room = 0;
    for (int i = 0; i < step->count; i++) {
        const Turn *turn = &step->turns[i];
        const RequestSpec *spec = &turn->request->spec;
        step->pages += turn->request->sequence[turn->sample].page_count;
        if (segments && step->segments[segments - 1].adapter == spec->adapter)
            step->segments[segments - 1].rows += turn->rows;
        else
            step->segments[segments++] = (Segment){spec->adapter, row, turn->rows};
        for (int j = 0; j < turn->rows; j++, row++) {
            int position = turn->from + j, last = position + 1 == turn->from + turn->rows;
            if (turn->sample == 0 && row_asked(turn->request, position)) {
                step->score_asks[step->score_count++] = (Ask){row, turn, position};
                step->ids_room += (size_t)ask_ids(&step->score_asks[step->score_count - 1]);
            }
            if (last && turn->draws)
                step->draw_asks[step->draw_count++] = (Ask){row, turn, position};
        }
        if (spec->topk_prompt > step->top) step->top = spec->topk_prompt;
        if (spec->topk_sample > step->top) step->top = spec->topk_sample;
    }
    step->T = row;
    step->batch.segment = step->segments;
    step->batch.segments = segments;
    int asks = step->draw_count > step->score_count ? step->draw_count : step->score_count;
    step->chunk = asks < most ? asks : most;
    if (step->ids_room < (size_t)step->chunk) step->ids_room = (size_t)step->chunk;
}

/* ---- running the transformer ---- */

static Status step_forward(Step *step)
{
    Sampler *sampler = step->sampler;
    int32_t tokens[STEP_ROWS] = {0}, pos[STEP_ROWS] = {0}, slot[STEP_ROWS] = {0};
    Span spans[STEP_SEQUENCES] = {0};
    int32_t *pages = malloc((size_t)step->pages * sizeof *pages);
    if (!pages) return fail(STATUS_MEMORY, "no memory for a step's %d cache pages", step->pages);
    int row = 0, first = 0;
    for (int i = 0; i < step->count; i++) {
        const Turn *turn = &step->turns[i];
        const Sequence *s = &turn->request->sequence[turn->sample];
        spans[i] = (Span){row, turn->rows, turn->from, first};
        for (int j = 0; j < turn->rows; j++, row++) {
            int at = turn->from + j;
            tokens[row] = s->tokens[at];
            pos[row] = at;
            slot[row] = s->pages[at / KV_PAGE] * KV_PAGE + at % KV_PAGE;
        }
        memcpy(pages + first, s->pages, (size_t)s->page_count * sizeof *pages);
        first += s->page_count;
    }
    BatchHost host = {step->T, step->count, step->pages, tokens, pos, slot, pages, spans};
    batch_upload(&step->batch, sampler->model->dev, &host);
    step->batch.stop = &sampler->interrupted;
    forward(sampler->model, &step->batch, &step->acts, &sampler->kv.cache);
    free(pages);
    if (sampler->interrupted) return fail(STATUS_INTERRUPTED, "sampling was interrupted");
    return STATUS_OK;
}

/* ---- the head ---- */

/* Logits of the rows that are asked for: each row's base product, then its own adapter's. */
static void ask_logits(Step *step, const Ask *asks, int count)
{
    const Model *m = step->sampler->model;
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

/* The k best of the first `width` of a row, into a request's arrays. */
static void keep_top(const Step *step, const int32_t *ids, const float *logp, int row, int k,
                     int32_t *to_ids, float *to_logp)
{
    memcpy(to_ids, ids + (size_t)row * (size_t)step->top, (size_t)k * sizeof *to_ids);
    memcpy(to_logp, logp + (size_t)row * (size_t)step->top, (size_t)k * sizeof *to_logp);
}

/* The K best of the chunk's rows: host copies, (count, top), for the caller to free; NULL if none
 * are asked for. */
static Status ask_top(Step *step, int count, int wanted, int32_t **ids, float **logp)
{
    *ids = NULL;
    *logp = NULL;
    if (!wanted) return STATUS_OK;
    const Model *m = step->sampler->model;
    Device *d = m->dev;
    size_t n = (size_t)count * (size_t)step->top;
    *ids = malloc(n * (sizeof **ids + sizeof **logp));
    if (!*ids) return fail(STATUS_MEMORY, "no memory for %zu top log-probabilities", n);
    *logp = (float *)(*ids + n);
    d->topk_logprob(d, step->top_ids, step->top_logp, step->logits, step->lse, count,
                    m->shape.vocab, step->top);
    TRY(d->sync(d));
    d->download(d, *ids, step->top_ids, n * sizeof **ids);
    d->download(d, *logp, step->top_logp, n * sizeof **logp);
    return STATUS_OK;
}

/* What a chunk of prompt rows scores: row i has ids [start[i], start[i + 1]). */
typedef struct Scores {
    int32_t start[STEP_ROWS + 1], *ids;
    float *logp;
} Scores;

/* Draws the tokens that are asked for at prompt positions, at the requests' temperatures, into the
 * ends of their rows' ids. */
static Status draw_prompt(Step *step, const Ask *asks, int count, Scores *scores)
{
    const Model *m = step->sampler->model;
    Device *d = m->dev;
    int32_t ids[STEP_ROWS] = {0}, start[STEP_ROWS + 1] = {0};
    Draw draws[STEP_ROWS] = {0};
    int most = 0;
    for (int i = 0; i < count; i++) {
        const RequestSpec *spec = &asks[i].turn->request->spec;
        draws[i] = (Draw){.seed = spec->seed,
                          .pos = (uint32_t)asks[i].position,
                          .temperature = spec->temperature,
                          .top_p = 1.0f,
                          .top_k = -1,
                          .limit = step->sampler->limit_ids};
        if (spec->draws > most) most = spec->draws;
    }
    if (!most) return STATUS_OK;
    ask_logits(step, asks, count);
    d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
    d->upload(d, step->start, start, (size_t)(count + 1) * sizeof *start);
    d->temper(d, step->logits, step->draws, count, m->shape.vocab);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count,
               m->shape.vocab);
    for (int j = 0; j < most; j++) {
        for (int i = 0; i < count; i++) draws[i].sample = (uint32_t)j;
        d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
        d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count,
                  m->shape.vocab);
        TRY(d->sync(d));
        d->download(d, ids, step->ids, (size_t)count * sizeof *ids);
        for (int i = 0; i < count; i++) {
            int k = asks[i].turn->request->spec.draws;
            if (j < k) scores->ids[scores->start[i + 1] - k + j] = ids[i];
        }
    }
    return STATUS_OK;
}

/* A chunk's log-probabilities into the arrays of their requests. */
static void keep_scores(const Ask *asks, int count, const Scores *scores)
{
    for (int i = 0; i < count; i++) {
        Request *r = asks[i].turn->request;
        int at = asks[i].position, targets = row_targets(&r->spec, at), k = r->spec.draws;
        const int32_t *ids = scores->ids + scores->start[i] + 1;
        const float *logp = scores->logp + scores->start[i] + 1;
        r->prompt_logprobs[at + 1] = logp[-1];
        r->scored = at + 1;
        if (targets)
            memcpy(r->target_logprobs + r->spec.starts[at], logp, (size_t)targets * sizeof *logp);
        memcpy(r->drawn_ids + (size_t)at * (size_t)k, ids + targets, (size_t)k * sizeof *ids);
        memcpy(r->drawn_logprobs + (size_t)at * (size_t)k, logp + targets,
               (size_t)k * sizeof *logp);
    }
}

/* Log-probabilities at temperature 1 in prompts' rows; the logits are made anew after draws, which
 * temper them. */
static Status score_rows(Step *step, const Ask *asks, int count, Scores *scores)
{
    const Model *m = step->sampler->model;
    Device *d = m->dev;
    size_t total = (size_t)scores->start[count];
    int32_t *top_ids;
    float *top_logp;
    int wanted = 0;
    for (int i = 0; i < count; i++) {
        const Turn *turn = asks[i].turn;
        const RequestSpec *spec = &turn->request->spec;
        int32_t *ids = scores->ids + scores->start[i];
        int targets = row_targets(spec, asks[i].position);
        ids[0] = turn->request->sequence[turn->sample].tokens[asks[i].position + 1];
        if (targets)
            memcpy(ids + 1, spec->targets + spec->starts[asks[i].position],
                   (size_t)targets * sizeof *ids);
        wanted |= spec->topk_prompt;
    }
    TRY(draw_prompt(step, asks, count, scores));
    ask_logits(step, asks, count);
    d->upload(d, step->ids, scores->ids, total * sizeof *scores->ids);
    d->upload(d, step->start, scores->start, (size_t)(count + 1) * sizeof *scores->start);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count,
               m->shape.vocab);
    TRY(ask_top(step, count, wanted, &top_ids, &top_logp));
    TRY(d->sync(d));
    d->download(d, scores->logp, step->logp, total * sizeof *scores->logp);
    keep_scores(asks, count, scores);
    for (int i = 0; i < count; i++) {
        Request *r = asks[i].turn->request;
        size_t k = (size_t)r->spec.topk_prompt, at = (size_t)asks[i].position + 1;
        if (k)
            keep_top(step, top_ids, top_logp, i, (int)k, r->top_ids + at * k,
                     r->top_logprobs + at * k);
    }
    free(top_ids);
    return STATUS_OK;
}

static Status score_chunk(Step *step, const Ask *asks, int count)
{
    Scores scores = {.start = {0}};
    for (int i = 0; i < count; i++) scores.start[i + 1] = scores.start[i] + ask_ids(&asks[i]);
    size_t total = (size_t)scores.start[count];
    scores.ids = malloc(total * (sizeof *scores.ids + sizeof *scores.logp));
    if (!scores.ids) return fail(STATUS_MEMORY, "no memory for %zu log-probabilities", total);
    scores.logp = (float *)(scores.ids + total);
    Status status = score_rows(step, asks, count, &scores);
    free(scores.ids);
    return status;
}

static Status draw_chunk(Step *step, const Ask *asks, int count)
{
    Sampler *sampler = step->sampler;
    const Model *m = sampler->model;
    Device *d = m->dev;
    int32_t ids[STEP_ROWS] = {0}, start[STEP_ROWS + 1] = {0}, *top_ids;
    float logp[STEP_ROWS], *top_logp;
    Draw draws[STEP_ROWS] = {0};
    int wanted = 0;
    for (int i = 0; i < count; i++) {
        draws[i] = sequence_draw(sampler, asks[i].turn);
        wanted |= asks[i].turn->request->spec.topk_sample;
    }
    ask_logits(step, asks, count);
    d->upload(d, step->draws, draws, (size_t)count * sizeof *draws);
    d->upload(d, step->start, start, (size_t)(count + 1) * sizeof *start);
    d->temper(d, step->logits, step->draws, count, m->shape.vocab);
    d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, count,
               m->shape.vocab);
    d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, count,
              m->shape.vocab);
    TRY(ask_top(step, count, wanted, &top_ids, &top_logp));
    TRY(d->sync(d));
    d->download(d, ids, step->ids, (size_t)count * sizeof *ids);
    d->download(d, logp, step->logp, (size_t)count * sizeof *logp);
    for (int i = 0; i < count; i++) {
        Request *r = asks[i].turn->request;
        Sequence *s = &r->sequence[asks[i].turn->sample];
        size_t k = (size_t)r->spec.topk_sample, at = (size_t)s->drawn * k;
        if (k) keep_top(step, top_ids, top_logp, i, (int)k, s->top_ids + at, s->top_logprobs + at);
        sequence_take_token(sampler, asks[i].turn, ids[i], logp[i]);
    }
    free(top_ids);
    return STATUS_OK;
}

static void asks_rehearse(Step *step, const Ask *asks, int count)
{
    Device *d = step->sampler->model->dev;
    int V = step->sampler->model->shape.vocab;
    for (int i = 0, n; i < count; i += n) {
        n = count - i < step->chunk ? count - i : step->chunk;
        ask_logits(step, asks + i, n);
        d->temper(d, step->logits, step->draws, n, V);
        d->logprob(d, step->lse, step->logp, step->logits, step->ids, step->start, n, V);
        d->sample(d, step->ids, step->logp, step->logits, step->lse, step->draws, n, V);
        d->topk_logprob(d, step->top_ids, step->top_logp, step->logits, step->lse, n, V, step->top);
    }
}

/* All ops of a step, for a device that rehearses. */
static void step_rehearse(void *context)
{
    Step *step = context;
    forward(step->sampler->model, &step->batch, &step->acts, &step->sampler->kv.cache);
    asks_rehearse(step, step->score_asks, step->score_count);
    asks_rehearse(step, step->draw_asks, step->draw_count);
}

static Status step_run(Step *step)
{
    Sampler *sampler = step->sampler;
    int rank = 1;
    for (int i = 0; i < step->count; i++) {
        const Adapter *adapter = step->turns[i].request->spec.adapter;
        if (adapter && adapter->rank > rank) rank = adapter->rank;
    }
    step_plan(step);
    Arena measure = {.dev = sampler->model->dev};
    step->acts.layer = sampler->layers;
    step_place(step, &measure, rank);
    TRY(arena_reserve(&sampler->arena, measure.used, "a sampling step"));
    step_place(step, &sampler->arena, rank);
    TRY(device_prepare(sampler->model->dev, step_rehearse, step));
    TRY(step_forward(step));
    for (int i = 0; i < step->score_count; i += step->chunk)
        TRY(score_chunk(step, step->score_asks + i,
                        step->score_count - i < step->chunk ? step->score_count - i : step->chunk));
    turns_cached(sampler, step->turns, step->count);
    for (int i = 0; i < step->draw_count; i += step->chunk)
        TRY(draw_chunk(step, step->draw_asks + i,
                       step->draw_count - i < step->chunk ? step->draw_count - i : step->chunk));
    return sampler->model->dev->sync(sampler->model->dev);
}

static void mark_done(Sampler *sampler)
{
    for (int i = 0; i < sampler->count; i++) {
        Request *r = sampler->request[i];
        r->done = 1;
        for (int j = 0; j < r->spec.samples; j++) r->done &= r->sequence[j].ending != RUNNING;
    }
}

Status sampler_step(Sampler *sampler)
{
    sampler->drawn_count = 0;
    sampler->interrupted = 0;
    Step *step = malloc(sizeof *step);
    if (!step) return fail(STATUS_MEMORY, "no memory for a sampling step");
    *step = (Step){.sampler = sampler};
    step->count = schedule(sampler, step->turns);
    Status status = decode_fits(sampler, step->turns, step->count)
                        ? decode_step(sampler, step->turns, step->count)
                    : step->count ? step_run(step)
                                  : STATUS_OK;
    if (status) kv_forget(&sampler->kv); /* what the step left in its pages is not known */
    free(step);
    mark_done(sampler);
    return status;
}
