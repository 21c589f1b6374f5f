/* sampling/window.h - frames in the windowed lists that no sequence reads any more. */
#ifndef TINSMITH_SAMPLING_WINDOW_H
#define TINSMITH_SAMPLING_WINDOW_H

#include "lru.h"
#include "sampler.h"

typedef struct Windows {
    int32_t *users;        /* [pages] sequences that hold a page's frames in the windowed lists */
    unsigned char *wanted; /* [pages] of those laid aside */
    Lru unused;            /* those laid aside */
} Windows;

Status windows_open(Windows *windows, int pages);
void windows_close(Windows *windows);
/* A sequence holds the frames of a page; it does not any more: returns whether it was the last. */
void windows_hold(Windows *windows, int32_t page);
int windows_leave(Windows *windows, int32_t page);
/* Lays the frames of a page aside that nobody holds. Those that are not wanted are the first to be
 * given up. */
void windows_lay(Windows *windows, int32_t page, int wanted);
/* They are laid aside no more, if they were. */
void windows_lift(Windows *windows, int32_t page);
/* The page whose frames are to be given up next; -1: there is none, or, unless `wanted`, none that
 * is not wanted. */
int32_t windows_oldest(const Windows *windows, int wanted);
int windows_users(const Windows *windows, int32_t page);

#endif
