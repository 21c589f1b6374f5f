/* train/step.c - forward_backward, and its halves: micro-batches → transformer → head in chunks →
 * loss → gradients.
 *
 * Gradients add up over micro-batches. The head sees rows in chunks: logits, log-probabilities, the
 * loss of those targets, and their gradient in place. A loss whose gradient is known beforehand
 * (`linear`) is told at the end, and the host waits once. A loss that needs whole datums is
 * evaluated after the last chunk, and the logits of each are computed once more, to the same bits,
 * for their gradient. Rows that the loss can't give a gradient (their weights are zero) get no
 * backward.
 *
 * A forward that is kept leaves the activations of the first micro-batches in the adapter's arena:
 * of one, and of as many more as keep_bytes allow. It therefore begins with the last micro-batch,
 * in the memory that the first ones take at the end, and so keeping one costs no more than a
 * training step. Backward computes the others again.
 *
 * What a micro-batch's layers keep is planned before the call begins (step_plan): all, if that fits
 * in what a step may take, or the most that does. What is not kept is made again, to the same bits,
 * so no result depends on the plan. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "step.h"

/* One call under way, with the micro-batch at hand. */
typedef struct Step {
    Adapter *adapter;
    const Datums *datums;
    const Loss *loss;
    int with_backward;
    int held;  /* micro-batches, the first ones, whose activations lie or stay in the arena */
    int *keep; /* of each micro-batch, what is kept; 0: no backward pass */
    Pack pack;
    const Micro *micro;
    Batch batch;
    Acts acts;
    Grads grads;
    Head head, second; /* second: with logits of its own, where the device is ahead by a chunk */
    Cache cache;
    double *losses;                   /* of each micro-batch */
    float *logp, *dlogp;              /* (targets), in the order of the head */
    float *input[LOSS_INPUTS], *flat; /* of the targets at hand; flat: dlogp in the datums' order */
    double tokens, sequences;
} Step;

/* Whether the host needs a chunk's log-probabilities before its gradient can be computed. */
static int step_waits(const Step *step)
{
    const Loss *loss = step->loss; /* NULL: the plan of any */
    return step->with_backward && !(loss && (loss->linear || loss->whole));
}

/* By how many chunks the device then is ahead, so that it does not wait for the host: a chunk's
 * logits take it 100 µs and more, and the way to the host and back some 40. */
static int step_ahead(const Step *step)
{
    return step->adapter->model->dev->async && step_waits(step) && step->head.chunk < step->head.T;
}

/* The head that has the logits of the chunk at `row`. */
static const Head *head_of(const Step *step, int row)
{
    return row / step->head.chunk % 2 ? &step->second : &step->head;
}

/* ---- a chunk of the head ---- */

static void chunk_logits(Step *step, int row)
{
    const Head *h = head_of(step, row);
    int rows = head_chunk(h, row);
    head_logits(h, step->adapter, step->acts.hidden, row, rows);
    head_logprob(h, step->adapter->model, row, rows);
}

static void chunk_backward(Step *step, int row)
{
    const Head *h = head_of(step, row);
    int rows = head_chunk(h, row);
    head_logprob_backward(h, step->adapter->model, row, rows);
    head_logits_backward(h, step->adapter, step->grads.dxn, row, rows);
}

/* ---- memory ---- */

static void step_place(Step *step, Arena *arena, const Micro *micro, int keep)
{
    const Model *m = step->adapter->model;
    int R = step->adapter->rank;
    size_t page = (size_t)KV_PAGE * (size_t)m->shape.kv_heads * (size_t)m->shape.head_width *
                  m->dev->real_bytes;
    batch_place(&step->batch, arena, micro->T, micro->S, micro->pages);
    step->cache.k = arena_take(arena, (size_t)micro->pages * page);
    step->cache.v = arena_take(arena, (size_t)micro->pages * page);
    acts_place(&step->acts, arena, m, micro->T, R, keep);
    if (keep) grads_place(&step->grads, arena, m, micro->T, R);
    Head *h = &step->head;
    head_place(h, arena, m, micro->T, R, micro->targets);
    step->second = *h;
    if (!step_ahead(step)) return;
    size_t C = (size_t)h->chunk, size = m->dev->real_bytes;
    step->second.x = arena_take(arena, C * (size_t)m->shape.width * size);
    step->second.s = arena_take(arena, C * (size_t)R * size);
    step->second.logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    step->second.lse = arena_take(arena, C * sizeof(float));
}

