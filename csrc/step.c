/* step.c - forward_backward: datums → micro-batches → transformer → head in chunks → loss →
 * gradients.
 *
 * Datums are packed whole, in order, into micro-batches of at most step_tokens rows (a longer datum
 * gets one of its own); gradients add up. The head sees rows in chunks, so the N×V logits never
 * exist: logits of a chunk, log-probabilities, the loss of those targets, then logits turn into
 * their own gradient in place. A loss whose gradient is known beforehand (`linear`) is told at the
 * end, and the host waits once. A loss that needs whole datums is evaluated after the last chunk,
 * and the logits of each are computed once more, to the same bits, for their gradient. Rows that
 * the loss can't give a gradient (their weights are zero) come last and get no backward. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

/* A chunk of rows from its logits to their gradient. */
typedef struct Chunk {
    real *x, *s;         /* (C,D), (C,R) */
    float *logits, *lse; /* (C,V), (C) */
} Chunk;

/* What one micro-batch has on the device beyond Acts and Grads. */
typedef struct Head {
    Chunk chunk[2]; /* one after the other, where the host waits for one while the next is made */
    real *dx, *ds;  /* (C,D), (C,R) */
    int32_t *rows, *start,
        *ids;            /* (T), (T+1), (targets): in the order in which the head sees rows */
    float *logp, *dlogp; /* (targets) */
} Head;

/* One call under way: sizes of the micro-batch at hand, and host arrays that are large enough for
 * any. */
typedef struct Step {
    Adapter *adapter;
    const Datums *datums;
    const Loss *loss;
    int with_backward;
    int first, last;              /* datums of this micro-batch */
    int64_t token0, target0;      /* where theirs begin in the flat arrays */
    int T, S, pages, chunk, live; /* live: rows, first in order, that may have a gradient */
    int64_t targets;
    Batch batch;
    Acts acts;
    Grads grads;
    Head head;
    Cache cache;
    int32_t *pos, *slot, *page, *rows, *start, *ids,
        *source; /* host; source: flat index of each target */
    Span *spans;
    float *logp, *dlogp;              /* in the order of the head */
    float *input[LOSS_INPUTS], *flat; /* likewise, or of the datums if the loss is whole; flat: its
                                         d loss / d logp */
    double loss_sum, tokens, sequences;
} Step;

int head_rows(const Model *model)
{
    int64_t rows = ((int64_t)1 << 27) / ((int64_t)model->shape.vocab * 4); /* 128 MiB of logits */
    return rows < 32 ? 32 : rows > 512 ? 512 : (int)rows;
}

/* Whether the host needs a chunk's log-probabilities before its gradient can be computed. */
static int step_waits(const Step *step)
{
    const Loss *loss = step->loss; /* NULL: the plan of any */
    return step->with_backward && !(loss && (loss->linear || loss->whole));
}

/* By how many chunks the device then is ahead, so that it does not wait for the host: its logits
 * take 2·V·D flops a row, 100 µs and more a chunk, and the way to the host and back some 40. */
static int step_ahead(const Step *step)
{
    return step->adapter->model->dev->async && step_waits(step) && step->chunk < step->T;
}

/* ---- memory ---- */

