/* cuda/lora.cu - LoRA's narrow products, for all matrices that read the same input in one launch.
 *
 *   c (M,N) = or += scale·Σ_p a_p (M,K)·b_p (K,N)
 *
 *   forward    s = x·a                        y += scale·s·b
 *   backward   ds = scale·dy·bᵀ               db += scale·sᵀ·dy and da += xᵀ·ds       dx += Σ ds·aᵀ
 *
 * Each is a list of jobs whose tiles share a grid, so a layer's seven matrices cost eight launches
 * forward and twelve backward. x, s and dy are bf16; LoRA's matrices are f32 in memory and rounded
 * to bf16 on the way to shared memory, so no copy of them is kept.
 *
 * One side is the rank, so all of it is memory bound: forward moves T·(D + 2·N) reals for each
 * matrix. A sum over k is made of slices whose length depends on K alone, added in order. Where
 * there are too few tiles to fill the card (decoding; gradients) a block takes one slice, and a
 * second launch adds them up. The sums and their order are the same, so the choice changes only the
 * time, and the op is batch-invariant. */
#include "cuda.cuh"

enum {
    TILE = 64,     /* rows and columns of c that a block makes */
    STEP = 32,     /* of k, from one barrier to the next */
    THREADS = 128, /* four warps, each with a quarter of the tile: 32 by 32 */
    PIECE = 8,     /* reals of one 16-byte access */
    SLICE = 512,   /* k of a slice, at least ... */
    SLICES = 16,   /* ... and there are no more than these, which bounds the scratch */
    JOBS = 2 * LORA_GROUP,
    SUMS = 32, /* elements of c that a thread holds */
    /* reals of a row in shared memory: the 80 or 144 bytes put the eight rows that ldmatrix reads
     * together into different banks */
    ALONG = STEP + PIECE,
    ACROSS = TILE + PIECE,
};

/* Where an operand's element (i, k) is: at[i·stride + k], or at[k·stride + i] where the kernel says
 * that it is stored across. */
struct Operand {
    const void *at;
    int64_t stride;
    bool aligned; /* 16-byte accesses may be used */
};

enum Result { SET_REAL, ADD_REAL, ADD_F32 };

struct Job {
    Operand a[LORA_GROUP], b[LORA_GROUP];
    void *c;
    int parts, M, N, K;
    int slice, slices; /* k of one; how many in all parts together */
    int first;         /* this job's first tile */
    float scale;
    Result result;
};

struct Jobs {
    Job job[JOBS];
    int count, tiles, slices;
};

/* ---- from memory to shared memory ---- */

/* Eight elements, of which the first `valid` exist, as bf16; zeros for the others. */
template <class T>
__device__ static __forceinline__ uint4 fetch(const T *from, int valid, bool aligned)
{
    float v[PIECE];
    if (valid >= PIECE && aligned) {
        load<PIECE>(v, from);
    } else {
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            if constexpr (sizeof(T) == 4)
                v[e] = e < valid ? from[e] : 0.0f;
            else
                v[e] = e < valid ? f32(from[e]) : 0.0f;
        }
    }
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

enum { PIECES = TILE * STEP / PIECE, EACH = PIECES / THREADS }; /* of an operand's tile */

/* This thread's pieces of the tile at (i0, k0), on the way in registers. */
template <bool IS_ACROSS, class T>
__device__ static __forceinline__ void tile_fetch(uint4 (&on_the_way)[EACH], const Operand &x,
                                                  int i0, int i_end, int k0, int k_end)
{
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        int piece = threadIdx.x + n * THREADS;
        int row = piece / ((IS_ACROSS ? TILE : STEP) / PIECE);
        int col = piece % ((IS_ACROSS ? TILE : STEP) / PIECE) * PIECE;
        int i = i0 + (IS_ACROSS ? col : row), k = k0 + (IS_ACROSS ? row : col);
        int valid = i < i_end && k < k_end ? (IS_ACROSS ? i_end - i : k_end - k) : 0;
        const T *at = (const T *)x.at;
        if (valid) at += IS_ACROSS ? k * x.stride + i : i * x.stride + k;
        on_the_way[n] = fetch<T>(at, valid, x.aligned);
    }
}

