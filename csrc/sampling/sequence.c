/* sampling/sequence.c - a sequence after its rows have run: they count as cached, a token is drawn
 * and added, its pages are given back. */
#include <math.h>

#include "sampler.h"

void sequence_forget(Kv *kv, Sequence *sequence)
{
    for (int i = 0; i < sequence->page_count; i++)
        kv_drop(kv, sequence->pages[i], i >= sequence->seen);
    if (sequence->state >= 0) states_give(&kv->states, sequence->state);
    sequence->page_count = sequence->cached = sequence->kept = sequence->shared_end = 0;
    sequence->seen = 0;
    sequence->behind = 0;
    sequence->state = -1;
}

void sequence_drop(Kv *kv, const Request *request, Sequence *sequence)
{
    keep_own(kv, request, sequence);
    sequence_forget(kv, sequence);
}

void turns_cached(Sampler *sampler, const Turn *turns, int count)
{
    for (const Turn *turn = turns; turn < turns + count; turn++) {
        Sequence *s = &turn->request->sequence[turn->sample];
        s->cached += turn->rows;
        if (turn->sample == 0 && s->cached > turn->request->reached)
            turn->request->reached = s->cached;
        share_keep(&sampler->kv, turn->request, s);
        leave_ran(&sampler->kv, turn->request, s);
        if (sampler->kv.states.count) keep_ran(&sampler->kv, turn->request, s);
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

void sequence_take_token(Sampler *sampler, const Turn *turn, int32_t token, float logp)
{
    Request *r = turn->request;
    Sequence *s = &r->sequence[turn->sample];
    if (!isfinite(logp)) {
        r->overflowed = 1;
        return;
    }
    if (turn->sample == 0 && s->drawn == 0) {
        share_prompt(sampler, r);
        keep_copy(&sampler->kv, r, s);
    }
    s->tokens[s->length++] = token;
    s->logprobs[s->drawn++] = logp;
    if (s->length == r->limit) s->ending = FULL;
    for (int64_t i = 0; i < r->spec.stop_count; i++)
        if (token == r->spec.stop_ids[i]) s->ending = STOPPED;
    sampler->drawn[sampler->drawn_count++] = (Drawn){r->spec.id, turn->sample, token};
    if (s->ending != RUNNING) sequence_drop(&sampler->kv, r, s);
}
