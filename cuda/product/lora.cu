/* cuda/product/lora.cu - LoRA's narrow products: one launch for all matrices that read the same
 * input; and products of pairs with their expert's matrix.
 *
 *   c (M,N) = or += scale·Σ_p a_p (M,K)·b_p (K,N)
 *
 *   forward    s = x·a                        y += scale·s·b
 *   backward   ds = scale·dy·bᵀ               db += scale·sᵀ·dy and da += xᵀ·ds       dx += Σ ds·aᵀ
 *   grouped    y = or += scale·x·w_e          dw_e += scale·xᵀ·dy
 *
 * Each is a list of jobs whose tiles share a grid, so a layer's seven matrices cost eight launches
 * forward and twelve backward. x, s and dy are bf16; LoRA's matrices are f32 in memory and rounded
 * to bf16 when loaded to shared memory, so no copy of them is kept.
 *
 * One side is the rank, so everything is memory bound: forward moves T·(D + 2·N) reals per matrix.
 * A sum over k is split into slices whose length depends only on K, added in order. If the tiles
 * would leave much of the card idle (decoding; gradients), a block takes one slice, and a second
 * launch adds the slices (is_split). The sums and their order are the same, so the choice changes
 * only the time, and the op is batch-invariant.
 *
 * In a grouped product a tile belongs to one expert, which its block finds on the card
 * (fragments.cuh); from then on it is a job with only that expert's pairs. */
#include "fragments.cuh"

enum {
    TILE = 64,     /* rows and columns of c per block */
    STEP = 32,     /* of k between barriers */
    THREADS = 128, /* four warps, each with a quarter of the tile: 32 by 32 */
    SLICE = 512,   /* the least k of a slice ... */
    SLICES = 16,   /* ... and the most slices, which bounds the scratch */
    JOBS = 2 * LORA_GROUP,
    SUMS = 32,         /* elements of c per thread */
    RESIDENT = 4,      /* blocks per multiprocessor, limited by registers */
    SPLIT_MOST = 8192, /* the most slices of tiles in scratch: 128 MiB */
    /* reals of a row in shared memory */
    ALONG = STEP + APART,
    ACROSS = TILE + APART,
};

/* An operand's element (i, k) is at[i·stride + k], or at[k·stride + i] if the kernel reads it
 * across. */
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
    int64_t c_stride;  /* c's row stride */
    int slice, slices; /* k per slice; slices of all parts together */
    int first;         /* this job's first tile */
    float scale;
    Result result;
    bool aligned; /* 16-byte accesses to c may be used */
    /* For a grouped product: the bounds of X experts, and the stride between their matrices, b or
     * c; else NULL. */
    const int32_t *bounds;
    int64_t step;
    int X;
};

struct Jobs {
    Job job[JOBS];
    int count, tiles, slices;
};

/* ---- from memory to shared memory ---- */

