/* train/step.c - one training call, whatever its loss: micro-batches → transformer → head → loss →
 * gradients.
 *
 * Gradients are summed over the micro-batches of a part in a separate vector, and the parts as a
 * tree (gradient_parts.c), which is added to the others at the end. So others may work between two
 * micro-batches without changing a bit of the call. The head sees rows in chunks. An objective
 * (step.h) computes their loss, and their gradient in place. Rows with zero weights have no
 * gradient, and so no backward.
 *
 * A kept forward leaves the activations of the first micro-batches in the model's arena: of one,
 * and of as many more as keep_bytes allow. It therefore runs the micro-batches last to first: the
 * later ones use the memory that the first ones fill at the end. So keeping one costs no more
 * memory than a training step. Backward recomputes the others, and all if another trainer used the
 * arena.
 *
 * Activation recomputation: step_plan decides before the call begins which activations a
 * micro-batch's layers keep: as many as fit in the step's memory. The rest is recomputed, to the
 * same bits, so no result depends on the plan. Running the micro-batch on a rehearsing device
 * measures the ops' scratch. micro_work is both the run and the rehearsal, so their ops are the
 * same. */
#include "step.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../model/gradient_parts.h"
#include "../model/layers/backward.h"
#include "../model/layers/forward.h"
#include "../model/memory_share.h"

#define MIB (1.0 / 1048576.0)

Device *step_device(const TrainStep *step)
{
    return step->trainer->adapter->model->dev;
}

/* ---- one micro-batch ---- */

Status step_host(TrainStep *step, HostWork *work, int from, int to)
{
    return step->rehearsing ? STATUS_OK : work(step, from, to);
}

Status step_going(const TrainStep *step)
{
    return step->trainer->interrupted && !step->rehearsing
               ? fail(STATUS_INTERRUPTED, "forward_backward was interrupted")
               : STATUS_OK;
}

static Status loss_overflow(const TrainStep *step, double loss)
{
    char text[128];
    snprintf(text, sizeof text,
             "%s is not finite (%g) on this batch; nothing was added to the gradients",
             step->loss->name, loss);
    return adapter_overflow(step->trainer->adapter, text);
}

Status step_loss(TrainStep *step, double loss)
{
    if (!isfinite(loss)) return loss_overflow(step, loss);
    step->losses[step->micro - step->pack.micro] += loss;
    return STATUS_OK;
}

void step_result(TrainStep *step)
{
    for (int64_t i = 0; step->result && i < step->micro->targets; i++)
        step->result[step->micro->target0 + step->pack.source[i]] = step->logp[i];
}

static Status rows_send(TrainStep *step, int from, int to)
{
    (void)from, (void)to;
    Pack *pack = &step->pack;
    pack_upload(pack, step->micro, &step->batch, step_device(step));
    head_upload(&step->head, step_device(step), pack->rows, pack->start, pack->ids,
                step->micro->targets);
    return STATUS_OK;
}

/* Counts the tokens and sequences that have a gradient, for grad_accumulation_normalization. A
 * counted sequence's span->rows is cleared on the host, so that it counts once. */
static void live_count(TrainStep *step)
{
    const Pack *pack = &step->pack;
    for (int i = 0, span = 0; i < pack->live; i++) {
        int live = 0;
        for (int32_t k = pack->start[i]; k < pack->start[i + 1]; k++)
            live |= step->dlogp[k] != 0.0f;
        if (!live) continue;
        step->tokens += 1.0;
        while (span + 1 < step->micro->S && pack->rows[i] >= pack->host.spans[span + 1].row) span++;
        step->sequences += pack->host.spans[span].rows != 0;
        pack->host.spans[span].rows = 0;
    }
}

/* Fails if a log-probability is NaN: the loss need not have read it. */
static Status logp_check(const TrainStep *step)
{
    for (int64_t i = 0; step->result && i < step->micro->targets; i++)
        if (isnan(step->logp[i])) return logprobs_overflow(step->trainer->adapter);
    return STATUS_OK;
}

/* Reports the head's remaining results. */
static Status head_tell(TrainStep *step, int from, int to)
{
    Device *dev = step_device(step);
    const Trainer *trainer = step->trainer;
    TRY(dev->await(dev, 0));
    step_result(step);
    if (trainer->routed) acts_count(trainer->adapter->model, &step->acts, trainer->routed);
    if (step->with_backward) live_count(step);
    TRY(step->objective->tell(step, from, to));
    return logp_check(step);
}

