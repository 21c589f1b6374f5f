/* device/quantize.h - the constants for quantizing wide weights to int8 and int4. All devices share
 * them, so that they make the same codes (cpu/weights/quantize.c explains them). */
#ifndef TINSMITH_DEVICE_QUANTIZE_H
#define TINSMITH_DEVICE_QUANTIZE_H

/* For int4: levels are multiples of 1/FINE; numbers are compared with them in steps of 1/UNIT of
 * that; the largest weight of a block becomes WHOLE. */
enum { FINE = 16, UNIT = 240, WHOLE = 32767 };
#define STEP 0.06f         /* between the scales that are tried */
#define HALF_MOST 65504.0f /* the largest f16 */
#define TINY 1e-30f        /* a block's peak below this counts as 0 */
#define GAIN 2e-5f         /* the least gain for which a scale replaces the one before */

#endif
