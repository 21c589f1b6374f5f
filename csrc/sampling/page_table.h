/* sampling/page_table.h - the pages that a sequence holds, and how the device sees them. */
#ifndef TINSMITH_SAMPLING_PAGE_TABLE_H
#define TINSMITH_SAMPLING_PAGE_TABLE_H

#include "sequence.h"

/* For at most `tokens` tokens; 0: no memory. */
int page_table_open(PageTable *table, int tokens);
void page_table_close(PageTable *table);
/* Appends a page for new content; 0: there is none. */
int page_table_allocate(PagePool *pool, PageTable *table);
/* Appends a page that has its content. */
void page_table_touch(PagePool *pool, PageTable *table, int32_t page);
/* Appends a page with the first `rows` keys of `page`; 0: there is none. */
int page_table_fork(PagePool *pool, PageTable *table, int32_t page, int rows);
/* Appends to an empty table the first `count` pages of another one, held as they are there. */
void page_table_copy(PagePool *pool, PageTable *table, const PageTable *from, int count);
/* Frees the windowed frames of the first page that is held with them. */
void page_table_free_window(PagePool *pool, PageTable *table, int expected);
/* Frees the pages behind the first `count`. */
void page_table_free(PagePool *pool, PageTable *table, int count);

/* Frames of a sequence in all lists. */
int page_table_size(const PagePool *pool, const PageTable *table);
/* The slot of a sequence's token in a list. */
int32_t page_table_slot(const PagePool *pool, const PageTable *table, int list, int position);
/* Writes a sequence's frames in a list behind the `at` that are in `frames`, and returns how many
 * are there then. *first is where the sequence's pages begin (Span). */
int page_table_write(const PagePool *pool, const PageTable *table, int list, int32_t *frames,
                     int at, int32_t *first);

#endif