template <bool IS_ACROSS>
__device__ static __forceinline__ void tile_keep(Shared<real> tile, const uint4 (&arrived)[EACH])
{
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        int piece = threadIdx.x + n * THREADS;
        int row = piece / ((IS_ACROSS ? TILE : STEP) / PIECE);
        int col = piece % ((IS_ACROSS ? TILE : STEP) / PIECE) * PIECE;
        int at = row * (IS_ACROSS ? ACROSS : ALONG) + col;
        *(uint4 *)shared_range(tile, at, PIECE) = arrived[n];
    }
}

/* Four 8×8 matrices that cover 16 of i from `i` on and 16 of k from `k` on. mma wants them, for its
 * left operand, by i first; for its right one, by k first. */
template <bool IS_ACROSS, bool IS_RIGHT>
__device__ static __forceinline__ void fragment(uint32_t (&r)[4], Shared<real> tile, int i, int k)
{
    int lane = threadIdx.x % 32, matrix = lane / 8;
    i += (IS_RIGHT ? matrix / 2 : matrix % 2) * 8;
    k += (IS_RIGHT ? matrix % 2 : matrix / 2) * 8;
    if constexpr (IS_ACROSS)
        ldmatrix_transposed(r, shared_range(tile, (k + lane % 8) * ACROSS + i, PIECE));
    else
        ldmatrix(r, shared_range(tile, (i + lane % 8) * ALONG + k, PIECE));
}

/* ---- a tile of c ---- */

/* Where element `e` of a thread's sums is in the block's tile: row and column. */
__device__ static __forceinline__ void place(int e, int *row, int *col)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    *row = warp / 2 * 32 + e / 16 * 16 + e / 2 % 2 * 8 + lane / 4;
    *col = warp % 2 * 32 + e / 4 % 4 * 8 + lane % 4 * 2 + e % 2;
}

/* sum = this thread's part of one slice of the tile at (i0, j0). */
template <bool A_ACROSS, bool B_ACROSS, class B>
__device__ static __forceinline__ void slice_sum(float (&sum)[SUMS / 4][4], const Job &job,
                                                 int slice, int i0, int j0, Shared<real> a,
                                                 Shared<real> b)
{
    int pieces = job.slices / job.parts, part = slice / pieces, begin = slice % pieces * job.slice;
    int end = begin + job.slice < job.K ? begin + job.slice : job.K;
    int warp = threadIdx.x / 32;
    uint4 next_a[EACH], next_b[EACH];
#pragma unroll
    for (int t = 0; t < SUMS / 4; t++)
        for (int e = 0; e < 4; e++) sum[t][e] = 0.0f;
    tile_fetch<A_ACROSS, real>(next_a, job.a[part], i0, job.M, begin, end);
    tile_fetch<B_ACROSS, B>(next_b, job.b[part], j0, job.N, begin, end);
    for (int k0 = begin; k0 < end; k0 += STEP) {
        __syncthreads();
        tile_keep<A_ACROSS>(a, next_a);
        tile_keep<B_ACROSS>(b, next_b);
        __syncthreads();
        if (k0 + STEP < end) {
            tile_fetch<A_ACROSS, real>(next_a, job.a[part], i0, job.M, k0 + STEP, end);
            tile_fetch<B_ACROSS, B>(next_b, job.b[part], j0, job.N, k0 + STEP, end);
        }
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t left[2][4], right[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                fragment<A_ACROSS, false>(left[h], a, warp / 2 * 32 + h * 16, k);
                fragment<B_ACROSS, true>(right[h], b, warp % 2 * 32 + h * 16, k);
            }
#pragma unroll
            for (int t = 0; t < SUMS / 4; t++)
                mma(sum[t], left[t / 4], right[t % 4 / 2][t % 2 * 2],
                    right[t % 4 / 2][t % 2 * 2 + 1]);
        }
    }
}

