/* cpu/runtime/memory.h - the memory that this process may have. */
#ifndef TINSMITH_CPU_RUNTIME_MEMORY_H
#define TINSMITH_CPU_RUNTIME_MEMORY_H

#include <stddef.h>

#include "../../device/status.h"

/* Bytes of memory that this process can still take, and its total: the machine's, or its control
 * groups' limit. `root` is "", or in tests a folder with its own proc and sys. */
TINSMITH_EXPORT void host_memory(const char *root, size_t *free_bytes, size_t *all_bytes);

#endif
