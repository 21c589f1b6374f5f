/* train/step.c - one training call, whatever its loss: micro-batches → transformer → head → loss →
 * gradients.
 *
 * Gradients are summed over micro-batches in a separate vector, which is added to the others at the
 * end. So others may work between two micro-batches without changing a bit of the call. The head
 * sees rows in chunks. An objective (step.h) computes their loss, and their gradient in place. Rows
 * with zero weights have no gradient, and so no backward.
 *
 * A kept forward leaves the activations of the first micro-batches in the trainer's arena: of one,
 * and of as many more as keep_bytes allow. It therefore runs the micro-batches last to first: the
 * later ones use the memory that the first ones fill at the end. So keeping one costs no more
 * memory than a training step. Backward recomputes the others.
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
    pack_rows(pack, step->micro, &step->batch, step_device(step));
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

/* Reserves bytes for all held micro-batches, or for the largest other one if that is more. */
static Status step_reserve(TrainStep *step)
{
    size_t bytes = span_bytes(step, 0, step->held);
    for (int i = step->held; i < step->pack.count; i++) {
        size_t one = span_bytes(step, i, i + 1);
        if (one > bytes) bytes = one;
    }
    char purpose[64];
    snprintf(purpose, sizeof purpose, step->objective->purpose, step->pack.most.T);
    return arena_reserve(&step->trainer->arena, bytes, purpose);
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
    size_t free_bytes, all_bytes;
    dev->memory(dev, &free_bytes, &all_bytes);
    plan.with_backward = 1;
    for (int i = first; i < end; i++) {
        plan.micro = &step->pack.micro[i];
        TRY(step_going(step));
        TRY(micro_keep(&step->keep[i], &plan, free_bytes + step->trainer->arena.size));
    }
    return STATUS_OK;
}

/* Sets how many micro-batches a kept forward holds, and reserves memory for them and for the
 * others' backward; 0 if memory is short. If several are held, all their activations are kept. */
static Status step_reserve_kept(TrainStep *step)
{
    const Trainer *trainer = step->trainer;
    int all = keep_all(trainer->adapter->model);
    size_t most = trainer->limits.keep_bytes < trainer->limits.step_bytes
                      ? trainer->limits.keep_bytes
                      : trainer->limits.step_bytes;
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

static void step_close(TrainStep *step)
{
    pack_close(&step->pack);
    free(step->acts.layer);
}

/* ---- the call ---- */

static Status micro_run(TrainStep *step, int i)
{
    Device *dev = step_device(step);
    Arena *arena = &step->trainer->arena;
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
static Status sum_check(const TrainStep *step, double norm)
{
    double before = 0.0;
    if (norm >= 0x1p103) TRY(adapter_norm(step->trainer->adapter, GRADIENTS, &before));
    if (norm + before <= FLT_MAX) return STATUS_OK;
    return fail(STATUS_NUMERIC, isfinite(norm)
                                    ? "the sum of this batch's gradient and those before it is not "
                                      "finite; this batch's was dropped"
                                    : "the gradient of this batch is not finite; it was dropped");
}

/* Adds the FRESH gradients to the others, with their loss and counts, and clears them. It adds
 * nothing if the call failed or they are not finite. */
static Status gradients_take(const TrainStep *step, Status status, double loss)
{
    Adapter *adapter = step->trainer->adapter;
    double norm = 0.0;
    if (!status) status = adapter_norm(adapter, FRESH, &norm);
    if (!status) status = sum_check(step, norm);
    if (!status) {
        adapter_gather(adapter);
        adapter->loss += loss;
        adapter->tokens += step->tokens;
        adapter->sequences += step->sequences;
    }
    if (status) adapter_drop(adapter);
    return status;
}

/* Lets others work: nothing of the step is in flight, its activations are no longer needed (or held
 * in the arena), and each micro-batch reserves the device's scratch again. */
static Status step_pause(const TrainStep *step, int done)
{
    const Trainer *trainer = step->trainer;
    uint64_t stamp = trainer->adapter->stamp;
    if (trainer->between) TRY(trainer->between(trainer->context, done, step->pack.count));
    if (trainer->adapter->stamp == stamp) return STATUS_OK;
    return fail(STATUS_INVALID,
                "the weights changed between two micro-batches of a call; it was dropped");
}

/* Runs an open step, whose memory is reserved, and adds its gradients to the others. */
static Status step_run(TrainStep *step, double *loss_sum)
{
    Status status = STATUS_OK;
    int count = step->pack.count;
    for (int i = 0; !status && i < count; i++) {
        if (i > 0) status = step_pause(step, i);
        if (!status) status = micro_run(step, step->with_backward ? i : count - 1 - i);
        if (!status) status = step_going(step);
    }
    *loss_sum = 0.0;
    for (int i = 0; !status && i < count; i++) *loss_sum += step->losses[i];
    return step->with_backward ? gradients_take(step, status, *loss_sum) : status;
}

static void routed_clear(Trainer *trainer)
{
    const Shape *s = &trainer->adapter->model->shape;
    size_t count = (size_t)s->layers * (size_t)s->experts;
    if (trainer->routed) memset(trainer->routed, 0, count * sizeof *trainer->routed);
}

Status step_call(TrainStep *step, Pass pass, double *loss_sum)
{
    Trainer *trainer = step->trainer;
    int held = step->held;
    step->with_backward = pass == FORWARD_BACKWARD;
    if (trainer->busy)
        return fail(STATUS_INVALID, "another call on this adapter has more micro-batches to run");
    TRY(step_open(step));
    trainer->busy = 1;
    trainer->interrupted = 0;
    routed_clear(trainer);
    for (int i = 0; i < held; i++) step->keep[i] = trainer->held_keep;
    trainer->held = 0;
    size_t size = trainer->arena.size;
    Status status = step->with_backward ? step_plan(step, held, step->pack.count) : STATUS_OK;
    if (!status) status = pass == FORWARD_KEEP ? step_reserve_kept(step) : step_reserve(step);
    if (held && trainer->arena.size != size) step->held = 0; /* it grew, and lost its content */
    if (!status) status = step_run(step, loss_sum);
    trainer->held_keep = step->keep[0];
    trainer->busy = 0;
    step_close(step);
    return status;
}