/* Eight elements as bf16, zero-padded after the first `valid`. */
__device__ static __forceinline__ uint4 fetch(const real *from, int valid, bool aligned)
{
    if (valid >= PIECE && aligned) return *reinterpret_cast<const uint4 *>(from);
    uint32_t pair[PIECE / 2];
#pragma unroll
    for (int e = 0; e < PIECE; e += 2)
        pair[e / 2] = (e < valid ? real_bits(from[e]) : 0) |
                      (e + 1 < valid ? real_bits(from[e + 1]) << 16 : 0);
    return make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

__device__ static __forceinline__ uint4 fetch(const float *from, int valid, bool aligned)
{
    float v[PIECE];
    if (valid >= PIECE && aligned)
        load<PIECE>(v, from);
    else
#pragma unroll
        for (int e = 0; e < PIECE; e++) v[e] = e < valid ? from[e] : 0.0f;
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

enum { PIECES = TILE * STEP / PIECE, EACH = PIECES / THREADS }; /* of an operand's tile */

/* A thread's first piece of a tile, by row and column in shared memory. Its others follow at a
 * stride of ROWS rows. */
template <bool IS_ACROSS> struct Place {
    enum { WIDTH = (IS_ACROSS ? TILE : STEP) / PIECE, ROWS = THREADS / WIDTH };
    int row, col;
    __device__ Place() : row(threadIdx.x / WIDTH), col(threadIdx.x % WIDTH * PIECE)
    {
    }
};

/* A thread's walk through an operand's tiles of one slice: its first piece of the next tile, and
 * the distances from there to the ends of i and k. */
template <bool IS_ACROSS, class T> struct Walk {
    const T *at;
    int64_t apart, step; /* strides to its next piece, and to the next tile */
    int i_left, k_left;
    bool aligned;

    __device__ Walk(const Operand &x, int i0, int i_end, int k0, int k_end)
    {
        Place<IS_ACROSS> place;
        int i = i0 + (IS_ACROSS ? place.col : place.row);
        int k = k0 + (IS_ACROSS ? place.row : place.col);
        at = (const T *)x.at + (IS_ACROSS ? k * x.stride + i : i * x.stride + k);
        apart = place.ROWS * x.stride;
        step = STEP * (IS_ACROSS ? x.stride : 1);
        i_left = i_end - i;
        k_left = k_end - k;
        aligned = x.aligned;
    }
};

/* This thread's pieces of the next tile, in flight to registers. */
template <bool IS_ACROSS, class T>
__device__ static __forceinline__ void tile_fetch(uint4 (&on_the_way)[EACH],
                                                  Walk<IS_ACROSS, T> &walk)
{
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        int below = n * Place<IS_ACROSS>::ROWS;
        int valid = IS_ACROSS ? walk.i_left : walk.k_left;
        if ((IS_ACROSS ? walk.k_left : walk.i_left) <= below) valid = 0;
        on_the_way[n] = fetch(walk.at + n * walk.apart, valid, walk.aligned);
    }
    walk.at += walk.step;
    walk.k_left -= STEP;
}

template <bool IS_ACROSS>
__device__ static __forceinline__ void tile_keep(Shared<real> tile, const uint4 (&arrived)[EACH])
{
    Place<IS_ACROSS> place;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
        int row = place.row + n * place.ROWS;
        *(uint4 *)shared_range(tile, row * (IS_ACROSS ? ACROSS : ALONG) + place.col, PIECE) =
            arrived[n];
    }
}

/* ---- a tile of c ---- */

/* The start of a warp's quarter of the tile. */
__device__ static __forceinline__ int quarter_row()
{
    return threadIdx.x / 64 * 32;
}

__device__ static __forceinline__ int quarter_column()
{
    return threadIdx.x / 32 % 2 * 32;
}

/* Whether any of the warp's quarter is in c: with rank 32 every second one is empty. */
__device__ static __forceinline__ bool is_live(const Job &job, int i0, int j0)
{
    return i0 + quarter_row() < job.M && j0 + quarter_column() < job.N;
}

/* k of a slice. */
__host__ __device__ static __forceinline__ int slice_of(int K)
{
    int even = (K + SLICES - 1) / SLICES;
    return even > SLICE ? (even + STEP - 1) / STEP * STEP : SLICE;
}

/* sum = this thread's part of one slice of the tile at (i0, j0). A grouped job has one part. */
template <bool A_ACROSS, bool B_ACROSS, class B, bool GROUPED>
__device__ static __forceinline__ void slice_sum(float (&sum)[SUMS / 4][4], const Job &job,
                                                 int slice, int i0, int j0, Shared<real> a,
                                                 Shared<real> b)
{
    int pieces = GROUPED ? job.slices : job.slices / job.parts;
    int part = GROUPED ? 0 : slice / pieces, begin = slice % pieces * job.slice;
    int end = begin + job.slice < job.K ? begin + job.slice : job.K;
    bool live = is_live(job, i0, j0);
    uint4 next_a[EACH], next_b[EACH];
    Walk<A_ACROSS, real> walk_a(job.a[part], i0, job.M, begin, end);
    Walk<B_ACROSS, B> walk_b(job.b[part], j0, job.N, begin, end);
#pragma unroll
    for (int t = 0; t < SUMS / 4; t++)
        for (int e = 0; e < 4; e++) sum[t][e] = 0.0f;
    tile_fetch(next_a, walk_a);
    tile_fetch(next_b, walk_b);
    for (int k0 = begin; k0 < end; k0 += STEP) {
        __syncthreads();
        tile_keep<A_ACROSS>(a, next_a);
        tile_keep<B_ACROSS>(b, next_b);
        __syncthreads();
        if (k0 + STEP < end) {
            tile_fetch(next_a, walk_a);
            tile_fetch(next_b, walk_b);
        }
        if (!live) continue;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t left[2][4], right[2][4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                fragment<A_ACROSS, false>(left[h], a, A_ACROSS ? ACROSS : ALONG,
                                          quarter_row() + h * 16, k);
                fragment<B_ACROSS, true>(right[h], b, B_ACROSS ? ACROSS : ALONG,
                                         quarter_column() + h * 16, k);
            }
#pragma unroll
            for (int t = 0; t < SUMS / 4; t++)
                mma(sum[t], left[t / 4], right[t % 4 / 2][t % 2 * 2],
                    right[t % 4 / 2][t % 2 * 2 + 1]);
        }
    }
}

