/* cuda/product/gemm.cu - products with bf16 matrices by our own kernel: pairs with their expert's
 * base weights, and all rows with one matrix where cuBLASLt can't.
 *
 *   own_product              c (M,N) = a (M,K)·b (K,N) [+ bias] [+ plus]
 *   grouped_linear           y (P,N) = x (P,D)·w_eᵀ + b_e, of one weight or of several (count)
 *   grouped_linear_backward  dx (P,D) = or += dy (P,N)·w_e
 *
 * A block computes a tile of rows by columns. In a grouped product the rows are pairs of one
 * expert, which the block finds from `bounds` on the card (fragments.cuh): so the host need not
 * know the distribution of pairs, and a recording is valid for any. Tiles of operands are loaded
 * with cp.async, several steps of k ahead of the tensor cores; the result is stored through shared
 * memory, 16 bytes at a time. Unaligned operands are read number by number.
 *
 * There are two shapes of tile. WIDE is for many rows: each operand is read from the cache once per
 * 128 of the other side. FEW is for decoding: a weight is streamed once, and the blocks of all
 * columns have enough of it in flight to keep the memory busy. Both sum an element over k from 0
 * on, 16 of k at a time, in one sum: so neither the shape nor the other rows change a row's bits.
 *
 * Roofline: 2·P·N·D flops, against the weights of the chosen experts, 2·N·D bytes each: compute
 * bound from about 300 rows of a weight on, memory bound below. A wide tile's warp issues 2.6 to 3
 * instructions per mma (kernels.csv). On a Hopper mma has some 60 % of wgmma's speed. */
#include "gemm.cuh"
#include "../weights/weight_load.cuh"
#include "gemm_quantized.cuh"
#include "gemm_tiles.cuh"

typedef Tiling<128, 128, 32, 2, 2, 4> Wide;
typedef Tiling<16, 64, 128, 1, 4, 3> Few;

/* The most pairs per expert, on average, for FEW tiles. For 64 of k and 128 columns, a FEW tile
 * moves 416 times 128 bytes through shared memory, so two move 832, and a wide one 768. */
enum { FEW_PAIRS = 16 };

/* y (P,N) = x (P,K)·w_e [+ bias_e] [+ plus]; strides are of stored rows. */
struct Product {
    Result<real> result; /* of the first row, with the first expert's bias */
    bool f32_out;        /* y and plus are floats */
    const real *x;
    int64_t x_stride;
    const unsigned char *w;
    int64_t w_stride, step; /* step: the stride between experts' weights, in bytes */
    const int32_t *bounds;  /* NULL: all rows with the first weight */
    int X, N, K, P, count;
    bool aligned; /* rows of both operands are 16-byte aligned, with lengths in 16 bytes */
};

/* ---- from memory to shared memory ---- */

/* The start of an operand's tiles from `side` on, at k = 0. */
template <bool IS_ACROSS>
__device__ static __forceinline__ const real *tiles_at(const real *x, int64_t stride, int side)
{
    return opaque(x + (IS_ACROSS ? side : side * stride));
}

/* Starts loading such a tile at k, zero-padded past K and past `sides`, the count from its side on.
 * Aligned rows end at a multiple of 16 bytes, or are padded. */
template <bool IS_ACROSS, bool IS_ALIGNED, class P>
__device__ static __forceinline__ void tile_load(const P &piece, Shared<real> tile, const real *x,
                                                 int64_t stride, int sides, int k, int K)
{
    const real *first = x + (IS_ACROSS ? k * stride : k);
    int valid = (IS_ACROSS ? sides : K - k) - piece.col;
#pragma unroll
    for (int m = 0; m < P::COUNT; m++) {
        bool there = valid > 0 && (!IS_ACROSS || k + piece.row + m * P::STEP < K);
        if constexpr (IS_ALIGNED)
            cp_async(piece.place(tile, m), piece.of(first, m), there ? 16 : 0);
        else
            *reinterpret_cast<uint4 *>(piece.place(tile, m)) =
                fetch(piece.of(first, m), there ? valid : 0);
    }
}

