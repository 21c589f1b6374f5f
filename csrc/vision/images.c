/* vision/images.c - the process's images: ids, pixels, and the positions of their rows.
 *
 * A row of an image is a token with an id below 0. Each distinct image gets ids of its own, which
 * are never used again. So whatever compares tokens (the prefix cache, groups, preemption) is right
 * for images too: equal ids are the same picture's same row.
 *
 * Positions are those of M-RoPE. At position p, text of length L takes p … p+L−1 on all three axes.
 * An image takes time p, height p … p+high−1 and width p … p+wide−1, and text goes on at p +
 * max(high, wide). So text behind an image has a position that is at most its index.
 *
 * Any thread may use the table; only holders of an image read its pixels. */
#include "images.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Ids from −1 to −UNUSED are no image's: what a caller writes by mistake (−1, −100) stays wrong. */
enum { UNUSED = 1 << 20 };

static struct {
    pthread_mutex_t lock;
    Image **image; /* by `first`, from 0 down */
    int count, capacity;
    int64_t used; /* the lowest id that was given is −used */
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .used = UNUSED};

static void table_lock(void)
{
    pthread_mutex_lock(&table.lock);
}

static void table_unlock(void)
{
    pthread_mutex_unlock(&table.lock);
}

/* A forked child finds the table whole. */
static void forks_wait(void)
{
    pthread_atfork(table_lock, table_unlock, table_unlock);
}

/* How many images begin at that id or above it. */
static int begun(int32_t id)
{
    int low = 0, high = table.count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (table.image[middle]->first >= id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static Image *find(int32_t id)
{
    int at = begun(id);
    Image *image = at ? table.image[at - 1] : NULL;
    return image && id > image->first - image_rows(image) ? image : NULL;
}

const Image *image_of(int32_t id)
{
    if (id >= 0) return NULL;
    table_lock();
    const Image *image = find(id);
    table_unlock();
    return image;
}

/* Inserts an image of these ids, without pixels; NULL: no memory. */
static Image *insert(int32_t first, int high, int wide, int side)
{
    if (table.count == table.capacity) {
        int capacity = table.capacity ? 2 * table.capacity : 64;
        Image **grown = realloc(table.image, (size_t)capacity * sizeof *grown);
        if (!grown) return NULL;
        table.image = grown;
        table.capacity = capacity;
    }
    Image *image = malloc(sizeof *image);
    if (!image) return NULL;
    *image = (Image){.first = first, .high = high, .wide = wide, .side = side};
    int at = begun(first);
    memmove(table.image + at + 1, table.image + at,
            (size_t)(table.count - at) * sizeof *table.image);
    table.image[at] = image;
    table.count++;
    int64_t lowest = (int64_t)image_rows(image) - first - 1;
    if (lowest > table.used) table.used = lowest;
    return image;
}

/* Whether no image has one of the ids from `first` on. */
static int are_free(int32_t first, int64_t rows)
{
    int64_t last = first - rows + 1;
    int at = begun(first);
    return last >= -INT32_MAX && (at == table.count || table.image[at]->first < last);
}

/* The image of these ids, or a new one. */
static Status place(Image **image, int32_t first, int high, int wide, int side)
{
    int64_t rows = (int64_t)high * wide;
    if (!first && table.used + rows > INT32_MAX)
        return fail(STATUS_INVALID,
                    "this process has given all ids of images: start it again to send new ones");
    if (!first) first = (int32_t)(-1 - table.used);
    *image = find(first);
    if (!*image && !are_free(first, rows))
        return fail(STATUS_INVALID, "%lld ids from %d on are not free", (long long)rows, first);
    if (!*image) *image = insert(first, high, wide, side);
    if (!*image) return fail(STATUS_MEMORY, "no memory for another image");
    const Image *is = *image;
    if (is->first == first && is->high == high && is->wide == wide && is->side == side)
        return STATUS_OK;
    return fail(STATUS_INVALID, "the ids from %d on are those of an image of %d × %d tokens", first,
                is->high, is->wide);
}

Status image_hold(const Image **out, int32_t first, const uint8_t *pixels, int high, int wide,
                  int side)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, forks_wait);
    size_t bytes = (size_t)high * (size_t)wide * (size_t)side * (size_t)side * 3;
    uint8_t *copy = malloc(bytes);
    if (!copy) return fail(STATUS_MEMORY, "no memory for the pixels of %d × %d tokens", high, wide);
    memcpy(copy, pixels, bytes);
    Image *image = NULL;
    table_lock();
    Status status = place(&image, first, high, wide, side);
    if (!status) {
        if (!image->holders++) {
            image->pixels = copy;
            copy = NULL;
        }
        *out = image;
    }
    table_unlock();
    free(copy);
    return status;
}

int image_keep(const Image *known)
{
    table_lock();
    Image *image = find(known->first);
    int kept = image->holders > 0;
    image->holders += kept;
    table_unlock();
    return kept;
}

Status image_gone(const Image *image)
{
    return fail(STATUS_INVALID,
                "the pixels of the image whose ids begin with %d were freed: keep the image while "
                "its ids are in use",
                image->first);
}

void image_release(const Image *held)
{
    table_lock();
    Image *image = find(held->first);
    uint8_t *pixels = NULL;
    if (!--image->holders) {
        pixels = (uint8_t *)image->pixels;
        image->pixels = NULL;
    }
    table_unlock();
    free(pixels);
}

/* ---- images in a sequence ---- */

/* Whether all rows of the image follow from ids[0] on. */
static int whole(const Image *image, const int32_t *ids, int count)
{
    int rows = image ? image_rows(image) : 0;
    if (!image || rows > count) return 0;
    for (int i = 0; i < rows; i++)
        if (ids[i] != image->first - i) return 0;
    return 1;
}

int image_runs(ImageRun *runs, const int32_t *tokens, int count, int *bad)
{
    int found = 0, shift = 0;
    for (int t = 0; t < count; t++) {
        if (tokens[t] >= 0) continue;
        const Image *image = image_of(tokens[t]);
        if (!whole(image, tokens + t, count - t)) {
            *bad = t;
            return -1;
        }
        int rows = image_rows(image), most = image->high > image->wide ? image->high : image->wide;
        shift += most - rows;
        if (runs) runs[found] = (ImageRun){image, t, shift};
        found++;
        t += rows - 1;
    }
    return found;
}

void image_position(int32_t *pos, const ImageRun *runs, int count, int index, int axes)
{
    int low = 0, high = count; /* the images that begin at the index or before it */
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (runs[middle].at <= index)
            low = middle + 1;
        else
            high = middle;
    }
    const ImageRun *run = low ? &runs[low - 1] : NULL;
    int row = run ? index - run->at : 0;
    if (axes == 1 || !run || row >= image_rows(run->image)) {
        for (int a = 0; a < axes; a++) pos[a] = index + (run && axes > 1 ? run->shift : 0);
        return;
    }
    int begin = run->at + (low > 1 ? runs[low - 2].shift : 0);
    pos[0] = begin;
    pos[1] = begin + row / run->image->wide;
    pos[2] = begin + row % run->image->wide;
}
