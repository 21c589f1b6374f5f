/* device/levels.h - the values of 4-bit codes, on all devices. */
#ifndef TINSMITH_DEVICE_LEVELS_H
#define TINSMITH_DEVICE_LEVELS_H

/* The values of the 16 codes of 4 bits, or of a code's low 4 bits. int4's are Lloyd's levels for
 * Gaussian weights at the best scale, in sixteenths. */
#define LEVELS_INT4                                                                              \
    -127 / 16.0f, -101 / 16.0f, -79 / 16.0f, -62 / 16.0f, -47 / 16.0f, -33 / 16.0f, -21 / 16.0f, \
        -9 / 16.0f, 2 / 16.0f, 13 / 16.0f, 24 / 16.0f, 36 / 16.0f, 49 / 16.0f, 64 / 16.0f,       \
        83 / 16.0f, 108 / 16.0f
#define LEVELS_Q4_0 -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7
#define LEVELS_WHOLE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define LEVELS_MXFP4 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6
/* bitsandbytes' table: quantiles of a Gaussian, from −1 to 1. */
#define LEVELS_NF4                                                                              \
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,                   \
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,              \
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, \
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f

enum { LEVELS = 16 };

#endif
