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

#include "scheduler.h"
#include "decode_graph.h"
#include "preempt.h"
#include "resume.h"
#include "reuse.h"
#include "state_checkpoint.h"

enum { GATHER_STEPS = 3, GATHER_ROWS = STEP_ROWS / 2 };

/* ---- clients ---- */

static Client *client_find(Scheduler *scheduler, int64_t id)
{
    for (int i = 0; i < scheduler->clients; i++)
        if (scheduler->client[i]->id == id) return scheduler->client[i];
    if (scheduler->clients == scheduler->client_room) {
        int room = scheduler->client_room ? 2 * scheduler->client_room : 4;
        Client **grown = realloc(scheduler->client, (size_t)room * sizeof *grown);
        if (!grown) return NULL;
        scheduler->client = grown;
        scheduler->client_room = room;
    }
    Client *client = calloc(1, sizeof *client);
    if (!client) return NULL;
    client->id = id;
    return scheduler->client[scheduler->clients++] = client;
}

static int queue_grow(Scheduler *scheduler, int64_t sequences)
{
    if (sequences <= scheduler->room) return 1;
    if (sequences > INT32_MAX / 2) return 0;
    size_t room = 2 * (size_t)sequences;
    Waiter *waiter = realloc(scheduler->waiter, room * sizeof *waiter);
    if (waiter) scheduler->waiter = waiter;
    int *rank = realloc(scheduler->rank, (room + 1) * sizeof *rank);
    if (rank) scheduler->rank = rank;
    if (!waiter || !rank) return 0;
    scheduler->room = (int)room;
    return 1;
}

static int requests_grow(Scheduler *scheduler)
{
    if (scheduler->requests < scheduler->request_room) return 1;
    int room = scheduler->request_room ? 2 * scheduler->request_room : 16;
    Request **grown = realloc(scheduler->request, (size_t)room * sizeof *grown);
    if (!grown) return 0;
    scheduler->request = grown;
    scheduler->request_room = room;
    return 1;
}

Status scheduler_join(Scheduler *scheduler, Request *r)
{
    int64_t sequences = (int64_t)scheduler->sequences + r->spec.samples;
    if (requests_grow(scheduler) && queue_grow(scheduler, sequences))
        r->client = client_find(scheduler, r->spec.client);
    if (!r->client) return fail(STATUS_MEMORY, "no memory for another request");
    scheduler->request[scheduler->requests++] = r;
    r->client->requests++;
    scheduler->sequences = (int)sequences;
    return STATUS_OK;
}

void scheduler_leave(Scheduler *scheduler, const Request *r)
{
    int at = 0;
    while (scheduler->request[at] != r) at++;
    memmove(scheduler->request + at, scheduler->request + at + 1,
            (size_t)(--scheduler->requests - at) * sizeof *scheduler->request);
    scheduler->sequences -= r->spec.samples;
    if (--r->client->requests) return;
    for (at = 0; scheduler->client[at] != r->client;) at++;
    scheduler->client[at] = scheduler->client[--scheduler->clients];
    free(r->client);
}

void scheduler_close(Scheduler *scheduler)
{
    free(scheduler->request);
    free(scheduler->waiter);
    free(scheduler->rank);
    free(scheduler->client);
}

/* ---- the line ---- */

static int waits(const Sequence *s)
{
    return s->tokens.ending == RUNNING && s->progress.ready;
}

static int missing(const Sequence *s)
{
    return s->tokens.length - s->progress.cached;
}

/* Whether a sequence lacks only its newest token. One that has no pages yet counts as a prompt,
 * though the prefix cache may have its beginning. */
static int decodes(const Sequence *s)
{
    return s->pages.count && missing(s) == 1;
}

/* Counts a sequence of a client that waits. */
static void line_add(Scheduler *scheduler, Client *c, const RequestSpec *spec, const Sequence *s)
{
    scheduler->rank[++c->in_line]++;
    if (decodes(s)) {
        if (!scheduler->decoding++) scheduler->adapter = spec->adapter;
        if (!decode_joins(spec, scheduler->adapter)) scheduler->mixed = 1;
        return;
    }
    if (c->wanted < STEP_ROWS) c->wanted += missing(s);
    scheduler->prompt_rows += missing(s);
}

