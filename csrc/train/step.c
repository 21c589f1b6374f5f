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
 * measures the ops' scratch (micro_work.c). */
#include "step.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/numbers.h"
#include "../model/gradient_parts.h"
#include "../model/memory_share.h"
#include "../model/stages.h"
#include "micro_work.h"

#define MIB (1.0 / 1048576.0)

/* ---- memory ---- */

/* Places (or measures) the current micro-batch. */
static void micro_place(TrainStep *step, Arenas *arenas, int keep)
{
    const Micro *micro = step->micro;
    const Adapter *adapter = step->trainer->adapter;
    const Model *m = adapter->model;
    Arena *last = &arenas->of[m->stages - 1];
    size_t end[STAGES_MOST] = {0};
    step->objective->place(step, arenas, end);
    batch_place(step->batch, arenas, m, micro->T, micro->S, 1, micro->pages);
    cache_place(step->cache, arenas, m, micro->pages);
    acts_place(step->acts, arenas, m, micro->T, adapter->rank, keep);
    size_t head = last->used;
    if (keep) head = grads_place(step->grads, arenas, m, micro->T, adapter->rank);
    for (int k = 0; k < m->stages; k++) arenas->of[k].used = max_size(arenas->of[k].used, end[k]);
    Arena chunk = *last;
    chunk.used = head;
    step->objective->chunk(step, &chunk);
    last->used = max_size(last->used, chunk.used);
}

/* The same, measured; the sum of the stages' bytes. */
static size_t micro_bytes(TrainStep *step, int keep, Arenas *measured)
{
    size_t sum = 0;
    *measured = (Arenas){0};
    micro_place(step, measured, keep);
    for (int k = 0; k < step_model(step)->stages; k++) sum += measured->of[k].used;
    return sum;
}

/* The scratch of the ops of the current micro-batch, which is placed: of each device, and of each
 * of the other model's; returns the sum. */
static size_t micro_scratch(const TrainStep *step, size_t *own, size_t *other)
{
    TrainStep rehearsal = *step;
    const Model *m = step_model(step);
    rehearsal.rehearsing = 1;
    if (!m->dev->rehearse) return 0;
    model_rehearse(m);
    if (step->other) model_rehearse(step->other);
    micro_work(&rehearsal);
    return model_rehearsed(m, own) + (step->other ? model_rehearsed(step->other, other) : 0);
}

/* Reserves that scratch. */
static Status micro_prepare(const TrainStep *step)
{
    size_t own[STAGES_MOST] = {0}, other[STAGES_MOST] = {0};
    micro_scratch(step, own, other);
    TRY(model_reserve(step_model(step), own));
    return step->other ? model_reserve(step->other, other) : STATUS_OK;
}

/* The limits of the arenas that step_measure looks for. */
typedef struct Room {
    TrainStep *step;
    size_t most;
    const size_t *part; /* of each stage; NULL: any */
    size_t scratch[STAGES_MOST];
} Room;

static int room_fits(void *context, int keep)
{
    const Room *room = context;
    Arenas measured;
    if (micro_bytes(room->step, keep, &measured) > room->most) return 0;
    for (int k = 0; room->part && k < step_model(room->step)->stages; k++)
        if (measured.of[k].used + room->scratch[k] > room->part[k]) return 0;
    return 1;
}

void step_measure(TrainStep *step, size_t most, const size_t *part, StepNeeds *needs)
{
    const Model *m = step_model(step);
    Arenas measured;
    size_t other[STAGES_MOST] = {0}, least = micro_bytes(step, 1, &measured);
    Room room = {.step = step, .part = part};
    step->pack.live = step->micro->T;
    size_t scratch = micro_scratch(step, room.scratch, other);
    for (int k = 0; k < m->stages; k++) room.scratch[k] += other[k]; /* on the same devices */
    room.most = most - min_size(most, scratch);
    int keep = most > scratch ? budget_keep(m, room_fits, &room) : 0;
    *needs = (StepNeeds){.scratch = scratch,
                         .least = least + scratch,
                         .whole = micro_bytes(step, keep_all(m), &measured) + scratch,
                         .bytes = micro_bytes(step, keep ? keep : 1, &measured),
                         .keep = keep};
    for (int k = 0; k < m->stages; k++) {
        needs->stage_bytes[k] = measured.of[k].used;
        needs->stage_scratch[k] = room.scratch[k];
    }
}

/* Measures micro-batches [first, end), one after another; the sum of the stages' bytes. */
static size_t span_bytes(TrainStep *step, int first, int end, Arenas *measured)
{
    size_t bytes = 0;
    *measured = (Arenas){0};
    for (int i = first; i < end; i++) {
        Arenas one;
        step->micro = &step->pack.micro[i];
        bytes += micro_bytes(step, step->keep[i], &one);
        for (int k = 0; k < STAGES_MOST; k++) measured->of[k].used += one.of[k].used;
    }
    return bytes;
}

/* The model's arenas serve this step now. Returns in *kept whether they hold what this trainer's
 * last step left there. */
static Status arena_claim(TrainStep *step, int *kept)
{
    const Trainer *trainer = step->trainer;
    const Model *model = step_model(step);
    TrainingMemory *memory = &trainer->adapter->model->training;
    Arenas before = memory->step;
    int mine = memory->user == trainer->number;
    char purpose[64];
    snprintf(purpose, sizeof purpose, step->objective->purpose, step->pack.most.T);
    memory->user = 0;
    TRY(arenas_reserve(model, &memory->step, &step->need, purpose));
    memory->user = trainer->number;
    for (int k = 0; k < model->stages; k++) {
        const Arena *old = &before.of[k], *now = &memory->step.of[k];
        mine &= old->base && old->base == now->base && old->size == now->size;
    }
    *kept = mine;
    return STATUS_OK;
}

