/* faults.c - a library that is loaded before all others: it counts what its process changes under
 * a folder, and at a given count fails it, cuts it short, or kills the process.
 *
 * Every call of the C library that changes a file system is wrapped. Calls on paths and files that
 * are not under the folder go through. What is not seen: memory that is mapped (SQLite's -shm,
 * which it makes again), and the loss of what was written and not synced, as where the power goes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, FULL_ONCE, FULL, BROKEN_ONCE, SHORT };
enum { CHANGES, ALLOCATES, SYNCS }; /* what a call does: the disk can be full where it allocates */

static char folder[PATH_MAX];
static int mode = COUNT, number, seen;

void faults_arm(const char *under, int at, int what)
{
    snprintf(folder, sizeof folder, "%s", under);
    number = at;
    mode = what;
    seen = 0;
}

int faults_seen(void)
{
    return seen;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int under(int dir, const char *path)
{
    char place[PATH_MAX], link[64];
    if (!folder[0]) return 0;
    if (path && path[0] == '/') return !strncmp(path, folder, strlen(folder));
    if (dir == AT_FDCWD) return 0; /* the programs name no relative paths */
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t size = readlink(link, place, sizeof place - 1);
    if (size < 0) return 0;
    place[size] = 0;
    return !strncmp(place, folder, strlen(folder));
}

/* Whether this call fails, with errno; it may not come back. `after`: it was made already. */
static int hit(int kind, int after)
{
    if (!after) seen++;
    if (mode == KILL_BEFORE && !after && seen == number) kill(getpid(), SIGKILL);
    if (mode == KILL_AFTER && after && seen == number) kill(getpid(), SIGKILL);
    if (after) return 0;
    int full = mode == FULL_ONCE ? seen == number : mode == FULL && seen >= number;
    if (full && (kind != CHANGES || mode == FULL_ONCE)) return errno = ENOSPC, 1;
    if (mode == BROKEN_ONCE && seen == number) return errno = EIO, 1;
    return 0;
}

#define CALL(is, kind, call)                 \
    {                                        \
        int ours = is, result;               \
        if (ours && hit(kind, 0)) return -1; \
        result = call;                       \
        if (ours) hit(kind, 1);              \
        return result;                       \
    }

static ssize_t written(int fd, ssize_t (*call)(int, const void *, size_t, off_t), const void *data,
                       size_t size, off_t at)
{
    int ours = under(fd, NULL);
    if (ours && hit(ALLOCATES, 0)) return -1;
    if (ours && seen == number && (mode == SHORT || mode == KILL_AFTER) && size > 1) size /= 2;
    ssize_t result = call(fd, data, size, at);
    if (ours) hit(ALLOCATES, 1);
    return result;
}

static ssize_t plain(int fd, const void *data, size_t size, off_t at)
{
    (void)at;
    return REAL(write)(fd, data, size);
}

static ssize_t placed(int fd, const void *data, size_t size, off_t at)
{
    return REAL(pwrite)(fd, data, size, at);
}

ssize_t write(int fd, const void *data, size_t size)
{
    return written(fd, plain, data, size, 0);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return written(fd, placed, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    return written(fd, placed, data, size, at);
}

int fsync(int fd) CALL(under(fd, NULL), SYNCS, REAL(fsync)(fd)) int fdatasync(int fd)
    CALL(under(fd, NULL), SYNCS, REAL(fdatasync)(fd)) int ftruncate(int fd, off_t size) CALL(
        under(fd, NULL), CHANGES, REAL(ftruncate)(fd, size)) int ftruncate64(int fd, off64_t size)
        CALL(under(fd, NULL), CHANGES, REAL(ftruncate64)(fd, size)) int fchmod(int fd, mode_t bits)
            CALL(under(fd, NULL), CHANGES, REAL(fchmod)(fd, bits)) int chmod(
                const char *path,
                mode_t bits) CALL(under(AT_FDCWD, path), CHANGES,
                                  REAL(chmod)(path, bits)) int mkdir(const char *path, mode_t bits)
                CALL(under(AT_FDCWD, path), ALLOCATES, REAL(mkdir)(path, bits)) int rmdir(
                    const char *path) CALL(under(AT_FDCWD, path), CHANGES,
                                           REAL(rmdir)(path)) int unlink(const char *path)
                    CALL(under(AT_FDCWD, path), CHANGES,
                         REAL(unlink)(path)) int unlinkat(int dir, const char *path, int flags)
                        CALL(under(dir, path), CHANGES,
                             REAL(unlinkat)(dir, path, flags)) int rename(const char *from,
                                                                          const char *to)
                            CALL(under(AT_FDCWD, from), CHANGES,
                                 REAL(rename)(from, to)) int renameat(int dir, const char *from,
                                                                      int other, const char *to)
                                CALL(under(dir, from), CHANGES,
                                     REAL(renameat)(dir, from, other,
                                                    to)) int renameat2(int dir, const char *from,
                                                                       int other,
                                                                       const char *to,
                                                                       unsigned flags)
                                    CALL(under(dir, from), CHANGES,
                                         REAL(renameat2)(dir, from, other, to,
                                                         flags)) int linkat(int dir,
                                                                            const char *from,
                                                                            int other,
                                                                            const char *to,
                                                                            int flags)
                                        CALL(under(other, to), ALLOCATES,
                                             REAL(linkat)(dir, from, other, to,
                                                          flags)) int link(const char *from,
                                                                           const char *to)
                                            CALL(under(AT_FDCWD, to), ALLOCATES,
                                                 REAL(link)(from,
                                                            to)) int utimensat(int dir,
                                                                               const char *path,
                                                                               const struct timespec
                                                                                   times[2],
                                                                               int flags)
                                                CALL(under(dir, path), CHANGES,
                                                     REAL(utimensat)(dir, path, times, flags))

                                                    static int opened(int dir, const char *path,
                                                                      int flags, mode_t bits)
{
    int makes = flags & (O_CREAT | O_TRUNC) && under(dir, path);
    if (makes && hit(ALLOCATES, 0)) return -1;
    int fd = REAL(openat)(dir, path, flags, bits);
    if (makes) hit(ALLOCATES, 1);
    return fd;
}

#define MODE_OF(flags)                     \
    mode_t bits = 0;                       \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest;                      \
        va_start(rest, flags);             \
        bits = va_arg(rest, mode_t);       \
        va_end(rest);                      \
    }

int open(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return opened(AT_FDCWD, path, flags, bits);
}
int open64(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return opened(AT_FDCWD, path, flags, bits);
}
int openat(int dir, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return opened(dir, path, flags, bits);
}
int openat64(int dir, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return opened(dir, path, flags, bits);
}
