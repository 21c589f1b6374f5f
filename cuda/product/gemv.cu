/* cuda/product/gemv.cu - products of few rows with base weights of 8 and 4 bits: decoding.
 *
 *   y (T,N) = x (T,K)·wᵀ [+ bias] [+ plus]     of w (N,K): linear, head, grouped_linear
 *
 * A warp has a few columns and all rows of a tile. Codes are loaded with cp.async into the warp's
 * own shared memory, steps of k ahead; one ldmatrix gives each lane the codes of its part of mma's
 * operand, and the lane widens them in its registers (lane_codes.cuh). So each weight is widened
 * once, nothing wide is in shared memory, and a block's warps share only x there.
 *
 * An element is the same sum over k as in gemm_quantized.cu, 16 of k at a time in one accumulator,
 * and a weight has the same bits: so a row's result is the same for any number of rows.
 *
 * Roofline: N·K/2 or N·K bytes of codes, and 1/8 or 1/16 of that for scales; memory bound. A
 * multiprocessor of an H100 gets 14 bytes a cycle, so the 72 bytes of 128 weights of 4 bits take 5
 * cycles. At 16 rows they take 15 to 22 instructions (kernels.csv), 4 to 5 cycles of the four
 * schedulers, and shared memory moves x's 512 bytes in 4, or in 2 for a broad tile. */
#include "gemv.cuh"
#include "gemm_tiles.cuh"
#include "lane_codes.cuh"

typedef Tiling<16, 32, 256, 1, 4, 5> Narrow;
typedef Tiling<16, 64, 256, 1, 4, 3> Broad;
typedef Tiling<64, 64, 128, 1, 4, 3> Tall;

/* A kernel's arguments: PackedCall with typed results. */
template <class C> struct Strip {
    Result<C> result; /* of the first row, with the first expert's bias */
    const real *x;
    int64_t x_step;
    const unsigned char *w;
    int64_t row, w_step; /* strides in bytes of w's rows, and of experts */
    Lookup lookup;
    int T, K, padded; /* inputs of a row of w, padded to whole blocks */
    const int32_t *bounds;
    int X, count;
};

/* A warp's rows of the weight in its shared memory for one step of k: the head, codes, the second
 * head. A row is an odd number of 16-byte pieces, so that ldmatrix reads eight rows from different
 * banks. A lane loads one piece of codes of every STEP-th row, and a head; their addresses are
 * computed once. */
template <class S, int KIND> struct Codes {
    static constexpr int BITS = BITS_OF<KIND>, HEADS = HEADS_OF<KIND>, ROWS = S::WARP_COLUMNS;
    static constexpr int PIECES = S::DEEP * BITS / 128, INPUTS = 128 / BITS; /* of one */
    static constexpr int PITCH = (1 + PIECES + (HEADS == 2 ? 2 : 0)) * 16, BYTES_OF = ROWS * PITCH;
    static constexpr int STEP = 32 / PIECES, COUNT = ROWS / STEP;
    static constexpr int PARTS = GROUP / S::DEEP; /* steps per group */
    static constexpr unsigned GROUP_BYTES = 16 * HEADS + GROUP * BITS / 8;
    static_assert(PITCH / 16 % 2 == 1 && 32 % PIECES == 0 && ROWS % STEP == 0, "whole rows");
    static_assert(ROWS * HEADS <= 32, "a lane brings one head at most");
    const unsigned char *from[COUNT], *head; /* at k = 0 */
    unsigned char *to, *head_to;             /* in the first stage */
    int left;                                /* remaining inputs from the lane's first on */
    int heads;                               /* the lane loads one */

    /* For the rows from j on, of `rows` in total. */
    __device__ __forceinline__ Codes(Shared<unsigned char> stage, const unsigned char *w,
                                     int64_t step, int j, int rows, int padded)
    {
        int lane = threadIdx.x % 32, row = lane / PIECES, piece = lane % PIECES;
        int mine = lane / HEADS, part = lane % HEADS;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            from[n] = opaque(w + min(j + row + n * STEP, rows - 1) * step + 16 * (HEADS + piece));
        to = opaque(shared_range(stage, row * PITCH + 16 + 16 * piece, 16));
        head = opaque(w + min(j + mine, rows - 1) * step + 16 * part);
        head_to = opaque(shared_range(stage, mine % ROWS * PITCH + part * (PITCH - 32), 16));
        heads = opaque((int)(mine < ROWS));
        left = opaque(padded - piece * INPUTS);
    }

    /* Starts loading a step into the stage `at` bytes after the first, zero-padded past the last
     * block. */
    __device__ __forceinline__ void load(unsigned step, int at) const
    {
        unsigned group = step / PARTS, on = step % PARTS * (S::DEEP * BITS / 8);
        int bytes = (int)step * S::DEEP < left ? 16 : 0;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            cp_async(to + (at + n * STEP * PITCH), from[n] + ((uint64_t)group * GROUP_BYTES + on),
                     bytes);
        if (heads) cp_async(head_to + at, head + (uint64_t)group * GROUP_BYTES);
    }
};

