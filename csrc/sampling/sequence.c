/* sampling/sequence.c - a sequence after its rows have run: they count as cached, a token is drawn
 * and appended, its pages are freed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequence.h"
#include "page_table.h"
#include "reuse.h"
#include "state_checkpoint.h"
#include "window.h"

int sequence_open(Sequence *s, Request *r, int sample)
{
    size_t limit = (size_t)r->limit, prompt = (size_t)r->spec.prompt_length, draws = limit - prompt,
           top = draws * (size_t)r->spec.topk_sample + 1;
    Tokens *t = &s->tokens;
    *s = (Sequence){r, sample, .tokens.length = r->spec.prompt_length};
    s->state.slot = -1;
    s->progress.ready = sample == 0;
    t->ids = malloc(limit * sizeof *t->ids);
    t->logprobs = malloc(draws * sizeof *t->logprobs);
    t->top_ids = malloc(top * sizeof *t->top_ids);
    t->top_logprobs = malloc(top * sizeof *t->top_logprobs);
    if (!t->ids || !t->logprobs || !t->top_ids || !t->top_logprobs ||
        !page_table_open(&s->pages, r->limit))
        return 0;
    memcpy(t->ids, r->spec.prompt, prompt * sizeof *t->ids);
    return 1;
}

void sequence_close(Sequence *s)
{
    free(s->tokens.ids);
    free(s->tokens.logprobs);
    free(s->tokens.top_ids);
    free(s->tokens.top_logprobs);
    page_table_close(&s->pages);
}

void sequence_reset(PagePool *pool, Sequence *s)
{
    page_table_free(pool, &s->pages, 0);
    state_slot_free(pool, &s->state);
    progress_reset(&s->progress);
}

void sequence_free(PagePool *pool, Sequence *s)
{
    checkpoint_move(pool, s);
    sequence_reset(pool, s);
}

void sequences_advance(PagePool *pool, const ScheduledRows *runs, int count)
{
    for (const ScheduledRows *run = runs; run < runs + count; run++) {
        reuse_advance(pool, run->sequence, run->rows);
        window_advance(pool, run->sequence);
        if (pool->states.count) checkpoint_advance(pool, run->sequence);
    }
}

void sequence_position(int32_t *pos, const Sequence *s, int index, int axes)
{
    image_position(pos, s->request->runs, s->request->images, index, axes);
}

Draw sequence_draw(const Sequence *s, int position)
{
    const RequestSpec *spec = sequence_spec(s);
    return (Draw){spec->seed,         (uint32_t)(spec->first_sample + s->sample),
                  (uint32_t)position, spec->temperature,
                  spec->top_p,        spec->top_k};
}

void sequence_set_top(Sequence *s, int k, const int32_t *ids, const float *logprobs)
{
    size_t at = (size_t)s->tokens.drawn * (size_t)k;
    memcpy(s->tokens.top_ids + at, ids, (size_t)k * sizeof *ids);
    memcpy(s->tokens.top_logprobs + at, logprobs, (size_t)k * sizeof *logprobs);
}

void sequence_finish(Sequence *s, Finish finish)
{
    s->tokens.finish = finish;
}

void sequence_append(PagePool *pool, StepResult *result, Sequence *s, int32_t token, float logp)
{
    Request *r = s->request;
    Tokens *t = &s->tokens;
    if (!isfinite(logp)) {
        r->overflowed = 1;
        return;
    }
    if (s->sample == 0 && t->drawn == 0) {
        reuse_prompt(pool, r);
        checkpoint_copy(pool, s);
    }
    t->ids[t->length++] = token;
    t->logprobs[t->drawn++] = logp;
    if (t->length == r->limit) t->finish = LENGTH;
    for (int64_t i = 0; i < r->spec.stop_count; i++)
        if (token == r->spec.stop_ids[i]) t->finish = STOPPED;
    result->drawn[result->count++] = (Drawn){r->spec.id, s->sample, token};
    if (t->finish != RUNNING) sequence_free(pool, s);
}
