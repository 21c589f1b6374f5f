/* sampling/window.c - frees a sequence's frames in the windowed lists (Lists) as its window moves
 * on.
 *
 * A sequence holds the frames that the first row of its newest page reads, and all after them. So
 * its newest row can be rerun, and another sequence can start with that page, or resume after the
 * last full one. These are at most budget_window_pages, whatever the length.
 *
 * Some freed frames are expected to be read: by a later sequence that resumes at the page of a
 * prompt's last token, for the same prompt again, or at the end of a shared prefix, for a third
 * one. They are evicted last, like the frames of a sequence that ends or is preempted. */
#include "window.h"
#include "page_table.h"

int window_first_page(const PagePool *pool, int row)
{
    int window = pool->lists.window;
    return window && row >= window ? (row - window + 1) / KV_PAGE : 0;
}

/* Whether a sequence that resumes after the first `end` tokens, at a page's beginning, reads it. */
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
