/* tests/support/traffic.cpp - counts the bytes of the emulated card's memory that each launch,
 * product and copy reads and writes: each byte once for reading and once for writing, however many
 * threads do it. That is what a card's memory moves where caches keep all of one launch, and nothing from one
 * to the next.
 *
 * The emulated device is compiled with -fsanitize=thread, which puts a call before each read and
 * write of memory, and is linked with this file instead of the sanitizer. memcpy and its like come
 * through the linker (--wrap). What a compiler's optimizer would leave out must not be missing, so
 * it is compiled without one. */
#include <stddef.h>
#include <stdint.h>

#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" const uint64_t *cuda_emulated_work(void);
extern "C" int cuda_emulated_blocks(const char **at, size_t *bytes, int room);

enum { LINE = 64, BLOCKS_MOST = 1024 };

namespace {

struct Line {
    uint64_t touched[2]; /* a bit for each byte: read, written */
};

struct Moved {
    int64_t bytes[2];
};

bool inside; /* the counter itself runs: what it calls is counted by nobody */
uint64_t work;
std::unordered_map<uintptr_t, Line> lines; /* of this work */
std::vector<Moved> all;                    /* of works so far */
const char *begin[BLOCKS_MOST];
size_t length[BLOCKS_MOST];
int blocks;

void work_begin(uint64_t now)
{
    inside = true;
    work = now;
    lines.clear();
    all.push_back({{0, 0}});
    blocks = cuda_emulated_blocks(begin, length, BLOCKS_MOST);
    inside = false;
}

bool is_of_card(const char *at)
{
    for (int i = 0; i < blocks; i++)
        if (at >= begin[i] && at < begin[i] + length[i]) return true;
    return false;
}

void touch(const void *memory, size_t bytes, int written)
{
    static const uint64_t *const now = cuda_emulated_work();
    if (inside || !*now) return;
    if (*now != work) work_begin(*now);
    if (!bytes || !is_of_card((const char *)memory)) return;
    for (uintptr_t at = (uintptr_t)memory, end = at + bytes; at < end;) {
        uintptr_t next = at / LINE * LINE + LINE, to = next < end ? next : end;
        uint64_t mask = (to - at == LINE ? 0 : (uint64_t)1 << (to - at)) - 1;
        uint64_t &touched = lines[at / LINE].touched[written], bits = mask << at % LINE & ~touched;
        all.back().bytes[written] += __builtin_popcountll(bits);
        touched |= bits;
        at = to;
    }
}

} // namespace

/* What each work since the last call has read and written, two numbers each. Returns how many works
 * there were. */
EXPORT int traffic_take(int64_t *bytes, int room)
{
    int count = (int)all.size();
    for (int i = 0; i < count && i < room; i++)
        for (int written = 0; written < 2; written++) *bytes++ = all[i].bytes[written];
    all.clear();
    work = 0;
    return count;
}

/* ---- what -fsanitize=thread calls ---- */

#define TOUCHES(size)                              \
    EXPORT void __tsan_read##size(const void *at)  \
    {                                              \
        touch(at, size, 0);                        \
    }                                              \
    EXPORT void __tsan_write##size(const void *at) \
    {                                              \
        touch(at, size, 1);                        \
    }
TOUCHES(1)
TOUCHES(2)
TOUCHES(4)
TOUCHES(8)
TOUCHES(16)

EXPORT void __tsan_read_range(const void *at, size_t bytes)
{
    touch(at, bytes, 0);
}

EXPORT void __tsan_write_range(const void *at, size_t bytes)
{
    touch(at, bytes, 1);
}

EXPORT void __tsan_init(void)
{
}

EXPORT void __tsan_vptr_update(void *, void *)
{
}

/* Counters and flags of the emulator, which are not in a card's memory. */
#define ATOMIC(bits, type)                                                       \
    EXPORT type __tsan_atomic##bits##_load(const volatile type *at, int)         \
    {                                                                            \
        return __atomic_load_n(at, __ATOMIC_SEQ_CST);                            \
    }                                                                            \
    EXPORT void __tsan_atomic##bits##_store(volatile type *at, type value, int)  \
    {                                                                            \
        __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                           \
    }                                                                            \
    EXPORT type __tsan_atomic##bits##_exchange(volatile type *at, type to, int)  \
    {                                                                            \
        return __atomic_exchange_n(at, to, __ATOMIC_SEQ_CST);                    \
    }                                                                            \
    EXPORT type __tsan_atomic##bits##_fetch_add(volatile type *at, type by, int) \
    {                                                                            \
        return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST);                     \
    }
ATOMIC(8, char)
ATOMIC(64, long)

/* ---- what the linker sends here ---- */

#define COPIES(name)                                                      \
    extern "C" void *__real_##name(void *to, const void *from, size_t n); \
    EXPORT void *__wrap_##name(void *to, const void *from, size_t bytes)  \
    {                                                                     \
        touch(from, bytes, 0);                                            \
        touch(to, bytes, 1);                                              \
        return __real_##name(to, from, bytes);                            \
    }
COPIES(memcpy)
COPIES(memmove)

extern "C" void *__real_memset(void *to, int value, size_t bytes);
EXPORT void *__wrap_memset(void *to, int value, size_t bytes)
{
    if (!value) touch(to, bytes, 1); /* anything else is the emulator's poison */
    return __real_memset(to, value, bytes);
}
