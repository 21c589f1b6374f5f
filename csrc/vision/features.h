/* vision/features.h - images' features, kept on the devices while there is room. */
#ifndef TINSMITH_VISION_FEATURES_H
#define TINSMITH_VISION_FEATURES_H

#include "tower.h"

/* level[0] (rows, out) stands in place of the embedding; level[1 + k] is added after layer k. */
typedef struct Features {
    const Image *image;
    real *level[1 + DEEPS_MOST];
    size_t bytes;
    uint64_t used; /* the last step that wanted them */
} Features;

/* A step begins: what it wants stays until the next one begins. */
void features_begin(Tower *tower);
/* An image's features, computed if they are not there. */
Status features_want(const Features **features, Tower *tower, const Image *image,
                     const atomic_int *stop);
/* Whether an image's features are there, and so stay for the step. Whoever wants several asks this
 * for all before the first is computed, which would evict others. */
int features_keep(Tower *tower, const Image *image);
/* Frees all features. */
void features_drop(Tower *tower);

#endif
