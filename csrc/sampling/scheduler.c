/* sampling/scheduler.c - which sequences run in a step, and which of their rows.
 *
 * Clients are served round-robin. The queue begins with the oldest sequence of each client, then
 * the second of each, and so on; within a round the older request comes first. So a client with one
 * sequence runs it in every step, under any load, and a lone client's requests run in order of
 * arrival. The first STEP_SEQUENCES at most run. A sequence that lacks one token decodes: it takes
 * one row. The remaining rows go to chunks of prompts, shared equally among the clients with
 * prompts.
 *
 * If decode steps are recorded (decode_graph.c), a step with a prompt is launched op by op instead,
 * which takes the host as long for a few rows as for hundreds. So prompts gather: while others
 * decode, a few prompt rows wait up to GATHER_STEPS steps for more. With GATHER_ROWS of them the
 * step is compute bound, and its decoding rows cost nothing.
 *
 * A sequence that finds no free page preempts the last in the queue (preempt.c). If an earlier
 * sequence is computing a page that this one needs, this one waits (reuse.c, reuse_states.c). */
#include <stdlib.h>
#include <string.h>

#include "../device/numbers.h"
#include "scheduler.h"
#include "decode_graph.h"
#include "preempt.h"
#include "reuse.h"
#include "reuse_states.h"
#include "state_checkpoint.h"

enum { GATHER_STEPS = 3, GATHER_ROWS = STEP_ROWS / 2 };

/* ---- requests and their clients ---- */

/* Grows the array at *pointer to at least `count` items; 0: no memory. */
static int grow(void *pointer, int *capacity, int64_t count, size_t size)
{
    void *array;
    if (count <= *capacity) return 1;
    memcpy(&array, pointer, sizeof array);
    array = count < INT32_MAX / 2 ? realloc(array, 2 * (size_t)count * size) : NULL;
    if (!array) return 0;
    memcpy(pointer, &array, sizeof array);
    *capacity = 2 * (int)count;
    return 1;
}

static Client *client_find(Scheduler *scheduler, int64_t id)
{
    for (int i = 0; i < scheduler->clients; i++)
        if (scheduler->client[i]->id == id) return scheduler->client[i];
    int64_t clients = scheduler->clients + 1;
    if (!grow(&scheduler->client, &scheduler->client_capacity, clients, sizeof(Client *)))
        return NULL;
    Client *client = calloc(1, sizeof *client);
    if (!client) return NULL;
    client->id = id;
    return scheduler->client[scheduler->clients++] = client;
}

Status scheduler_add(Scheduler *scheduler, Request *r)
{
    int64_t requests = scheduler->requests + 1,
            sequences = (int64_t)scheduler->sequences + r->spec.samples;
    if (grow(&scheduler->request, &scheduler->request_capacity, requests, sizeof(Request *)) &&
        grow(&scheduler->queue, &scheduler->queue_capacity, sequences, sizeof(Sequence *)) &&
        grow(&scheduler->rank, &scheduler->rank_capacity, sequences + 1, sizeof(int)))
        r->client = client_find(scheduler, r->spec.client);
    if (!r->client) return fail(STATUS_MEMORY, "no memory for another request");
    scheduler->request[scheduler->requests++] = r;
    r->client->requests++;
    scheduler->sequences = (int)sequences;
    return STATUS_OK;
}

void scheduler_remove(Scheduler *scheduler, const Request *r)
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
    free(scheduler->queue);
    free(scheduler->rank);
    free(scheduler->client);
}

/* ---- the queue ---- */

static int is_waiting(const Sequence *s)
{
    return s->tokens.finish == RUNNING && s->progress.ready;
}

static int missing(const Sequence *s)
{
    return s->tokens.length - s->progress.cached;
}

/* Whether a sequence lacks only its newest token. A sequence without pages counts as a prompt, even
 * if the prefix cache has its beginning. */
static int decodes(const Sequence *s)
{
    return s->pages.count && missing(s) == 1;
}

/* Counts a waiting sequence. */
static void queue_count(Scheduler *scheduler, const Sequence *s)
{
    const RequestSpec *spec = sequence_spec(s);
    Client *c = s->request->client;
    scheduler->rank[++c->queued]++;
    if (decodes(s)) {
        if (!scheduler->decoding++) scheduler->adapter = spec->adapter;
        if (!decode_shares(spec, scheduler->adapter)) scheduler->mixed = 1;
        return;
    }
    if (c->wanted < STEP_ROWS) c->wanted += missing(s);
    scheduler->prompt_rows += missing(s);
}

/* Counts all waiting sequences. Orders clients by their oldest requests; rank[k + 1] counts the
 * clients with more than k sequences. */
static void queue_measure(Scheduler *scheduler)
{
    int known = 0;
    memset(scheduler->rank, 0, (size_t)(scheduler->sequences + 1) * sizeof *scheduler->rank);
    for (int i = 0; i < scheduler->clients; i++) scheduler->client[i]->queued = -1;
    for (int i = 0; i < scheduler->requests; i++) {
        const Request *r = scheduler->request[i];
        Client *c = r->client;
        if (c->queued < 0) {
            scheduler->client[known++] = c;
            c->queued = c->wanted = c->rows = 0;
        }
        for (int j = 0; j < r->spec.samples; j++)
            if (is_waiting(&r->sequence[j])) queue_count(scheduler, &r->sequence[j]);
    }
}

