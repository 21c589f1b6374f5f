/* sampling/sampler.c - continuous batching: each step is one forward for all sequences that need a
 * token or run a prompt.
 *
 * model_runner.c runs it. decode_graph.c runs steps that only decode, if the device can record. */
#include <stdlib.h>

#include "../model/stages.h"
#include "decode_graph.h"
#include "request.h"
#include "scheduler.h"

struct Sampler {
    ModelRunner runner;
    Scheduler scheduler;
    DecodeGraphs graphs;
};

/* ---- opening and closing ---- */

Status sampler_open(Sampler **out, Model *model, int64_t tokens, int graphs)
{
    if (!model->sealed)
        return fail(STATUS_INVALID, "the model is not sealed: load every slot, then seal it");
    if (tokens < 0 || tokens > CACHE_TOKENS_MAX)
        return fail(STATUS_INVALID, "the cache can hold 0 (the default) to %d tokens, not %lld",
                    CACHE_TOKENS_MAX, (long long)tokens);
    Sampler *sampler = calloc(1, sizeof *sampler);
    if (!sampler) return fail(STATUS_MEMORY, "no memory for a sampler");
    ModelRunner *runner = &sampler->runner;
    runner->model = model;
    sampler->scheduler.graphs = graphs && model->dev->record && model->stages == 1;
    if (!tokens) tokens = budget_cache_tokens(model, 0, 0);
    runner->layers = calloc((size_t)model->shape.layers, sizeof *runner->layers);
    Status status = runner->layers ? page_pool_open(&runner->pool, model, tokens)
                                   : fail(STATUS_MEMORY, "no memory for a sampler");
    if (status) {
        sampler_close(sampler);
        return status;
    }
    *out = sampler;
    return STATUS_OK;
}

/* Removes its requests first. */
void sampler_close(Sampler *sampler)
{
    if (!sampler) return;
    Scheduler *scheduler = &sampler->scheduler;
    while (scheduler->requests) sampler_remove(sampler, scheduler->request[0]->spec.id);
    scheduler_close(scheduler);
    decode_close(&sampler->graphs, sampler->runner.model->dev);
    free(sampler->runner.layers);
    arenas_release(&sampler->runner.arenas);
    page_pool_close(&sampler->runner.pool);
    free(sampler);
}

/* ---- requests ---- */

static Request *find(const Sampler *sampler, int64_t id)
{
    const Scheduler *scheduler = &sampler->scheduler;
    for (int i = 0; i < scheduler->requests; i++)
        if (scheduler->request[i]->spec.id == id) return scheduler->request[i];
    return NULL;
}

const Request *sampler_find(const Sampler *sampler, int64_t id)
{
    return find(sampler, id);
}

const Request *sampler_request(const Sampler *sampler, int index)
{
    return index < sampler->scheduler.requests ? sampler->scheduler.request[index] : NULL;
}

const Tokens *request_tokens(const Request *request, int sample)
{
    return &request->sequence[sample].tokens;
}

Status sampler_add(Sampler *sampler, const RequestSpec *spec)
{
    PagePool *pool = &sampler->runner.pool;
    Request *r;
    TRY(request_check(pool, spec));
    if (find(sampler, spec->id))
        return fail(STATUS_INVALID, "request %lld is already here", (long long)spec->id);
    TRY(request_open(&r, pool, spec));
    Status status = scheduler_add(&sampler->scheduler, r);
    if (status) request_close(pool, r);
    return status;
}

Status sampler_set_adapter(Sampler *sampler, int64_t id, const Adapter *adapter)
{
    Request *r = find(sampler, id);
    if (!r || !r->spec.session)
        return fail(STATUS_INVALID, "no request %lld of a session is here", (long long)id);
    if (adapter && adapter->model != sampler->runner.model)
        return fail(STATUS_INVALID, "the adapter belongs to another model than the sampler");
    r->spec.adapter = adapter;
    return STATUS_OK;
}

Status sampler_stop(Sampler *sampler, int64_t id, int sample)
{
    Request *r = find(sampler, id);
    if (!r || sample < 0 || sample >= r->spec.samples)
        return fail(STATUS_INVALID, "no sample %d of request %lld is here", sample, (long long)id);
    Sequence *s = &r->sequence[sample];
    if (!s->tokens.drawn)
        return fail(STATUS_INVALID, "sample %d of request %lld has no token to end with", sample,
                    (long long)id);
    sequence_finish(s, STOPPED);
    sequence_free(&sampler->runner.pool, s);
    return STATUS_OK;
}

void sampler_remove(Sampler *sampler, int64_t id)
{
    Request *r = find(sampler, id);
    if (!r) return;
    scheduler_remove(&sampler->scheduler, r);
    request_close(&sampler->runner.pool, r);
}

/* ---- a step ---- */

/* A failed step leaves the cache in an unknown state. So all sequences free their pages and restart
 * in the next step, to the same bits. */
static void sequences_restart(Sampler *sampler)
{
    const Scheduler *scheduler = &sampler->scheduler;
    PagePool *pool = &sampler->runner.pool;
    for (int i = 0; i < scheduler->requests; i++)
        for (int j = 0; j < scheduler->request[i]->spec.samples; j++)
            sequence_reset(pool, &scheduler->request[i]->sequence[j]);
    pages_evict(pool);
}

static void mark_done(Sampler *sampler)
{
    for (int i = 0; i < sampler->scheduler.requests; i++) {
        Request *r = sampler->scheduler.request[i];
        if (r->overflowed && !r->done) request_overflow(&sampler->runner.pool, r);
        r->done = 1;
        for (int j = 0; j < r->spec.samples; j++)
            r->done &= r->sequence[j].tokens.finish != RUNNING;
    }
}

Status sampler_step(Sampler *sampler, StepResult *result)
{
    ModelRunner *runner = &sampler->runner;
    ScheduledRows runs[STEP_SEQUENCES];
    result->count = 0;
    runner->interrupted = 0;
    int count = schedule(&sampler->scheduler, &runner->pool, runs);
    Status status = STATUS_OK;
    if (sampler->scheduler.graphs && decode_records(runs, count))
        status = decode_step(&sampler->graphs, runner, runs, count, result);
    else if (count)
        status = model_runner_step(runner, runs, count, result);
    if (status) sequences_restart(sampler);
    mark_done(sampler);
    return status;
}

void sampler_interrupt(Sampler *sampler)
{
    sampler->runner.interrupted = 1;
}

/* ---- numbers ---- */

SamplerStats sampler_stats(const Sampler *sampler)
{
    const PagePool *pool = &sampler->runner.pool;
    return (SamplerStats){pool->prefix.reused, sampler->graphs.steps, sampler->graphs.replays,
                          pool->states.count, pool->states.cached};
}

CacheCounts sampler_cache(const Sampler *sampler)
{
    return page_pool_counts(&sampler->runner.pool);
}

void sampler_spoil(Sampler *sampler)
{
    page_pool_spoil(&sampler->runner.pool);
}