/* Bytes of the micro-batch at hand. */
static size_t micro_bytes(void *context, int keep)
{
    Step *step = context;
    Arena arena = {.dev = step->adapter->model->dev};
    step_place(step, &arena, step->micro, keep);
    return arena.used;
}

/* Bytes of micro-batches [first, end), one after another. */
static size_t span_bytes(Step *step, int first, int end)
{
    size_t bytes = 0;
    for (int i = first; i < end; i++) {
        step->micro = &step->pack.micro[i];
        bytes += micro_bytes(step, step->keep[i]);
    }
    return bytes;
}

/* Room for those that are held side by side, in which the others come and go. */
static Status step_reserve(Step *step)
{
    size_t bytes = span_bytes(step, 0, step->held);
    for (int i = step->held; i < step->pack.count; i++) {
        size_t one = span_bytes(step, i, i + 1);
        if (one > bytes) bytes = one;
    }
    char purpose[64];
    snprintf(purpose, sizeof purpose, "a training step of %d tokens", step->pack.most.T);
    return arena_reserve(&step->adapter->arena, bytes, purpose);
}

/* All ops of the micro-batch at hand, for a device that rehearses. */
static void micro_rehearse(void *context)
{
    Step *step = context;
    const Model *m = step->adapter->model;
    batch_whole(&step->batch, step->adapter, step->micro->T);
    forward(m, &step->batch, &step->acts, &step->cache);
    for (int row = 0; row < step->head.T;
         row += step->head.chunk) { /* the last one has fewer rows */
        chunk_logits(step, row);
        if (step->with_backward) chunk_backward(step, row);
    }
    if (!step->with_backward) return;
    backward(m, step->adapter, &step->batch, &step->acts, &step->cache, &step->grads);
}

/* What is kept of micro-batches [first, end), which backward will see, now or after this call. */
static Status step_plan(Step *step, int first, int end)
{
    Step plan = *step;
    plan.with_backward = 1;
    for (int i = first; i < end; i++) {
        plan.micro = &step->pack.micro[i];
        micro_bytes(&plan, 1);
        size_t scratch = device_rehearse(step->adapter->model->dev, micro_rehearse, &plan);
        TRY(step_keep(&step->keep[i], step->adapter, plan.micro->T, scratch, micro_bytes, &plan));
    }
    return STATUS_OK;
}

/* How many micro-batches a kept forward holds, with room for them and for the others' backward;
 * none where memory is short. What is held beside others is kept whole. */
static Status step_reserve_kept(Step *step)
{
    Adapter *adapter = step->adapter;
    int all = keep_all(adapter->model);
    size_t most =
        adapter->keep_bytes < adapter->step_most ? adapter->keep_bytes : adapter->step_most;
    Status status = step_plan(step, 0, step->pack.count);
    if (!status) {
        step->held = 1;
        while (step->held < step->pack.count && step->keep[step->held - 1] == all &&
               step->keep[step->held] == all && span_bytes(step, 0, step->held + 1) <= most)
            step->held++;
        status = step_reserve(step);
    }
    if (status != STATUS_MEMORY) return status;
    memset(step->keep, 0, (size_t)step->pack.count * sizeof *step->keep);
    step->held = 0;
    return step_reserve(step);
}