/* All work on a micro-batch, which is placed and ordered. */
static Status micro_work(TrainStep *step)
{
    Adapter *adapter = step->trainer->adapter;
    const Model *m = adapter->model;
    const Objective *objective = step->objective;
    int T = step->micro->T;
    batch_whole(&step->batch, adapter, T);
    step->batch.stop = step->rehearsing ? NULL : &step->trainer->interrupted;
    if (objective->before) TRY(objective->before(step));
    TRY(step_host(step, rows_send, 0, T));
    if (!step->forwarded) forward(m, &step->batch, &step->acts, &step->cache);
    if (step->with_backward)
        m->dev->zero(m->dev, step->grads.dxn,
                     (size_t)T * (size_t)m->shape.width * m->dev->real_bytes);
    TRY(objective->head(step));
    if (step->with_backward && step->pack.live)
        backward(m, adapter, &step->batch, &step->acts, &step->cache, &step->grads);
    return step_host(step, head_tell, 0, T);
}

/* ---- memory ---- */

/* Places (or measures) the current micro-batch. */
static void micro_place(TrainStep *step, Arena *arena, int keep)
{
    const Micro *micro = step->micro;
    const Adapter *adapter = step->trainer->adapter;
    const Model *m = adapter->model;
    size_t end = step->objective->place(step, arena);
    batch_place(&step->batch, arena, micro->T, micro->S, 1, micro->pages);
    step->cache = cache_place(arena, m, micro->pages);
    acts_place(&step->acts, arena, m, micro->T, adapter->rank, keep);
    size_t head = arena->used;
    if (keep) head = grads_place(&step->grads, arena, m, micro->T, adapter->rank);
    if (end < arena->used) end = arena->used;
    arena->used = head;
    step->objective->chunk(step, arena);
    if (arena->used < end) arena->used = end;
}

static size_t micro_bytes(void *context, int keep)
{
    TrainStep *step = context;
    Arena arena = {.dev = step_device(step)};
    micro_place(step, &arena, keep);
    return arena.used;
}

/* Bytes of scratch for the ops of the current micro-batch, which is placed; *other: on the other
 * device. */
static size_t micro_scratch(const TrainStep *step, size_t *other)
{
    TrainStep rehearsal = *step;
    Device *dev = step_device(step), *second = step->other;
    rehearsal.rehearsing = 1;
    *other = 0;
    if (!dev->rehearse) return 0;
    dev->rehearse(dev);
    if (second) second->rehearse(second);
    micro_work(&rehearsal);
    if (second) *other = second->rehearsed(second);
    return dev->rehearsed(dev);
}

/* Reserves that scratch. */
static Status micro_prepare(const TrainStep *step)
{
    Device *dev = step_device(step);
    size_t other, own = micro_scratch(step, &other);
    if (own) TRY(dev->reserve(dev, own));
    return other ? step->other->reserve(step->other, other) : STATUS_OK;
}

void step_measure(TrainStep *step, size_t most, StepNeeds *needs)
{
    const Model *m = step->trainer->adapter->model;
    size_t least = micro_bytes(step, 1), other;
    step->pack.live = step->micro->T;
    size_t scratch = micro_scratch(step, &other) + other;
    int keep = most > scratch ? budget_keep(m, most - scratch, micro_bytes, step) : 0;
    *needs = (StepNeeds){.scratch = scratch,
                         .least = least + scratch,
                         .whole = micro_bytes(step, keep_all(m)) + scratch,
                         .bytes = micro_bytes(step, keep ? keep : 1),
                         .keep = keep};
}

/* Bytes of micro-batches [first, end), one after another. */
static size_t span_bytes(TrainStep *step, int first, int end)
{
    size_t bytes = 0;
    for (int i = first; i < end; i++) {
        step->micro = &step->pack.micro[i];
        bytes += micro_bytes(step, step->keep[i]);
    }
    return bytes;
}

/* The model's arena serves this step now. Returns in *kept whether it holds what this trainer's
 * last step left there. */
