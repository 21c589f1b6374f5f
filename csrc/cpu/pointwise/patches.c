/* cpu/pointwise/patches.c - an image's patches as rows (device.h, Patches).
 *
 *   y[n, c, f, i, j] = (u·rescale − mean[c])/std[c],  u the byte of pixel (i, j) of patch n
 *
 * A byte has 256 values, so the numbers of each channel are a table of them, which L1 holds: no
 * division for a pixel, and the bits of the formula. Reads 3 bytes and writes 12·frames for a
 * pixel; bound by the lookups, one by one. */
#include <assert.h>
#include <string.h>

#include "../runtime/cpu.h"

enum {
    CHANNELS = 3,
    BYTES = 256,
    GRAIN = 1 << 13, /* elements of one job */
};

#define NS 0.4 /* of an element (cpu.h) */

typedef struct PatchRows {
    float *y;
    const uint8_t *pixels;
    Patches how;
    int grain;
    float value[CHANNELS][BYTES];
} PatchRows;

/* One patch: `from` is its first byte, `line` the bytes of an image's row. */
static void patch_put(const PatchRows *g, float *to, const uint8_t *from, int64_t line)
{
    int side = g->how.side;
    int64_t frame = (int64_t)side * side;
    for (int c = 0; c < CHANNELS; c++, to += g->how.frames * frame) {
        for (int i = 0; i < side; i++)
            for (int j = 0; j < side; j++)
                to[i * side + j] = g->value[c][from[i * line + j * CHANNELS + c]];
        for (int f = 1; f < g->how.frames; f++)
            memcpy(to + f * frame, to, (size_t)frame * sizeof *to);
    }
}

static void patches_job(void *context, int64_t job)
{
    const PatchRows *g = context;
    int side = g->how.side, merge = g->how.merge, blocks = g->how.cols / merge;
    int all = g->how.rows * g->how.cols, from = (int)job * g->grain;
    int to = all - from < g->grain ? all : from + g->grain;
    int64_t line = (int64_t)g->how.cols * side * CHANNELS;
    int64_t width = (int64_t)CHANNELS * g->how.frames * side * side;
    for (int n = from; n < to; n++) {
        int block = n / (merge * merge), within = n % (merge * merge);
        int row = block / blocks * merge + within / merge;
        int col = block % blocks * merge + within % merge;
        const uint8_t *first = g->pixels + row * side * line + (int64_t)col * side * CHANNELS;
        patch_put(g, g->y + n * width, first, line);
    }
}

void CPU(patches)(Device *dev, real *y, const uint8_t *pixels, Patches how)
{
    assert(how.merge > 0 && how.rows % how.merge == 0 && how.cols % how.merge == 0);
    int width = CHANNELS * how.frames * how.side * how.side, all = how.rows * how.cols;
    PatchRows g = {
        .y = f32(y), .pixels = pixels, .how = how, .grain = cpu_rows_of_job(GRAIN, width)};
    for (int c = 0; c < CHANNELS; c++)
        for (int u = 0; u < BYTES; u++)
            g.value[c][u] = ((float)u * how.rescale - how.mean[c]) / how.std[c];
    cpu_run_of(dev, NS * all * width, ((int64_t)all + g.grain - 1) / g.grain, patches_job, &g);
}