/* Host arrays, in one block. */
static Status step_open(Step *step)
{
    TRY(pack_open(&step->pack, step->datums, step->adapter->step_tokens));
    int inputs = 0;
    while (inputs < LOSS_INPUTS && step->loss->input[inputs].name) inputs++;
    size_t targets = (size_t)step->pack.most.targets, count = (size_t)step->pack.count,
           layers = (size_t)step->adapter->model->shape.layers;
    char *memory = calloc(1, layers * sizeof(LayerActs) + count * (sizeof(double) + sizeof(int)) +
                                 (3 + (size_t)inputs) * targets * sizeof(float));
    if (!memory) {
        pack_close(&step->pack);
        return fail(STATUS_MEMORY, "no memory for a batch of %zu targets", targets);
    }
    step->acts.layer = (LayerActs *)memory;
    step->losses = (double *)(step->acts.layer + layers);
    step->keep = (int *)(step->losses + count);
    step->logp = (float *)(step->keep + count);
    step->dlogp = step->logp + targets;
    step->flat = step->dlogp + targets;
    for (int j = 0; j < inputs; j++) step->input[j] = step->flat + (size_t)(j + 1) * targets;
    return STATUS_OK;
}

static void step_close(Step *step)
{
    pack_close(&step->pack);
    free(step->acts.layer);
}

/* ---- the loss ---- */

/* Fills a call in: its targets are those that `source` lists, or where it is NULL those from
 * `from`. */
static void piece_fill(Step *step, LossCall *call, const int32_t *source, int64_t from)
{
    call->key = step->datums->key;
    for (int j = 0; j < LOSS_INPUTS && step->loss->input[j].name; j++) {
        for (int64_t i = 0; i < call->count; i++)
            step->input[j][i] = loss_input(step->loss, step->datums, j,
                                           step->micro->target0 + (source ? source[i] : from + i));
        call->input[j] = step->input[j];
    }
}

/* The call for `rows` rows in the order of the head, from `row` on. */
static LossCall rows_call(Step *step, int row, int rows)
{
    const int32_t *start = step->pack.start + row;
    LossCall call = {.count = start[rows] - *start,
                     .logp = step->logp + *start,
                     .dlogp = step->dlogp + *start,
                     .rows = rows,
                     .start = start};
    piece_fill(step, &call, step->pack.source + *start, 0);
    return call;
}

static Status piece_loss(Step *step, const LossCall *call)
{
    double loss = step->loss->evaluate(call);
    if (!isfinite(loss))
        return fail(STATUS_NUMERIC,
                    "%s is not finite (%g) on this batch; nothing was added to the gradients",
                    step->loss->name, loss);
    step->losses[step->micro - step->pack.micro] += loss;
    return STATUS_OK;
}

/* A whole loss, datum by datum; `logp` is in their order. */
static Status datums_loss(Step *step, const float *logp)
{
    const Datums *d = step->datums;
    int64_t from = 0, targets = step->micro->targets;
    for (int i = step->micro->first; i < step->micro->last; i++) {
        LossCall call = {.count = (int64_t)d->lengths[i] * d->counts[i],
                         .logp = logp + from,
                         .dlogp = step->flat + from};
        piece_fill(step, &call, NULL, from);
        TRY(piece_loss(step, &call));
        from += call.count;
    }
    for (int64_t i = 0; i < targets; i++) step->dlogp[i] = step->flat[step->pack.source[i]];
    Device *dev = step->adapter->model->dev;
    dev->upload(dev, step->head.dlogp, step->dlogp, (size_t)targets * sizeof(float));
    return STATUS_OK;
}

/* Counts the tokens and sequences that have a gradient, for grad_accumulation_normalization. The
 * host's copy of a span loses its rows once its sequence was counted. */
static void count_live(Step *step)
{
    const Pack *pack = &step->pack;
    for (int i = 0; i < pack->live; i++) {
        int live = 0, span = 0;
        for (int32_t k = pack->start[i]; k < pack->start[i + 1]; k++)
            live |= step->dlogp[k] != 0.0f;
        if (!live) continue;
        step->tokens += 1.0;
        while (span + 1 < step->micro->S && pack->rows[i] >= pack->spans[span + 1].row) span++;
        if (pack->spans[span].rows == 0) continue;
        step->sequences += 1.0;
        pack->spans[span].rows = 0;
    }
}