/* Puts the tile's sums into c. */
__device__ static __forceinline__ void finish(const Job &job, const float (&total)[SUMS / 4][4],
                                              int i0, int j0)
{
#pragma unroll
    for (int e = 0; e < SUMS; e++) {
        int row, col;
        place(e, &row, &col);
        int i = i0 + row, j = j0 + col;
        if (i >= job.M || j >= job.N) continue;
        int64_t at = (int64_t)i * job.N + j;
        float value = job.scale * total[e / 4][e % 4];
        if (job.result == ADD_F32) {
            ((float *)job.c)[at] += value;
        } else {
            real *c = (real *)job.c + at;
            *c = to_real(job.result == ADD_REAL ? f32(*c) + value : value);
        }
    }
}

/* The job of a block's tile, and where in c it lies. */
__device__ static __forceinline__ const Job &job_of(const Jobs &jobs, int tile, int *i0, int *j0)
{
    int which = 0;
    while (which + 1 < jobs.count && tile >= jobs.job[which + 1].first) which++;
    const Job &job = jobs.job[which];
    int columns = (job.N + TILE - 1) / TILE, at = tile - job.first;
    *i0 = at / columns * TILE;
    *j0 = at % columns * TILE;
    return job;
}

/* The place of a thread's sum `e` of one slice of one tile, until the slices are added. */
__device__ static __forceinline__ float *waiting(float *partial, const Jobs &jobs, int slice,
                                                 int tile, int e)
{
    return partial + (((int64_t)slice * jobs.tiles + tile) * SUMS + e) * THREADS + threadIdx.x;
}

/* One tile of c; or, with `partial`, one slice of it. */
template <bool A_ACROSS, bool B_ACROSS, class B>
static __global__ void __launch_bounds__(THREADS)
    product_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    SHARED_ARRAY(real, a, (A_ACROSS ? STEP * ACROSS : TILE * ALONG));
    SHARED_ARRAY(real, b, (B_ACROSS ? STEP * ACROSS : TILE * ALONG));
    int tile = (int)blockIdx.x, i0, j0;
    const Job &job = job_of(jobs, tile, &i0, &j0);
    float sum[SUMS / 4][4], total[SUMS / 4][4];
    if (partial) {
        if ((int)blockIdx.y >= job.slices) return;
        slice_sum<A_ACROSS, B_ACROSS, B>(sum, job, (int)blockIdx.y, i0, j0, a, b);
#pragma unroll
        for (int e = 0; e < SUMS; e++)
            *waiting(partial, jobs, (int)blockIdx.y, tile, e) = sum[e / 4][e % 4];
        return;
    }
#pragma unroll
    for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] = 0.0f;
    for (int slice = 0; slice < job.slices; slice++) {
        slice_sum<A_ACROSS, B_ACROSS, B>(sum, job, slice, i0, j0, a, b);
#pragma unroll
        for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] += sum[e / 4][e % 4];
    }
    finish(job, total, i0, j0);
}

/* c from the slices that product_kernel left. */
static __global__ void __launch_bounds__(THREADS)
    slices_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    int tile = (int)blockIdx.x, i0, j0;
    const Job &job = job_of(jobs, tile, &i0, &j0);
    float total[SUMS / 4][4];
#pragma unroll
    for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] = 0.0f;
    for (int slice = 0; slice < job.slices; slice++)
#pragma unroll
        for (int e = 0; e < SUMS; e++)
            total[e / 4][e % 4] += *waiting(partial, jobs, slice, tile, e);
    finish(job, total, i0, j0);
}

/* ---- launching ---- */

template <class T> static Operand operand(const T *at, int64_t stride)
{
    bool aligned = (uintptr_t)at % 16 == 0 && stride * (int64_t)sizeof(T) % 16 == 0;
    return {at, stride, aligned};
}

/* A job of one part, appended to the list. */
static Job *add_job(Jobs *jobs, void *c, Result result, Operand a, Operand b, int M, int N, int K,
                    float scale)
{
    Job *job = &jobs->job[jobs->count++];
    *job = {};
    job->a[0] = a;
    job->b[0] = b;
    job->c = c;
    job->parts = 1;
    job->M = M;
    job->N = N;
    job->K = K;
    int even = (K + SLICES - 1) / SLICES;
    job->slice = even > SLICE ? (even + STEP - 1) / STEP * STEP : SLICE;
    job->scale = scale;
    job->result = result;
    return job;
}

