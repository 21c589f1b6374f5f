/* cuda/rope.cu - rotary positions of the first W of a head's E numbers, in Hugging Face's pairing
 * (e, e + W/2).
 *
 *   rope_table     cosine, sine[t,e] = cos, sin(pos[t]·inv_freq[e])·scale
 *   rope           (u, v) → (u·c − v·s, v·c + u·s)
 *   rope_backward  the transposed map: the same with −s
 *
 * The table writes T·W floats, once a step. rope reads and writes T·H·W reals, 8 pairs a thread;
 * memory bound: the table's rows are shared by the heads and come from L2. The angle is rounded to
 * f32 before its cosine is taken, as transformers does. */
#include "cuda.cuh"

enum { THREADS = 256 };

static __global__ void __launch_bounds__(THREADS)
    rope_table_kernel(float *cosine, float *sine, const int32_t *pos, const float *inv_freq, int T,
                      int half, float scale)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * half) return;
    float angle = (float)pos[i / half] * inv_freq[i % half];
    cosine[i] = cosf(angle) * scale;
    sine[i] = sinf(angle) * scale;
}

template <int PAIRS>
static __global__ void __launch_bounds__(THREADS)
    rope_kernel(real *x, const float *cosine, const float *sine, int T, int H, int E, int half,
                float sign)
{
    int per_head = half / PAIRS;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * H * per_head) return;
    int64_t head = i / per_head; /* of T·H */
    int e = (int)(i % per_head) * PAIRS;
    int64_t angle = head / H * half + e;
    real *at = x + head * E + e;
    float u[PAIRS], v[PAIRS], c[PAIRS], s[PAIRS];
    load<PAIRS>(u, at);
    load<PAIRS>(v, at + half);
    load<PAIRS>(c, cosine + angle);
    load<PAIRS>(s, sine + angle);
    for (int j = 0; j < PAIRS; j++) {
        float a = u[j], b = v[j], turn = sign * s[j];
        u[j] = a * c[j] - b * turn;
        v[j] = b * c[j] + a * turn;
    }
    store<PAIRS>(at, u);
    store<PAIRS>(at + half, v);
}

static void rotate(Device *dev, real *x, const float *cosine, const float *sine, int T, int H,
                   int E, int W, float sign)
{
    int half = W / 2, pairs = half % 8 || E % 8 ? 1 : 8;
    auto kernel = pairs == 8 ? rope_kernel<8> : rope_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * H * (half / pairs), THREADS), THREADS, 0,
           x, cosine, sine, T, H, E, half, sign);
}

void cuda_rope_table(Device *dev, float *cosine, float *sine, const int32_t *pos,
                     const float *inv_freq, int T, int W, float scale)
{
    LAUNCH(cuda_of(dev), rope_table_kernel, cuda_blocks((int64_t)T * (W / 2), THREADS), THREADS, 0,
           cosine, sine, pos, inv_freq, T, W / 2, scale);
}

void cuda_rope(Device *dev, real *x, const float *cosine, const float *sine, int T, int H, int E,
               int W)
{
    rotate(dev, x, cosine, sine, T, H, E, W, 1.0f);
}

void cuda_rope_backward(Device *dev, real *dx, const float *cosine, const float *sine, int T, int H,
                        int E, int W)
{
    rotate(dev, dx, cosine, sine, T, H, E, W, -1.0f);
}