static Status arena_claim(TrainStep *step, int *kept)
{
    const Trainer *trainer = step->trainer;
    TrainingMemory *memory = &trainer->adapter->model->training;
    const char *before = memory->user == trainer->number ? memory->arena.base : NULL;
    size_t size = memory->arena.size;
    char purpose[64];
    snprintf(purpose, sizeof purpose, step->objective->purpose, step->pack.most.T);
    memory->user = 0;
    TRY(arena_reserve(&memory->arena, step->bytes, purpose));
    memory->user = trainer->number;
    *kept = before && before == memory->arena.base && size == memory->arena.size;
    return STATUS_OK;
}

/* Reserves bytes for all held micro-batches, or for the largest other one if that is more. */
static Status step_reserve(TrainStep *step, int *kept)
{
    size_t bytes = span_bytes(step, 0, step->held);
    for (int i = step->held; i < step->pack.count; i++) {
        size_t one = span_bytes(step, i, i + 1);
        if (one > bytes) bytes = one;
    }
    step->bytes = bytes;
    return arena_claim(step, kept);
}

/* The most activations of the current micro-batch that fit in the limit and in the free memory.
 * Fails if it does not fit at all. */
static Status micro_keep(int *keep, TrainStep *step, size_t free_bytes)
{
    size_t limit = step->trainer->limits.step_bytes, most = step->trainer->limits.datum_bytes;
    StepNeeds needs;
    step_measure(step, limit < free_bytes ? limit : free_bytes, &needs);
    *keep = needs.keep ? needs.keep : 1;
    if (needs.keep || needs.least <= most)
        return STATUS_OK; /* the arena reports a lack of free memory */
    return fail(STATUS_MEMORY,
                "a training step of %d tokens needs at least %.2f MiB on device %s, with nothing "
                "kept that can be computed again, and may take %.2f MiB: give it shorter datums, "
                "or more memory",
                step->micro->T, (double)needs.least * MIB, step_device(step)->name,
                (double)most * MIB);
}

/* Plans the kept activations of micro-batches [first, end), for a backward in this call or a later
 * one. */
static Status step_plan(TrainStep *step, int first, int end)
{
    TrainStep plan = *step;
    Device *dev = step_device(step);
    const Model *model = step->trainer->adapter->model;
    size_t free_bytes, all_bytes;
    dev->memory(dev, &free_bytes, &all_bytes);
    plan.with_backward = 1;
    for (int i = first; i < end; i++) {
        plan.micro = &step->pack.micro[i];
        TRY(step_going(step));
        TRY(micro_keep(&step->keep[i], &plan, free_bytes + model->training.arena.size));
    }
    return STATUS_OK;
}

/* Sets how many micro-batches a kept forward holds, and reserves memory for them and for the
 * others' backward; 0 if memory is short. If several are held, all their activations are kept. */
static Status step_reserve_kept(TrainStep *step)
{
    const Trainer *trainer = step->trainer;
    int kept, all = keep_all(trainer->adapter->model);
    size_t most = trainer->limits.keep_bytes < trainer->limits.step_bytes
                      ? trainer->limits.keep_bytes
                      : trainer->limits.step_bytes;
    Status status = step_plan(step, 0, step->pack.count);
    if (!status) {
        step->held = 1;
        while (step->held < step->pack.count && step->keep[step->held - 1] == all &&
               step->keep[step->held] == all && span_bytes(step, 0, step->held + 1) <= most)
            step->held++;
        status = step_reserve(step, &kept);
    }
    if (status != STATUS_MEMORY) return status;
    memset(step->keep, 0, (size_t)step->pack.count * sizeof *step->keep);
    step->held = 0;
    return step_reserve(step, &kept);
}

/* Places (or measures) the host's arrays. */
static void host_place(TrainStep *step, Arena *host)
{
    size_t targets = (size_t)step->pack.most.targets, count = (size_t)step->pack.count,
           layers = (size_t)step->trainer->adapter->model->shape.layers;
    step->acts.layer = arena_take(host, layers * sizeof *step->acts.layer);
    step->losses = arena_take(host, count * sizeof *step->losses);
    step->keep = arena_take(host, count * sizeof *step->keep);
    step->logp = arena_take(host, targets * sizeof *step->logp);
    step->dlogp = arena_take(host, targets * sizeof *step->dlogp);
    step->objective->arrays(step, host);
}

