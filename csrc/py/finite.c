/* py/finite.c - finds the first number of an array that is not finite: a NaN or an infinity.
 *
 * Such a number has an exponent of ones. Blocks of the bits are looked at as a whole, which the
 * compiler does a register at a time; only a block that has one is searched. Memory bound. */
#include "finite.h"

#include "arrays.h"

enum { BLOCK = 4096 };

#define FIRST_BAD(bits, from, count, ones)                                      \
    for (int64_t at = 0; at < (count); at += BLOCK) {                           \
        const bits *block = (const bits *)(from) + at;                          \
        int64_t n = (count) - at < BLOCK ? (count) - at : BLOCK;                \
        bits found = 0;                                                         \
        for (int64_t i = 0; i < n; i++) found |= (block[i] & (ones)) == (ones); \
        if (!found) continue;                                                   \
        for (int64_t i = 0; i < n; i++)                                         \
            if ((block[i] & (ones)) == (ones)) return at + i;                   \
    }

int64_t first_bad(const void *numbers, DType type, int64_t count)
{
    switch (type) {
    case DTYPE_F32: FIRST_BAD(uint32_t, numbers, count, 0x7f800000u) break;
    case DTYPE_BF16: FIRST_BAD(uint16_t, numbers, count, 0x7f80u) break;
    case DTYPE_F16: FIRST_BAD(uint16_t, numbers, count, 0x7c00u) break;
    default: break; /* blocks are not numbers */
    }
    return -1;
}

PyObject *core_first_bad(PyObject *module, PyObject *array)
{
    (void)module;
    Borrowed numbers;
    int64_t bad;
    if (borrow_numbers(array, "the array", &numbers) < 0) return NULL;
    NO_GIL(bad = first_bad(numbers.data, numbers.type, numbers.length));
    Py_DECREF(numbers.owner);
    return PyLong_FromLongLong(bad);
}
