/* cuda/grouped.cu - products of pairs with their own expert's base weights.
 *
 *   grouped_linear           y (P,N) = x (P,D)·w_eᵀ + b_e, of one weight or of several (count)
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
#include "packed.cuh"
#include "product.cuh"

typedef Tiling<128, 128, 32, 2, 2, 4> Wide;
typedef Tiling<16, 64, 128, 1, 4, 3> Few;

/* Of an expert, on average: up to here tiles are FEW. For 64 of k and 128 columns, one of them
 * moves 416 times 128 bytes through shared memory, so two 832, and a wide one 768. */
enum { FEW_PAIRS = 16 };

/* y (P,N) = x (P,K)·b_e [+ bias_e] [+ y]; the weight's rows are `stride` apart, those of b's
 * columns (along k), or of its k (across). */
struct Product {
    Result<real> result; /* of the first pair, with the first expert's bias */
    const real *x;
    const unsigned char *w;
    int64_t step;
    const int32_t *bounds;
    int X, N, K, P, count;
    int64_t stride;
};

/* ---- from memory to shared memory ---- */

/* A tile of the weight has columns of y as its rows, or k. */
template <class S, bool IS_ACROSS>
using WPieces = Pieces<S, IS_ACROSS ? S::DEEP : S::COLUMNS, IS_ACROSS ? S::COLUMNS : S::DEEP>;

/* Starts the weight's tile at k and column j0. Rows are filled up with zeros, so pieces are
 * whole. */
template <bool IS_ACROSS, class P>
__device__ static __forceinline__ void w_load(const P &piece, Shared<real> tile, const real *w,
                                              const Product &p, int k, int j0)
{
    const real *first = IS_ACROSS ? w + k * p.stride + j0 : w + j0 * p.stride + k;
    bool valid = piece.col < p.stride - (IS_ACROSS ? j0 : k);
#pragma unroll
    for (int m = 0; m < P::COUNT; m++) {
        bool there = valid && (!IS_ACROSS || k + piece.row + m * P::STEP < p.K);
        cp_async(piece.place(tile, m), piece.of(first, m), there ? 16 : 0);
    }
}

/* ---- a tile ---- */

template <class S, bool IS_ACROSS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(S::THREADS, 2)
    grouped_kernel(__grid_constant__ const Product p)
{
    DYNAMIC_SHARED(bytes);
    constexpr int STAGE = S::template STAGE<IS_ACROSS>;
    ColumnTile place = column_tile(p.N, S::COLUMNS, p.count);
    int j0 = place.column;
    ExpertTile own;
    if (!expert_tile(&own, p.bounds, p.X, S::ROWS, place.tile)) return;
    own.e += place.part * p.X;
    const real *x = p.x + (int64_t)own.begin * p.K;
    const real *w = frozen_data(reinterpret_cast<const frozen *>(p.w + own.e * p.step));
    int rows = own.end - own.begin, steps = (p.K + S::DEEP - 1) / S::DEEP;
    int warp = threadIdx.x / 32;
    int i = warp / S::ACROSS_WARPS * S::WARP_ROWS, j = warp % S::ACROSS_WARPS * S::WARP_COLUMNS;
    Shared<real> stages = shared_part<real>(bytes, 0, S::STAGES * STAGE);
    XPieces<S> of_x(p.K, rows);
    WPieces<S, IS_ACROSS> of_w(p.stride, IS_ACROSS ? S::DEEP : p.N - j0);
    auto stage_load = [&](int step) {
        if (step < steps) {
            Shared<real> stage = stages + step % S::STAGES * STAGE;
            x_load<IS_ALIGNED>(of_x, stage, x, step * S::DEEP, p.K);
            w_load<IS_ACROSS>(of_w, stage + S::X_REALS, w, p, step * S::DEEP, j0);
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
    sums_put<S>(bytes, sum, result_of(p.result, own, p.P, place.part), rows, i, j, j0);
}

/* ---- launching ---- */

template <class S, bool IS_ACROSS> static void launch(CudaDevice *cuda, const Product &p)
{
    bool aligned = p.K % PIECE == 0 && (uintptr_t)p.x % 16 == 0;
    auto kernel =
        aligned ? grouped_kernel<S, IS_ACROSS, true> : grouped_kernel<S, IS_ACROSS, false>;
    int64_t tiles = expert_tiles(p.X, p.P, S::ROWS) * cuda_blocks(p.N, S::COLUMNS) * p.count;
    size_t stages = S::STAGES * S::template STAGE<IS_ACROSS> * sizeof(real);
    size_t out = S::ROWS * S::OUT * sizeof(float);
    LAUNCH(cuda, kernel, (unsigned)tiles, S::THREADS, stages > out ? stages : out, p);
}

template <bool IS_ACROSS> static void run(Device *dev, Product p)
{
    if (p.P == 0) return;
    p.result.wide = result_is_wide(p.result);
    if ((int64_t)p.P > (int64_t)FEW_PAIRS * p.X)
        launch<Wide, IS_ACROSS>(cuda_of(dev), p);
    else
        launch<Few, IS_ACROSS>(cuda_of(dev), p);
}

/* The same of weights with blocks. */
static void packed_run(Device *dev, PackedCall call, int64_t step, const int32_t *bounds, int X)
{
    if (call.T == 0) return;
    call.w_step = step;
    call.bounds = bounds;
    call.X = X;
    packed_product(cuda_of(dev), call);
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
    const unsigned char *first = (const unsigned char *)w;
    Result<real> result = {y, nullptr, bias, N, N, false, false};
    Product p = {result, x, first, step, bounds, X, N, D, P, count, frozen_stride(D)};
    run<false>(dev, p);
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
    const unsigned char *first = (const unsigned char *)w;
    Result<real> result = {dx, accumulate ? dx : nullptr, nullptr, D, D, false, false};
    Product p = {result, dy, first, step, bounds, X, D, N, P, 1, frozen_stride(D)};
    run<true>(dev, p);
}
