/* sampling/window.c - frames in the windowed lists that no sequence reads any more (core.h), kept
 * for sequences that begin alike.
 *
 * Each page counts the sequences that hold its frames there. When the last one leaves, the frames
 * of a page that the prefix cache knows are laid aside: at the end of the order if a later sequence
 * is expected to go on behind the page, else at its beginning (leave.c). page_pool.c takes them
 * back from the beginning on. */
#include <stdlib.h>

#include "window.h"

/* Of a page. */
struct WindowPage {
    int32_t users;        /* sequences that hold its frames in the windowed lists */
    int32_t older, newer; /* among those laid aside; -1: the end */
    unsigned char laid, wanted;
};

Status windows_open(Windows *windows, int pages)
{
    *windows = (Windows){.oldest = -1, .newest = -1};
    windows->page = calloc((size_t)pages, sizeof *windows->page);
    return windows->page ? STATUS_OK
                         : fail(STATUS_MEMORY, "no memory for the windows of %d pages", pages);
}

void windows_close(Windows *windows)
{
    free(windows->page);
    *windows = (Windows){0};
}

void windows_hold(Windows *windows, int32_t page)
{
    if (windows->page[page].users++ == 0) windows_lift(windows, page);
}

int windows_leave(Windows *windows, int32_t page)
{
    return --windows->page[page].users == 0;
}

void windows_lay(Windows *windows, int32_t page, int wanted)
{
    struct WindowPage *p = &windows->page[page];
    p->laid = 1;
    p->wanted = wanted != 0;
    p->older = wanted ? windows->newest : -1;
    p->newer = wanted ? -1 : windows->oldest;
    *(p->older < 0 ? &windows->oldest : &windows->page[p->older].newer) = page;
    *(p->newer < 0 ? &windows->newest : &windows->page[p->newer].older) = page;
}

void windows_lift(Windows *windows, int32_t page)
{
    struct WindowPage *p = &windows->page[page];
    if (!p->laid) return;
    *(p->older < 0 ? &windows->oldest : &windows->page[p->older].newer) = p->newer;
    *(p->newer < 0 ? &windows->newest : &windows->page[p->newer].older) = p->older;
    p->laid = 0;
}

int32_t windows_oldest(const Windows *windows, int wanted)
{
    int32_t page = windows->oldest;
    return page >= 0 && windows->page[page].wanted <= wanted ? page : -1;
}

int windows_users(const Windows *windows, int32_t page)
{
    return windows->page[page].users;
}