static void step_place(Step *step, Arena *arena)
{
    const Model *m = step->adapter->model;
    const Shape *s = &m->shape;
    size_t size = m->dev->real_bytes, C = (size_t)step->chunk, T = (size_t)step->T,
           R = (size_t)step->adapter->rank;
    size_t targets = (size_t)step->targets;
    size_t page = (size_t)KV_PAGE * (size_t)s->kv_heads * (size_t)s->head_width;
    batch_place(&step->batch, arena, step->T, step->S, step->pages);
    step->cache.k = arena_take(arena, (size_t)step->pages * page * size);
    step->cache.v = arena_take(arena, (size_t)step->pages * page * size);
    acts_place(&step->acts, arena, m, step->T, step->adapter->rank, step->with_backward);
    if (step->with_backward) grads_place(&step->grads, arena, m, step->T, step->adapter->rank);
    Head *h = &step->head;
    for (int i = 0; i < 2; i++) {
        if (i > step_ahead(step)) {
            h->chunk[i] = h->chunk[0];
            break;
        }
        h->chunk[i].x = arena_take(arena, C * (size_t)s->width * size);
        h->chunk[i].s = arena_take(arena, C * R * size);
        h->chunk[i].logits = arena_take(arena, C * (size_t)s->vocab * sizeof(float));
        h->chunk[i].lse = arena_take(arena, C * sizeof(float));
    }
    h->dx = arena_take(arena, C * (size_t)s->width * size);
    h->ds = arena_take(arena, C * R * size);
    h->rows = arena_take(arena, T * sizeof(int32_t));
    h->start = arena_take(arena, (T + 1) * sizeof(int32_t));
    h->ids = arena_take(arena, targets * sizeof(int32_t));
    h->logp = arena_take(arena, targets * sizeof(float));
    h->dlogp = arena_take(arena, targets * sizeof(float));
}

/* ---- packing ---- */

/* Takes datums from `first` on until the rows are full; sets the sizes. */
static void step_take(Step *step, int first)
{
    const Datums *d = step->datums;
    step->first = step->last = first;
    step->T = step->S = step->pages = 0;
    step->targets = 0;
    while (step->last < d->count) {
        int length = d->lengths[step->last];
        if (step->T > 0 && step->T + length > step->adapter->step_tokens) break;
        step->T += length;
        step->pages += (length + KV_PAGE - 1) / KV_PAGE;
        step->targets += (int64_t)length * d->counts[step->last];
        step->S++;
        step->last++;
    }
    int most = head_rows(step->adapter->model);
    step->chunk = step->T < most ? step->T : most;
}

static void step_pack(Step *step)
{
    const Datums *d = step->datums;
    int row = 0, page = 0;
    for (int i = step->first; i < step->last; i++) {
        step->spans[i - step->first] = (Span){row, d->lengths[i], 0, page};
        for (int t = 0; t < d->lengths[i]; t++, row++) {
            step->pos[row] = t;
            step->slot[row] = page * KV_PAGE + t;
        }
        page += (d->lengths[i] + KV_PAGE - 1) / KV_PAGE;
    }
    for (int i = 0; i < step->pages; i++) step->page[i] = i;
    BatchHost host = {step->T,   step->S,    step->pages, d->tokens + step->token0,
                      step->pos, step->slot, step->page,  step->spans};
    batch_upload(&step->batch, step->adapter->model->dev, &host);
}

/* Whether the loss can give any of these targets a gradient. */
static int row_live(const Step *step, int64_t target, int count)
{
    if (step->loss->gate == UNGATED) return 1;
    const float *gate = step->datums->input[step->loss->gate];
    if (!gate) return 1;
    for (int k = 0; k < count; k++)
        if (gate[target + k] != 0.0f) return 1;
    return 0;
}

/* Lists rows and their targets in the order of the head: the live ones first. */
static void step_order(Step *step)
{
    const Datums *d = step->datums;
    int at = 0;
    int32_t next = 0;
    for (int live = 1; live >= 0; live--) {
        int64_t target = step->target0;
        int row = 0;
        for (int i = step->first; i < step->last; i++)
            for (int t = 0; t < d->lengths[i]; t++, row++, target += d->counts[i]) {
                if (row_live(step, target, d->counts[i]) != live) continue;
                step->rows[at] = row;
                step->start[at++] = next;
                for (int k = 0; k < d->counts[i]; k++, next++) {
                    int32_t source = (int32_t)(target - step->target0) + k;
                    int32_t to = step->loss->whole ? source : next;
                    step->source[next] = source;
                    step->ids[next] = d->targets[target + k];
                    for (int j = 0; j < LOSS_INPUTS && step->loss->input[j].name; j++)
                        step->input[j][to] = loss_input(step->loss, d, j, target + k);
                }
            }
        if (live) step->live = at;
    }
    step->start[at] = next;
    Device *dev = step->adapter->model->dev;
    dev->upload(dev, step->head.rows, step->rows, (size_t)step->T * sizeof(int32_t));
    dev->upload(dev, step->head.start, step->start, (size_t)(step->T + 1) * sizeof(int32_t));
    dev->upload(dev, step->head.ids, step->ids, (size_t)step->targets * sizeof(int32_t));
}

