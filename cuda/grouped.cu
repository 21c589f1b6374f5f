/* cuda/grouped.cu - products of pairs with their own expert's base weights.
 *
 *   grouped_linear           y (P,N) = x (P,D)·w_eᵀ + b_e
 *   grouped_linear_backward  dx (P,D) = or += dy (P,N)·w_e
 *
 * A block makes a tile of pairs of one expert by columns. It finds its expert from `bounds` on the
 * card (tiles.cuh), so the host need not know how pairs are spread, and a recording holds for any
 * spread. Tiles of operands arrive by cp.async, several steps of k ahead of the tensor cores; the
 * result leaves through shared memory, 16 bytes at a time.
 *
 * There are two shapes of tile. WIDE is for many pairs: each operand is read from the cache for 128
 * of the other side. FEW is for decoding: a chosen expert's weight is streamed through once, and
 * enough of it is under way in the blocks of all columns to keep the memory busy. Which one is
 * taken depends on P and X. Either adds up an element over k from 0 on, 16 of k at a time, in one
 * sum: so neither that choice nor the other pairs of an expert change a pair's bits.
 *
 * Roofline: 2·P·N·D flops, against the weights of the chosen experts, 2·N·D bytes each: compute
 * bound from about 300 pairs of an expert on, memory bound below. */
#include "tiles.cuh"

/* Tiles of ROWS by COLUMNS, DEEP of k from one barrier to the next, by WARPS_I by WARPS_J warps. */
template <int ROWS_, int COLUMNS_, int DEEP_, int WARPS_I, int WARPS_J, int STAGES_> struct Tiling {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEEP = DEEP_, STAGES = STAGES_;
    static constexpr int ACROSS_WARPS = WARPS_J, THREADS = WARPS_I * WARPS_J * 32;
    static constexpr int WARP_ROWS = ROWS / WARPS_I, WARP_COLUMNS = COLUMNS / WARPS_J;
    static constexpr int I = WARP_ROWS / 16, J = WARP_COLUMNS / 16;      /* fragments of a warp */
    static constexpr int ALONG = DEEP + APART, ACROSS = COLUMNS + APART; /* reals of a row */
    static constexpr int OUT = COLUMNS + APART;                          /* floats of a row */
    static constexpr int X_REALS = ROWS * ALONG;
    template <bool IS_ACROSS>
    static constexpr int STAGE = X_REALS + (IS_ACROSS ? DEEP * ACROSS : COLUMNS * ALONG);
};

typedef Tiling<128, 128, 32, 4, 2, 4> Wide;
typedef Tiling<16, 64, 64, 1, 4, 4> Few;

enum { FEW_PAIRS = 8 }; /* of an expert, on average: up to here tiles are FEW */

/* y (P,N) = x (P,K)·b_e [+ bias_e] [+ y]; the weight's rows are `stride` apart, those of b's
 * columns (along k), or of its k (across). */
struct Product {
    real *y;
    const real *x;
    const unsigned char *w;
    int64_t step;
    const float *bias; /* (X,N) or NULL */
    const int32_t *bounds;
    int X, N, K;
    int64_t stride;
    int accumulate;
    bool wide_out; /* 16-byte accesses of y may be used */
};

/* ---- from memory to shared memory ---- */

