/* train/objective_logprob.c - the objective for losses on the targets' log-probabilities
 * (losses.c).
 *
 * For each chunk of rows the device computes logits, then log-probabilities. The host computes
 * their loss, and the gradient overwrites the logits. A loss whose gradient does not depend on
 * log-probabilities (`linear`) is evaluated at the end, and the host waits once. A loss that needs
 * whole datums is evaluated after the last chunk; each chunk's logits are then recomputed, to the
 * same bits, for the gradient. For other losses the device runs a chunk ahead of the host, if it
 * can. */
#include "objective_logprob.h"

#include <stdlib.h>
#include <string.h>

#include "micro_work.h"

typedef struct Targets {
    Head second;                      /* with its own logits, if the device is ahead */
    float *flat, *input[LOSS_INPUTS]; /* of the current targets; flat: dlogp in the datums' order */
} Targets;

/* Whether the host needs a chunk's log-probabilities to compute its gradient. */
static int waits(const TrainStep *step)
{
    return step->with_backward && !step->loss->linear && !step->loss->whole;
}

/* How many chunks the device is ahead, so that it does not wait for the host. A chunk's logits take
 * 100 µs or more, a round trip to the host about 40. */
static int chunks_ahead(const TrainStep *step)
{
    return step_device(step)->async && waits(step) && step->head.chunk < step->head.T;
}

/* ---- memory ---- */

static void targets_arrays(TrainStep *step, Arena *host)
{
    Targets own, *at = arena_take(host, sizeof own);
    size_t bytes = (size_t)step->pack.most.targets * sizeof(float);
    own.flat = arena_take(host, bytes);
    for (int j = 0; j < LOSS_INPUTS && step->loss->input[j].name; j++)
        own.input[j] = arena_take(host, bytes);
    if (at) *at = own;
    step->own = at;
}

static void targets_place(TrainStep *step, Arenas *arenas, size_t *end)
{
    const Model *m = step_model(step);
    (void)end;
    head_place(&step->head, &arenas->of[m->stages - 1], m, step->micro->T, step->micro->targets);
}

static void targets_chunk(TrainStep *step, Arena *arena)
{
    const Model *m = step->trainer->adapter->model;
    Head *h = &step->head, *second = &((Targets *)step->own)->second;
    int R = step->trainer->adapter->rank;
    head_place_chunk(h, arena, m, R);
    *second = *h;
    if (!chunks_ahead(step)) return;
    size_t C = (size_t)h->chunk, size = m->dev->real_bytes;
    second->x = arena_take(arena, C * (size_t)m->shape.width * size);
    second->s = arena_take(arena, C * (size_t)R * size);
    second->logits = arena_take(arena, C * (size_t)m->shape.vocab * sizeof(float));
    second->lse = arena_take(arena, 2 * C * sizeof(float));
}

/* ---- the host's work ---- */

/* Evaluates the loss of the targets listed in `source`, or from `from` on if it is NULL. */
static Status piece_loss(TrainStep *step, LossCall *call, const int32_t *source, int64_t from)
{
    Targets *own = step->own;
    call->key = step->datums->key;
    for (int j = 0; j < LOSS_INPUTS && step->loss->input[j].name; j++) {
        for (int64_t i = 0; i < call->count; i++)
            own->input[j][i] = loss_input(step->loss, step->datums, j,
                                          step->micro->target0 + (source ? source[i] : from + i));
        call->input[j] = own->input[j];
    }
    return step_loss(step, step->loss->evaluate(call));
}

/* Evaluates the loss of rows [from, to), in the order of the head. */
static Status rows_loss(TrainStep *step, int from, int to)
{
    const int32_t *start = step->pack.start + from;
    LossCall call = {.count = start[to - from] - *start,
                     .logp = step->logp + *start,
                     .dlogp = step->dlogp + *start,
                     .rows = to - from,
                     .start = start};
    return piece_loss(step, &call, step->pack.source + *start, 0);
}

/* Begins to fetch these rows' log-probabilities. */
static Status rows_fetch(TrainStep *step, int from, int to)
{
    Device *dev = step_device(step);
    int64_t first = step->pack.start[from], count = step->pack.start[to] - first;
    dev->fetch(dev, step->logp + first, step->head.logp + first, (size_t)count * sizeof(float));
    return STATUS_OK;
}

static void dlogp_send(TrainStep *step, int from, int to)
{
    Device *dev = step_device(step);
    int64_t first = step->pack.start[from], count = step->pack.start[to] - first;
    dev->upload(dev, step->head.dlogp + first, step->dlogp + first, (size_t)count * sizeof(float));
}

static Status rows_answer(TrainStep *step, int from, int to)
{
    TRY(rows_loss(step, from, to));
    dlogp_send(step, from, to);
    return STATUS_OK;
}

/* A linear loss's gradient. It does not depend on log-probabilities, so they are set to 0. */
static Status linear_answer(TrainStep *step, int from, int to)
{
    memset(step->logp, 0, (size_t)step->micro->targets * sizeof(float));
    return rows_answer(step, from, to);
}

