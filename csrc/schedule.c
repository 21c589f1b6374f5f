/* schedule.c - which sequences run in a step, and on which pages.
 *
 * Oldest request first. Sequences that lack one token (they decode) all run; the rows that are left
 * go to prompts, in pieces. A sequence that finds no free page takes those of the youngest; the
 * youngest waits. So the oldest always gets on, and what was dropped is computed again, to the same
 * bits. */
#include <stdlib.h>

#include "sampler.h"

void sequence_drop(Kv *kv, Sequence *sequence)
{
    for (int i = 0; i < sequence->page_count; i++) kv_drop(kv, sequence->pages[i]);
    sequence->page_count = sequence->cached = sequence->kept = 0;
    sequence->behind = 0;
}

/* The youngest sequence with pages that comes after (request, sample) and does not run in this
 * step. */
static Sequence *youngest_after(Sampler *sampler, int request, int sample, const Turn *turns,
                                int count)
{
    for (int i = sampler->count - 1; i >= request; i--) {
        Request *r = sampler->request[i];
        for (int j = r->spec.samples - 1; j >= 0 && (i > request || j > sample); j--) {
            int runs = 0;
            for (int k = 0; k < count; k++) runs |= turns[k].request == r && turns[k].sample == j;
            if (!runs && r->sequence[j].page_count) return &r->sequence[j];
        }
    }
    return NULL;
}

/* Gives a sequence pages for `length` tokens; 0 if it has to wait. */
static int make_room(Sampler *sampler, int request, int sample, int length, const Turn *turns,
                     int count)
{
    Sequence *sequence = &sampler->request[request]->sequence[sample];
    while (sequence->page_count * KV_PAGE < length) {
        int32_t page = kv_take(&sampler->kv);
        if (page < 0) {
            Sequence *victim = youngest_after(sampler, request, sample, turns, count);
            if (!victim) return 0;
            sequence_drop(&sampler->kv, victim);
            continue;
        }
        sequence->pages[sequence->page_count++] = page;
    }
    return 1;
}

void share_prompt(Sampler *sampler, Request *r)
{
    int common = r->spec.prompt_length - 1, whole = common / KV_PAGE, rest = common % KV_PAGE;
    for (int j = 1; j < r->spec.samples; j++) {
        Sequence *from = &r->sequence[0], *to = &r->sequence[j];
        to->ready = 1;
        for (int i = 0; i < whole; i++) {
            kv_share(&sampler->kv, from->pages[i]);
            to->pages[to->page_count++] = from->pages[i];
        }
        to->cached = whole * KV_PAGE;
        int32_t page = rest ? kv_fork(&sampler->kv, from->pages[whole], rest) : -1;
        if (page < 0) continue;
        to->pages[to->page_count++] = page;
        to->cached = common;
    }
}

static void order_by_adapter(Turn *turns, int count)
{
    for (int i = 1; i < count; i++) { /* stable, and nearly always in order already */
        Turn turn = turns[i];
        int j = i;
        for (; j > 0 && turns[j - 1].request->spec.adapter > turn.request->spec.adapter; j--)
            turns[j] = turns[j - 1];
        turns[j] = turn;
    }
}

/* Pages for a sequence that has none, of what is known already. Its last token is run for what
 * follows it, and a prompt's positions that are to be scored for their logits. */
static void begin(Sampler *sampler, const Request *r, int sample)
{
    Sequence *s = &r->sequence[sample];
    int limit = s->length - 1;
    if (sample == 0 && request_scores(&r->spec) && r->scored < limit) limit = r->scored;
    prefix_begin(&sampler->kv, r, s, limit);
}

int schedule(Sampler *sampler, Turn *turns)
{
    int count = 0, rows = 0;
    for (int decoding = 1; decoding >= 0; decoding--)
        for (int i = 0; i < sampler->count; i++) {
            Request *r = sampler->request[i];
            for (int j = 0; j < r->spec.samples; j++) {
                Sequence *s = &r->sequence[j];
                if (s->ending == RUNNING && s->ready && !s->page_count) begin(sampler, r, j);
                int missing = s->length - s->cached;
                if (s->ending != RUNNING || !s->ready || (missing == 1) != decoding) continue;
                if (count == STEP_SEQUENCES || rows == STEP_ROWS) break;
                int take = missing < STEP_ROWS - rows ? missing : STEP_ROWS - rows;
                if (!make_room(sampler, i, j, s->cached + take, turns, count)) continue;
                turns[count++] = (Turn){r, j, s->cached, take, take == missing};
                rows += take;
            }
        }
    order_by_adapter(turns, count);
    return count;
}