/* The part of x's tiles a thread loads: 16 bytes of every STEP-th row. */
template <class S> struct Rows {
    static constexpr int STEP = S::THREADS / (S::DEEP / PIECE), COUNT = S::ROWS / STEP;
    const real *from[COUNT]; /* at k = 0 */
    char *to;                /* in the first stage */
    int left, rows; /* numbers left from the thread's first on; rows left from its first on */

    __device__ __forceinline__ Rows(Shared<real> stage, const real *x, int64_t step, int all, int K)
    {
        int row = threadIdx.x / (S::DEEP / PIECE), col = threadIdx.x % (S::DEEP / PIECE) * PIECE;
#pragma unroll
        for (int m = 0; m < COUNT; m++)
            from[m] = opaque(x + min(row + m * STEP, all - 1) * step + col);
        to = opaque(reinterpret_cast<char *>(shared_range(stage, row * S::ALONG + col, PIECE)));
        left = opaque(K - col);
        rows = opaque(all - row);
    }

    /* Starts loading a step, zero-padded past K. Missing rows are not loaded; their results are not
     * read. */
    __device__ __forceinline__ void load(unsigned step, int at) const
    {
        int bytes = (int)step * S::DEEP < left ? 16 : 0;
#pragma unroll
        for (int m = 0; m < COUNT; m++)
            if (m * STEP < rows)
                cp_async(to + (at + m * STEP * S::ALONG * (int)sizeof(real)),
                         from[m] + (uint64_t)step * S::DEEP, bytes);
    }
};

/* The scales of a column's blocks in one step, two per register, and offsets. */
template <class S, int KIND> struct Heads {
    static constexpr int COUNT = S::DEEP / BLOCK / 2;
    uint32_t scales[COUNT], offsets[COUNT];

    __device__ __forceinline__ void load(Shared<unsigned char> codes, int row, int k)
    {
        typedef Codes<S, KIND> W;
        int at = row * W::PITCH + (S::DEEP < GROUP ? k % GROUP / BLOCK * 2 : 0);
        const uint32_t *from =
            reinterpret_cast<const uint32_t *>(shared_range(codes, at, 4 * COUNT));
#pragma unroll
        for (int i = 0; i < COUNT; i++) scales[i] = from[i];
        from = reinterpret_cast<const uint32_t *>(
            shared_range(codes, at + (KIND == SHIFTED ? W::PITCH - 32 : 0), 4 * COUNT));
#pragma unroll
        for (int i = 0; i < COUNT; i++) offsets[i] = KIND == SHIFTED ? from[i] : 0;
    }
};

/* A warp's part of one step: all rows of x, and the warp's columns. */
template <class S, int KIND>
__device__ static __forceinline__ void strip_multiply(Sums<S> &sum, Shared<real> x,
                                                      Shared<unsigned char> codes,
                                                      const Lookup &lookup, int k)
{
    typedef Codes<S, KIND> W;
    constexpr int AT_ONCE = 4 * W::INPUTS / BLOCK; /* blocks per ldmatrix */
    int lane = threadIdx.x % 32;
    Heads<S, KIND> heads[S::EIGHTS];
#pragma unroll
    for (int n = 0; n < S::EIGHTS; n++) heads[n].load(codes, 8 * n + lane / 4, k);
#pragma unroll
    for (int first = 0; first < S::DEEP / BLOCK; first += AT_ONCE) {
        uint32_t words[S::EIGHTS][4];
#pragma unroll
        for (int n = 0; n < S::EIGHTS; n++)
            ldmatrix(words[n], shared_range(codes,
                                            (8 * n + lane % 8) * W::PITCH + 16 +
                                                (first * BLOCK / W::INPUTS + lane / 8) * 16,
                                            16));
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
            uint32_t right[S::EIGHTS][4];
            int block = first + b;
#pragma unroll
            for (int n = 0; n < S::EIGHTS; n++) {
                uint32_t low = words[n][b * 4 / AT_ONCE],
                         high = words[n][(b * 4 / AT_ONCE + 1) % 4];
                uint32_t scales = heads[n].scales[block / 2], offsets = heads[n].offsets[block / 2];
                if (block % 2)
                    widen_block<KIND, true>(right[n], lookup, low, high, scales, offsets);
                else
                    widen_block<KIND, false>(right[n], lookup, low, high, scales, offsets);
            }
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int m = 0; m < S::I; m++) {
                    uint32_t left[4];
                    fragment<false, false>(left, x, S::ALONG, m * 16, block * BLOCK + half * 16);
#pragma unroll
                    for (int n = 0; n < S::EIGHTS; n++)
                        mma(sum.at[m][n], left, right[n][2 * half], right[n][2 * half + 1]);
                }
        }
    }
}