static Status step_open(TrainStep *step)
{
    Arena host = {0};
    TRY(pack_open(&step->pack, step->datums, step->trainer->limits.step_tokens));
    host_place(step, &host);
    host = (Arena){.base = calloc(1, host.used), .size = host.used};
    host_place(step, &host);
    if (host.base) return STATUS_OK;
    pack_close(&step->pack);
    return fail(STATUS_MEMORY, "no memory for a batch of %lld targets",
                (long long)step->pack.most.targets);
}

/* ---- micro-batches and parts ---- */

static Status micro_run(TrainStep *step, int i)
{
    Device *dev = step_device(step);
    Arena *arena = &step->trainer->adapter->model->training.arena;
    int held = i < step->held, gate = step->loss->gate;
    arena->used = held ? span_bytes(step, 0, i) : 0;
    step->micro = &step->pack.micro[i];
    step->forwarded = held && step->with_backward;
    micro_place(step, arena, step->keep[i]);
    pack_order(&step->pack, step->micro, gate == UNGATED ? NULL : step->datums->input[gate]);
    TRY(micro_prepare(step));
    step->losses[i] = 0.0;
    Status status = micro_work(step), last = dev->sync(dev); /* fetches may be in flight */
    return last ? last : status;
}

/* Whether the sum of the gradients so far and the FRESH ones, of this norm, is finite. A number
 * below 2^103, half an ulp of f32's maximum, cannot overflow a finite sum. */
static Status sum_check(Adapter *adapter, double norm)
{
    double before = 0.0;
    if (norm >= 0x1p103 && adapter->vector[GRADIENTS])
        TRY(adapter_norm(adapter, GRADIENTS, &before));
    if (norm + before <= FLT_MAX) return STATUS_OK;
    return fail(STATUS_NUMERIC, isfinite(norm)
                                    ? "the sum of this batch's gradient and those before it is not "
                                      "finite; this batch's was dropped"
                                    : "the gradient of this batch is not finite; it was dropped");
}

Status gradients_gather(Adapter *adapter, double *loss_sum)
{
    PartSum sum;
    double norm;
    TRY(adapter_trainable(adapter));
    TRY(parts_take(adapter, 1, &sum));
    *loss_sum = sum.loss;
    if (!sum.vector) return STATUS_OK;
    adapter->vector[FRESH] = sum.vector;
    Status status = adapter_norm(adapter, FRESH, &norm);
    if (!status) status = sum_check(adapter, norm);
    if (status) {
        adapter_give(adapter, FRESH);
        return status;
    }
    adapter_gather(adapter);
    adapter->loss += sum.loss;
    adapter->tokens += sum.tokens;
    adapter->sequences += sum.sequences;
    return STATUS_OK;
}

/* The part that a micro-batch belongs to. */
static int micro_part(const TrainStep *step, int i)
{
    const Micro *micro = &step->pack.micro[i];
    return step->part == WHOLE_CALL ? rows_part(micro->token0, micro->T, step->datums->token_total)
                                    : step->part;
}

/* Sums the parts up to `end`, without gradients but for those of the part in flight. */
static Status parts_end(TrainStep *step, int end)
{
    Adapter *adapter = step->trainer->adapter;
    for (; step->leaf < end; step->leaf++) {
        TRY(parts_put(adapter, GRADIENT_PARTS + step->leaf, step->sum));
        if (step->sum.vector) adapter->vector[FRESH] = NULL;
        step->sum = (PartSum){0};
    }
    return STATUS_OK;
}

/* The losses of a call without gradients, summed as those of one with gradients are. */
static double losses_sum(const TrainStep *step)
{
    double sum[PART_NODES] = {0.0};
    for (int i = 0; i < step->pack.count; i++)
        sum[GRADIENT_PARTS + micro_part(step, i)] += step->losses[i];
    for (int node = GRADIENT_PARTS - 1; node > 0; node--)
        sum[node] = sum[2 * node] + sum[2 * node + 1];
    return sum[1];
}

/* After a micro-batch with gradients: they are its part's. */
static void part_add(TrainStep *step, int i)
{
    step->sum.vector = step->trainer->adapter->vector[FRESH];
    step->sum.loss += step->losses[i];
    step->sum.tokens = step->tokens;
    step->sum.sequences = step->sequences;
}

static Status micro_backward(TrainStep *step, int i)
{
    Adapter *adapter = step->trainer->adapter;
    TRY(parts_end(step, micro_part(step, i)));
    if (!step->sum.vector) step->tokens = step->sequences = 0.0;
    TRY(adapter_take(adapter, FRESH));
    TRY(micro_run(step, i));
    part_add(step, i);
    return STATUS_OK;
}

