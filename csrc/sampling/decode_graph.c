/* sampling/decode_graph.c - decode steps: every sequence runs one row and draws one token. A step
 * is recorded once, then replayed (a CUDA graph, on a GPU).
 *
 * Such a step does the same work on the same addresses for any sequences, if it has the same number
 * of rows. So it is padded to a power of two with rows of token 0, in a cache page that no sequence
 * has, with a greedy draw that is not read. All that differs between steps is one block, uploaded
 * first. The ops are batch-invariant, so the tokens equal those of the other path, bit for bit. A
 * token then costs one upload, one replay and one download, instead of launching some 15 ops per
 * layer.
 *
 * A recording is of one device: with several stages no step is recorded. It belongs to a number of
 * rows, an adapter (or none) and an arena. It reads weights in place, so it sees them change. Steps
 * that mix adapters are not recorded: training loops sample from one. A new kind of step first runs
 * unrecorded, which loads everything that is loaded on first use. It is recorded the second time.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

#include "../model/stages.h"
#include "decode_graph.h"
#include "page_table.h"

typedef struct Decode {
    DecodeGraphs *graphs;
    ModelRunner *runner;
    const Adapter *adapter;
    int rows, pages; /* of the recording; entries of the longest table of pages */
    Batch batch;
    Segment segment;
    Draw *draws;
    int32_t *start, *ids;
    Acts acts;
    real *s;
    float *logits, *lse, *logp;
} Decode;

int decode_shares(const RequestSpec *spec, const Adapter *adapter)
{
    return !spec->topk_sample && spec->adapter == adapter;
}

int decode_records(const ScheduledRows *runs, int count)
{
    if (!count) return 0;
    for (int i = 0; i < count; i++) {
        const RequestSpec *spec = sequence_spec(runs[i].sequence);
        if (runs[i].rows != 1 || !runs[i].draws) return 0;
        if (runs[i].sequence->tokens.ids[runs[i].from] < 0) return 0; /* an image's last row */
        if (!decode_shares(spec, sequence_spec(runs[0].sequence)->adapter)) return 0;
    }
    return 1;
}

/* ---- memory ---- */

/* The uploaded block, with the same layout on the device and on the host. */
static void inputs_place(Decode *d, Arena *arena)
{
    d->draws = arena_take(arena, (size_t)d->rows * sizeof *d->draws);
    d->start = arena_take(arena, (size_t)(d->rows + 1) * sizeof *d->start);
    const Lists *lists = &d->runner->pool.lists;
    batch_place_on(&d->batch, arena, d->rows, d->rows, lists->full + lists->windowed, d->pages,
                   d->runner->model->shape.axes);
}

static void decode_place(Decode *d, Arenas *arenas)
{
    Arena *arena = &arenas->of[0];
    const Model *m = d->runner->model;
    int rank = d->adapter ? d->adapter->rank : 1, most = head_rows(m);
    size_t B = (size_t)d->rows, C = (size_t)(d->rows < most ? d->rows : most);
    inputs_place(d, arena);
    acts_place(&d->acts, arenas, m, d->rows, rank, 0);
    d->s = arena_take(arena, C * (size_t)rank * m->dev->real_bytes);
    d->logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    d->lse = arena_take(arena, 2 * C * sizeof(float));
    d->ids = arena_take(arena, B * (sizeof(int32_t) + sizeof(float)));
    d->logp = (float *)(d->ids + d->rows);
}

/* Fills the host's copy of the inputs; returns how many bytes of it are used. */
static size_t inputs_fill(Decode *d, Arena *host, const ScheduledRows *runs, int count)
{
    Decode to = *d;
    inputs_place(&to, host);
    const PagePool *pool = &d->runner->pool;
    int32_t used = 1, padding = pool->frames;
    int axes = pool->model->shape.axes;
    for (int i = 0; i < d->rows; i++) {
        const ScheduledRows *run = &runs[i];
        to.draws[i] = i < count ? sequence_draw(run->sequence, run->from) : (Draw){.top_p = 1.0f};
        int32_t *pos = to.batch.pos + i * axes;
        for (int a = 0; a < axes; a++) pos[a] = 0;
        if (i < count) sequence_position(pos, run->sequence, run->from, axes);
        to.batch.tokens[i] = i < count ? run->sequence->tokens.ids[run->from] : 0;
    }
    to.batch.pages[0] = padding;
    for (int list = 0; list < to.batch.lists; list++) {
        int32_t *slot = to.batch.slot + list * d->rows;
        Span *spans = to.batch.spans + list * d->rows;
        for (int i = 0; i < count; i++) {
            const Sequence *s = runs[i].sequence;
            slot[i] = page_table_slot(pool, &s->pages, list, runs[i].from);
            spans[i] = (Span){i, 1, runs[i].from, 0, s->state.slot};
            used = page_table_write(pool, &s->pages, list, to.batch.pages, used, &spans[i].first);
        }
        for (int i = count; i < d->rows; i++) {
            slot[i] = padding * KV_PAGE;
            spans[i] = (Span){i, 1, 0, 0, -1};
        }
    }
    for (int i = 0; i <= d->rows; i++) to.start[i] = 0;
    assert(used <= d->pages);
    return (size_t)((char *)(to.batch.pages + used) - host->base);
}

