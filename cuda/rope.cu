/* cuda/rope.cu - rotary positions, in Hugging Face's pairing (e, e + E/2).
 *
 *   rope_table     cosine, sine[t,e] = cos, sin(pos[t]·inv_freq[e])·scale
 *   rope           (u, v) → (u·c − v·s, v·c + u·s)
 *   rope_backward  the transposed map: the same with −s
 *
 * The table writes T·E floats, once a step. rope reads and writes T·H·E reals, 8 pairs a thread;
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

template <int W>
static __global__ void __launch_bounds__(THREADS)
    rope_kernel(real *x, const float *cosine, const float *sine, int T, int H, int half, float sign)
{
    int per_head = half / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * H * per_head) return;
    int64_t head = i / per_head; /* of T·H */
    int e = (int)(i % per_head) * W;
    int64_t angle = head / H * half + e;
    real *at = x + head * 2 * half + e;
    float u[W], v[W], c[W], s[W];
    load<W>(u, at);
    load<W>(v, at + half);
    load<W>(c, cosine + angle);
    load<W>(s, sine + angle);
    for (int j = 0; j < W; j++) {
        float a = u[j], b = v[j], turn = sign * s[j];
        u[j] = a * c[j] - b * turn;
        v[j] = b * c[j] + a * turn;
    }
    store<W>(at, u);
    store<W>(at + half, v);
}

static void rotate(Device *dev, real *x, const float *cosine, const float *sine, int T, int H,
                   int E, float sign)
{
    int half = E / 2, W = half % 8 ? 1 : 8;
    auto kernel = W == 8 ? rope_kernel<8> : rope_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * H * (half / W), THREADS), THREADS, 0, x,
           cosine, sine, T, H, half, sign);
}

void cuda_rope_table(Device *dev, float *cosine, float *sine, const int32_t *pos,
                     const float *inv_freq, int T, int E, float scale)
{
    LAUNCH(cuda_of(dev), rope_table_kernel, cuda_blocks((int64_t)T * (E / 2), THREADS), THREADS, 0,
           cosine, sine, pos, inv_freq, T, E / 2, scale);
}

void cuda_rope(Device *dev, real *x, const float *cosine, const float *sine, int T, int H, int E)
{
    rotate(dev, x, cosine, sine, T, H, E, 1.0f);
}

void cuda_rope_backward(Device *dev, real *dx, const float *cosine, const float *sine, int T, int H,
                        int E)
{
    rotate(dev, dx, cosine, sine, T, H, E, -1.0f);
}