/* Counts what waits: clients, in the order of their oldest requests, and in rank[k + 1] those that
 * have more than k sequences. */
static void line_count(Scheduler *scheduler)
{
    int known = 0;
    scheduler->decoding = scheduler->mixed = 0;
    scheduler->prompt_rows = 0;
    memset(scheduler->rank, 0, (size_t)(scheduler->sequences + 1) * sizeof *scheduler->rank);
    for (int i = 0; i < scheduler->clients; i++) scheduler->client[i]->in_line = -1;
    for (int i = 0; i < scheduler->requests; i++) {
        Request *r = scheduler->request[i];
        Client *c = r->client;
        if (c->in_line < 0) {
            scheduler->client[known++] = c;
            c->in_line = c->wanted = c->rows = 0;
        }
        for (int j = 0; j < r->spec.samples; j++) {
            if (waits(&r->sequence[j])) line_add(scheduler, c, &r->spec, &r->sequence[j]);
        }
    }
}

/* Puts the sequences in line. */
static void line_form(Scheduler *scheduler)
{
    scheduler->count = 0;
    if (!scheduler->sequences) return;
    line_count(scheduler);
    for (int k = 0; k < scheduler->sequences; k++) scheduler->rank[k + 1] += scheduler->rank[k];
    scheduler->count = scheduler->rank[scheduler->sequences];
    for (int i = 0; i < scheduler->clients; i++) scheduler->client[i]->in_line = 0;
    for (int i = 0; i < scheduler->requests; i++) {
        Request *r = scheduler->request[i];
        for (int j = 0; j < r->spec.samples; j++)
            if (waits(&r->sequence[j]))
                scheduler->waiter[scheduler->rank[r->client->in_line++]++] = (Waiter){r, j};
    }
}

/* Whether prompts wait for more of them, while the others' step is replayed. */
static int prompts_gather(Scheduler *scheduler)
{
    int gather = scheduler->graphs && scheduler->count && scheduler->decoding &&
                 !scheduler->mixed && scheduler->prompt_rows &&
                 scheduler->prompt_rows < GATHER_ROWS && !scheduler->prompts_left &&
                 scheduler->gathered < GATHER_STEPS;
    scheduler->gathered = gather ? scheduler->gathered + 1 : 0;
    return gather;
}

/* Shares rows among the clients' prompts, equally among those that still want more. */
static void rows_share(Scheduler *scheduler, int rows)
{
    for (int waiting = 1; rows && waiting;) {
        waiting = 0;
        for (int i = 0; i < scheduler->clients; i++)
            waiting += scheduler->client[i]->rows < scheduler->client[i]->wanted;
        int share = waiting ? (rows + waiting - 1) / waiting : 0;
        for (int i = 0; i < scheduler->clients; i++) {
            Client *c = scheduler->client[i];
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

int schedule(Scheduler *scheduler, Kv *kv, Turn *turns)
{
    int count = 0, states = kv->states.count, full = 0;
    line_form(scheduler);
    int gather = prompts_gather(scheduler), prompts = scheduler->count - scheduler->decoding;
    if (!gather)
        rows_share(scheduler,
                   STEP_ROWS - (scheduler->decoding < STEP_SEQUENCES ? scheduler->decoding
                                                                     : STEP_SEQUENCES));
    for (int i = 0; i < scheduler->count && count < STEP_SEQUENCES; i++) {
        Request *r = scheduler->waiter[i].request;
        int j = scheduler->waiter[i].sample, prompt = !decodes(&r->sequence[j]);
        Sequence *s = &r->sequence[j];
        if (prompt && !r->client->rows) continue;
        if (states ? resume_begin(scheduler, kv, turns, count, i, &full)
                   : share_begin(kv, turns, count, r, s))
            continue;
        int lacks = missing(s);
        int take = prompt && lacks > r->client->rows ? r->client->rows : lacks;
        if (states) take = keep_rows(s, take);
        if (!room_pages(scheduler, kv, i, s->progress.cached + take)) continue;
        turns[count++] = (Turn){r, j, s->progress.cached, take, take == lacks};
        if (prompt) r->client->rows -= take;
        prompts -= prompt && take == lacks;
    }
    scheduler->prompts_left = !gather && prompts > 0;
    order_by_adapter(turns, count);
    return count;
}