/* ---- one micro-batch ---- */

/* The targets of a chunk, in the order of the head. */
static int64_t chunk_targets(const Step *step, int row, int64_t *from)
{
    *from = step->pack.start[row];
    return step->pack.start[row + head_chunk(&step->head, row)] - *from;
}

static Status chunk_loss(Step *step, int row)
{
    LossCall call = rows_call(step, row, head_chunk(&step->head, row));
    return piece_loss(step, &call);
}

size_t step_bytes(Adapter *adapter, int T, int keep, size_t *scratch)
{
    const Model *model = adapter->model;
    LayerActs *layers = calloc((size_t)model->shape.layers, sizeof *layers);
    if (!layers) return 0;
    Micro micro = {.T = T, .S = 1, .pages = (T + KV_PAGE - 1) / KV_PAGE, .targets = T};
    Step step = {.adapter = adapter, .with_backward = 1, .micro = &micro, .acts.layer = layers};
    size_t bytes = micro_bytes(&step, keep);
    if (scratch) *scratch = device_rehearse(model->dev, micro_rehearse, &step);
    free(layers);
    return bytes;
}

/* Chunks whose gradient needs their loss: the host fetches one's log-probabilities while the device
 * is already at the next one's. */
static Status chunks_run(Step *step)
{
    Device *dev = step->adapter->model->dev;
    const Head *h = &step->head;
    int chunks = (h->T + h->chunk - 1) / h->chunk, ahead = step_ahead(step);
    int64_t from, count;
    for (int i = 0; i < chunks + ahead; i++) {
        TRY(not_interrupted(step->adapter));
        if (i < chunks) {
            chunk_logits(step, i * h->chunk);
            count = chunk_targets(step, i * h->chunk, &from);
            dev->fetch(dev, step->logp + from, h->logp + from, (size_t)count * sizeof(float));
        }
        if (i < ahead) continue;
        int row = (i - ahead) * h->chunk;
        TRY(dev->await(dev, i < chunks ? ahead : 0));
        TRY(chunk_loss(step, row));
        count = chunk_targets(step, row, &from);
        dev->upload(dev, h->dlogp + from, step->dlogp + from, (size_t)count * sizeof(float));
        if (row < step->pack.live) chunk_backward(step, row);
    }
    return STATUS_OK;
}

/* All logits, then the loss, then the logits once more for their gradient. */
static Status whole_run(Step *step, float *logp)
{
    Device *dev = step->adapter->model->dev;
    const Head *h = &step->head;
    int64_t targets = step->micro->targets;
    for (int row = 0; row < h->T; row += h->chunk) {
        TRY(not_interrupted(step->adapter));
        chunk_logits(step, row);
    }
    dev->fetch(dev, step->logp, h->logp, (size_t)targets * sizeof(float));
    TRY(dev->await(dev, 0));
    for (int64_t i = 0; i < targets; i++) logp[step->pack.source[i]] = step->logp[i];
    TRY(datums_loss(step, logp));
    for (int row = 0; step->with_backward && row < step->pack.live; row += h->chunk) {
        TRY(not_interrupted(step->adapter));
        chunk_logits(step, row);
        chunk_backward(step, row);
    }
    return STATUS_OK;
}

/* Rows [0, end) in chunks of which nothing is asked, or whose dlogp a linear loss knows beforehand:
 * nobody waits. The log-probabilities are on their way when it returns. */
static Status known_run(Step *step, int end)
{
    Device *dev = step->adapter->model->dev;
    const Head *h = &step->head;
    int64_t targets = step->micro->targets;
    if (step->with_backward) {
        memset(step->logp, 0, (size_t)targets * sizeof(float));
        LossCall call = rows_call(step, 0, h->T);
        step->loss->evaluate(&call);
        dev->upload(dev, h->dlogp, step->dlogp, (size_t)targets * sizeof(float));
    }
    for (int row = 0; row < end; row += h->chunk) {
        TRY(not_interrupted(step->adapter));
        chunk_logits(step, row);
        if (step->with_backward && row < step->pack.live) chunk_backward(step, row);
    }
    if (end) dev->fetch(dev, step->logp, h->logp, (size_t)step->pack.start[end] * sizeof(float));
    return STATUS_OK;
}

