/* cuda/attention/rope.cu - rotary positions of the first W of a head's E numbers, in Hugging Face's
 * pairing (e, e + W/2), after each head's norm if the model has one.
 *
 *   rope_table       cosine, sine[t,e] = cos, sin(pos[t,axis[e]]·inv_freq[e])·scale
 *   rotate           y = x·rstd·w;  (u, v) → (u·c − v·s, v·c + u·s)
 *   rotate_backward  the transposed map (the same with −s), then the norm's gradient
 *
 * The table writes T·W floats, once per step. A warp takes a head of queries or keys, all in one
 * launch: rotate reads and writes T·(H+G)·E reals, backward reads twice that; memory bound, because
 * heads share the table's rows, which come from L2. A number's partner is in another lane, and
 * comes through shared memory. The angle is rounded to f32 before its cosine is taken, as
 * transformers does. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256, HEADS = THREADS / 32 /* of a block */, WIDEST = 256 /* numbers of a head */ };

static __global__ void __launch_bounds__(THREADS)
    rope_table_kernel(float *cosine, float *sine, const int32_t *pos, const int32_t *axis,
                      const float *inv_freq, int T, int half, int A, float scale)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * half) return;
    int64_t t = i / half, e = i % half;
    float angle = (float)pos[t * A + (axis ? axis[e] : 0)] * inv_freq[e];
    cosine[i] = cosf(angle) * scale;
    sine[i] = sinf(angle) * scale;
}

/* A kernel's arguments for queries, or for keys. */
struct RopeHeads {
    real *y;     /* rotate's result; backward's gradient, in place */
    float *rstd; /* written, or read by backward */
    const real *x;
    const float *w; /* NULL: no norm */
    int count;      /* heads per token */
    int64_t step;   /* stride between tokens of x, and of a gradient */
};

/* The arguments for this warp's head, field by field, so that they stay in registers; its token,
 * its index among all tokens' heads, and its offset in x. */
__device__ static __forceinline__ RopeHeads heads_of(const RopeHeads &q, const RopeHeads &k,
                                                     int64_t warp, int64_t *t, int64_t *head,
                                                     int64_t *at, int E)
{
    int both = q.count + k.count, h = (int)(warp % both);
    bool query = h < q.count;
    RopeHeads heads = {query ? q.y : k.y, query ? q.rstd : k.rstd,   query ? q.x : k.x,
                       query ? q.w : k.w, query ? q.count : k.count, query ? q.step : k.step};
    *t = warp / both;
    *head = *t * heads.count + (query ? h : h - q.count);
    *at = *t * heads.step + (query ? h : h - q.count) * E;
    return heads;
}

