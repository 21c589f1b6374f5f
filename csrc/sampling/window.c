/* sampling/window.c - which pages a sequence passes in the windowed lists (Lists), as its window
 * moves on.
 *
 * A sequence holds the frames that the first row of its newest row's page reads, and all after
 * them. So the newest row can be run again, and another sequence can begin with the page, or go on
 * behind the last full one. That is budget_window_pages at most, whatever the length.
 *
 * Of the others some are expected to be read: by a later sequence that goes on at the page of a
 * prompt's last token, for the same prompt again, or at the end of a prefix that two had in common,
 * for a third. They are evicted last, as the frames of a sequence that ends or is preempted are. */
#include "window.h"
#include "page_table.h"

int window_first_page(const PagePool *pool, int row)
{
    int window = pool->lists.window;
    return window && row >= window ? (row - window + 1) / KV_PAGE : 0;
}

/* Whether a sequence that goes on behind the first `end` tokens, at a page's beginning, reads it.
 */
static int read_from(const PagePool *pool, int page, int end)
{
    end = end / KV_PAGE * KV_PAGE;
    return page < end / KV_PAGE && page >= window_first_page(pool, end);
}

void window_free_before(PagePool *pool, Sequence *s, int first)
{
    for (int page; (page = s->pages.window_begin) < first;) {
        int expected = read_from(pool, page, s->request->spec.prompt_length - 1) ||
                       read_from(pool, page, s->state.checkpoint);
        page_table_free_window(pool, &s->pages, expected);
    }
}

void window_advance(PagePool *pool, Sequence *s)
{
    int newest = (s->progress.cached - 1) / KV_PAGE * KV_PAGE;
    window_free_before(pool, s, window_first_page(pool, newest));
}
