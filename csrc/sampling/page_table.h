/* sampling/page_table.h - the pages that a sequence holds, and how the device sees them. */
#ifndef TINSMITH_SAMPLING_PAGE_TABLE_H
#define TINSMITH_SAMPLING_PAGE_TABLE_H

#include "sequence.h"

/* For at most `tokens` tokens; 0: no memory. */
int page_table_open(PageTable *table, int tokens);
void page_table_close(PageTable *table);
/* Adds a page for new content at the end; 0: there is none. */
int page_table_allocate(Kv *kv, PageTable *table);
/* Adds a page that has its content. */
void page_table_touch(Kv *kv, PageTable *table, int32_t page);
/* Adds a page with the first `rows` keys of `page`, for a sequence that diverges from it; 0: there
 * is none. */
int page_table_fork(Kv *kv, PageTable *table, int32_t page, int rows);
/* Adds to an empty table the first `count` pages of another one, held as they are there. */
void page_table_share(Kv *kv, PageTable *table, const PageTable *from, int count);
/* Frees the windowed frames of the first page that is held with them. */
void page_table_free_window(Kv *kv, PageTable *table, int wanted);
/* Frees the pages behind the first `count`. */
void page_table_free(Kv *kv, PageTable *table, int count);

/* Frames of a sequence in all lists. */
int table_size(const Kv *kv, const PageTable *table);
/* Where a sequence's token is put in a list. */
int32_t table_slot(const Kv *kv, const PageTable *table, int list, int position);
/* Writes a sequence's frames in a list behind the `at` that are in `frames`, and returns how many
 * are there then. *first is where the sequence's pages begin (Span). */
int table_add(const Kv *kv, const PageTable *table, int list, int32_t *frames, int at,
              int32_t *first);

#endif
