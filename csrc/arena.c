/* arena.c - device memory in one block: the same code that places things first measures them.
 *
 * An arena without a base only counts. So what a step will need is known, and refused, before it
 * starts; nothing is allocated while it runs. */
#include <assert.h>
#include <stdio.h>

#include "core.h"

enum { ALIGNMENT = 256 };

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

Status arena_reserve(Arena *arena, size_t bytes, const char *purpose)
{
    bytes = aligned(bytes);
    arena->used = 0;
    if (arena->base && arena->size >= bytes) return STATUS_OK;
    arena_release(arena);
    void *base;
    if (arena->dev->alloc(arena->dev, &base, bytes) != STATUS_OK) {
        char reason[256];
        snprintf(reason, sizeof reason, "%s", status_text());
        return fail(STATUS_MEMORY, "%s needs %.1f MiB on device %s: %s", purpose,
                    (double)bytes / 1048576.0, arena->dev->name, reason);
    }
    arena->base = base;
    arena->size = bytes;
    return STATUS_OK;
}

void arena_release(Arena *arena)
{
    if (arena->base) arena->dev->release(arena->dev, arena->base, arena->size);
    arena->base = NULL;
    arena->size = arena->used = 0;
}

void *arena_take(Arena *arena, size_t bytes)
{
    size_t at = arena->used;
    arena->used += aligned(bytes);
    if (!arena->base) return NULL;
    assert(arena->used <= arena->size);
    return arena->base + at;
}
