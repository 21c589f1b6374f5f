/* binding/checksum.c - tells whether bytes, or the code that made them, have changed.
 *
 *   lane ← rotate(lane ^ word, 29)·ODD     for LANES words of 64 bits side by side
 *
 * A step is one-to-one in its word and in its lane, so a change of one word always shows, and any
 * other change with probability 1 − 2^-64. It is not cryptographic: a writer of the bytes can forge
 * a match. Words have this machine's byte order. Eight bytes a cycle: memory bound. */
#include "checksum.h"

#include <string.h>

#include "arrays.h"
#include "turn.h"

/* setup.py's checksum of the files that turn weights into bytes (PACKERS there). */
#ifndef WEIGHTS_CODE
#define WEIGHTS_CODE 0u
#endif

enum { LANES = 8, WORD = 8, STRETCH = LANES * WORD };

#define ODD 0x9e3779b97f4a7c15u

static inline uint64_t lane_step(uint64_t lane, uint64_t word)
{
    lane ^= word;
    return (lane << 29 | lane >> 35) * ODD;
}

static void lanes_take(uint64_t *lanes, const unsigned char *from)
{
    uint64_t words[LANES];
    memcpy(words, from, sizeof words);
    for (int i = 0; i < LANES; i++) lanes[i] = lane_step(lanes[i], words[i]);
}

static uint64_t checksum(const unsigned char *from, size_t bytes)
{
    uint64_t lanes[LANES], sum = bytes;
    unsigned char last[STRETCH] = {0};
    size_t whole = bytes / STRETCH * STRETCH;
    for (int i = 0; i < LANES; i++) lanes[i] = (uint64_t)i + 1;
    for (size_t at = 0; at < whole; at += STRETCH) lanes_take(lanes, from + at);
    if (whole < bytes) memcpy(last, from + whole, bytes - whole);
    lanes_take(lanes, last);
    for (int i = 0; i < LANES; i++) sum = lane_step(sum, lanes[i]);
    return sum ^ sum >> 32;
}

PyObject *core_checksum(PyObject *module, PyObject *array)
{
    (void)module;
    Borrowed bytes;
    uint64_t sum;
    if (borrow(array, KIND_UINT8, "the array", &bytes) < 0) return NULL;
    NO_GIL(sum = checksum(bytes.data, (size_t)bytes.length));
    Py_DECREF(bytes.owner);
    return PyLong_FromUnsignedLongLong(sum);
}

PyObject *core_weights_code(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromUnsignedLong(WEIGHTS_CODE);
}
