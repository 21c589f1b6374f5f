/* device/dtype.h - the element types by name, and what the codes of a type with blocks mean. */
#ifndef TINSMITH_DEVICE_DTYPE_H
#define TINSMITH_DEVICE_DTYPE_H

#include "device.h"

typedef struct TypeInfo {
    const char *name;
    int block;          /* numbers per block of an array, a multiple of FROZEN_BLOCK */
    size_t block_bytes; /* 0: arrays have no such blocks */
    int bits;           /* of a code */
    int made;           /* whether loading can quantize wide numbers to it */
} TypeInfo;

TypeInfo dtype_info(DType type);
/* The type of that name; DTYPES: there is none. */
DType dtype_find(const char *name);
/* Whether numbers have blocks. */
static inline int dtype_packed(DType type)
{
    return type >= DTYPE_INT8;
}
/* Whether a weight that is kept in one type can be loaded from an array of another. */
int dtype_loads(DType kept, DType from);

#endif
