/* cpu/runtime/memory.h - the memory that this process may have. */
#ifndef TINSMITH_CPU_RUNTIME_MEMORY_H
#define TINSMITH_CPU_RUNTIME_MEMORY_H

#include <stddef.h>

#include "../../device/status.h"

/* Bytes of memory that this process can still take, and that it may have in all: the machine's, or
 * its control groups' limit. `root` is "", or, for tests, a folder with proc and sys of its own. */
TINSMITH_EXPORT void host_memory(const char *root, size_t *free_bytes, size_t *all_bytes);

#endif