/* Eight of x's row from k on, of which the first `valid` exist, where rows are not aligned. */
__device__ static __forceinline__ uint4 fetch(const real *from, int valid)
{
    float v[PIECE];
#pragma unroll
    for (int e = 0; e < PIECE; e++) v[e] = e < valid ? f32(from[e]) : 0.0f;
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

/* Starts the tile of x at k0: ROWS by DEEP, zeros for pairs that are not the expert's. */
template <class S, bool IS_ALIGNED>
__device__ static __forceinline__ void x_load(Shared<real> tile, const real *x, int rows, int k0,
                                              int K)
{
#pragma unroll
    for (int piece = threadIdx.x; piece < S::ROWS * S::DEEP / PIECE; piece += S::THREADS) {
        int row = piece / (S::DEEP / PIECE), col = piece % (S::DEEP / PIECE) * PIECE;
        int valid = row < rows ? min(max(K - (k0 + col), 0), (int)PIECE) : 0;
        const real *from = valid ? x + (int64_t)row * K + k0 + col : x;
        real *to = shared_range(tile, row * S::ALONG + col, PIECE);
        if constexpr (IS_ALIGNED)
            cp_async(to, from, valid * (int)sizeof(real));
        else
            *reinterpret_cast<uint4 *>(to) = fetch(from, valid);
    }
}

/* Starts the weight's tile at (k0, j0). Rows are filled up with zeros, so pieces are whole. */
template <class S, bool IS_ACROSS>
__device__ static __forceinline__ void w_load(Shared<real> tile, const real *w, const Product &p,
                                              int k0, int j0)
{
    constexpr int WIDTH = IS_ACROSS ? S::COLUMNS : S::DEEP,
                  HEIGHT = IS_ACROSS ? S::DEEP : S::COLUMNS;
    int first = IS_ACROSS ? k0 : j0, from = IS_ACROSS ? j0 : k0, end = IS_ACROSS ? p.K : p.N;
#pragma unroll
    for (int piece = threadIdx.x; piece < WIDTH * HEIGHT / PIECE; piece += S::THREADS) {
        int row = piece / (WIDTH / PIECE), col = piece % (WIDTH / PIECE) * PIECE;
        bool valid = first + row < end && from + col < p.stride;
        const real *at = valid ? w + (first + row) * p.stride + from + col : w;
        cp_async(shared_range(tile, row * (WIDTH + APART) + col, PIECE), at, valid ? 16 : 0);
    }
}

/* ---- a tile ---- */

template <class S> struct Sums {
    float at[S::I][2 * S::J][4];
};

/* A warp's part of one step of k. */
template <class S, bool IS_ACROSS>
__device__ static __forceinline__ void multiply(Sums<S> &sum, Shared<real> x, Shared<real> w, int i,
                                                int j)
{
#pragma unroll
    for (int k = 0; k < S::DEEP; k += 16) {
        uint32_t left[S::I][4], right[S::J][4];
#pragma unroll
        for (int m = 0; m < S::I; m++) fragment<false, false>(left[m], x, S::ALONG, i + m * 16, k);
#pragma unroll
        for (int n = 0; n < S::J; n++)
            fragment<IS_ACROSS, true>(right[n], w, IS_ACROSS ? S::ACROSS : S::ALONG, j + n * 16, k);
#pragma unroll
        for (int m = 0; m < S::I; m++)
#pragma unroll
            for (int n = 0; n < 2 * S::J; n++)
                mma(sum.at[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
}

/* Leaves a warp's sums in shared memory. */
template <class S>
__device__ static __forceinline__ void sums_keep(Shared<float> out, const Sums<S> &sum, int i,
                                                 int j)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < S::I; m++)
#pragma unroll
        for (int n = 0; n < 2 * S::J; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = i + m * 16 + half * 8 + lane / 4, col = j + n * 8 + lane % 4 * 2;
                *reinterpret_cast<float2 *>(shared_range(out, row * S::OUT + col, 2)) =
                    make_float2(sum.at[m][n][2 * half], sum.at[m][n][2 * half + 1]);
            }
}

/* W elements of y. */
template <int W>
__device__ static __forceinline__ void put(real *y, const float *sum, const float *bias,
                                           int accumulate)
{
    float v[W], more[W];
    load<W>(v, sum);
    if (bias) {
        load<W>(more, bias);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] += more[e];
    }
    if (accumulate) {
        load<W>(more, y);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] += more[e];
    }
    store<W>(y, v);
}

/* Puts the tile at column j0 into y, which begins at the tile's first pair. */
template <class S>
__device__ static __forceinline__ void tile_put(real *y, Shared<float> out, const Product &p,
                                                const float *bias, int rows, int j0)
{
    for (int piece = threadIdx.x; piece < S::ROWS * S::COLUMNS / PIECE; piece += S::THREADS) {
        int row = piece / (S::COLUMNS / PIECE), col = piece % (S::COLUMNS / PIECE) * PIECE;
        int j = j0 + col;
        if (row >= rows || j >= p.N) continue;
        real *to = y + (int64_t)row * p.N + j;
        const float *sum = shared_range(out, row * S::OUT + col, PIECE);
        if (p.wide_out) {
            put<PIECE>(to, sum, bias ? bias + j : nullptr, p.accumulate);
        } else {
            for (int e = 0; e < PIECE && j + e < p.N; e++)
                put<1>(to + e, sum + e, bias ? bias + j + e : nullptr, p.accumulate);
        }
    }
}

