/* device/arena.c - device memory in one block: the same code first measures and then places arrays,
 * and ops are rehearsed before they run.
 *
 * An arena without a base only counts. A device that rehearses only counts its ops' scratch. So a
 * step's memory is known, and refused if too large, before it starts. A step allocates nothing. */
#include <assert.h>
#include <stdio.h>

#include "arena.h"

enum {
    ALIGNMENT = 256,
    UNASKED = 1 << 18, /* bytes up to which free memory is not checked: a check takes 0.1 ms */
};

size_t arena_step(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

Status arena_reserve(Arena *arena, size_t bytes, const char *purpose)
{
    bytes = arena_step(bytes);
    arena->used = 0;
    if (arena->base && arena->size >= bytes) return STATUS_OK;
    arena_release(arena);
    size_t free_bytes = UNASKED, all_bytes = UNASKED;
    if (bytes > UNASKED) arena->dev->memory(arena->dev, &free_bytes, &all_bytes);
    if (bytes > free_bytes)
        return fail(
            STATUS_MEMORY,
            "%s needs %.1f MiB on device %s, which can give %.1f of its %.1f MiB of memory in all",
            purpose, (double)bytes / 1048576.0, arena->dev->name, (double)free_bytes / 1048576.0,
            (double)all_bytes / 1048576.0);
    void *base;
    Status status = arena->dev->alloc(arena->dev, &base, bytes);
    if (status == STATUS_MEMORY) {
        char reason[512];
        snprintf(reason, sizeof reason, "%s", status_text());
        return fail(STATUS_MEMORY, "%s needs %.1f MiB on device %s: %s", purpose,
                    (double)bytes / 1048576.0, arena->dev->name, reason);
    }
    if (status) return status;
    arena->base = base;
    arena->size = bytes;
    return STATUS_OK;
}

Status arena_map(Arena *arena, int file, size_t at, size_t bytes)
{
    void *base;
    bytes = arena_step(bytes);
    arena_release(arena);
    TRY(arena->dev->map(arena->dev, &base, file, at, bytes));
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

size_t device_rehearse(Device *dev, void (*work)(void *), void *context)
{
    if (!dev->rehearse) return 0;
    dev->rehearse(dev);
    work(context);
    return dev->rehearsed(dev);
}

Status device_prepare(Device *dev, void (*work)(void *), void *context)
{
    return dev->rehearse ? dev->reserve(dev, device_rehearse(dev, work, context)) : STATUS_OK;
}

void *arena_take(Arena *arena, size_t bytes)
{
    size_t at = arena->used;
    arena->used += arena_step(bytes);
    if (!arena->base) return NULL;
    assert(arena->used <= arena->size);
    return arena->base + at;
}

real *real_at(const Device *dev, const real *base, size_t index)
{
    return (real *)((char *)base + index * dev->real_bytes);
}
