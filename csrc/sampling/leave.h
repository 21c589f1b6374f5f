/* sampling/leave.h - which pages a sequence leaves behind in the windowed lists. */
#ifndef TINSMITH_SAMPLING_LEAVE_H
#define TINSMITH_SAMPLING_LEAVE_H

#include "sequence.h"

/* The first page that rows read there from this one on. */
int leave_first(const Kv *kv, int row);
/* A sequence leaves its pages before this one. */
void leave_pages(Kv *kv, const Request *request, Sequence *s, int first);
/* The rows of a sequence's turn have run. */
void leave_ran(Kv *kv, const Request *request, Sequence *s);

#endif
