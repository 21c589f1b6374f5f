/* device/levels.h - what the codes of 4 bits stand for, on all devices. */
#ifndef TINSMITH_LEVELS_H
#define TINSMITH_LEVELS_H

/* The values of the 16 codes of 4 bits, or of the lowest 4 bits, in the order of codes. int4's are
 * Lloyd's levels for Gaussian weights whose scale is the best one, in sixteenths. */
#define LEVELS_INT4                                                                              \
    -127 / 16.0f, -101 / 16.0f, -79 / 16.0f, -62 / 16.0f, -47 / 16.0f, -33 / 16.0f, -21 / 16.0f, \
        -9 / 16.0f, 2 / 16.0f, 13 / 16.0f, 24 / 16.0f, 36 / 16.0f, 49 / 16.0f, 64 / 16.0f,       \
        83 / 16.0f, 108 / 16.0f
#define LEVELS_Q4_0 -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7
#define LEVELS_WHOLE 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define LEVELS_MXFP4 0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6

enum { LEVELS = 16 };

#endif