/* ---- the head ---- */

/* Log-probabilities of the targets of rows [row, row + rows) in head order, left in logits and lse
 * too. */
static void chunk_logits(Step *step, int row, int rows)
{
    Adapter *adapter = step->adapter;
    const Model *m = adapter->model;
    Device *d = m->dev;
    const Head *h = &step->head;
    const Chunk *c = &h->chunk[row / step->chunk % 2];
    int D = m->shape.width, V = m->shape.vocab, R = adapter->rank;
    const float *weights = adapter->vector[WEIGHTS];
    Pair pair = adapter->head;
    d->gather(d, c->x, step->acts.hidden, h->rows + row, rows, D);
    d->head(d, c->logits, c->x, m->head, rows, V, D);
    if (pair.a >= 0)
        d->head_lora(d, c->logits, c->s, c->x, weights + pair.a, weights + pair.b, rows, V, D, R,
                     adapter->scale);
    d->logprob(d, c->lse, h->logp, c->logits, h->ids, h->start + row, rows, V);
}

/* The gradient of those rows, out of the logits that chunk_logits has just left and of dlogp. */
static void chunk_backward(Step *step, int row, int rows)
{
    Adapter *adapter = step->adapter;
    const Model *m = adapter->model;
    Device *d = m->dev;
    const Head *h = &step->head;
    const Chunk *c = &h->chunk[row / step->chunk % 2];
    int D = m->shape.width, V = m->shape.vocab, R = adapter->rank;
    const float *weights = adapter->vector[WEIGHTS];
    float *fresh = adapter->vector[FRESH];
    Pair pair = adapter->head;
    real *dlogits = (real *)c->logits; /* in place */
    d->logprob_backward(d, dlogits, c->logits, c->lse, h->dlogp, h->ids, h->start + row, rows, V);
    d->linear_backward(d, h->dx, dlogits, m->head, rows, V, D, 0);
    if (pair.a >= 0)
        d->lora_backward(d, h->dx, fresh + pair.a, fresh + pair.b, h->ds, dlogits, c->x, c->s,
                         weights + pair.a, weights + pair.b, rows, V, D, R, adapter->scale);
    d->scatter(d, step->grads.dxn, h->dx, h->rows + row, rows, D);
}

/* All ops of a micro-batch, for a device that rehearses. */
static void step_rehearse(void *context)
{
    Step *step = context;
    const Model *m = step->adapter->model;
    forward(m, &step->batch, &step->acts, &step->cache);
    chunk_logits(step, 0, step->chunk);
    if (!step->with_backward) return;
    chunk_backward(step, 0, step->chunk);
    backward(m, step->adapter, &step->batch, &step->acts, &step->grads);
}

size_t step_bytes(Adapter *adapter, int T, size_t *scratch)
{
    const Model *model = adapter->model;
    LayerActs *layers = calloc((size_t)model->shape.layers, sizeof *layers);
    if (!layers) return 0;
    Segment segment = {adapter, 0, T};
    Step step = {.adapter = adapter,
                 .with_backward = 1,
                 .T = T,
                 .S = 1,
                 .pages = (T + KV_PAGE - 1) / KV_PAGE,
                 .chunk = T < head_rows(model) ? T : head_rows(model),
                 .targets = T,
                 .batch = {.segment = &segment, .segments = 1},
                 .acts.layer = layers};
    Arena arena = {.dev = model->dev};
    step_place(&step, &arena);
    *scratch = device_rehearse(model->dev, step_rehearse, &step);
    free(layers);
    return arena.used;
}