static void queue_fill(Scheduler *scheduler)
{
    int *rank = scheduler->rank, all = scheduler->sequences;
    scheduler->waiting = scheduler->decoding = scheduler->mixed = 0;
    scheduler->prompt_rows = 0;
    if (!all) return;
    queue_measure(scheduler);
    for (int k = 0; k < all; k++) rank[k + 1] += rank[k];
    scheduler->waiting = rank[all];
    for (int i = 0; i < scheduler->clients; i++) scheduler->client[i]->queued = 0;
    for (int i = 0; i < scheduler->requests; i++) {
        Request *r = scheduler->request[i];
        for (int j = 0; j < r->spec.samples; j++)
            if (is_waiting(&r->sequence[j]))
                scheduler->queue[rank[r->client->queued++]++] = &r->sequence[j];
    }
}

/* Whether prompts wait for more prompts while the decode step is replayed. */
static int prompts_gather(Scheduler *scheduler)
{
    int few = scheduler->prompt_rows && scheduler->prompt_rows < GATHER_ROWS,
        recorded = scheduler->graphs && scheduler->decoding && !scheduler->mixed;
    int gather = recorded && few && !scheduler->prompts_left && scheduler->gathered < GATHER_STEPS;
    scheduler->gathered = gather ? scheduler->gathered + 1 : 0;
    return gather;
}

/* Shares rows equally among the clients whose prompts still need some. */
static void rows_share(Scheduler *scheduler, int rows)
{
    for (int short_of = 1; rows && short_of;) {
        short_of = 0;
        for (int i = 0; i < scheduler->clients; i++)
            short_of += scheduler->client[i]->rows < scheduler->client[i]->wanted;
        int share = short_of ? (rows + short_of - 1) / short_of : 0;
        for (int i = 0; i < scheduler->clients; i++) {
            Client *c = scheduler->client[i];
            int more = min_int(min_int(c->wanted - c->rows, share), rows);
            c->rows += more;
            rows -= more;
        }
    }
}

/* ---- the rows of a step ---- */

/* How many of these rows a step runs: it computes the features of one image at most, so that others
 * never wait for more. *newest is that image, or NULL. */
static int rows_seen(const Sequence *s, Tower *tower, int rows, const Image **newest)
{
    const Request *r = s->request;
    for (const ImageRun *run = r->runs; run < r->runs + r->images; run++) {
        int begin = run->at - s->progress.cached;
        if (begin + image_rows(run->image) <= 0 || run->image == *newest) continue;
        if (begin >= rows) break;
        if (features_keep(tower, run->image)) continue;
        if (*newest) return begin > 0 ? begin : 0;
        *newest = run->image;
    }
    return rows;
}

static void order_by_adapter(ScheduledRows *runs, int count)
{
    for (int i = 1; i < count; i++) { /* stable, and nearly always in order already */
        ScheduledRows run = runs[i];
        const Adapter *adapter = sequence_spec(run.sequence)->adapter;
        int j = i;
        for (; j > 0 && sequence_spec(runs[j - 1].sequence)->adapter > adapter; j--)
            runs[j] = runs[j - 1];
        runs[j] = run;
    }
}

int schedule(Scheduler *scheduler, PagePool *pool, ScheduledRows *runs)
{
    int count = 0, states = pool->states.count, full = 0;
    const Image *newest = NULL;
    if (pool->model->tower) features_begin(pool->model->tower);
    queue_fill(scheduler);
    int gather = prompts_gather(scheduler), prompts = scheduler->waiting - scheduler->decoding;
    if (!gather) rows_share(scheduler, STEP_ROWS - min_int(scheduler->decoding, STEP_SEQUENCES));
    for (int i = 0; i < scheduler->waiting && count < STEP_SEQUENCES; i++) {
        Sequence *s = scheduler->queue[i];
        Client *client = s->request->client;
        int prompt = !decodes(s);
        if (prompt && !client->rows) continue;
        if (states ? reuse_states_begin(scheduler, pool, runs, count, i, &full)
                   : reuse_begin(pool, runs, count, s))
            continue;
        int all = missing(s), rows = prompt ? min_int(all, client->rows) : all;
        rows = rows_seen(s, pool->model->tower, rows, &newest);
        if (!rows) continue;
        if (states) rows = checkpoint_rows(s, rows);
        if (!preempt_for_pages(scheduler, pool, i, s->progress.cached + rows)) continue;
        runs[count++] = (ScheduledRows){s, s->progress.cached, rows, rows == all};
        if (prompt) client->rows -= rows;
        prompts -= prompt && rows == all;
    }
    scheduler->prompts_left = !gather && prompts > 0;
    order_by_adapter(runs, count);
    return count;
}