/* ---- a tile ---- */

template <class S, bool X_ACROSS, bool W_ACROSS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(S::THREADS, 2)
    gemm_kernel(__grid_constant__ const Product p)
{
    typedef Operand<S, S::ROWS, X_ACROSS> OfX;
    typedef Operand<S, S::COLUMNS, W_ACROSS> OfW;
    constexpr int STAGE = OfX::REALS + OfW::REALS;
    DYNAMIC_SHARED(bytes);
    ColumnTile place = column_tile(p.N, S::COLUMNS, p.count);
    int j0 = place.column, tile = place.tile;
    ExpertTile own = {0, tile * S::ROWS, min((tile + 1) * S::ROWS, p.P)};
    if (p.bounds && !expert_tile(&own, p.bounds, p.X, S::ROWS, tile)) return;
    own.e += place.part * p.X;
    const real *x = tiles_at<X_ACROSS>(p.x, p.x_stride, own.begin);
    const real *w =
        tiles_at<W_ACROSS>(reinterpret_cast<const real *>(p.w + own.e * p.step), p.w_stride, j0);
    int rows = own.end - own.begin, steps = (p.K + S::DEEP - 1) / S::DEEP;
    int warp = threadIdx.x / 32;
    int i = warp / S::ACROSS_WARPS * S::WARP_ROWS, j = warp % S::ACROSS_WARPS * S::WARP_COLUMNS;
    Shared<real> stages = shared_part<real>(bytes, 0, S::STAGES * STAGE);
    typename OfX::Brought of_x(p.x_stride, X_ACROSS ? S::DEEP : rows);
    typename OfW::Brought of_w(p.w_stride, W_ACROSS ? S::DEEP : p.N - j0);
    auto stage_load = [&](int step) {
        if (step < steps) {
            Shared<real> stage = stages + step % S::STAGES * STAGE;
            int k = step * S::DEEP;
            tile_load<X_ACROSS, IS_ALIGNED>(of_x, stage, x, p.x_stride, rows, k, p.K);
            tile_load<W_ACROSS, IS_ALIGNED>(of_w, stage + OfX::REALS, w, p.w_stride, p.N - j0, k,
                                            p.K);
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
        if (i < rows) multiply<S, X_ACROSS, W_ACROSS>(sum, stage, stage + OfX::REALS, i, j);
    }
    Result<real> half = result_of(p.result, own, p.P, place.part);
    if (!p.f32_out) return sums_put<S>(bytes, sum, half, rows, i, j, j0);
    Result<float> whole = {(float *)p.result.y, (const float *)p.result.plus,
                           p.result.bias,       p.result.step,
                           p.result.N,          p.result.narrow,
                           p.result.wide};
    sums_put<S>(bytes, sum, result_of(whole, own, p.P, place.part), rows, i, j, j0);
}

/* ---- launching ---- */

template <class S> static int64_t tiles_in(const Product &p)
{
    int64_t rows = p.bounds ? expert_tiles(p.X, p.P, S::ROWS) : cuda_blocks(p.P, S::ROWS);
    return rows * cuda_blocks(p.N, S::COLUMNS) * p.count;
}

template <class S, bool X_ACROSS, bool W_ACROSS, bool IS_ALIGNED>
static void launch(CudaDevice *cuda, const Product &p)
{
    constexpr int REALS =
        Operand<S, S::ROWS, X_ACROSS>::REALS + Operand<S, S::COLUMNS, W_ACROSS>::REALS;
    size_t stages = S::STAGES * REALS * sizeof(real), out = S::ROWS * S::OUT * sizeof(float);
    LAUNCH(cuda, (gemm_kernel<S, X_ACROSS, W_ACROSS, IS_ALIGNED>), (unsigned)tiles_in<S>(p),
           S::THREADS, stages > out ? stages : out, p);
}

/* Wide tiles, unless an expert has few rows or the tiles are too few for the card. The choice
 * changes no bit. */
template <bool X_ACROSS, bool W_ACROSS> static void run(CudaDevice *cuda, const Product &p)
{
    if (p.P == 0) return;
    if (!p.aligned) return launch<Wide, X_ACROSS, W_ACROSS, false>(cuda, p);
    bool few = p.bounds ? p.P <= (int64_t)FEW_PAIRS * p.X
                        : p.P <= FEW_PAIRS || tiles_in<Wide>(p) < (cuda->processors + 1) / 2;
    if constexpr (!X_ACROSS)
        if (few) return launch<Few, false, W_ACROSS, true>(cuda, p);
    launch<Wide, X_ACROSS, W_ACROSS, true>(cuda, p);
}

static bool is_aligned(const void *at, int64_t stride)
{
    return (uintptr_t)at % 16 == 0 && stride % PIECE == 0;
}

/* ---- all rows with one matrix ---- */

void own_product(CudaDevice *cuda, const Gemm &g)
{
    Result<real> result = {(real *)g.c, (const real *)g.plus, g.bias, g.c_stride, g.N, true, false};
    result.wide = result_is_wide(result);
    bool along = !g.a_by_column || g.b_by_column; /* at least one is stored along k */
    Product p = {result,     g.f32_out, g.a,  g.a_stride, (const unsigned char *)g.b,
                 g.b_stride, 0,         NULL, 1,          g.N,
                 g.K,        g.M,       1,    false};
    p.aligned =
        is_aligned(g.a, g.a_stride) && is_aligned(g.b, g.b_stride) && (!along || g.K % PIECE == 0);
    if (g.a_by_column)
        g.b_by_column ? run<true, false>(cuda, p) : run<true, true>(cuda, p);
    else
        g.b_by_column ? run<false, false>(cuda, p) : run<false, true>(cuda, p);
}

/* ---- pairs with their expert's weight ---- */

/* The same for weights with blocks. */
static void packed_run(Device *dev, PackedCall call, int64_t step, const int32_t *bounds, int X)
{
    if (call.T == 0) return;
    call.w_step = step;
    call.bounds = bounds;
    call.X = X;
    packed_product(cuda_of(dev), call);
}

/* Rows of x are K numbers wide. */
static Product grouped(Result<real> result, const real *x, const frozen *w, int64_t step,
                       const int32_t *bounds, int X, int P, int K, int64_t w_stride, int count)
{
    result.wide = result_is_wide(result);
    const unsigned char *first = (const unsigned char *)frozen_data(w);
    return {result, false, x,        K, first, w_stride, step,
            bounds, X,     result.N, K, P,     count,    is_aligned(x, K)};
}

void cuda_grouped_linear(Device *dev, real *y, const real *x, const frozen *w, int64_t step,
                         const float *bias, const int32_t *bounds, int X, int P, int N, int D,
                         int count)
{
    PackedCall call = packed_call(y, N, x, D, P, N, D);
    if (packed_find(cuda_of(dev), w, D, &call.w)) {
        call.bias = bias;
        call.count = count;
        return packed_run(dev, call, step, bounds, X);
    }
    Result<real> result = {y, nullptr, bias, N, N, false, false};
    run<false, false>(cuda_of(dev),
                      grouped(result, x, w, step, bounds, X, P, D, frozen_stride(D), count));
}

void cuda_grouped_linear_backward(Device *dev, real *dx, const real *dy, const frozen *w,
                                  int64_t step, const int32_t *bounds, int X, int P, int N, int D,
                                  int accumulate)
{
    PackedCall call = packed_call(dx, D, dy, N, P, D, N);
    if (packed_find(cuda_of(dev), w, D, &call.w)) {
        call.plus = accumulate ? dx : nullptr;
        call.across = true;
        return packed_run(dev, call, step, bounds, X);
    }
    Result<real> result = {dx, accumulate ? dx : nullptr, nullptr, D, D, false, false};
    run<false, true>(cuda_of(dev),
                     grouped(result, dy, w, step, bounds, X, P, N, frozen_stride(D), 1));
}
