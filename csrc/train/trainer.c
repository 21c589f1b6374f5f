/* train/trainer.c - an adapter's training calls: forward_backward and its halves, their memory and
 * their limits.
 *
 * A step's rows depend on the device's total memory, not on the free memory: gradients are summed
 * step by step, so the same run on the same card gives the same bits. The activations that a step
 * keeps (acts.c) change no result, and are as many as fit in the free memory. Rows are few enough
 * that all of them fit. Longer datums, or a smaller limit, cost activation recomputation.
 *
 * A kept forward has a copy of its datums, because the caller may change the arrays before
 * backward, and the stamp of its weights: with other weights it is not valid. Its activations are
 * in the arena (step.c). */
#include "trainer.h"

#include <stdlib.h>
#include <string.h>

#include "../model/memory_share.h"
#include "objective_logprob.h"

enum { STEP_TOKENS_MIN = 256 };

/* One block; datums without the loss's inputs. */
struct KeptForward {
    uint64_t stamp;
    Datums datums;
};

static Status default_tokens(Trainer *trainer)
{
    const Model *model = trainer->adapter->model;
    size_t most = budget_rows(model);
    StepNeeds needs;
    for (int tokens = model->dev->step_rows;; tokens /= 2) {
        trainer->limits.step_tokens = tokens;
        if (tokens <= STEP_TOKENS_MIN) return STATUS_OK;
        TRY(targets_needs(trainer, tokens, &needs));
        if (needs.whole <= most && needs.least <= trainer->limits.step_bytes) return STATUS_OK;
    }
}

static Status routed_open(Trainer *trainer)
{
    const Shape *s = &trainer->adapter->model->shape;
    if (!has_experts(&trainer->adapter->model->shape)) return STATUS_OK;
    trainer->routed = calloc((size_t)s->layers * (size_t)s->experts, sizeof *trainer->routed);
    return trainer->routed ? STATUS_OK : fail(STATUS_MEMORY, "no memory for an adapter");
}

void trainer_limit(Trainer *trainer, size_t step_bytes, size_t datum_bytes)
{
    const Adapter *adapter = trainer->adapter;
    TrainerLimits *limits = &trainer->limits;
    size_t vectors = (VECTORS + PART_LEVELS) * adapter_vector_bytes(adapter);
    size_t most = budget_datum(adapter->model, vectors);
    limits->step_bytes = step_bytes ? step_bytes : budget_step(adapter->model, 0);
    limits->datum_bytes = datum_bytes ? datum_bytes : step_bytes ? step_bytes : most;
}

Status trainer_open(Trainer **out, Adapter *adapter, const TrainerLimits *limits)
{
    if (limits->step_tokens < 0)
        return fail(STATUS_INVALID, "step_tokens must be 0 (the default) or more, not %d",
                    limits->step_tokens);
    static _Atomic uint64_t numbers;
    Trainer *trainer = calloc(1, sizeof *trainer);
    if (!trainer) return fail(STATUS_MEMORY, "no memory for an adapter");
    trainer->adapter = adapter;
    trainer->number = ++numbers;
    trainer->limits = *limits;
    trainer_limit(trainer, limits->step_bytes, limits->datum_bytes);
    Status status = limits->step_tokens ? STATUS_OK : default_tokens(trainer);
    if (!status) status = routed_open(trainer);
    if (status)
        free(trainer);
    else
        *out = trainer;
    return status;
}

void trainer_close(Trainer *trainer)
{
    if (!trainer) return;
    free(trainer->kept);
    free(trainer->routed);
    free(trainer);
}

/* ---- the kept forward ---- */

#define COPY(to, from, count)                          \
    do {                                               \
        size_t bytes = (size_t)(count) * sizeof *(to); \
        (to) = memcpy(next, from, bytes);              \
        next += bytes;                                 \
    } while (0)

static Status kept_copy(KeptForward **out, const Datums *d, uint64_t stamp)
{
    size_t count = (size_t)d->count, tokens = (size_t)d->token_total,
           targets = (size_t)d->target_total;
    KeptForward *kept = malloc(sizeof *kept + (tokens + targets + 2 * count) * sizeof(int32_t));
    if (!kept) return fail(STATUS_MEMORY, "no memory to keep %zu tokens", tokens);
    char *next = (char *)(kept + 1);
    *kept = (KeptForward){
        stamp, {.count = d->count, .token_total = d->token_total, .target_total = d->target_total}};
    COPY(kept->datums.tokens, d->tokens, tokens);
    COPY(kept->datums.lengths, d->lengths, count);
    COPY(kept->datums.targets, d->targets, targets);
    COPY(kept->datums.counts, d->counts, count);
    *out = kept;
    return STATUS_OK;
}

/* Replaces the kept forward; NULL: none. */
static void kept_set(Trainer *trainer, KeptForward *kept, int held)
{
    free(trainer->kept);
    trainer->kept = kept;
    trainer->held = held;
}

/* Drops a kept forward of earlier weights. */
static void kept_check(Trainer *trainer)
{
    if (trainer->kept && trainer->kept->stamp != trainer->adapter->stamp)
        kept_set(trainer, NULL, 0);
}

/* ---- the calls ---- */

Status trainer_forward_backward(TrainStep **out, Trainer *trainer, const Datums *datums,
                                const Loss *loss, Pass pass, int part, float *logp)
{
    if (loss->taught && !datums->input[loss->taught])
        return fail(STATUS_INVALID, "%s needs a teacher: use distill, or give its %s", loss->name,
                    loss->input[loss->taught].name);
    TRY(datums_check(datums, trainer->adapter->model, loss));
    if (pass != FORWARD && part == WHOLE_CALL) TRY(adapter_trainable(trainer->adapter));
    if (!trainer->busy) kept_check(trainer);
    TrainStep step = {.trainer = trainer,
                      .datums = datums,
                      .loss = loss,
                      .objective = &targets_objective,
                      .part = part,
                      .result = logp};
    if (pass == FORWARD_KEEP) TRY(kept_copy(&step.keeping, datums, trainer->adapter->stamp));
    Status status = step_start(out, &step, pass);
    if (status) free(step.keeping);
    return status;
}

Status trainer_backward(TrainStep **out, Trainer *trainer, const float *dlogp, int64_t count)
{
    TRY(adapter_trainable(trainer->adapter));
    if (!trainer->kept || trainer->kept->stamp != trainer->adapter->stamp)
        return fail(STATUS_INVALID, "there is no kept forward to go back from: none was made since "
                                    "the weights last changed, or backward has used it");
    Datums datums = trainer->kept->datums;
    datums.input[0] = dlogp;
    datums.input_total[0] = count;
    TRY(datums_check(&datums, trainer->adapter->model, &loss_given));
    TrainStep step = {.trainer = trainer,
                      .datums = &datums,
                      .loss = &loss_given,
                      .objective = &targets_objective,
                      .part = WHOLE_CALL,
                      .goes_back = 1,
                      .held = trainer->held};
    return step_start(out, &step, FORWARD_BACKWARD);
}

Status trainer_next(TrainStep *step, int *done, int *count)
{
    Trainer *trainer = step->trainer;
    TRY(step_next(step));
    *done = step->done;
    *count = step->pack.count;
    if (!step->finished) return STATUS_OK;
    if (step->goes_back) kept_set(trainer, NULL, 0);
    if (step->keeping) kept_set(trainer, step->keeping, step->held);
    step->keeping = NULL;
    return STATUS_OK;
}

double trainer_loss(const TrainStep *step)
{
    return step->loss_sum;
}

void trainer_end(TrainStep *step)
{
    step_close(step);
}