/* A whole loss, datum by datum, in order. */
static Status datums_answer(TrainStep *step, int from, int to)
{
    const Datums *d = step->datums;
    const Micro *micro = step->micro;
    Device *dev = step_device(step);
    float *flat = ((Targets *)step->own)->flat;
    TRY(rows_fetch(step, from, to));
    TRY(dev->await(dev, 0));
    step_result(step);
    int64_t at = 0;
    for (int i = micro->first; i < micro->last; i++) {
        LossCall call = {.count = (int64_t)d->lengths[i] * d->counts[i],
                         .logp = step->result + micro->target0 + at,
                         .dlogp = flat + at};
        TRY(piece_loss(step, &call, NULL, at));
        at += call.count;
    }
    for (int64_t i = 0; i < at; i++) step->dlogp[i] = flat[step->pack.source[i]];
    dlogp_send(step, from, to);
    return STATUS_OK;
}

/* ---- the head ---- */

/* The head that holds the logits of the chunk at `row`. */
static const Head *head_of(const TrainStep *step, int row)
{
    return row / step->head.chunk % 2 ? &((const Targets *)step->own)->second : &step->head;
}

static void chunk_logits(TrainStep *step, int row)
{
    const Head *h = head_of(step, row);
    int rows = head_chunk(h, row);
    head_logits(h, step->trainer->adapter, step_hidden(step), row, rows);
    head_logprob(h, step->trainer->adapter->model, row, rows);
}

static void chunk_backward(TrainStep *step, int row)
{
    const Head *h = head_of(step, row);
    int rows = head_chunk(h, row);
    head_logprob_backward(h, step->trainer->adapter->model, row, rows);
    head_logits_backward(h, step->trainer->adapter, step_last_grads(step)->dxn, row, rows);
}

/* Computes rows [0, end) in chunks, and, if `back`, the gradient of the live ones. If the host must
 * compute the loss, it fetches one chunk's log-probabilities while the device computes the next. */
static Status chunks_run(TrainStep *step, int end, int back)
{
    Device *dev = step_device(step);
    const Head *h = &step->head;
    int ahead = chunks_ahead(step);
    for (int next = 0, row; next < end + ahead * h->chunk; next += h->chunk) {
        TRY(step_going(step));
        if (next < end) chunk_logits(step, next);
        if (next < end && waits(step))
            TRY(step_host(step, rows_fetch, next, next + head_chunk(h, next)));
        if ((row = next - ahead * h->chunk) < 0) continue;
        if (waits(step)) {
            TRY(dev->await(dev, next < end ? ahead : 0));
            TRY(step_host(step, rows_answer, row, row + head_chunk(h, row)));
        }
        if (back && row < step->pack.live) chunk_backward(step, row);
    }
    return STATUS_OK;
}

/* Rows whose log-probabilities are needed, in whole chunks. If no result is wanted, these are only
 * the live rows. */
static int rows_wanted(const TrainStep *step)
{
    const Head *h = &step->head;
    int live = (step->pack.live + h->chunk - 1) / h->chunk * h->chunk;
    return step->result || live > h->T ? h->T : live;
}

static Status targets_head(TrainStep *step)
{
    int T = step->head.T, end = rows_wanted(step), back = step->with_backward;
    if (step->loss->whole) {
        TRY(chunks_run(step, T, 0));
        TRY(step_host(step, datums_answer, 0, T));
        return back ? chunks_run(step, step->pack.live, 1) : STATUS_OK;
    }
    if (back && step->loss->linear) TRY(step_host(step, linear_answer, 0, T));
    TRY(chunks_run(step, end, back));
    return waits(step) ? STATUS_OK : step_host(step, rows_fetch, 0, end);
}

/* Evaluates the loss of rows for which no chunk waited. */
static Status targets_tell(TrainStep *step, int from, int to)
{
    (void)to;
    if (step->loss->whole || waits(step)) return STATUS_OK;
    for (int row = from, end = rows_wanted(step); row < end; row += step->head.chunk)
        TRY(rows_loss(step, row, row + head_chunk(&step->head, row)));
    return STATUS_OK;
}

const Objective targets_objective = {"a training step of %d tokens",
                                     targets_arrays,
                                     targets_place,
                                     targets_chunk,
                                     NULL,
                                     targets_head,
                                     targets_tell};

Status targets_needs(Trainer *trainer, int T, StepNeeds *needs)
{
    static const Loss any = {.name = "a loss for which the host must wait"};
    const Model *model = trainer->adapter->model;
    Micro micro = {.T = T, .S = 1, .pages = (T + KV_PAGE - 1) / KV_PAGE, .targets = T};
    Targets own;
    TrainStep step = {.trainer = trainer,
                      .loss = &any,
                      .objective = &targets_objective,
                      .own = &own,
                      .with_backward = 1,
                      .micro = &micro,
                      .acts[0].layer = calloc((size_t)model->shape.layers, sizeof(LayerActs))};
    if (!step.acts[0].layer) return fail(STATUS_MEMORY, "no memory for a plan");
    step_measure(&step, trainer->limits.step_bytes, NULL, needs);
    free(step.acts[0].layer);
    return STATUS_OK;
}
