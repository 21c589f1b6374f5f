/* device/numbers.h - the smaller and the larger of two numbers. */
#ifndef TINSMITH_DEVICE_NUMBERS_H
#define TINSMITH_DEVICE_NUMBERS_H

#include <stddef.h>
#include <stdint.h>

/* One of the two is an int. */
static inline int min_int(int64_t a, int64_t b)
{
    return (int)(a < b ? a : b);
}

static inline size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

#endif