/* Rows whose log-probabilities anybody wants: those that are not live have none where logp is NULL.
 * Whole chunks. */
static int head_end(const Step *step, const float *logp)
{
    const Head *h = &step->head;
    int live = (step->pack.live + h->chunk - 1) / h->chunk * h->chunk;
    return logp || live > h->T ? h->T : live;
}

/* Log-probabilities of rows, and their gradient; their loss too, but where it can be told later. */
static Status head_run(Step *step, float *logp)
{
    if (step->loss->whole) return whole_run(step, logp);
    if (step_waits(step)) return chunks_run(step);
    return known_run(step, head_end(step, logp));
}

/* What is left to tell of the head: the log-probabilities, and the loss of those that nobody waited
 * for. */
static Status head_tell(Step *step, float *logp)
{
    Device *dev = step->adapter->model->dev;
    TRY(dev->await(dev, 0));
    for (int64_t i = 0; logp && i < step->micro->targets; i++)
        logp[step->pack.source[i]] = step->logp[i];
    if (step->loss->whole || step_waits(step)) return STATUS_OK;
    for (int row = 0, end = head_end(step, logp); row < end; row += step->head.chunk)
        TRY(chunk_loss(step, row));
    return STATUS_OK;
}

static Status micro_run(Step *step, int i, float *logp)
{
    Adapter *adapter = step->adapter;
    const Model *m = adapter->model;
    Device *dev = m->dev;
    int held = i < step->held, gate = step->loss->gate;
    size_t before = held ? span_bytes(step, 0, i) : 0;
    const Micro *micro = step->micro = &step->pack.micro[i];
    adapter->arena.used = before;
    step_place(step, &adapter->arena, micro, step->keep[i]);
    TRY(device_prepare(dev, micro_rehearse, step));
    batch_whole(&step->batch, adapter, micro->T);
    step->batch.stop = &adapter->interrupted;
    pack_rows(&step->pack, micro, &step->batch, dev);
    pack_order(&step->pack, micro, gate == UNGATED ? NULL : step->datums->input[gate]);
    head_upload(&step->head, dev, (&step->pack)->rows, (&step->pack)->start, (&step->pack)->ids,
                micro->targets);
    step->losses[i] = 0.0;
    if (!(held && step->with_backward)) forward(m, &step->batch, &step->acts, &step->cache);
    if (step->with_backward)
        dev->zero(dev, step->grads.dxn,
                  (size_t)micro->T * (size_t)m->shape.width * dev->real_bytes);
    float *own_logp = logp ? logp + micro->target0 : NULL;
    Status status = head_run(step, own_logp);
    if (!status && step->with_backward && step->pack.live) {
        count_live(step);
        backward(m, adapter, &step->batch, &step->acts, &step->cache, &step->grads);
    }
    if (!status) status = head_tell(step, own_logp);
    Status last = dev->sync(dev); /* also after a failure: fetches may be under way */
    return last ? last : status;
}

/* ---- the call ---- */

static Status run_all(Step *step, float *logp)
{
    Adapter *adapter = step->adapter;
    for (int i = 0, count = step->pack.count; i < count; i++) {
        TRY(micro_run(step, step->with_backward ? i : count - 1 - i, logp));
        TRY(not_interrupted(adapter));
    }
    return STATUS_OK;
}

static Status fresh_check(Adapter *adapter)
{
    double norm;
    TRY(adapter_norm(adapter, FRESH, &norm));
    if (isfinite(norm)) return STATUS_OK;
    return fail(STATUS_NUMERIC, "the gradient of this batch is not finite; it was dropped");
}