/* Rotates W numbers from `e` on of a head in shared memory; sign −1 rotates back. */
template <int W>
__device__ static __forceinline__ void rotate_pairs(float (&v)[W], Shared<float> row,
                                                    const float *cosine, const float *sine, int e,
                                                    int half, float sign)
{
    float c[W], s[W];
    bool first = e < half;
    for (int j = 0; j < W; j++) v[j] = row[e + j];
    if (e >= 2 * half) return;
    load<W>(c, cosine + (first ? e : e - half));
    load<W>(s, sine + (first ? e : e - half));
    for (int j = 0; j < W; j++) {
        float other = row[first ? e + j + half : e + j - half], by = sign * s[j];
        v[j] = first ? v[j] * c[j] - other * by : v[j] * c[j] + other * by;
    }
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    rotate_kernel(RopeHeads q, RopeHeads k, const float *cosine, const float *sine, int T, int E,
                  int half, float eps)
{
    SHARED_ARRAY(float, rows, HEADS *WIDEST);
    int64_t warp = (int64_t)blockIdx.x * HEADS + threadIdx.x / 32, t, head, at;
    if (warp >= (int64_t)T * (q.count + k.count)) return; /* exits as a whole warp */
    RopeHeads heads = heads_of(q, k, warp, &t, &head, &at, E);
    int first = (int)threadIdx.x % 32 * W;
    Shared<float> row = rows + (int)(threadIdx.x / 32) * WIDEST;
    const real *x = heads.x + at;
    real *y = heads.y + head * E;
    cosine += t * half;
    sine += t * half;
    float v[W], scale[W], sum = 0.0f, r = 1.0f;
    if (heads.w) {
#pragma unroll 1
        for (int e = first; e < E; e += 32 * W) {
            load<W>(v, x + e);
            for (int j = 0; j < W; j++) sum = fmaf(v[j], v[j], sum);
        }
        r = 1.0f / sqrtf(warp_sum(sum) / (float)E + eps);
        if (first == 0) heads.rstd[head] = r;
    }
#pragma unroll 1
    for (int e = first; e < E; e += 32 * W) {
        load<W>(v, x + e);
        if (heads.w) {
            load<W>(scale, heads.w + e);
            for (int j = 0; j < W; j++) v[j] = v[j] * r * scale[j];
        }
        for (int j = 0; j < W; j++) row[e + j] = v[j];
    }
    __syncwarp();
#pragma unroll 1
    for (int e = first; e < E; e += 32 * W) {
        rotate_pairs<W>(v, row, cosine, sine, e, half, 1.0f);
        store<W>(y + e, v);
    }
}

template <int W>
static __global__ void __launch_bounds__(THREADS)
    rotate_backward_kernel(RopeHeads q, RopeHeads k, const float *cosine, const float *sine, int T,
                           int E, int half)
{
    SHARED_ARRAY(float, rows, HEADS *WIDEST);
    const int groups = WIDEST / 32 / W; /* of W numbers per lane */
    int64_t warp = (int64_t)blockIdx.x * HEADS + threadIdx.x / 32, t, head, at;
    if (warp >= (int64_t)T * (q.count + k.count)) return; /* exits as a whole warp */
    RopeHeads heads = heads_of(q, k, warp, &t, &head, &at, E);
    int first = (int)threadIdx.x % 32 * W;
    Shared<float> row = rows + (int)(threadIdx.x / 32) * WIDEST;
    const real *x = heads.x + at;
    real *d = heads.y + at;
    cosine += t * half;
    sine += t * half;
    float g[groups][W], v[W], scale[W], sum = 0.0f;
#pragma unroll 1
    for (int e = first; e < E; e += 32 * W) {
        load<W>(v, d + e);
        for (int j = 0; j < W; j++) row[e + j] = v[j];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < groups; i++) {
        int e = first + i * 32 * W;
        if (e >= E) continue;
        rotate_pairs<W>(g[i], row, cosine, sine, e, half, -1.0f);
        if (!heads.w) {
            store<W>(d + e, g[i]);
            continue;
        }
        load<W>(v, x + e);
        load<W>(scale, heads.w + e);
        for (int j = 0; j < W; j++) {
            g[i][j] *= scale[j];
            sum = fmaf(g[i][j], v[j], sum);
        }
    }
    if (!heads.w) return;
    float r = heads.rstd[head], mean = warp_sum(sum) * r / (float)E;
#pragma unroll
    for (int i = 0; i < groups; i++) {
        int e = first + i * 32 * W;
        if (e >= E) continue;
        load<W>(v, x + e);
        for (int j = 0; j < W; j++) g[i][j] = r * (g[i][j] - v[j] * r * mean);
        store<W>(d + e, g[i]);
    }
}

/* Whether a lane can take 8 numbers at once, all on one side of a pair. */
static bool by_eights(int E, int W, int q_step, int kv_step)
{
    return E % 8 == 0 && W % 16 == 0 && q_step % 8 == 0 && kv_step % 8 == 0;
}

void cuda_rope_table(Device *dev, float *cosine, float *sine, const int32_t *pos,
                     const int32_t *axis, const float *inv_freq, int T, int W, int A, float scale)
{
    LAUNCH(cuda_of(dev), rope_table_kernel, cuda_blocks((int64_t)T * (W / 2), THREADS), THREADS, 0,
           cosine, sine, pos, axis, inv_freq, T, W / 2, A, scale);
}

void cuda_rotate(Device *dev, real *q, real *k, float *q_rstd, float *k_rstd, const real *q_raw,
                 const real *k_raw, const float *q_norm, const float *k_norm, const float *cosine,
                 const float *sine, int T, int H, int G, int E, int W, int q_step, int kv_step,
                 float eps)
{
    RopeHeads queries = {q, q_rstd, q_raw, q_norm, H, q_step};
    RopeHeads keys = {k, k_rstd, k_raw, k_norm, G, kv_step};
    auto kernel = by_eights(E, W, q_step, kv_step) ? rotate_kernel<8> : rotate_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * (H + G), HEADS), THREADS, 0, queries,
           keys, cosine, sine, T, E, W / 2, eps);
}

void cuda_rotate_backward(Device *dev, real *dq, real *dk, const real *q_raw, const real *k_raw,
                          const float *q_norm, const float *k_norm, const float *q_rstd,
                          const float *k_rstd, const float *cosine, const float *sine, int T, int H,
                          int G, int E, int W, int q_step, int kv_step)
{
    /* rstd is only read */
    RopeHeads queries = {dq, const_cast<float *>(q_rstd), q_raw, q_norm, H, q_step};
    RopeHeads keys = {dk, const_cast<float *>(k_rstd), k_raw, k_norm, G, kv_step};
    auto kernel =
        by_eights(E, W, q_step, kv_step) ? rotate_backward_kernel<8> : rotate_backward_kernel<1>;
    LAUNCH(cuda_of(dev), kernel, cuda_blocks((int64_t)T * (H + G), HEADS), THREADS, 0, queries,
           keys, cosine, sine, T, E, W / 2);
}
