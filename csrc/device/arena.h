/* device/arena.h - device memory, taken in one block and handed out by walking it. */
#ifndef TINSMITH_ARENA_H
#define TINSMITH_ARENA_H

#include "device.h"

typedef struct Arena {
    Device *dev;
    char *base; /* NULL while measuring: takes only count */
    size_t size, used;
} Arena;

/* Makes room for `bytes`, dropping what was there if it was smaller; takes begin from the start
 * again. */
Status arena_reserve(Arena *arena, size_t bytes, const char *purpose);
void arena_release(Arena *arena);
/* The next `bytes`, aligned; NULL while measuring. Placing more than was measured is a programmer's
 * error. */
void *arena_take(Arena *arena, size_t bytes);
/* What a take of so many bytes moves the next one on by. */
size_t arena_step(size_t bytes);
/* Bytes that the ops of `work` need for themselves; nothing is computed. */
size_t device_rehearse(Device *dev, void (*work)(void *), void *context);
/* Makes room for them. */
Status device_prepare(Device *dev, void (*work)(void *), void *context);

/* The `index`-th element of a device array of real. */
real *real_at(const Device *dev, const real *base, size_t index);

#endif
