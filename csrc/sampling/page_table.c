/* sampling/page_table.c - the pages that a sequence holds, and their tables for the device: for
 * each list of layers (Lists) the frames of each sequence and the slot of each row.
 *
 * In a windowed list a sequence has only the frames that it holds: earlier ones are not read. */
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

int page_table_allocate(PagePool *pool, PageTable *table)
{
    return add(table, page_allocate(pool));
}

void page_table_touch(PagePool *pool, PageTable *table, int32_t page)
{
    page_touch(pool, page, table->count >= table->window_begin);
    add(table, page);
}

int page_table_fork(PagePool *pool, PageTable *table, int32_t page, int rows)
{
    return add(table, page_fork(pool, page, rows));
}

void page_table_copy(PagePool *pool, PageTable *table, const PageTable *from, int count)
{
    table->window_begin = from->window_begin;
    for (int i = 0; i < count; i++) page_table_touch(pool, table, from->page[i]);
}

void page_table_free_window(PagePool *pool, PageTable *table, int expected)
{
    int first = table->window_begin++;
    if (first < table->count) page_free_window(pool, table->page[first], expected);
}

void page_table_free(PagePool *pool, PageTable *table, int count)
{
    for (int i = count; i < table->count; i++)
        page_free(pool, table->page[i], i >= table->window_begin);
    table->count = count;
    if (table->window_begin > count) table->window_begin = count;
}

/* ---- tables for the device ---- */

int page_table_size(const PagePool *pool, const PageTable *table)
{
    return pool->lists.full * table->count +
           pool->lists.windowed * (table->count - table->window_begin);
}

static int32_t frame_of(const PagePool *pool, int32_t page, int list)
{
    return pool->frame[page * (pool->lists.full + pool->lists.windowed) + list];
}

int32_t page_table_slot(const PagePool *pool, const PageTable *table, int list, int position)
{
    return frame_of(pool, table->page[position / KV_PAGE], list) * KV_PAGE + position % KV_PAGE;
}

int page_table_write(const PagePool *pool, const PageTable *table, int list, int32_t *frames,
                     int at, int32_t *first)
{
    int begin = list < pool->lists.full ? 0 : table->window_begin;
    *first = at - begin;
    for (int i = begin; i < table->count; i++) frames[at++] = frame_of(pool, table->page[i], list);
    return at;
}
