/* sampling/sequence.c - a sequence after its rows have run: they count as cached, a token is drawn
 * and added, its pages are given back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sequence.h"
#include "leave.h"
#include "page_table.h"
#include "reuse.h"
#include "state_checkpoint.h"

int sequence_open(Sequence *s, const RequestSpec *spec, int limit, int ready)
{
    size_t prompt = (size_t)spec->prompt_length, draws = (size_t)limit - prompt,
           top = draws * (size_t)spec->topk_sample;
    Tokens *tokens = &s->tokens;
    *s =
        (Sequence){.tokens.length = spec->prompt_length, .state.slot = -1, .progress.ready = ready};
    tokens->ids = malloc((size_t)limit * sizeof *tokens->ids);
    tokens->logprobs = malloc(draws * sizeof *tokens->logprobs);
    tokens->top_ids = malloc((top + 1) * sizeof *tokens->top_ids);
    tokens->top_logprobs = malloc((top + 1) * sizeof *tokens->top_logprobs);
    if (!tokens->ids || !tokens->logprobs || !tokens->top_ids || !tokens->top_logprobs ||
        !page_table_open(&s->pages, limit))
        return 0;
    memcpy(tokens->ids, spec->prompt, prompt * sizeof *tokens->ids);
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

void sequence_forget(Kv *kv, Sequence *s)
{
    page_table_free(kv, &s->pages, 0);
    state_drop(kv, &s->state);
    progress_reset(&s->progress);
}

void sequence_drop(Kv *kv, const Request *request, Sequence *s)
{
    keep_own(kv, request, s);
    sequence_forget(kv, s);
}

void turns_cached(Kv *kv, const Turn *turns, int count)
{
    for (const Turn *turn = turns; turn < turns + count; turn++) {
        Sequence *s = turn_sequence(turn);
        share_ran(kv, turn->request, s, turn->rows);
        leave_ran(kv, turn->request, s);
        if (kv->states.count) keep_ran(kv, turn->request, s);
    }
}

Draw sequence_draw(const Turn *turn)
{
    const RequestSpec *spec = &turn->request->spec;
    return (Draw){spec->seed,
                  (uint32_t)turn->sample,
                  (uint32_t)(turn->from + turn->rows - 1),
                  spec->temperature,
                  spec->top_p,
                  spec->top_k};
}

void sequence_take_top(Sequence *s, int k, const int32_t *ids, const float *logprobs)
{
    size_t at = (size_t)s->tokens.drawn * (size_t)k;
    memcpy(s->tokens.top_ids + at, ids, (size_t)k * sizeof *ids);
    memcpy(s->tokens.top_logprobs + at, logprobs, (size_t)k * sizeof *logprobs);
}

void sequence_end(Sequence *s, Ending ending)
{
    s->tokens.ending = ending;
}

void sequence_take_token(Kv *kv, StepResult *result, const Turn *turn, int32_t token, float logp)
{
    Request *r = turn->request;
    Sequence *s = turn_sequence(turn);
    if (!isfinite(logp)) {
        r->overflowed = 1;
        return;
    }
    if (turn->sample == 0 && s->tokens.drawn == 0) {
        share_prompt(kv, r);
        keep_copy(kv, r, s);
    }
    s->tokens.ids[s->tokens.length++] = token;
    s->tokens.logprobs[s->tokens.drawn++] = logp;
    if (s->tokens.length == r->limit) s->tokens.ending = FULL;
    for (int64_t i = 0; i < r->spec.stop_count; i++)
        if (token == r->spec.stop_ids[i]) s->tokens.ending = STOPPED;
    result->drawn[result->count++] = (Drawn){r->spec.id, turn->sample, token};
    if (s->tokens.ending != RUNNING) sequence_drop(kv, r, s);
}
