/* sampling/request.c - checks, copies, ends and frees a request. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../model/model_tower.h"
#include "prompt_scores.h"
#include "request.h"
#include "sequence.h"

enum {
    SAMPLES_MAX = 1 << 16,
    DRAWS_MAX = 4096,
    /* so that a step's ids can be counted in 32 bits */
    ROW_TARGETS_MAX = INT32_MAX / STEP_ROWS - 1 - DRAWS_MAX,
};

static void request_free(Request *r)
{
    for (int j = 0; r->sequence && j < r->spec.samples; j++) sequence_close(&r->sequence[j]);
    free(r->sequence);
    free(r->prompt_logprobs);
    free(r->top_ids);
    free(r->top_logprobs);
    free(r->target_logprobs);
    free(r->drawn_ids);
    free(r->drawn_logprobs);
    free((void *)r->spec.prompt);
    free((void *)r->spec.stop_ids);
    free((void *)r->spec.targets);
    free((void *)r->spec.starts);
    for (int i = 0; i < r->images; i++) image_release(r->runs[i].image);
    free(r->runs);
    free(r);
}

/* ---- checks ---- */

/* Lower temperatures, except 0, are raised to this: logits stay finite, and any gap that float32
 * can show already makes the lower logit's probability 0. */
#define COLDEST 1e-30f

static Status numbers_check(const RequestSpec *spec)
{
    if (spec->samples < 1 || spec->samples > SAMPLES_MAX)
        return fail(STATUS_INVALID, "num_samples must be at least 1 and at most %d, not %d",
                    SAMPLES_MAX, spec->samples);
    if (spec->first_sample < 0 || spec->first_sample > SAMPLES_MAX - spec->samples)
        return fail(STATUS_INVALID, "first_sample must be from 0 to %d, not %d",
                    SAMPLES_MAX - spec->samples, spec->first_sample);
    if (spec->max_tokens < 1 && spec->max_tokens != -1)
        return fail(STATUS_INVALID,
                    "max_tokens must be at least 1, or None for the whole context, not %d",
                    spec->max_tokens);
    if (!(spec->temperature >= 0.0f) || !isfinite(spec->temperature))
        return fail(STATUS_INVALID, "temperature must be 0 or more and finite, not %g",
                    (double)spec->temperature);
    if (!(spec->top_p > 0.0f && spec->top_p <= 1.0f))
        return fail(STATUS_INVALID, "top_p must be in (0, 1], not %g", (double)spec->top_p);
    if (spec->top_k < 1 && spec->top_k != -1)
        return fail(STATUS_INVALID, "top_k must be at least 1, or -1 for no cut, not %d",
                    spec->top_k);
    return STATUS_OK;
}

/* The most tokens of a sequence. The last drawn token is never run, so it needs no room in the
 * cache or in a full context. */
static int64_t most_tokens(const PagePool *pool, const RequestSpec *spec)
{
    int64_t context = pool->model->shape.context;
    int64_t most = spec->prompt_length < context ? context : context + 1;
    int64_t cached = (int64_t)pool->longest * KV_PAGE + 1;
    return most < cached ? most : cached;
}

static Status lengths_check(const PagePool *pool, const RequestSpec *spec)
{
    int context = pool->model->shape.context;
    if (spec->prompt_length < 1)
        return fail(STATUS_INVALID, "the prompt is empty: at least one token is needed");
    if (spec->prompt_length > context)
        return fail(STATUS_INVALID,
                    "the prompt has %d tokens; the model's context is %d: cut its beginning",
                    spec->prompt_length, context);
    int64_t drawn = spec->max_tokens > 0 ? spec->max_tokens : 1, most = context;
    if (spec->prompt_length == context) most++;
    if (spec->prompt_length + drawn > most)
        return fail(STATUS_INVALID,
                    "a prompt of %d tokens and max_tokens %d are more than the context, %d",
                    spec->prompt_length, spec->max_tokens, context);
    if (spec->prompt_length + drawn > most_tokens(pool, spec))
        return fail(
            STATUS_MEMORY, "the request needs a cache of %lld tokens; the sampler's holds %lld",
            (long long)(spec->prompt_length + drawn - 1), (long long)pool->longest * KV_PAGE);
    return STATUS_OK;
}

