/* sampling/page_table.c - the pages that a sequence holds, and the pages of a step's sequences as
 * the device sees them: for each list of layers (core.h) a table of frames, a span for each
 * sequence and a slot for each row.
 *
 * In a windowed list a sequence has the frames that it holds alone: none before them is read. */
#include <stdlib.h>

#include "page_table.h"

int page_table_open(PageTable *table, int tokens)
{
    *table = (PageTable){.page = malloc(((size_t)tokens / KV_PAGE + 1) * sizeof *table->page)};
    return table->page != NULL;
}

void page_table_close(PageTable *table)
{
    free(table->page);
}

/* ---- pages that are held ---- */

static int add(PageTable *table, int32_t page)
{
    if (page < 0) return 0;
    table->page[table->count++] = page;
    return 1;
}

int page_table_allocate(Kv *kv, PageTable *table)
{
    return add(table, kv_take(kv));
}

void page_table_touch(Kv *kv, PageTable *table, int32_t page)
{
    kv_share(kv, page, table->count >= table->window_begin);
    add(table, page);
}

int page_table_fork(Kv *kv, PageTable *table, int32_t page, int rows)
{
    return add(table, kv_fork(kv, page, rows));
}

void page_table_share(Kv *kv, PageTable *table, const PageTable *from, int count)
{
    table->window_begin = from->window_begin;
    for (int i = 0; i < count; i++) page_table_touch(kv, table, from->page[i]);
}

void page_table_free_window(Kv *kv, PageTable *table, int wanted)
{
    int first = table->window_begin++;
    if (first < table->count) kv_leave(kv, table->page[first], wanted);
}

void page_table_free(Kv *kv, PageTable *table, int count)
{
    for (int i = count; i < table->count; i++)
        kv_drop(kv, table->page[i], i >= table->window_begin);
    table->count = count;
    if (table->window_begin > count) table->window_begin = count;
}

/* ---- as the device sees them ---- */

int table_size(const Kv *kv, const PageTable *table)
{
    return kv->lists.full * table->count +
           kv->lists.windowed * (table->count - table->window_begin);
}

static int32_t frame_of(const Kv *kv, int32_t page, int list)
{
    return kv->frame[page * (kv->lists.full + kv->lists.windowed) + list];
}

int32_t table_slot(const Kv *kv, const PageTable *table, int list, int position)
{
    return frame_of(kv, table->page[position / KV_PAGE], list) * KV_PAGE + position % KV_PAGE;
}

int table_add(const Kv *kv, const PageTable *table, int list, int32_t *frames, int at,
              int32_t *first)
{
    int begin = list < kv->lists.full ? 0 : table->window_begin;
    *first = at - begin;
    for (int i = begin; i < table->count; i++) frames[at++] = frame_of(kv, table->page[i], list);
    return at;
}
