/* train/micro_batch.c - datums → micro-batches: their grouping, their rows, and the head's order.
 *
 * Whole datums are concatenated in order, without padding, each on its own pages. Rows without a
 * gradient come last in the head's order, so the head's backward skips them. Nothing here depends
 * on the objective. */
#include "micro_batch.h"

#include <stdlib.h>

#include "../model/gradient_parts.h"

/* The next micro-batch: datums from the end of `micro` on, until the rows are full. */
static void micro_next(Micro *micro, const Datums *d, int step_tokens)
{
    *micro = (Micro){.first = micro->last,
                     .last = micro->last,
                     .token0 = micro->token0 + micro->T,
                     .target0 = micro->target0 + micro->targets};
    while (micro->last < d->count) {
        int length = d->lengths[micro->last];
        if (micro->T > 0 && micro->T + length > step_tokens) break;
        micro->T += length;
        micro->pages += (length + KV_PAGE - 1) / KV_PAGE;
        micro->targets += (int64_t)length * d->counts[micro->last];
        micro->S++;
        micro->last++;
    }
}

#define RAISE(field) \
    if (micro.field > most->field) most->field = micro.field

/* Counts the micro-batches; writes them to `list` unless it is NULL. */
static int micro_list(Micro *list, Micro *most, const Datums *datums, int step_tokens)
{
    Micro micro = {0};
    int count = 0;
    while (micro.last < datums->count) {
        micro_next(&micro, datums, step_tokens);
        if (list) list[count] = micro;
        count++;
        RAISE(T);
        RAISE(S);
        RAISE(pages);
        RAISE(targets);
    }
    return count;
}

void parts_cut(int first[GRADIENT_PARTS + 1], const int32_t *lengths, int count, int step_tokens)
{
    Datums datums = {.count = count, .lengths = lengths, .counts = lengths};
    Micro micro = {0};
    int64_t total = 0;
    int part = 0;
    for (int i = 0; i < count; i++) total += lengths[i];
    while (micro.last < count) {
        micro_next(&micro, &datums, step_tokens);
        while (part <= rows_part(micro.token0, micro.T, total)) first[part++] = micro.first;
    }
    while (part <= GRADIENT_PARTS) first[part++] = count;
}

/* The most images of a micro-batch. */
static int images_most(const Pack *pack)
{
    const int32_t *tokens = pack->datums->tokens;
    int most = 0, bad;
    for (const Micro *micro = pack->micro; micro < pack->micro + pack->count; micro++) {
        int images = image_runs(NULL, tokens + micro->token0, micro->T, &bad);
        if (images > most) most = images;
    }
    return most;
}

/* Memory for the images, if there are any. */
static Status images_open(Pack *pack)
{
    size_t most = (size_t)images_most(pack), T = (size_t)pack->most.T;
    if (!most) return STATUS_OK;
    char *memory = malloc(most * (sizeof *pack->runs + sizeof *pack->image) + T * sizeof(int32_t));
    if (!memory) return fail(STATUS_MEMORY, "no memory for a batch of %zu images", most);
    pack->runs = (ImageRun *)(void *)memory;
    pack->image = (ImageRows *)(void *)(pack->runs + most);
    pack->tokens = (int32_t *)(void *)(pack->image + most);
    return STATUS_OK;
}

Status pack_open(Pack *pack, const Datums *datums, const Model *model, int step_tokens)
{
    *pack = (Pack){.datums = datums};
    Micro *most = &pack->most;
    pack->count = micro_list(NULL, most, datums, step_tokens);
    if (most->targets > INT32_MAX / 2)
        return fail(STATUS_INVALID, "a datum with %lld targets is too large",
                    (long long)most->targets);
    size_t T = (size_t)most->T, S = (size_t)most->S, pages = (size_t)most->pages,
           targets = (size_t)most->targets, count = (size_t)pack->count;
    size_t axes = (size_t)model->shape.axes, ints = (3 + axes) * T + 1 + pages + 2 * targets;
    char *memory = malloc(count * sizeof(Micro) + S * sizeof(Span) + ints * sizeof(int32_t));
    if (!memory) return fail(STATUS_MEMORY, "no memory for a batch of %zu targets", targets);
    pack->micro = (Micro *)memory;
    pack->host.spans = (Span *)(pack->micro + count);
    pack->host.pos = (int32_t *)(pack->host.spans + S);
    pack->host.slot = pack->host.pos + axes * T;
    pack->host.pages = pack->host.slot + T;
    pack->rows = pack->host.pages + pages;
    pack->start = pack->rows + T;
    pack->ids = pack->start + T + 1;
    pack->source = pack->ids + targets;
    micro_list(pack->micro, most, datums, step_tokens);
    Status status = images_open(pack);
    if (status) pack_close(pack);
    return status;
}