/* Checks which log-probabilities are requested at the prompt's positions. */
static Status scores_check(const RequestSpec *spec, int vocab)
{
    if (spec->draws < 0 || spec->draws > DRAWS_MAX)
        return fail(STATUS_INVALID, "prompt_draws must be 0 to %d, not %d", DRAWS_MAX, spec->draws);
    if (spec->targets && spec->start_count != spec->prompt_length)
        return fail(STATUS_INVALID, "target_starts must be %d offsets, not %lld",
                    spec->prompt_length, (long long)spec->start_count);
    if (spec->first_scored < 0 || spec->first_scored > spec->prompt_length)
        return fail(STATUS_INVALID, "prompt_from must be 0 to the prompt's %d tokens, not %d",
                    spec->prompt_length, spec->first_scored);
    if (spec->first_scored && (spec->draws || spec->target_count))
        return fail(STATUS_INVALID, "prompt_from can't be used with prompt_draws or targets");
    const int tops[] = {spec->topk_prompt, spec->topk_sample};
    for (int i = 0; i < 2; i++)
        if (tops[i] < 0 || tops[i] > vocab)
            return fail(STATUS_INVALID, "%s must be 0 to %d, not %d",
                        i ? "topk_sample_logprobs" : "topk_prompt_logprobs", vocab, tops[i]);
    return STATUS_OK;
}

/* All checks that do not read the request's arrays, which are not copied yet. */
Status request_check(const PagePool *pool, const RequestSpec *spec)
{
    TRY(numbers_check(spec));
    TRY(lengths_check(pool, spec));
    TRY(scores_check(spec, pool->model->shape.vocab));
    if (spec->adapter && spec->adapter->model != pool->model)
        return fail(STATUS_INVALID, "the adapter belongs to another model than the sampler");
    return STATUS_OK;
}

/* Checks the content of the copied arrays, which no other thread can change. */
static Status targets_check(const RequestSpec *spec, int vocab)
{
    if (!spec->targets) return STATUS_OK;
    const int32_t *starts = spec->starts;
    if (starts[0] != 0 || starts[spec->prompt_length - 1] != spec->target_count)
        return fail(STATUS_INVALID, "target_starts must go from 0 to the %lld targets there are",
                    (long long)spec->target_count);
    for (int i = 1; i < spec->prompt_length; i++) {
        int64_t targets = (int64_t)starts[i] - starts[i - 1];
        if (targets < 0)
            return fail(STATUS_INVALID, "target_starts falls at %d, from %d to %d", i,
                        starts[i - 1], starts[i]);
        if (targets > ROW_TARGETS_MAX)
            return fail(STATUS_INVALID, "position %d has %lld targets; it may have %d", i,
                        (long long)targets, ROW_TARGETS_MAX);
    }
    for (int64_t i = 0; i < spec->target_count; i++)
        if (spec->targets[i] < 0 || spec->targets[i] >= vocab)
            return fail(STATUS_INDEX, "the target %lld is %d; the model's ids are 0 to %d",
                        (long long)i, spec->targets[i], vocab - 1);
    return STATUS_OK;
}

/* ---- copies and results ---- */

static void *copy_of(const void *from, size_t bytes)
{
    void *to = malloc(bytes ? bytes : 1);
    if (to && bytes) memcpy(to, from, bytes);
    return to;
}

/* Copies the request's arrays; 0 if there is no memory. */
static int copies_make(RequestSpec *spec)
{
    size_t P = (size_t)spec->prompt_length, targets = (size_t)spec->target_count;
    int scores = spec->targets != NULL;
    spec->prompt = copy_of(spec->prompt, P * sizeof(int32_t));
    spec->stop_ids = copy_of(spec->stop_ids, (size_t)spec->stop_count * sizeof(int32_t));
    spec->targets = scores ? copy_of(spec->targets, targets * sizeof(int32_t)) : NULL;
    spec->starts = scores ? copy_of(spec->starts, P * sizeof(int32_t)) : NULL;
    return spec->prompt && spec->stop_ids && !scores == !(spec->targets && spec->starts);
}

static int results_make(Request *r)
{
    const RequestSpec *spec = &r->spec;
    size_t P = (size_t)spec->prompt_length, top = P * (size_t)spec->topk_prompt,
           draws = P * (size_t)spec->draws;
    r->prompt_logprobs = malloc(P * sizeof(float));
    r->top_ids = malloc((top + 1) * sizeof(int32_t));
    r->top_logprobs = malloc((top + 1) * sizeof(float));
    r->target_logprobs = calloc((size_t)spec->target_count + 1, sizeof(float));
    r->drawn_ids = calloc(draws + 1, sizeof(int32_t));
    r->drawn_logprobs = calloc(draws + 1, sizeof(float));
    r->sequence = calloc((size_t)spec->samples, sizeof *r->sequence);
    int made = r->prompt_logprobs && r->top_ids && r->top_logprobs && r->target_logprobs &&
               r->drawn_ids && r->drawn_logprobs && r->sequence;
    for (int j = 0; made && j < spec->samples; j++) made = sequence_open(&r->sequence[j], r, j);
    return made;
}

