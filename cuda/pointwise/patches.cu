/* cuda/pointwise/patches.cu - an image's patches as rows (device.h, Patches).
 *
 *   y[n, c, f, i, j] = (u·rescale − mean[c])/std[c],  u the byte of pixel (i, j) of patch n
 *
 * Reads 3 bytes and writes 6·frames for a pixel; memory bound. A thread has W pixels of one line
 * and channel of a patch, and writes them to all frames: 16 bytes each if a patch's side allows it.
 */
#include "../runtime/kernel.cuh"

enum { THREADS = 256, CHANNELS = 3 };

/* A channel's number; an index that is not constant would put all three into local memory. */
__device__ static __forceinline__ float of_channel(const float (&three)[CHANNELS], int channel)
{
    return channel == 0 ? three[0] : channel == 1 ? three[1] : three[2];
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    patches_kernel(real *y, const uint8_t *pixels, Patches how, int64_t pieces)
{
    int64_t piece = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (piece >= pieces) return;
    int side = how.side, merge = how.merge, blocks = how.cols / merge, frame = side * side;
    int within_patch = CHANNELS * frame / W; /* pieces of a patch */
    int n = (int)(piece / within_patch), at = (int)(piece % within_patch) * W;
    int channel = at / frame, i = at % frame / side, j = at % side;
    int block = n / (merge * merge), within = n % (merge * merge);
    int64_t row = (int64_t)(block / blocks * merge + within / merge) * side + i;
    int64_t col = (int64_t)(block % blocks * merge + within % merge) * side + j;
    const uint8_t *from = pixels + (row * how.cols * side + col) * CHANNELS + channel;
    real *to = y + ((int64_t)n * CHANNELS + channel) * how.frames * frame + i * side + j;
    float mean = of_channel(how.mean, channel), std = of_channel(how.std, channel), v[W];
    for (int e = 0; e < W; e++) v[e] = ((float)from[e * CHANNELS] * how.rescale - mean) / std;
    for (int f = 0; f < how.frames; f++) store<W>(to + (int64_t)f * frame, v);
}

void cuda_patches(Device *dev, real *y, const uint8_t *pixels, Patches how)
{
    int W = how.side % 8 ? 1 : 8;
    int64_t pieces = (int64_t)how.rows * how.cols * CHANNELS * how.side * how.side / W;
    auto kernel = W == 8 ? patches_kernel<8> : patches_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks(pieces, THREADS), THREADS, 0, y, pixels, how, pieces);
}
