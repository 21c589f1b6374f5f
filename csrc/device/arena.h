/* device/arena.h - device memory: one allocated block, handed out from its start on. */
#ifndef TINSMITH_DEVICE_ARENA_H
#define TINSMITH_DEVICE_ARENA_H

#include "device.h"

typedef struct Arena {
    Device *dev;
    char *base; /* NULL while measuring: arena_take only counts */
    size_t size, used;
} Arena;

/* Makes room for `bytes`; a smaller block is freed with its content. The next take is at the
 * start. */
Status arena_reserve(Arena *arena, size_t bytes, const char *purpose);
/* The same with the bytes of an open file, from byte `at` on (device.h's map). */
Status arena_map(Arena *arena, int file, size_t at, size_t bytes);
void arena_release(Arena *arena);
/* The next `bytes`, aligned; NULL while measuring. Placing more than was measured is a programmer's
 * error. */
void *arena_take(Arena *arena, size_t bytes);
/* The bytes by which such a take advances the arena. */
size_t arena_step(size_t bytes);
/* The bytes of scratch that the ops of `work` need; nothing is computed. */
size_t device_rehearse(Device *dev, void (*work)(void *), void *context);
/* Reserves that scratch. */
Status device_prepare(Device *dev, void (*work)(void *), void *context);

/* The `index`-th element of a device array of real. */
real *real_at(const Device *dev, const real *base, size_t index);

#endif
