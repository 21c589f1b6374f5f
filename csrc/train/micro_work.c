/* train/micro_work.c - the work on one micro-batch: rows to the devices, forward, the objective's
 * head, backward, and what the host makes of the results.
 *
 * It is both the run and the rehearsal, in which devices only count, so their ops are the same. */
#include <math.h>
#include <stdio.h>

#include "../model/layers/backward.h"
#include "../model/layers/forward.h"
#include "micro_work.h"

const Model *step_model(const TrainStep *step)
{
    return step->trainer->adapter->model;
}

Device *step_device(const TrainStep *step)
{
    return step_model(step)->dev;
}

Grads *step_last_grads(TrainStep *step)
{
    return &step->grads[step_model(step)->stages - 1];
}

const real *step_hidden(const TrainStep *step)
{
    return step->acts[step_model(step)->stages - 1].hidden;
}

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
    pack_upload(pack, step->micro, step->batch, step_model(step));
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
    if (trainer->routed) acts_count(trainer->adapter->model, step->acts, trainer->routed);
    if (step->with_backward) live_count(step);
    TRY(step->objective->tell(step, from, to));
    return logp_check(step);
}

Status micro_work(TrainStep *step)
{
    Adapter *adapter = step->trainer->adapter;
    const Model *m = adapter->model;
    const Objective *objective = step->objective;
    int T = step->micro->T;
    batch_whole(step->batch, m, adapter, T, step->rehearsing ? NULL : &step->trainer->interrupted);
    batch_images(step->batch, m, step->pack.image, step->pack.images);
    if (objective->before) TRY(objective->before(step));
    TRY(step_host(step, rows_send, 0, T));
    if (!step->forwarded) forward(m, step->batch, step->acts, step->cache);
    if (step->with_backward)
        m->dev->zero(m->dev, step_last_grads(step)->dxn,
                     (size_t)T * (size_t)m->shape.width * m->dev->real_bytes);
    TRY(objective->head(step));
    if (step->with_backward && step->pack.live)
        backward(m, adapter, step->batch, step->acts, step->cache, step->grads);
    return step_host(step, head_tell, 0, T);
}
