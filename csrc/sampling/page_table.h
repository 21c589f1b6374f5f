/* sampling/page_table.h - the pages that a sequence holds, and their tables for the device. */
#ifndef TINSMITH_SAMPLING_PAGE_TABLE_H
#define TINSMITH_SAMPLING_PAGE_TABLE_H

#include "sequence.h"

/* For at most `tokens` tokens; 0: no memory. */
int page_table_open(PageTable *table, int tokens);
void page_table_close(PageTable *table);
/* Appends a new page; 0: none is left. */
int page_table_allocate(PagePool *pool, PageTable *table);
/* Appends an existing page. */
void page_table_touch(PagePool *pool, PageTable *table, int32_t page);
/* Appends a new page with the first `rows` keys of `page`; 0: none is left. */
int page_table_fork(PagePool *pool, PageTable *table, int32_t page, int rows);
/* Appends to an empty table the first `count` pages of another, with its window_begin. */
void page_table_copy(PagePool *pool, PageTable *table, const PageTable *from, int count);
/* Frees the windowed frames of the first page held with them. */
void page_table_free_window(PagePool *pool, PageTable *table, int expected);
/* Frees the pages after the first `count`. */
void page_table_free(PagePool *pool, PageTable *table, int count);

/* Frames of a sequence in all lists. */
int page_table_size(const PagePool *pool, const PageTable *table);
/* The slot of a sequence's token in a list. */
int32_t page_table_slot(const PagePool *pool, const PageTable *table, int list, int position);
/* Writes a sequence's frames in a list to frames[at] and on, and returns the new end. *first is the
 * sequence's Span.first. */
int page_table_write(const PagePool *pool, const PageTable *table, int list, int32_t *frames,
                     int at, int32_t *first);

#endif
