/* device/delta_state.h - what a sequence keeps of a gated delta network, on all devices. */
#ifndef TINSMITH_DEVICE_DELTA_STATE_H
#define TINSMITH_DEVICE_DELTA_STATE_H

#include "device.h"

/* What a sequence keeps of a gated delta network, in floats. It belongs to one page: that of the
 * newest row. `start` and `state` are those at the page's beginning; `ring` and `open` are the
 * rest, with which the sequence goes on inside the page.
 *
 *   start (CONV - 1, C)   the convolution's inputs before the page
 *   ring (CONV, C)        its newest inputs: that of position p at p % CONV
 *   state                 of each value head the page's number, as an int32 and DELTA_HEAD floats
 *                         apart; behind all of them each head's state (N,E)
 *   open                  of each key head the page's keys, turned (N, KV_PAGE); of each value head
 *                         u (KV_PAGE, E); of each value head the sums of decays (KV_PAGE), and
 *                         what they lack: their differences must not lose digits (KV_PAGE) */
enum { CONV = 4, DELTA_HEAD = 16, DELTA_UNIT = 32, DELTA_MOST = 256 };
#define CONV_START(C) ((size_t)(CONV - 1) * (size_t)(C))
#define CONV_RING(C) ((size_t)CONV * (size_t)(C))
#define DELTA_STATE(H, N, E) ((size_t)(H) * (DELTA_HEAD + (size_t)(N) * (size_t)(E)))
#define DELTA_OPEN(G, H, N, E) \
    ((size_t)KV_PAGE * ((size_t)(G) * (size_t)(N) + (size_t)(H) * (size_t)((E) + 2)))

#endif
