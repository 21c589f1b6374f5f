/* device/philox.h - the random number of a draw, the same bits on all devices. */
#ifndef TINSMITH_DEVICE_PHILOX_H
#define TINSMITH_DEVICE_PHILOX_H

#include "device.h"

#ifdef __cplusplus /* the CUDA device */
#define PHILOX_QUALIFIER __device__
#else
#define PHILOX_QUALIFIER
#endif

/* Philox4x32-10 (Salmon et al. 2011) of the counter (sample, pos, 0, 0): a double in (0, 1). */
PHILOX_QUALIFIER static inline double draw_uniform(const Draw *draw)
{
    uint32_t c0 = draw->sample, c1 = draw->pos, c2 = 0, c3 = 0;
    uint32_t k0 = (uint32_t)draw->seed, k1 = (uint32_t)(draw->seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53 * c0, p1 = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    uint64_t bits = ((uint64_t)c0 << 32 | c1) >> 12;
    return ((double)bits + 0.5) * 0x1p-52;
}

#undef PHILOX_QUALIFIER

#endif
