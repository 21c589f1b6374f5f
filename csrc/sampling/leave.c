/* sampling/leave.c - which pages a sequence leaves behind in the windowed lists (core.h), as its
 * window moves on.
 *
 * A sequence holds the frames that the first row of its newest row's page reads, and all after
 * them. So the newest row can be run a second time, and another sequence can begin with the page,
 * or go on behind the last full one. That is budget_window_pages at most, whatever the length.
 *
 * Of those left behind, some are wanted: what a later sequence reads that goes on at the page of a
 * prompt's last token, for the same prompt again, or at the end of what was in common with an
 * earlier one, for a third. They are given up last, as what a sequence holds when it ends or is
 * preempted. */
#include "leave.h"
#include "page_table.h"

int leave_first(const Kv *kv, int row)
{
    int window = kv->model->lists.window;
    return window && row >= window ? (row - window + 1) / KV_PAGE : 0;
}

/* Whether a sequence that goes on behind the first `end` tokens, at a page's beginning, reads it.
 */
static int read_from(const Kv *kv, int page, int end)
{
    end = end / KV_PAGE * KV_PAGE;
    return page < end / KV_PAGE && page >= leave_first(kv, end);
}

void leave_pages(Kv *kv, const Request *r, Sequence *s, int first)
{
    PageTable *table = &s->pages;
    while (table->window_begin < first) {
        int wanted = read_from(kv, table->window_begin, r->spec.prompt_length - 1) ||
                     read_from(kv, table->window_begin, s->state.shared_end);
        page_table_free_window(kv, table, wanted);
    }
}

void leave_ran(Kv *kv, const Request *r, Sequence *s)
{
    leave_pages(kv, r, s, leave_first(kv, (s->progress.cached - 1) / KV_PAGE * KV_PAGE));
}