/* Runs the jobs: in one launch, or in two where they don't fill the card. */
template <bool A_ACROSS, bool B_ACROSS, class B> static void run(CudaDevice *cuda, Jobs *jobs)
{
    for (int i = 0; i < jobs->count; i++) {
        Job *job = &jobs->job[i];
        job->first = jobs->tiles;
        job->slices = (job->K + job->slice - 1) / job->slice * job->parts;
        jobs->tiles += (int)(cuda_blocks(job->M, TILE) * cuda_blocks(job->N, TILE));
        if (job->slices > jobs->slices) jobs->slices = job->slices;
    }
    auto kernel = product_kernel<A_ACROSS, B_ACROSS, B>;
    unsigned tiles = (unsigned)jobs->tiles, slices = (unsigned)jobs->slices;
    if (jobs->slices == 1 || jobs->tiles * 2 > cuda->processors) {
        LAUNCH(cuda, kernel, tiles, THREADS, 0, *jobs, (float *)nullptr);
        return;
    }
    size_t bytes = (size_t)tiles * slices * TILE * TILE * sizeof(float);
    float *partial = (float *)cuda_scratch(cuda, bytes);
    if (!partial) return;
    LAUNCH(cuda, kernel, dim3(tiles, slices), THREADS, 0, *jobs, partial);
    LAUNCH(cuda, slices_kernel, tiles, THREADS, 0, *jobs, partial);
}

/* ---- the ops ---- */

/* s = x·a; then c += scale·s·b, where c is y */
static void forward(CudaDevice *cuda, const Lora *group, int count, Result result, const real *x,
                    int T, int D, int R, float scale)
{
    if (T == 0) return;
    Jobs down = {}, up = {};
    for (const Lora *m = group; m < group + count; m++) {
        add_job(&down, m->s, SET_REAL, operand(x, D), operand(m->a, R), T, R, D, 1.0f);
        add_job(&up, m->y, result, operand(m->s, R), operand(m->b, m->N), T, m->N, R, scale);
    }
    run<false, true, float>(cuda, &down);
    run<false, true, float>(cuda, &up);
}

void cuda_lora(Device *dev, const Lora *group, int count, const real *x, int T, int D, int R,
               float scale)
{
    forward(cuda_of(dev), group, count, ADD_REAL, x, T, D, R, scale);
}

void cuda_head_lora(Device *dev, float *logits, real *s, const real *x, const float *a,
                    const float *b, int T, int V, int D, int R, float scale)
{
    Lora head = {};
    head.y = (real *)logits;
    head.s = s;
    head.a = a;
    head.b = b;
    head.N = V;
    forward(cuda_of(dev), &head, 1, ADD_F32, x, T, D, R, scale);
}

void cuda_lora_backward(Device *dev, real *dx, const Lora *group, int count, const real *x, int T,
                        int D, int R, float scale)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    Jobs down = {}, gradients = {}, up = {};
    for (const Lora *m = group; m < group + count; m++) {
        const real *dy = m->y;
        add_job(&down, m->ds, SET_REAL, operand(dy, m->N), operand(m->b, m->N), T, R, m->N, scale);
        add_job(&gradients, m->db, ADD_F32, operand(m->s, R), operand(dy, m->N), R, m->N, T, scale);
        add_job(&gradients, m->da, ADD_F32, operand(x, D), operand(m->ds, R), D, R, T, 1.0f);
    }
    run<false, false, float>(cuda, &down);
    run<true, true, real>(cuda, &gradients);
    if (!dx) return;
    Job *job =
        add_job(&up, dx, ADD_REAL, operand(group->ds, R), operand(group->a, R), T, D, R, 1.0f);
    for (job->parts = 1; job->parts < count; job->parts++) {
        job->a[job->parts] = operand(group[job->parts].ds, R);
        job->b[job->parts] = operand(group[job->parts].a, R);
    }
    run<false, false, float>(cuda, &up);
}