/* The loss of `count` targets whose inputs begin at `from`. */
static Status piece_loss(Step *step, int64_t from, int64_t count, const float *logp, float *dlogp)
{
    LossCall call = {.count = count, .logp = logp, .key = step->datums->key, .dlogp = dlogp};
    for (int j = 0; j < LOSS_INPUTS; j++)
        call.input[j] = step->input[j] ? step->input[j] + from : NULL;
    double loss = step->loss->evaluate(&call);
    if (!isfinite(loss))
        return fail(STATUS_NUMERIC,
                    "%s is not finite (%g) on this batch; nothing was added to the gradients",
                    step->loss->name, loss);
    step->loss_sum += loss;
    return STATUS_OK;
}

/* A whole loss, datum by datum; `logp` is in their order. */
static Status datums_loss(Step *step, const float *logp)
{
    Device *dev = step->adapter->model->dev;
    const Datums *d = step->datums;
    int64_t from = 0;
    for (int i = step->first; i < step->last; i++) {
        int64_t count = (int64_t)d->lengths[i] * d->counts[i];
        TRY(piece_loss(step, from, count, logp + from, step->flat + from));
        from += count;
    }
    for (int64_t i = 0; i < step->targets; i++) step->dlogp[i] = step->flat[step->source[i]];
    dev->upload(dev, step->head.dlogp, step->dlogp, (size_t)step->targets * sizeof(float));
    return STATUS_OK;
}

static int chunk_rows(const Step *step, int row)
{
    return step->T - row < step->chunk ? step->T - row : step->chunk;
}

static Status chunk_loss(Step *step, int row)
{
    int64_t from = step->start[row], to = step->start[row + chunk_rows(step, row)];
    return piece_loss(step, from, to - from, step->logp + from, step->dlogp + from);
}

/* Chunks whose gradient needs their loss: the host fetches one's log-probabilities while the device
 * is already at the next one's. */
static Status chunks_run(Step *step)
{
    Device *dev = step->adapter->model->dev;
    int chunks = (step->T + step->chunk - 1) / step->chunk, ahead = step_ahead(step);
    for (int i = 0; i < chunks + ahead; i++) {
        if (i < chunks) {
            int row = i * step->chunk, rows = chunk_rows(step, row);
            int64_t from = step->start[row], count = step->start[row + rows] - from;
            chunk_logits(step, row, rows);
            dev->fetch(dev, step->logp + from, step->head.logp + from,
                       (size_t)count * sizeof(float));
        }
        if (i < ahead) continue;
        int row = (i - ahead) * step->chunk, rows = chunk_rows(step, row);
        int64_t from = step->start[row], count = step->start[row + rows] - from;
        TRY(dev->await(dev, i < chunks ? ahead : 0));
        TRY(chunk_loss(step, row));
        dev->upload(dev, step->head.dlogp + from, step->dlogp + from,
                    (size_t)count * sizeof(float));
        if (row < step->live) chunk_backward(step, row, rows);
    }
    return STATUS_OK;
}

/* All logits, then the loss, then the logits once more for their gradient. */
static Status whole_run(Step *step, float *logp)
{
    Device *dev = step->adapter->model->dev;
    size_t bytes = (size_t)step->targets * sizeof(float);
    for (int row = 0; row < step->T; row += step->chunk)
        chunk_logits(step, row, chunk_rows(step, row));
    dev->fetch(dev, step->logp, step->head.logp, bytes);
    TRY(dev->await(dev, 0));
    for (int64_t i = 0; i < step->targets; i++) logp[step->source[i]] = step->logp[i];
    TRY(datums_loss(step, logp));
    for (int row = 0; step->with_backward && row < step->live; row += step->chunk) {
        chunk_logits(step, row, chunk_rows(step, row));
        chunk_backward(step, row, chunk_rows(step, row));
    }
    return STATUS_OK;
}

