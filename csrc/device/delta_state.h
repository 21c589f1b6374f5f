/* device/delta_state.h - a sequence's state in a gated delta network, on all devices. */
#ifndef TINSMITH_DEVICE_DELTA_STATE_H
#define TINSMITH_DEVICE_DELTA_STATE_H

#include "device.h"

/* A sequence's state in a gated delta network, in floats. It belongs to the page of the newest row.
 * `start` and `state` are as of the page's beginning; `ring` and `open` cover the rows inside the
 * page so far.
 *
 *   start (CONV - 1, C)   the convolution's inputs before the page
 *   ring (CONV, C)        its newest inputs: that of position p at p % CONV
 *   state                 for each value head the page's number, as an int32, at a stride
 *                         of DELTA_HEAD floats; after all of them each head's state (N,E)
 *   open                  of each key head the page's keys, turned (N, KV_PAGE); of each value head
 *                         u (KV_PAGE, E); of each value head the sums of decays (KV_PAGE), and
 *                         their rounding errors: differences must not lose digits (KV_PAGE) */
enum { CONV = 4, DELTA_HEAD = 16, DELTA_UNIT = 32, DELTA_MOST = 256 };
#define CONV_START(C) ((size_t)(CONV - 1) * (size_t)(C))
#define CONV_RING(C) ((size_t)CONV * (size_t)(C))
#define DELTA_STATE(H, N, E) ((size_t)(H) * (DELTA_HEAD + (size_t)(N) * (size_t)(E)))
#define DELTA_OPEN(G, H, N, E) \
    ((size_t)KV_PAGE * ((size_t)(G) * (size_t)(N) + (size_t)(H) * (size_t)((E) + 2)))

#endif
