/* sampling/scheduler.c - which sequences run in a step, and which of their rows.
 *
 * Clients take turns. The line begins with the oldest sequence of each client, then the second of
 * each, and so on; within a turn the older request comes first. So a client with one sequence runs
 * it in every step, under any load, and a lone client's requests run in the order in which they
 * came. In that order at most STEP_SEQUENCES run. A sequence that lacks one token decodes: it takes
 * one row. The rows that are left go to prompts, in pieces, shared equally by the clients that have
 * any.
 *
 * Where decoding steps are recorded (decode_graph.c), one with a prompt is started op by op
 * instead, which takes the host as long for a few rows as for hundreds. So prompts gather: while
 * others decode, few rows of prompts wait up to GATHER_STEPS steps for more. Once there are
 * GATHER_ROWS of them, the step is bound by its arithmetic, and the rows that decode come with it
 * at no cost.
 *
 * A sequence that finds no free page preempts the last in line (preempt.c). If an earlier sequence
 * is computing a page that this one needs, this one waits (reuse.c, resume.c). */
#include <stdlib.h>
#include <string.h>

#include "sampler.h"

enum { GATHER_STEPS = 3, GATHER_ROWS = STEP_ROWS / 2 };

/* ---- clients ---- */

static Client *client_find(Line *line, int64_t id)
{
    for (int i = 0; i < line->clients; i++)
        if (line->client[i]->id == id) return line->client[i];
    if (line->clients == line->client_room) {
        int room = line->client_room ? 2 * line->client_room : 4;
        Client **grown = realloc(line->client, (size_t)room * sizeof *grown);
        if (!grown) return NULL;
        line->client = grown;
        line->client_room = room;
    }
    Client *client = calloc(1, sizeof *client);
    if (!client) return NULL;
    client->id = id;
    return line->client[line->clients++] = client;
}

static int line_grow(Line *line, int64_t sequences)
{
    if (sequences <= line->room) return 1;
    if (sequences > INT32_MAX / 2) return 0;
    size_t room = 2 * (size_t)sequences;
    Waiter *waiter = realloc(line->waiter, room * sizeof *waiter);
    if (waiter) line->waiter = waiter;
    int *rank = realloc(line->rank, (room + 1) * sizeof *rank);
    if (rank) line->rank = rank;
    if (!waiter || !rank) return 0;
    line->room = (int)room;
    return 1;
}

int line_join(Line *line, Request *r)
{
    if (!line_grow(line, (int64_t)line->sequences + r->spec.samples)) return 0;
    r->client = client_find(line, r->spec.client);
    if (!r->client) return 0;
    r->client->requests++;
    line->sequences += r->spec.samples;
    return 1;
}

void line_leave(Line *line, const Request *r)
{
    if (!r->client) return;
    line->sequences -= r->spec.samples;
    if (--r->client->requests) return;
    int at = 0;
    while (line->client[at] != r->client) at++;
    line->client[at] = line->client[--line->clients];
    free(r->client);
}

void line_close(Line *line)
{
    free(line->waiter);
    free(line->rank);
    free(line->client);
}

/* ---- the line ---- */

static int waits(const Sequence *s)
{
    return s->ending == RUNNING && s->ready;
}

/* Whether a sequence lacks only its newest token. One that has no pages yet counts as a prompt,
 * though the prefix cache may have its beginning. */
static int decodes(const Sequence *s)
{
    return s->page_count && s->length - s->cached == 1;
}

/* Counts a sequence of a client that waits. */
static void line_add(Line *line, Client *c, const RequestSpec *spec, const Sequence *s)
{
    line->rank[++c->in_line]++;
    if (decodes(s)) {
        if (!line->decoding++) line->adapter = spec->adapter;
        if (!decode_joins(spec, line->adapter)) line->mixed = 1;
        return;
    }
    if (c->wanted < STEP_ROWS) c->wanted += s->length - s->cached;
    line->prompt_rows += s->length - s->cached;
}

/* Counts what waits: clients, in the order of their oldest requests, and in rank[k + 1] those that
 * have more than k sequences. */
