/* sampling/window.h - frames in the windowed lists that a sequence no longer reads. */
#ifndef TINSMITH_SAMPLING_WINDOW_H
#define TINSMITH_SAMPLING_WINDOW_H

#include "sequence.h"

/* The first page that rows from this one on read there. */
int window_first_page(const PagePool *pool, int row);
/* Frees a sequence's windowed frames before this page. */
void window_free_before(PagePool *pool, Sequence *s, int first);
/* Called after rows of a sequence have run. */
void window_advance(PagePool *pool, Sequence *s);

#endif