/* Puts the tile's sums into c, 16 bytes at a time. */
__device__ static __forceinline__ void finish(const Job &job, const float (&total)[SUMS / 4][4],
                                              int i0, int j0)
{
    int lane = threadIdx.x % 32, j = j0 + quarter_column() + lane % 4 * PIECE;
#pragma unroll
    for (int h = 0; h < 4; h++) { /* the quarter's rows, eight at a time */
        float value[PIECE];
#pragma unroll
        for (int e = 0; e < PIECE; e++)
            value[e] = job.scale * total[h / 2 * 4 + e / 2][h % 2 * 2 + e % 2];
        transpose_quad(value);
        int i = i0 + quarter_row() + h * 8 + lane / 4, valid = i < job.M ? job.N - j : 0;
        if (valid <= 0) continue;
        int64_t at = i * job.c_stride + j;
        if (job.result == ADD_F32)
            put((float *)job.c + at, value, true, valid, job.aligned);
        else
            put((real *)job.c + at, value, job.result == ADD_REAL, valid, job.aligned);
    }
}

/* The job of a block's tile, and the tile's place in c. */
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

/* A grouped job's part for the tile's expert: some of its rows, or all of them if k goes over rows.
 * False if the expert has none. */
template <bool OVER_ROWS, class B>
__device__ static __forceinline__ bool job_of_expert(Job *own, const Jobs &jobs, int tile, int *i0,
                                                     int *j0)
{
    *own = jobs.job[0];
    int columns = (own->N + TILE - 1) / TILE, across = tile / columns;
    *i0 = 0;
    *j0 = tile % columns * TILE;
    const real *a = (const real *)own->a[0].at;
    const B *b = (const B *)own->b[0].at;
    if constexpr (OVER_ROWS) {
        int rows = (own->M + TILE - 1) / TILE, e = across / rows, begin = own->bounds[2 * e];
        *i0 = across % rows * TILE;
        own->K = own->bounds[2 * e + 1] - begin;
        own->slice = slice_of(own->K);
        own->slices = (own->K + own->slice - 1) / own->slice;
        own->a[0].at = a + begin * own->a[0].stride;
        own->b[0].at = b + begin * own->b[0].stride;
        own->c = (float *)own->c + e * own->step;
        return own->K > 0;
    } else {
        ExpertTile pairs;
        if (!expert_tile(&pairs, own->bounds, own->X, TILE, across)) return false;
        own->M = pairs.end - pairs.begin;
        own->a[0].at = a + pairs.begin * own->a[0].stride;
        own->b[0].at = b + pairs.e * own->step;
        own->c = (real *)own->c + (int64_t)pairs.begin * own->N;
        return true;
    }
}

/* The scratch of a thread's sum `e` of one slice of one tile, until the slices are added. */
__device__ static __forceinline__ float *waiting(float *partial, int tiles, int slice, int e)
{
    int64_t tile = (int64_t)slice * tiles + blockIdx.x;
    return partial + (tile * SUMS + e) * THREADS + threadIdx.x;
}

/* One tile of c; or, with `partial`, one slice of it. */
template <bool A_ACROSS, bool B_ACROSS, class B, bool GROUPED>
__device__ static __forceinline__ void tile_product(const Job &job, int tiles, float *partial,
                                                    int i0, int j0)
{
    SHARED_ARRAY(real, a, (A_ACROSS ? STEP * ACROSS : TILE * ALONG));
    SHARED_ARRAY(real, b, (B_ACROSS ? STEP * ACROSS : TILE * ALONG));
    float sum[SUMS / 4][4], total[SUMS / 4][4];
    if (partial) {
        if ((int)blockIdx.y >= job.slices) return;
        slice_sum<A_ACROSS, B_ACROSS, B, GROUPED>(sum, job, (int)blockIdx.y, i0, j0, a, b);
        if (!is_live(job, i0, j0)) return;
#pragma unroll
        for (int e = 0; e < SUMS; e++)
            *waiting(partial, tiles, (int)blockIdx.y, e) = sum[e / 4][e % 4];
        return;
    }
#pragma unroll
    for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] = 0.0f;
    for (int slice = 0; slice < job.slices; slice++) {
        slice_sum<A_ACROSS, B_ACROSS, B, GROUPED>(sum, job, slice, i0, j0, a, b);
#pragma unroll
        for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] += sum[e / 4][e % 4];
    }
    finish(job, total, i0, j0);
}

