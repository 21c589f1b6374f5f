/* sampling/window.c - frames in the windowed lists that no sequence reads any more (core.h), kept
 * for sequences that begin alike.
 *
 * Each page counts the sequences that hold its frames there. When the last one leaves, the frames
 * of a page that the prefix cache knows are laid aside: at the end of the order if a later sequence
 * is expected to go on behind the page, else at its beginning (leave.c). page_pool.c takes them
 * back from the beginning on. */
#include <stdlib.h>

#include "window.h"

Status windows_open(Windows *windows, int pages)
{
    windows->users = calloc((size_t)pages, sizeof *windows->users);
    windows->wanted = calloc((size_t)pages, sizeof *windows->wanted);
    if (!windows->users || !windows->wanted || !lru_open(&windows->unused, pages))
        return fail(STATUS_MEMORY, "no memory for the windows of %d pages", pages);
    return STATUS_OK;
}

void windows_close(Windows *windows)
{
    free(windows->users);
    free(windows->wanted);
    lru_close(&windows->unused);
}

void windows_hold(Windows *windows, int32_t page)
{
    if (windows->users[page]++ == 0) windows_lift(windows, page);
}

int windows_leave(Windows *windows, int32_t page)
{
    return --windows->users[page] == 0;
}

void windows_lay(Windows *windows, int32_t page, int wanted)
{
    windows->wanted[page] = wanted != 0;
    if (wanted)
        lru_append(&windows->unused, page);
    else
        lru_prepend(&windows->unused, page);
}

void windows_lift(Windows *windows, int32_t page)
{
    lru_remove(&windows->unused, page);
}

int32_t windows_oldest(const Windows *windows, int wanted)
{
    int32_t page = windows->unused.oldest;
    return page >= 0 && windows->wanted[page] <= wanted ? page : -1;
}

int windows_users(const Windows *windows, int32_t page)
{
    return windows->users[page];
}
