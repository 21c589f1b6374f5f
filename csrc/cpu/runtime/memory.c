/* cpu/runtime/memory.c - the memory that this process may have: the machine's, or the limit of its
 * control groups.
 *
 * A container shares the machine's memory with others, and a process that exceeds its group's limit
 * is killed. The process's group and those above it, of version 1 or 2, each may have a limit.
 * Above memory.high (version 2) a process is not killed but throttled, which is no better. The
 * system evicts a group's file pages when memory is short, so they count as free. Without a limit
 * all memory counts as free, because pages that are never touched cost nothing. */
#define _GNU_SOURCE
#include "memory.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../../device/numbers.h"

enum { PATH = 4096 };

/* The files of a version of control groups, in a group's folder. */
typedef struct Version {
    const char *controller; /* in /proc/self/cgroup */
    const char *mount, *max, *high, *used, *stat;
    const char *files[2]; /* lines of `stat` */
} Version;

static const Version versions[] = {
    {"",
     "/sys/fs/cgroup",
     "memory.max",
     "memory.high",
     "memory.current",
     "memory.stat",
     {"inactive_file", "active_file"}},
    {"memory",
     "/sys/fs/cgroup/memory",
     "memory.limit_in_bytes",
     NULL,
     "memory.usage_in_bytes",
     "memory.stat",
     {"total_inactive_file", "total_active_file"}},
};

static FILE *group_file(const char *folder, const char *name)
{
    char path[PATH + 64];
    int n = snprintf(path, sizeof path, "%s/%s", folder, name);
    return n > 0 && (size_t)n < sizeof path ? fopen(path, "r") : NULL;
}

/* The number in a group's file; `otherwise` if there is none, or the word "max". */
static size_t group_number(const char *folder, const char *name, size_t otherwise)
{
    FILE *file = name ? group_file(folder, name) : NULL;
    size_t number;
    if (!file) return otherwise;
    if (fscanf(file, "%zu", &number) != 1) number = otherwise;
    fclose(file);
    return number;
}

/* Bytes of the group's file pages. */
static size_t group_files(const Version *version, const char *folder)
{
    FILE *file = group_file(folder, version->stat);
    char key[64];
    size_t bytes = 0, number;
    if (!file) return 0;
    while (fscanf(file, "%63s %zu", key, &number) == 2)
        for (int i = 0; i < 2; i++)
            if (strcmp(key, version->files[i]) == 0) bytes += number;
    fclose(file);
    return bytes;
}

static void group_limit(const Version *version, const char *folder, size_t *free_bytes,
                        size_t *all_bytes)
{
    size_t limit = min_size(group_number(folder, version->max, SIZE_MAX),
                            group_number(folder, version->high, SIZE_MAX));
    size_t used = group_number(folder, version->used, 0);
    used -= min_size(used, group_files(version, folder));
    *all_bytes = min_size(*all_bytes, limit);
    *free_bytes = min_size(*free_bytes, limit - min_size(limit, used));
}

/* The group's path in a line of /proc/self/cgroup, which is number:controllers:path; NULL if the
 * line is for another version or other controllers. */
static const char *path_of(const Version *version, char *line)
{
    char *list = strchr(line, ':'), *path = list ? strchr(list + 1, ':') : NULL, *rest;
    if (!path) return NULL;
    *list++ = *path++ = 0;
    path[strcspn(path, "\n")] = 0;
    if (!*version->controller) return *list ? NULL : path;
    for (char *one = strtok_r(list, ",", &rest); one; one = strtok_r(NULL, ",", &rest))
        if (strcmp(one, version->controller) == 0) return path;
    return NULL;
}

/* Applies the limits of a group and its ancestors. In a container that shows only its own groups
 * the path may not exist. The last folder, the root of the groups, is then the container's. */
static void path_limits(const Version *version, const char *root, const char *path,
                        size_t *free_bytes, size_t *all_bytes)
{
    char folder[PATH];
    int mount = snprintf(folder, sizeof folder, "%s%s", root, version->mount);
    int n = snprintf(folder, sizeof folder, "%s%s%s", root, version->mount, path);
    if (mount < 0 || n < mount || (size_t)n >= sizeof folder) return;
    for (char *end = folder + n; end; end = strrchr(folder + mount, '/')) {
        *end = 0;
        group_limit(version, folder, free_bytes, all_bytes);
    }
}

void host_memory(const char *root, size_t *free_bytes, size_t *all_bytes)
{
    *free_bytes = *all_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    FILE *groups = group_file(root, "proc/self/cgroup");
    char line[PATH];
    while (groups && fgets(line, sizeof line, groups))
        for (size_t i = 0; i < sizeof versions / sizeof *versions; i++) {
            char own[PATH];
            memcpy(own, line, sizeof own);
            const char *path = path_of(&versions[i], own);
            if (path) path_limits(&versions[i], root, path, free_bytes, all_bytes);
        }
    if (groups) fclose(groups);
}