static Status inputs_upload(Decode *d, const ScheduledRows *runs, int count)
{
    DecodeGraphs *graphs = d->graphs;
    Device *dev = d->runner->model->dev;
    Arena host = {.base = graphs->inputs, .size = graphs->inputs_size}, measure = {.dev = dev};
    Decode sizes = *d;
    inputs_place(&sizes, &measure);
    if (measure.used > host.size) {
        char *inputs = realloc(graphs->inputs, measure.used);
        if (!inputs) return fail(STATUS_MEMORY, "no memory for a decoding step");
        host.base = graphs->inputs = inputs;
        host.size = graphs->inputs_size = measure.used;
    }
    size_t bytes = inputs_fill(d, &host, runs, count);
    dev->upload(dev, d->draws, graphs->inputs, bytes);
    return STATUS_OK;
}

/* ---- the work ---- */

static void decode_work(void *context)
{
    const Decode *d = context;
    const Model *m = d->runner->model;
    Device *dev = m->dev;
    int D = m->shape.width, V = m->shape.vocab, most = head_rows(m);
    forward(m, &d->batch, &d->acts, d->runner->pool.cache);
    for (int row = 0, rows; row < d->rows; row += rows) {
        rows = d->rows - row < most ? d->rows - row : most;
        const real *x = real_at(dev, d->acts.hidden, (size_t)row * (size_t)D);
        rows_logits(m, d->adapter, d->logits, d->s, x, rows);
        dev->temper(dev, d->logits, d->draws + row, rows, V);
        dev->logprob(dev, d->lse, d->logp + row, d->logits, d->ids + row, d->start, rows, V);
        dev->sample(dev, d->ids + row, d->logp + row, d->logits, d->lse, d->draws + row, rows, V);
    }
}

/* ---- recordings ---- */

static void recording_close(Device *dev, Recording *r)
{
    if (r->graph) dev->graph_close(dev, r->graph);
    *r = (Recording){0};
}

/* The recording of this work; a new one replaces the least recently used. */
static Recording *recording_of(const Decode *d)
{
    const void *base = d->runner->arenas.of[0].base;
    uint64_t adapter = d->adapter ? d->adapter->number : 0;
    Recording *oldest = &d->graphs->recording[0];
    for (int i = 0; i < RECORDINGS; i++) {
        Recording *r = &d->graphs->recording[i];
        if (r->used && r->rows == d->rows && r->adapter == adapter && r->base == base) return r;
        if (r->used < oldest->used) oldest = r;
    }
    recording_close(d->runner->model->dev, oldest);
    *oldest = (Recording){.rows = d->rows, .adapter = adapter, .base = base};
    return oldest;
}

/* Replays recorded work. Work that ran before is recorded; new work only runs. */
static Status decode_run(Decode *d)
{
    Device *dev = d->runner->model->dev;
    Recording *r = recording_of(d);
    int again = r->used != 0;
    r->used = ++d->graphs->steps;
    if (!r->graph || !dev->replay(dev, r->graph)) {
        if (r->graph) dev->graph_close(dev, r->graph);
        r->graph = NULL;
        TRY(device_prepare(dev, decode_work, d));
        if (!again) {
            decode_work(d);
            return STATUS_OK;
        }
        TRY(dev->record(dev));
        decode_work(d);
        TRY(dev->recorded(dev, &r->graph));
        dev->replay(dev, r->graph);
    }
    d->graphs->replays++;
    return STATUS_OK;
}

/* The most frames of one sequence, in all lists. */
static int frames_limit(const PagePool *pool)
{
    int longest = pool->model->shape.context / KV_PAGE + 1,
        window = budget_window_pages(pool->model, 1);
    if (longest > pool->longest) longest = pool->longest;
    if (window > longest) window = longest;
    return pool->lists.full * longest + pool->lists.windowed * window;
}

Status decode_step(DecodeGraphs *graphs, ModelRunner *runner, const ScheduledRows *runs, int count,
                   StepResult *result)
{
    Device *dev = runner->model->dev;
    int rows = 1, ids[STEP_SEQUENCES * 2];
    while (rows < count) rows *= 2;
    Decode d = {graphs, runner, sequence_spec(runs[0].sequence)->adapter, .rows = rows};
    d.pages = rows * frames_limit(&runner->pool) + 1;
    d.acts.layer = runner->layers;
    d.segment = (Segment){d.adapter, 0, rows};
    d.batch.segment = &d.segment;
    d.batch.segments = 1;
    Arenas measured = {0};
    decode_place(&d, &measured);
    char purpose[64];
    snprintf(purpose, sizeof purpose, "a decoding step of %d sequences", rows);
    TRY(arenas_reserve(runner->model, &runner->arenas, &measured, purpose));
    decode_place(&d, &runner->arenas);
    TRY(inputs_upload(&d, runs, count));
    TRY(decode_run(&d));
    dev->download(dev, ids, d.ids, (size_t)rows * 2 * sizeof *ids);
    TRY(dev->sync(dev));
    sequences_advance(&runner->pool, runs, count);
    const float *logp = (const float *)(const void *)(ids + rows);
    for (int i = 0; i < count; i++)
        sequence_append(&runner->pool, result, runs[i].sequence, ids[i], logp[i]);
    return STATUS_OK;
}

void decode_close(DecodeGraphs *graphs, Device *dev)
{
    for (int i = 0; i < RECORDINGS; i++) recording_close(dev, &graphs->recording[i]);
    free(graphs->inputs);
}