template <bool A_ACROSS, bool B_ACROSS, class B>
static __global__ void __launch_bounds__(THREADS)
    product_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    int i0, j0;
    const Job &job = job_of(jobs, (int)blockIdx.x, &i0, &j0);
    tile_product<A_ACROSS, B_ACROSS, B, false>(job, jobs.tiles, partial, i0, j0);
}

/* The same for the one job of a grouped product: over k like product_kernel, or over rows. */
template <bool OVER_ROWS, bool B_ACROSS, class B>
static __global__ void __launch_bounds__(THREADS)
    grouped_product_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    Job own;
    int i0, j0;
    if (!job_of_expert<OVER_ROWS, B>(&own, jobs, (int)blockIdx.x, &i0, &j0)) return;
    tile_product<OVER_ROWS, B_ACROSS, B, true>(own, jobs.tiles, partial, i0, j0);
}

/* c from the slices of a product's kernel. */
__device__ static __forceinline__ void slices_add(const Job &job, int tiles, float *partial, int i0,
                                                  int j0)
{
    float total[SUMS / 4][4];
#pragma unroll
    for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] = 0.0f;
    if (!is_live(job, i0, j0)) return;
    for (int slice = 0; slice < job.slices; slice++)
#pragma unroll
        for (int e = 0; e < SUMS; e++) total[e / 4][e % 4] += *waiting(partial, tiles, slice, e);
    finish(job, total, i0, j0);
}

static __global__ void __launch_bounds__(THREADS)
    slices_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    int i0, j0;
    const Job &job = job_of(jobs, (int)blockIdx.x, &i0, &j0);
    slices_add(job, jobs.tiles, partial, i0, j0);
}

static __global__ void __launch_bounds__(THREADS)
    grouped_slices_kernel(__grid_constant__ const Jobs jobs, float *partial)
{
    Job own;
    int i0, j0;
    if (!job_of_expert<false, float>(&own, jobs, (int)blockIdx.x, &i0, &j0)) return;
    slices_add(own, jobs.tiles, partial, i0, j0);
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
    job->c_stride = N;
    job->K = K;
    job->slice = slice_of(K);
    job->scale = scale;
    job->result = result;
    job->aligned = (uintptr_t)c % 16 == 0 && N % PIECE == 0;
    return job;
}

/* Whether slices get their own blocks. Both costs are counted in slices computed sequentially by a
 * resident block; writing and rereading a slice's sums costs a quarter of computing it, and the
 * second launch another quarter. */
static bool is_split(const CudaDevice *cuda, int64_t tiles, int64_t slices)
{
    int64_t places = (int64_t)cuda->processors * RESIDENT;
    if (slices == 1 || tiles * slices > SPLIT_MOST) return false;
    int64_t whole = cuda_blocks(tiles, places) * slices,
            split = cuda_blocks(tiles * slices, places);
    return 4 * whole > 5 * split + 1;
}

/* One launch, or two if slices have their own blocks. */
static void launch(CudaDevice *cuda, void (*kernel)(Jobs, float *), void (*add)(Jobs, float *),
                   const Jobs *jobs)
{
    unsigned tiles = (unsigned)jobs->tiles, slices = (unsigned)jobs->slices;
    if (!is_split(cuda, jobs->tiles, jobs->slices)) {
        LAUNCH(cuda, kernel, tiles, THREADS, 0, *jobs, (float *)nullptr);
        return;
    }
    size_t bytes = (size_t)tiles * slices * TILE * TILE * sizeof(float);
    float *partial = (float *)cuda_scratch(cuda, bytes);
    if (!partial) return;
    LAUNCH(cuda, kernel, dim3(tiles, slices), THREADS, 0, *jobs, partial);
    LAUNCH(cuda, add, tiles, THREADS, 0, *jobs, partial);
}

/* Runs the jobs. */
template <bool A_ACROSS, bool B_ACROSS, class B> static void run(CudaDevice *cuda, Jobs *jobs)
{
    for (int i = 0; i < jobs->count; i++) {
        Job *job = &jobs->job[i];
        job->first = jobs->tiles;
        job->slices = (job->K + job->slice - 1) / job->slice * job->parts;
        jobs->tiles += (int)(cuda_blocks(job->M, TILE) * cuda_blocks(job->N, TILE));
        if (job->slices > jobs->slices) jobs->slices = job->slices;
    }
    launch(cuda, product_kernel<A_ACROSS, B_ACROSS, B>, slices_kernel, jobs);
}