/* Reserves bytes for all held micro-batches, or on each stage for the largest other one if that is
 * more. */
static Status step_reserve(TrainStep *step, int *kept)
{
    Arenas one;
    span_bytes(step, 0, step->held, &step->need);
    for (int i = step->held; i < step->pack.count; i++) {
        span_bytes(step, i, i + 1, &one);
        for (int k = 0; k < STAGES_MOST; k++)
            step->need.of[k].used = max_size(step->need.of[k].used, one.of[k].used);
    }
    return arena_claim(step, kept);
}

/* The most activations of the current micro-batch that fit in the limit and in the free memory.
 * Fails if it does not fit at all. */
static Status micro_keep(int *keep, TrainStep *step, const size_t *free_bytes)
{
    size_t limit = step->trainer->limits.step_bytes, most = step->trainer->limits.datum_bytes;
    StepNeeds needs;
    step_measure(step, limit, free_bytes, &needs);
    *keep = needs.keep ? needs.keep : 1;
    if (needs.keep || needs.least <= most)
        return STATUS_OK; /* the arena reports a lack of free memory */
    return fail(STATUS_MEMORY,
                "a training step of %d tokens needs at least %.2f MiB on device %s, with nothing "
                "kept that can be computed again, and may take %.2f MiB: give it shorter datums, "
                "or more memory",
                step->micro->T, (double)needs.least * MIB, step_model(step)->device,
                (double)most * MIB);
}

/* Plans the kept activations of micro-batches [first, end), for a backward in this call or a later
 * one. */
static Status step_plan(TrainStep *step, int first, int end)
{
    TrainStep plan = *step;
    const Model *model = step_model(step);
    size_t free_bytes[STAGES_MOST], all_bytes;
    for (int k = 0; k < model->stages; k++) {
        stage_memory(model, k, &free_bytes[k], &all_bytes);
        free_bytes[k] += model->training.step.of[k].size;
    }
    plan.with_backward = 1;
    for (int i = first; i < end; i++) {
        plan.micro = &step->pack.micro[i];
        TRY(step_going(step));
        TRY(micro_keep(&step->keep[i], &plan, free_bytes));
    }
    return STATUS_OK;
}

/* Sets how many micro-batches a kept forward holds, and reserves memory for them and for the
 * others' backward; 0 if memory is short. If several are held, all their activations are kept. */
static Status step_reserve_kept(TrainStep *step)
{
    const Trainer *trainer = step->trainer;
    int kept, all = keep_all(trainer->adapter->model);
    Arenas span;
    size_t most = trainer->limits.keep_bytes < trainer->limits.step_bytes
                      ? trainer->limits.keep_bytes
                      : trainer->limits.step_bytes;
    Status status = step_plan(step, 0, step->pack.count);
    if (!status) {
        step->held = 1;
        while (step->held < step->pack.count && step->keep[step->held - 1] == all &&
               step->keep[step->held] == all && span_bytes(step, 0, step->held + 1, &span) <= most)
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
    step->acts[0].layer = arena_take(host, layers * sizeof *step->acts[0].layer);
    step->losses = arena_take(host, count * sizeof *step->losses);
    step->keep = arena_take(host, count * sizeof *step->keep);
    step->logp = arena_take(host, targets * sizeof *step->logp);
    step->dlogp = arena_take(host, targets * sizeof *step->dlogp);
    step->objective->arrays(step, host);
}

static Status step_open(TrainStep *step)
{
    Arena host = {0};
    TRY(pack_open(&step->pack, step->datums, step_model(step), step->trainer->limits.step_tokens));
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
    const Model *model = step_model(step);
    Arenas *arenas = &step->trainer->adapter->model->training.step, before;
    int held = i < step->held, gate = step->loss->gate;
    span_bytes(step, 0, held ? i : 0, &before);
    for (int k = 0; k < model->stages; k++) arenas->of[k].used = before.of[k].used;
    step->micro = &step->pack.micro[i];
    step->forwarded = held && step->with_backward;
    if (!step->forwarded)
        TRY(pack_images(&step->pack, step->micro, model, &step->trainer->interrupted));
    micro_place(step, arenas, step->keep[i]);
    pack_order(&step->pack, step->micro, gate == UNGATED ? NULL : step->datums->input[gate]);
    TRY(micro_prepare(step));
    step->losses[i] = 0.0;
    Status status = micro_work(step), last = model_sync(model); /* fetches may be in flight */
    return last ? last : status;
}

/* Whether the sum of the gradients so far and the FRESH ones, of this norm, is finite. A number
 * below 2^103, half an ulp of f32's maximum, cannot overflow a finite sum. */
static Status sum_check(Adapter *adapter, double norm)
{
    double before = 0.0;
    if (norm >= 0x1p103 && flat_exists(&adapter->vector[GRADIENTS]))
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
    if (!flat_exists(&sum.vector)) return STATUS_OK;
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
        if (flat_exists(&step->sum.vector)) adapter->vector[FRESH] = (Flat){0};
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
    if (!flat_exists(&step->sum.vector)) step->tokens = step->sequences = 0.0;
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
    free(step->acts[0].layer);
    free(step->owned);
    free(step->keeping);
    free(step);
}