template <class S, bool IS_ACROSS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(S::THREADS, 2)
    grouped_kernel(__grid_constant__ const Product p)
{
    DYNAMIC_SHARED(bytes);
    constexpr int STAGE = S::template STAGE<IS_ACROSS>;
    int columns = (p.N + S::COLUMNS - 1) / S::COLUMNS, j0 = blockIdx.x % columns * S::COLUMNS;
    ExpertTile own;
    if (!expert_tile(&own, p.bounds, p.X, S::ROWS, (int)(blockIdx.x / columns))) return;
    const real *x = p.x + (int64_t)own.begin * p.K;
    const real *w = frozen_data(reinterpret_cast<const frozen *>(p.w + own.e * p.step));
    int rows = own.end - own.begin, steps = (p.K + S::DEEP - 1) / S::DEEP;
    int warp = threadIdx.x / 32;
    int i = warp / S::ACROSS_WARPS * S::WARP_ROWS, j = warp % S::ACROSS_WARPS * S::WARP_COLUMNS;
    Shared<real> stages = shared_part<real>(bytes, 0, S::STAGES * STAGE);
    auto stage_load = [&](int step) {
        if (step < steps) {
            Shared<real> stage = stages + step % S::STAGES * STAGE;
            x_load<S, IS_ALIGNED>(stage, x, rows, step * S::DEEP, p.K);
            w_load<S, IS_ACROSS>(stage + S::X_REALS, w, p, step * S::DEEP, j0);
        }
        cp_async_commit();
    };
    Sums<S> sum = {};
    for (int step = 0; step < S::STAGES - 1; step++) stage_load(step);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        stage_load(step + S::STAGES - 1);
        Shared<real> stage = stages + step % S::STAGES * STAGE;
        if (i < rows) multiply<S, IS_ACROSS>(sum, stage, stage + S::X_REALS, i, j);
    }
    cp_async_wait<0>();
    __syncthreads();
    Shared<float> out = shared_part<float>(bytes, 0, S::ROWS * S::OUT);
    if (i < rows) sums_keep<S>(out, sum, i, j);
    __syncthreads();
    const float *bias = p.bias ? p.bias + (int64_t)own.e * p.N : nullptr;
    tile_put<S>(p.y + (int64_t)own.begin * p.N, out, p, bias, rows, j0);
}

/* ---- launching ---- */

template <class S, bool IS_ACROSS> static void launch(CudaDevice *cuda, const Product &p, int P)
{
    bool aligned = p.K % PIECE == 0 && (uintptr_t)p.x % 16 == 0;
    auto kernel =
        aligned ? grouped_kernel<S, IS_ACROSS, true> : grouped_kernel<S, IS_ACROSS, false>;
    int64_t tiles = expert_tiles(p.X, P, S::ROWS) * cuda_blocks(p.N, S::COLUMNS);
    size_t stages = S::STAGES * S::template STAGE<IS_ACROSS> * sizeof(real);
    size_t out = S::ROWS * S::OUT * sizeof(float);
    LAUNCH(cuda, kernel, (unsigned)tiles, S::THREADS, stages > out ? stages : out, p);
}

template <bool IS_ACROSS> static void run(Device *dev, Product p, int P)
{
    if (P == 0) return;
    p.wide_out = p.N % PIECE == 0 && ((uintptr_t)p.y | (uintptr_t)p.bias) % 16 == 0;
    if ((int64_t)P > (int64_t)FEW_PAIRS * p.X)
        launch<Wide, IS_ACROSS>(cuda_of(dev), p, P);
    else
        launch<Few, IS_ACROSS>(cuda_of(dev), p, P);
}

void cuda_grouped_linear(Device *dev, real *y, const real *x, const frozen *w, int64_t step,
                         const float *bias, const int32_t *bounds, int X, int P, int N, int D)
{
    const unsigned char *first = (const unsigned char *)w;
    Product p = {y, x, first, step, bias, bounds, X, N, D, frozen_stride(D), 0, false};
    run<false>(dev, p, P);
}

void cuda_grouped_linear_backward(Device *dev, real *dx, const real *dy, const frozen *w,
                                  int64_t step, const int32_t *bounds, int X, int P, int N, int D,
                                  int accumulate)
{
    const unsigned char *first = (const unsigned char *)w;
    Product p = {dx, dy, first, step, NULL, bounds, X, D, N, frozen_stride(D), accumulate, false};
    run<true>(dev, p, P);
}
