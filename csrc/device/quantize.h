/* device/quantize.h - the numbers by which int8 and int4 are made of wide weights. All devices have
 * them in common, so that they make the same codes (cpu/weights/quantize.c says how). */
#ifndef TINSMITH_DEVICE_QUANTIZE_H
#define TINSMITH_DEVICE_QUANTIZE_H

/* Making int4 of wide weights: its levels are so many whole ones (FINE); numbers are compared with
 * them in steps of 1/UNIT of that; the largest weight of a block is WHOLE. */
enum { FINE = 16, UNIT = 240, WHOLE = 32767 };
#define STEP 0.06f         /* between the scales that are tried */
#define HALF_MOST 65504.0f /* the largest f16 */
#define TINY 1e-30f        /* less than any scale's weights */
#define GAIN 2e-5f         /* of a scale over the one before, from which it is better */

#endif