void pack_close(Pack *pack)
{
    free(pack->runs);
    free(pack->micro);
    pack->runs = NULL;
    pack->micro = NULL;
}

/* Keeps those features of the micro-batch's images that are there. */
static void features_stay(const Pack *pack, const Micro *micro, Tower *tower)
{
    const int32_t *tokens = pack->datums->tokens + micro->token0;
    int bad, images = image_runs(pack->runs, tokens, micro->T, &bad);
    features_begin(tower);
    for (int i = 0; i < images; i++) features_keep(tower, pack->runs[i].image);
}

Status pack_images(Pack *pack, const Micro *micro, const Model *model, const atomic_int *stop)
{
    int bad, row = 0;
    pack->images = 0;
    if (!pack->tokens) return STATUS_OK;
    features_stay(pack, micro, model->tower);
    for (int i = micro->first; i < micro->last; row += pack->datums->lengths[i++]) {
        const int32_t *tokens = pack->datums->tokens + micro->token0 + row;
        int images = image_runs(pack->runs, tokens, pack->datums->lengths[i], &bad);
        for (const ImageRun *run = pack->runs; run < pack->runs + images; run++) {
            ImageRows *one = &pack->image[pack->images++];
            *one = (ImageRows){.row = row + run->at, .rows = image_rows(run->image)};
            TRY(features_want(&one->features, model->tower, run->image, stop));
        }
    }
    return STATUS_OK;
}

void pack_upload(Pack *pack, const Micro *micro, Batch *batch, const Model *model)
{
    BatchHost *host = &pack->host;
    const int32_t *tokens = pack->datums->tokens + micro->token0;
    int bad;
    host->T = host->S = host->page_count = 0;
    host->lists = 1;
    host->tokens = pack->tokens ? pack->tokens : tokens;
    for (int t = 0; t < micro->T && pack->tokens; t++)
        pack->tokens[t] = tokens[t] < 0 ? 0 : tokens[t];
    for (int i = micro->first; i < micro->last; i++) {
        int length = pack->datums->lengths[i];
        int images = pack->tokens ? image_runs(pack->runs, tokens + host->T, length, &bad) : 0;
        batch_add(host, pack->runs, images, length, model->shape.axes);
    }
    batch_upload(batch, model, host);
}

static int row_live(const float *gate, int count)
{
    for (int k = 0; gate && k < count; k++)
        if (gate[k] != 0.0f) return 1;
    return !gate;
}

void pack_order(Pack *pack, const Micro *micro, const float *gate)
{
    const Datums *d = pack->datums;
    int at = 0;
    int32_t next = 0;
    for (int live = 1; live >= 0; live--) {
        int32_t target = 0;
        int row = 0;
        for (int i = micro->first; i < micro->last; i++)
            for (int t = 0; t < d->lengths[i]; t++, row++, target += d->counts[i]) {
                const float *own = gate ? gate + micro->target0 + target : NULL;
                if (row_live(own, d->counts[i]) != live) continue;
                pack->rows[at] = row;
                pack->start[at++] = next;
                for (int32_t k = target; k < target + d->counts[i]; k++, next++) {
                    pack->source[next] = k;
                    pack->ids[next] = d->targets[micro->target0 + k];
                }
            }
        if (live) pack->live = at;
    }
    pack->start[at] = next;
}