/* Runs the one job of a grouped product of P pairs. A sum over an expert's pairs is not split: only
 * the card knows their number. */
template <bool OVER_ROWS, bool B_ACROSS, class B>
static void run_grouped(CudaDevice *cuda, Jobs *jobs, const int32_t *bounds, int64_t step, int X,
                        int P)
{
    Job *job = &jobs->job[0];
    job->bounds = bounds;
    job->step = step;
    job->X = X;
    if (step * (int64_t)sizeof(B) % 16 && !OVER_ROWS) job->b[0].aligned = false;
    if (step * (int64_t)sizeof(float) % 16 && OVER_ROWS) job->aligned = false;
    int64_t across = OVER_ROWS ? (int64_t)X * cuda_blocks(job->M, TILE) : expert_tiles(X, P, TILE);
    jobs->tiles = (int)(across * cuda_blocks(job->N, TILE));
    jobs->slices = job->slices = OVER_ROWS ? 1 : (job->K + job->slice - 1) / job->slice;
    launch(cuda, grouped_product_kernel<OVER_ROWS, B_ACROSS, B>, grouped_slices_kernel, jobs);
}

/* ---- the ops ---- */

/* s = x·a; then c += scale·s·b, with c = y */
static void forward(CudaDevice *cuda, const Lora *group, int count, Result result, const real *x,
                    int T, int D, int R, float scale)
{
    if (T == 0) return;
    Jobs down = {}, up = {};
    for (const Lora *m = group; m < group + count; m++) {
        add_job(&down, m->s, SET_REAL, operand(x, D), operand(m->a, R), T, R, D, 1.0f);
        Job *job =
            add_job(&up, m->y, result, operand(m->s, R), operand(m->b, m->N), T, m->N, R, scale);
        job->c_stride = m->step;
        job->aligned = job->aligned && m->step % PIECE == 0;
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
    head.N = head.step = V;
    forward(cuda_of(dev), &head, 1, ADD_F32, x, T, D, R, scale);
}

void cuda_lora_backward(Device *dev, real *dx, const Lora *group, int count, const real *x, int T,
                        int D, int R, float scale)
{
    if (T == 0) return;
    CudaDevice *cuda = cuda_of(dev);
    Jobs down = {}, gradients = {}, up = {};
    for (const Lora *m = group; m < group + count; m++) {
        Operand dy = operand(m->y, m->step);
        add_job(&down, m->ds, SET_REAL, dy, operand(m->b, m->N), T, R, m->N, scale);
        add_job(&gradients, m->db, ADD_F32, operand(m->s, R), dy, R, m->N, T, scale);
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

/* ---- with each expert's own matrices ---- */

template <bool B_ACROSS>
static void grouped_run(CudaDevice *cuda, Jobs *jobs, const int32_t *bounds, int64_t step, int X,
                        int P)
{
    if (bounds)
        run_grouped<false, B_ACROSS, float>(cuda, jobs, bounds, step, X, P);
    else
        run<false, B_ACROSS, float>(cuda, jobs);
}

void cuda_grouped_matmul(Device *dev, real *y, const real *x, const float *w, int64_t step,
                         int turned, const int32_t *bounds, int X, int P, int N, int D, float scale,
                         int accumulate)
{
    if (P == 0) return;
    Jobs jobs = {};
    add_job(&jobs, y, accumulate ? ADD_REAL : SET_REAL, operand(x, D), operand(w, turned ? D : N),
            P, N, D, scale);
    if (turned)
        grouped_run<false>(cuda_of(dev), &jobs, bounds, step, X, P);
    else
        grouped_run<true>(cuda_of(dev), &jobs, bounds, step, X, P);
}

void cuda_grouped_gradient(Device *dev, float *dw, int64_t step, const real *x, const real *dy,
                           const int32_t *bounds, int X, int P, int N, int D, float scale)
{
    if (P == 0) return;
    Jobs jobs = {};
    add_job(&jobs, dw, ADD_F32, operand(x, D), operand(dy, N), D, N, P, scale);
    if (bounds)
        run_grouped<true, true, real>(cuda_of(dev), &jobs, bounds, step, X, P);
    else
        run<true, true, real>(cuda_of(dev), &jobs);
}
