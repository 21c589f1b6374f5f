/* vision/images.h - the process's images, whose rows stand in sequences as ids below 0. */
#ifndef TINSMITH_VISION_IMAGES_H
#define TINSMITH_VISION_IMAGES_H

#include <stdint.h>

#include "../device/status.h"

/* An image of high × wide tokens. Row i has the id first − i. */
typedef struct Image {
    int32_t first;
    int high, wide;
    int side;              /* pixels of a token's side */
    int holders;           /* of its pixels */
    const uint8_t *pixels; /* (high·side, wide·side, 3), NULL without a holder */
} Image;

/* An image among a sequence's tokens, from index `at` on. */
typedef struct ImageRun {
    const Image *image;
    int at;
    int shift; /* of the tokens after it: position − index */
} ImageRun;

static inline int image_rows(const Image *image)
{
    return image->high * image->wide;
}

/* Adds an image, and holds a copy of its pixels. `first` 0: it gets new ids. Otherwise it is the
 * image with that first id, known or not, and `pixels` must be its pixels. */
Status image_hold(const Image **image, int32_t first, const uint8_t *pixels, int high, int wide,
                  int side);
/* Holds an image once more, for as long as its ids are in use; 0 if its pixels were freed. */
int image_keep(const Image *image);
/* The failure of what needs an image's pixels after they were freed. */
Status image_gone(const Image *image);
/* Without holders the pixels are freed. The image stays known: its ids may be in a cache. */
void image_release(const Image *image);
/* The image with a row of that id; NULL: there is none. */
const Image *image_of(int32_t id);

/* Finds the images among tokens, and writes `runs` unless it is NULL. Returns their number, or −1
 * with the index of an id below 0 that does not begin a whole image. */
int image_runs(ImageRun *runs, const int32_t *tokens, int count, int *bad);
/* The position (axes) of the token at `index`: of time, height and width if axes is 3, its index
 * if axes is 1. */
void image_position(int32_t *pos, const ImageRun *runs, int count, int index, int axes);

#endif