/* Chunks of which nothing is asked, or whose dlogp a linear loss knows beforehand: nobody waits.
 * The log-probabilities are on their way when it returns. */
static void known_run(Step *step)
{
    Device *dev = step->adapter->model->dev;
    size_t bytes = (size_t)step->targets * sizeof(float);
    if (step->with_backward) {
        LossCall call = {.count = step->targets, .logp = step->logp, .dlogp = step->dlogp};
        for (int j = 0; j < LOSS_INPUTS; j++) call.input[j] = step->input[j];
        call.key = step->datums->key;
        memset(step->logp, 0, bytes);
        step->loss->evaluate(&call);
        dev->upload(dev, step->head.dlogp, step->dlogp, bytes);
    }
    for (int row = 0; row < step->T; row += step->chunk) {
        chunk_logits(step, row, chunk_rows(step, row));
        if (step->with_backward && row < step->live)
            chunk_backward(step, row, chunk_rows(step, row));
    }
    dev->fetch(dev, step->logp, step->head.logp, bytes);
}

/* Log-probabilities of all rows, and their gradient; their loss too, but where it can be told
 * later. */
static Status head_run(Step *step, float *logp)
{
    if (step->loss->whole) return whole_run(step, logp);
    if (step_waits(step)) return chunks_run(step);
    known_run(step);
    return STATUS_OK;
}

/* What is left to tell of the head: the log-probabilities, and the loss of those that nobody waited
 * for. */
static Status head_tell(Step *step, float *logp)
{
    Device *dev = step->adapter->model->dev;
    TRY(dev->await(dev, 0));
    for (int64_t i = 0; i < step->targets; i++) logp[step->source[i]] = step->logp[i];
    if (step->loss->whole || step_waits(step)) return STATUS_OK;
    for (int row = 0; row < step->T; row += step->chunk) TRY(chunk_loss(step, row));
    return STATUS_OK;
}

/* Counts the tokens and sequences that have a gradient, for grad_accumulation_normalization. The
 * host's copy of a span loses its rows once its sequence was counted. */
static void count_live(Step *step)
{
    for (int i = 0; i < step->live; i++) {
        int live = 0, span = 0;
        for (int32_t k = step->start[i]; k < step->start[i + 1]; k++)
            live |= step->dlogp[k] != 0.0f;
        if (!live) continue;
        step->tokens += 1.0;
        while (span + 1 < step->S && step->rows[i] >= step->spans[span + 1].row) span++;
        if (step->spans[span].rows == 0) continue;
        step->sequences += 1.0;
        step->spans[span].rows = 0;
    }
}

static Status micro_run(Step *step, float *logp)
{
    Adapter *adapter = step->adapter;
    const Model *m = adapter->model;
    Device *dev = m->dev;
    adapter->arena.used = 0;
    Arena measure = {.dev = dev};
    step_place(step, &measure);
    char purpose[64];
    snprintf(purpose, sizeof purpose, "a training step of %d tokens", step->T);
    TRY(arena_reserve(&adapter->arena, measure.used, purpose));
    step_place(step, &adapter->arena);
    Segment segment = {adapter, 0, step->T};
    step->batch.segment = &segment;
    step->batch.segments = 1;
    TRY(device_prepare(dev, step_rehearse, step));
    step_pack(step);
    step_order(step);
    forward(m, &step->batch, &step->acts, &step->cache);
    if (step->with_backward)
        dev->zero(dev, step->grads.dxn, (size_t)step->T * (size_t)m->shape.width * dev->real_bytes);
    Status status = head_run(step, logp + step->target0);
    if (!status && step->with_backward && step->live) {
        count_live(step);
        backward(m, adapter, &step->batch, &step->acts, &step->grads);
    }
    if (!status) status = head_tell(step, logp + step->target0);
    Status last = dev->sync(dev); /* also after a failure: fetches may be under way */
    return last ? last : status;
}