Status gradients_take(Adapter *adapter, Status status, double loss, double tokens, double sequences)
{
    Device *dev = adapter->model->dev;
    if (!status) status = fresh_check(adapter);
    if (!status) {
        dev->accumulate(dev, adapter->vector[GRADIENTS], adapter->vector[FRESH], adapter->size);
        adapter->loss += loss;
        adapter->tokens += tokens;
        adapter->sequences += sequences;
    }
    dev->zero(dev, adapter->vector[FRESH], (size_t)adapter->size * sizeof(float));
    return status;
}

/* Runs an open step, for which there is memory, and adds up what it gave. */
static Status step_run(Step *step, float *logp, double *loss_sum)
{
    Adapter *adapter = step->adapter;
    adapter->interrupted = 0;
    Status status = run_all(step, logp);
    *loss_sum = 0.0;
    for (int i = 0; !status && i < step->pack.count; i++) *loss_sum += step->losses[i];
    if (!step->with_backward) return status;
    return gradients_take(adapter, status, *loss_sum, step->tokens, step->sequences);
}

Status not_interrupted(const Adapter *adapter)
{
    return adapter->interrupted ? fail(STATUS_INTERRUPTED, "forward_backward was interrupted")
                                : STATUS_OK;
}

Status trainable(const Adapter *adapter)
{
    if (adapter->vector[GRADIENTS]) return STATUS_OK;
    return fail(STATUS_INVALID, "this adapter is a snapshot: it can be sampled from, not trained");
}

Status adapter_forward_backward(Adapter *adapter, const Datums *datums, const Loss *loss, Pass pass,
                                float *logp, double *loss_sum)
{
    int backward = pass == FORWARD_BACKWARD;
    if (loss->taught && !datums->input[loss->taught])
        return fail(STATUS_INVALID, "%s needs a teacher: use distill, or give its %s", loss->name,
                    loss->input[loss->taught].name);
    TRY(datums_check(datums, adapter->model, loss));
    if (pass != FORWARD) TRY(trainable(adapter));
    Step step = {.adapter = adapter, .datums = datums, .loss = loss, .with_backward = backward};
    Kept *kept = NULL;
    if (pass == FORWARD_KEEP) TRY(kept_copy(&kept, datums));
    adapter->held = 0;
    Status status = step_open(&step);
    if (!status) {
        if (backward) status = step_plan(&step, 0, step.pack.count);
        if (!status) status = pass == FORWARD_KEEP ? step_reserve_kept(&step) : step_reserve(&step);
        if (!status) status = step_run(&step, logp, loss_sum);
        adapter->held_keep = step.keep[0];
        step_close(&step);
    }
    if (status || pass != FORWARD_KEEP) {
        free(kept);
        return status;
    }
    adapter_drop_kept(adapter);
    adapter->kept = kept;
    adapter->held = step.held;
    return STATUS_OK;
}

Status adapter_backward(Adapter *adapter, const float *dlogp, int64_t count, double *loss_sum)
{
    TRY(trainable(adapter));
    if (!adapter->kept)
        return fail(STATUS_INVALID, "there is no kept forward to go back from: none was made since "
                                    "the weights last changed, or backward has used it");
    Datums datums = adapter->kept->datums;
    datums.input[0] = dlogp;
    datums.input_total[0] = count;
    TRY(datums_check(&datums, adapter->model, &loss_given));
    Step step = {.adapter = adapter,
                 .datums = &datums,
                 .loss = &loss_given,
                 .with_backward = 1,
                 .held = adapter->held};
    TRY(step_open(&step));
    for (int i = 0; i < step.held; i++) step.keep[i] = adapter->held_keep;
    adapter->held = 0;
    size_t size = adapter->arena.size;
    Status status = step_plan(&step, step.held, step.pack.count);
    if (!status) status = step_reserve(&step);
    if (adapter->arena.size != size) step.held = 0; /* it grew, and lost what it held */
    if (!status) status = step_run(&step, NULL, loss_sum);
    step_close(&step);
    if (!status) adapter_drop_kept(adapter);
    return status;
}