/* The memory for a request's results, most of it for large lists of the K best. */
static double result_bytes(const Request *r)
{
    const RequestSpec *spec = &r->spec;
    double row = 4 + 8.0 * spec->topk_prompt + 8.0 * spec->draws,
           token = 8 + 8.0 * spec->topk_sample;
    return row * spec->prompt_length + 4.0 * (double)spec->target_count +
           token * spec->samples * (r->limit - spec->prompt_length);
}

/* A prompt's first token has no log-probability, and neither have images' rows and tokens before
 * first_scored. */
static void scores_begin(Request *r)
{
    int scored = r->spec.first_scored > 1 ? r->spec.first_scored - 1 : 0;
    size_t best = (size_t)r->spec.topk_prompt;
    for (int i = 0; i < r->spec.prompt_length; i++) {
        if (i > scored && r->spec.prompt[i] >= 0) continue;
        r->prompt_logprobs[i] = NAN;
        for (size_t k = 0; k < best; k++) {
            r->top_ids[(size_t)i * best + k] = 0;
            r->top_logprobs[(size_t)i * best + k] = LOGPROB_NONE;
        }
    }
    scores_done(r, scored);
}

/* The prompt's images, whose pixels it keeps: a step may want them at any time. */
static Status images_make(Request *r, const Model *model)
{
    const RequestSpec *spec = &r->spec;
    int bad, images;
    TRY(model_ids_check(&images, model, spec->prompt, spec->prompt_length, "the prompt's token"));
    if (!images) return STATUS_OK;
    r->runs = malloc((size_t)images * sizeof *r->runs);
    if (!r->runs) return fail(STATUS_MEMORY, "no memory for a prompt of %d images", images);
    image_runs(r->runs, spec->prompt, spec->prompt_length, &bad);
    for (; r->images < images; r->images++)
        if (!image_keep(r->runs[r->images].image)) return image_gone(r->runs[r->images].image);
    return STATUS_OK;
}

static Status request_make(Request *r, const Model *model)
{
    if (!copies_make(&r->spec))
        return fail(STATUS_MEMORY, "no memory for a prompt of %d tokens and %lld targets",
                    r->spec.prompt_length, (long long)r->spec.target_count);
    TRY(images_make(r, model));
    TRY(targets_check(&r->spec, model->shape.vocab));
    if (!results_make(r))
        return fail(STATUS_MEMORY,
                    "no memory for a request of %d samples and up to %d tokens, whose results take "
                    "%.1f MiB",
                    r->spec.samples, r->limit, result_bytes(r) / 1048576.0);
    scores_begin(r);
    return STATUS_OK;
}

Status request_open(Request **out, const PagePool *pool, const RequestSpec *spec)
{
    Request *r = calloc(1, sizeof *r);
    if (!r) return fail(STATUS_MEMORY, "no memory for another request");
    r->spec = *spec;
    if (spec->temperature > 0.0f && spec->temperature < COLDEST) r->spec.temperature = COLDEST;
    r->limit = spec->max_tokens > 0 ? spec->prompt_length + spec->max_tokens
                                    : (int)most_tokens(pool, spec);
    Status status = request_make(r, pool->model);
    if (status)
        request_free(r);
    else
        *out = r;
    return status;
}

void request_close(PagePool *pool, Request *r)
{
    for (int j = 0; j < r->spec.samples; j++) sequence_free(pool, &r->sequence[j]);
    request_free(r);
}

/* A session's cached pages would still be found once its weights are good again, so they are
 * evicted. (Pages cached under their weights' stamp are right for these weights.) */
void request_overflow(PagePool *pool, Request *r)
{
    for (int j = 0; j < r->spec.samples; j++) {
        Sequence *s = &r->sequence[j];
        if (s->tokens.finish == RUNNING) sequence_finish(s, OVERFLOWED);
        sequence_reset(pool, s);
    }
    if (r->spec.session) pages_evict(pool);
}