template <class S, int KIND, class C>
static __global__ void __launch_bounds__(S::THREADS, 3)
    few_kernel(__grid_constant__ const Strip<C> p)
{
    typedef Codes<S, KIND> W;
    constexpr int STAGE = S::X_REALS * (int)sizeof(real) + 4 * W::BYTES_OF;
    DYNAMIC_SHARED(bytes);
    ColumnTile place = column_tile(p.result.N, S::COLUMNS, p.count);
    int j0 = place.column, tile = place.tile;
    ExpertTile own = {0, tile * S::ROWS, min((tile + 1) * S::ROWS, p.T)};
    if (p.bounds && !expert_tile(&own, p.bounds, p.X, S::ROWS, tile)) return;
    own.e += place.part * p.X;
    const real *x = p.x + own.begin * p.x_step;
    int rows = own.end - own.begin, steps = (p.K + S::DEEP - 1) / S::DEEP;
    int warp = threadIdx.x / 32, j = warp * S::WARP_COLUMNS;
    Shared<real> xs = shared_part<real>(bytes, 0, S::STAGES * STAGE / 2);
    Shared<unsigned char> codes = bytes + (S::X_REALS * (int)sizeof(real) + warp * W::BYTES_OF);
    Rows<S> of_x(xs, x, p.x_step, rows, p.K);
    W of_w(codes, p.w + own.e * p.w_step, p.row, j0 + j, p.result.N, p.padded);
    SHARED_ARRAY(Lookup, table, 1); /* read into registers */
    if (threadIdx.x == 0) table[0] = p.lookup;
    __syncthreads();
    Lookup lookup = table[0];
    Sums<S> sum = {};
    auto start = [&](int step, int at) {
        if (step < steps) {
            of_x.load((unsigned)step, at);
            of_w.load((unsigned)step, at);
        }
        cp_async_commit();
    };
    for (int step = 0; step < S::STAGES - 1; step++) start(step, step * STAGE);
    int now = 0, before = (S::STAGES - 1) * STAGE; /* offsets of two stages */
    for (int step = 0; step < steps; step++) {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        start(step + S::STAGES - 1, before);
        strip_multiply<S, KIND>(sum, shared_part<real>(bytes, now, S::X_REALS), codes + now, lookup,
                                step * S::DEEP);
        before = now;
        now = now == (S::STAGES - 1) * STAGE ? 0 : now + STAGE;
    }
    sums_put<S>(bytes, sum, result_of(p.result, own, p.T, place.part), rows, 0, j, j0);
}

/* ---- launching ---- */

template <class S> static int64_t tiles_in(const PackedCall &c)
{
    int64_t rows = c.bounds ? expert_tiles(c.X, c.T, S::ROWS) : cuda_blocks(c.T, S::ROWS);
    return rows * cuda_blocks(c.N, S::COLUMNS) * c.count;
}

template <class S, int KIND, class C> static void launch(CudaDevice *cuda, const PackedCall &c)
{
    Result<C> result = {(C *)c.y, (const C *)c.plus, c.bias, c.y_step, c.N, c.narrow_bias, false};
    result.wide = result_is_wide(result);
    int padded = (c.K + BLOCK - 1) / BLOCK * BLOCK;
    Strip<C> strip = {result, c.x, c.x_step, c.w.data, c.w.row, c.w_step, lookup_of(c.w),
                      c.T,    c.K, padded,   c.bounds, c.X,     c.count};
    size_t stage = S::X_REALS * sizeof(real) + 4 * Codes<S, KIND>::BYTES_OF;
    size_t stages = S::STAGES * stage, out = S::ROWS * S::OUT * sizeof(float);
    LAUNCH(cuda, (few_kernel<S, KIND, C>), (unsigned)tiles_in<S>(c), S::THREADS,
           stages > out ? stages : out, strip);
}

/* Tall tiles widen a weight once for all rows, broad ones read x once for more columns; neither is
 * used if there are too few for the card. */
template <int KIND, class C> static void run(CudaDevice *cuda, const PackedCall &call)
{
    int rows = call.bounds ? call.T / call.X : call.T;
    if (rows > Narrow::ROWS && tiles_in<Tall>(call) >= (cuda->processors + 1) / 2)
        launch<Tall, KIND, C>(cuda, call);
    else if (tiles_in<Broad>(call) >= 2 * cuda->processors)
        launch<Broad, KIND, C>(cuda, call);
    else
        launch<Narrow, KIND, C>(cuda, call);
}

template <int KIND> static void run_kind(CudaDevice *cuda, const PackedCall &call)
{
    if (call.f32_out)
        run<KIND, float>(cuda, call);
    else
        run<KIND, real>(cuda, call);
}

void packed_few(CudaDevice *cuda, const PackedCall &call)
{
    switch (call.w.type) {
    case DTYPE_INT8: return run_kind<BYTES>(cuda, call);
    case DTYPE_Q4_1: return run_kind<SHIFTED>(cuda, call);
    case DTYPE_MXFP4: return run_kind<POWERS>(cuda, call);
    default: return run_kind<NIBBLES>(cuda, call);
    }
}