static void line_count(Line *line, Request *const *requests, int count)
{
    int known = 0;
    line->decoding = line->mixed = 0;
    line->prompt_rows = 0;
    memset(line->rank, 0, (size_t)(line->sequences + 1) * sizeof *line->rank);
    for (int i = 0; i < line->clients; i++) line->client[i]->in_line = -1;
    for (int i = 0; i < count; i++) {
        Request *r = requests[i];
        Client *c = r->client;
        if (c->in_line < 0) {
            line->client[known++] = c;
            c->in_line = c->wanted = c->rows = 0;
        }
        for (int j = 0; j < r->spec.samples; j++) {
            if (waits(&r->sequence[j])) line_add(line, c, &r->spec, &r->sequence[j]);
        }
    }
}

/* Puts the sequences in line. */
static void line_form(Line *line, Request *const *requests, int count)
{
    line->count = 0;
    if (!line->sequences) return;
    line_count(line, requests, count);
    for (int k = 0; k < line->sequences; k++) line->rank[k + 1] += line->rank[k];
    line->count = line->rank[line->sequences];
    for (int i = 0; i < line->clients; i++) line->client[i]->in_line = 0;
    for (int i = 0; i < count; i++)
        for (int j = 0; j < requests[i]->spec.samples; j++)
            if (waits(&requests[i]->sequence[j]))
                line->waiter[line->rank[requests[i]->client->in_line++]++] =
                    (Waiter){requests[i], j};
}

/* Whether prompts wait for more of them, while the others' step is replayed. */
static int prompts_gather(Sampler *sampler)
{
    const Line *line = &sampler->line;
    int gather = sampler->graphs && line->count && line->decoding && !line->mixed &&
                 line->prompt_rows && line->prompt_rows < GATHER_ROWS && !sampler->prompts_left &&
                 sampler->gathered < GATHER_STEPS;
    sampler->gathered = gather ? sampler->gathered + 1 : 0;
    return gather;
}

/* Shares rows among the clients' prompts, equally among those that still want more. */
static void rows_share(Line *line, int rows)
{
    for (int waiting = 1; rows && waiting;) {
        waiting = 0;
        for (int i = 0; i < line->clients; i++)
            waiting += line->client[i]->rows < line->client[i]->wanted;
        int share = waiting ? (rows + waiting - 1) / waiting : 0;
        for (int i = 0; i < line->clients; i++) {
            Client *c = line->client[i];
            int more = c->wanted - c->rows < share ? c->wanted - c->rows : share;
            if (more > rows) more = rows;
            c->rows += more;
            rows -= more;
        }
    }
}

/* ---- the turns ---- */

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

int schedule(Sampler *sampler, Turn *turns)
{
    Line *line = &sampler->line;
    int count = 0, states = sampler->kv.states.count, full = 0;
    line_form(line, sampler->request, sampler->count);
    int gather = prompts_gather(sampler), prompts = line->count - line->decoding;
    if (!gather)
        rows_share(line,
                   STEP_ROWS - (line->decoding < STEP_SEQUENCES ? line->decoding : STEP_SEQUENCES));
    for (int i = 0; i < line->count && count < STEP_SEQUENCES; i++) {
        Request *r = line->waiter[i].request;
        int j = line->waiter[i].sample, prompt = !decodes(&r->sequence[j]);
        Sequence *s = &r->sequence[j];
        if (prompt && !r->client->rows) continue;
        if (states ? resume_begin(sampler, turns, count, i, &full)
                   : share_begin(sampler, turns, count, r, s))
            continue;
        int missing = s->length - s->cached;
        int take = prompt && missing > r->client->rows ? r->client->rows : missing;
        if (states) take = keep_rows(s, take);
        if (!room_pages(sampler, i, s->cached + take)) continue;
        turns[count++] = (Turn){r, j, s->cached, take, take == missing};
        if (prompt) r->client->rows -= take;
        prompts -= prompt && take == missing;
    }
    sampler->prompts_left = !gather && prompts > 0;
    order_by_adapter(turns, count);
    return count;
}