static void routed_clear(Trainer *trainer)
{
    const Shape *s = &trainer->adapter->model->shape;
    size_t count = (size_t)s->layers * (size_t)s->experts;
    if (trainer->routed) memset(trainer->routed, 0, count * sizeof *trainer->routed);
}

/* ---- the call ---- */

static Status step_prepare(TrainStep *step, Pass pass)
{
    Trainer *trainer = step->trainer;
    int held = step->held, kept;
    trainer->interrupted = 0;
    trainer->held = 0;
    routed_clear(trainer);
    for (int i = 0; i < held; i++) step->keep[i] = trainer->held_keep;
    if (step->with_backward) TRY(step_plan(step, held, step->pack.count));
    if (pass == FORWARD_KEEP) return step_reserve_kept(step);
    TRY(step_reserve(step, &kept));
    if (!kept) step->held = 0;
    return STATUS_OK;
}

Status step_start(TrainStep **out, const TrainStep *given, Pass pass)
{
    Trainer *trainer = given->trainer;
    if (trainer->busy)
        return fail(STATUS_INVALID, "another call on this adapter has more micro-batches to run");
    if (pass == FORWARD_BACKWARD && given->part == WHOLE_CALL && parts_wait(trainer->adapter))
        return fail(STATUS_INVALID, "parts of another call wait: end_parts() adds them, "
                                    "drop_parts() drops them");
    TrainStep *step = malloc(sizeof *step);
    if (!step) return fail(STATUS_MEMORY, "no memory for a call");
    *step = *given;
    step->data = *given->datums;
    step->datums = &step->data;
    step->stamp = trainer->adapter->stamp;
    step->with_backward = pass == FORWARD_BACKWARD;
    step->leaf = step->part == WHOLE_CALL ? 0 : step->part;
    Status status = step_open(step);
    if (status) {
        free(step);
        return status;
    }
    trainer->busy = 1;
    status = step_prepare(step, pass);
    if (!status) {
        *out = step;
        return STATUS_OK;
    }
    step->owned = NULL; /* the caller's, as `keeping` is */
    step->keeping = NULL;
    step_close(step);
    return status;
}

/* The arena may have served others since the last micro-batch, and the weights may have changed. */
static Status step_resume(TrainStep *step, int i)
{
    int kept;
    TRY(step_going(step));
    if (step->trainer->adapter->stamp != step->stamp)
        return fail(STATUS_INVALID,
                    "the weights changed between two micro-batches of a call; it was dropped");
    TRY(arena_claim(step, &kept));
    if (kept) return STATUS_OK;
    if (step->with_backward)
        step->held = 0;
    else if (step->held > i + 1)
        step->held = i + 1;
    return STATUS_OK;
}

static Status step_finish(TrainStep *step)
{
    Adapter *adapter = step->trainer->adapter;
    int whole = step->part == WHOLE_CALL;
    if (!step->with_backward) {
        step->loss_sum = losses_sum(step);
        return STATUS_OK;
    }
    step->loss_sum = step->sum.loss;
    TRY(parts_end(step, whole ? GRADIENT_PARTS : step->part + 1));
    return whole ? gradients_gather(adapter, &step->loss_sum) : STATUS_OK;
}

Status step_next(TrainStep *step)
{
    int count = step->pack.count, i = step->with_backward ? step->done : count - 1 - step->done;
    if (step->done < count) {
        if (step->done) TRY(step_resume(step, i));
        TRY(step->with_backward ? micro_backward(step, i) : micro_run(step, i));
        TRY(step_going(step));
        step->done++;
    }
    if (step->done < count) return STATUS_OK;
    step->trainer->held_keep = count ? step->keep[0] : 0;
    TRY(step_finish(step));
    step->finished = 1;
    return STATUS_OK;
}

void step_close(TrainStep *step)
{
    Trainer *trainer = step->trainer;
    Adapter *adapter = trainer->adapter;
    if (!step->finished && step->with_backward) {
        adapter_give(adapter, FRESH);
        if (step->part == WHOLE_CALL) parts_drop(adapter);
    }
    trainer->busy = 0;
    pack_close(&step->pack);
    free(step->acts.layer);
    free(step->owned);
    free(step->keeping);
    free(step);
}
