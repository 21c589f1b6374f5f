/* sampling/page_table.h - a step's pages, as the device sees them. */
#ifndef TINSMITH_SAMPLING_PAGE_TABLE_H
#define TINSMITH_SAMPLING_PAGE_TABLE_H

#include "sequence.h"

/* Frames of a sequence in all lists. */
int table_size(const Kv *kv, const Sequence *s);
/* Where a sequence's token is put in a list. */
int32_t table_slot(const Kv *kv, const Sequence *s, int list, int position);
/* Writes a sequence's frames in a list behind the `at` that are in the table, and returns how many
 * are in it then. *first is where the sequence's pages begin (Span). */
int table_add(const Kv *kv, const Sequence *s, int list, int32_t *table, int at, int32_t *first);

#endif