/* ---- the call ---- */

/* Host arrays for the largest micro-batch, in one block. */
static Status step_host(Step *step, void **block)
{
    size_t T = 0, S = 0, pages = 0, targets = 0;
    for (step_take(step, 0);; step_take(step, step->last)) {
        if ((size_t)step->T > T) T = (size_t)step->T;
        if ((size_t)step->S > S) S = (size_t)step->S;
        if ((size_t)step->pages > pages) pages = (size_t)step->pages;
        if ((size_t)step->targets > targets) targets = (size_t)step->targets;
        if (step->last == step->datums->count) break;
    }
    if (targets > INT32_MAX / 2)
        return fail(STATUS_INVALID, "a datum with %zu targets is too large", targets);
    int inputs = 0;
    while (inputs < LOSS_INPUTS && step->loss->input[inputs].name) inputs++;
    size_t ints = 4 * T + 1 + pages + 2 * targets, floats = (3 + (size_t)inputs) * targets;
    size_t layers = (size_t)step->adapter->model->shape.layers;
    char *memory = malloc(layers * sizeof(LayerActs) + S * sizeof(Span) + (ints + floats) * 4);
    if (!memory) return fail(STATUS_MEMORY, "no memory for a batch of %zu targets", targets);
    *block = memory;
    step->acts.layer = (LayerActs *)memory;
    step->spans = (Span *)(step->acts.layer + layers);
    int32_t *next = (int32_t *)(step->spans + S);
    step->pos = next;
    step->slot = step->pos + T;
    step->rows = step->slot + T;
    step->start = step->rows + T;
    step->page = step->start + T + 1;
    step->ids = step->page + pages;
    step->source = step->ids + targets;
    step->logp = (float *)(step->source + targets);
    step->dlogp = step->logp + targets;
    step->flat = step->dlogp + targets;
    for (int j = 0; j < inputs; j++) step->input[j] = step->flat + (size_t)(j + 1) * targets;
    return STATUS_OK;
}

static Status run_all(Step *step, float *logp)
{
    Adapter *adapter = step->adapter;
    for (int first = 0; first < step->datums->count; first = step->last) {
        step_take(step, first);
        TRY(micro_run(step, logp));
        step->token0 += step->T;
        step->target0 += step->targets;
        if (adapter->interrupted)
            return fail(STATUS_INTERRUPTED, "forward_backward was interrupted");
    }
    double norm = 0.0;
    if (step->with_backward) TRY(adapter_norm(adapter, FRESH, &norm));
    if (!isfinite(norm))
        return fail(STATUS_NUMERIC, "the gradient of this batch is not finite; it was dropped");
    return STATUS_OK;
}

Status adapter_forward_backward(Adapter *adapter, const Datums *datums, const Loss *loss,
                                int with_backward, float *logp, double *loss_sum)
{
    TRY(datums_check(datums, adapter->model, loss));
    if (with_backward && !adapter->vector[GRADIENTS])
        return fail(STATUS_INVALID,
                    "this adapter is a snapshot: it can be sampled from, not trained");
    Step step = {
        .adapter = adapter, .datums = datums, .loss = loss, .with_backward = with_backward};
    Device *dev = adapter->model->dev;
    void *block = NULL;
    TRY(step_host(&step, &block));
    adapter->interrupted = 0;
    Status status = run_all(&step, logp);
    free(block);
    if (status == STATUS_OK && with_backward) {
        dev->accumulate(dev, adapter->vector[GRADIENTS], adapter->vector[FRESH], adapter->size);
        adapter->loss += step.loss_sum;
        adapter->tokens += step.tokens;
        adapter->sequences += step.sequences;
    }
    if (with_backward)
        dev->zero(dev, adapter->vector[FRESH], (size_t)adapter->size * sizeof(float));
    *loss_sum = step.loss_sum;
    return status;
}
