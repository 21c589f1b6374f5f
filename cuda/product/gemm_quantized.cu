/* cuda/product/gemm_quantized.cu - products with base weights of 8 and 4 bits, and lookup of their
 * rows.
 *
 *   y (T,N) = x (T,K)·wᵀ [+ bias] [+ plus]     of w (N,K): linear, head, grouped_linear
 *   y (T,N) = x (T,K)·w [+ plus]               of w (K,N): their backward
 *
 * A block computes a tile of y. The weight's codes and the tile of x are loaded with cp.async,
 * several steps of k ahead; while one step is multiplied, the next one's codes are widened to bf16
 * in one of two tiles in shared memory. So there is one barrier per step, and nothing wide is ever
 * in global memory.
 *
 * There are three shapes of tile, and gemv.cu's for decoding and other forward products of few
 * rows. All have one order of sums (gemm_tiles.cuh): any number of rows has the same bits, in
 * training, prefill and decoding, and also the bits of gemm.cu with the widened weight. The cost
 * compared with a bf16 weight: many rows are multiplied with mma, not with cuBLASLt's algorithm,
 * which is faster on Hopper, and each tile of rows widens its weights again. A wide tile has 256
 * rows, so widening is a third of its work; a panel widened once in global memory would save that,
 * but be written and read, 4 bytes per weight.
 *
 * Roofline: 2·T·N·K flops, N·K/2 or N·K bytes of codes, and 1/8 or 1/16 of that for scales: compute
 * bound from about 100 or 200 rows on, memory bound below. */
#include "gemm_quantized.cuh"
#include "gemm_tiles.cuh"
#include "gemv.cuh"

typedef Tiling<256, 64, 32, 4, 1, 3> Wide;
typedef Tiling<64, 64, 64, 2, 4, 4> Middle;
typedef Tiling<16, 32, 128, 1, 2, 6, 8> Few;

template <class S> static constexpr bool IS_WIDE = S::ROWS == Wide::ROWS; /* its x is aligned */

enum { EMBED_THREADS = 256 };

/* A kernel's arguments: PackedCall with typed results. */
template <class C> struct Tiles {
    Result<C> result; /* of the first row, with the first expert's bias */
    const real *x;
    int64_t x_step;
    bool aligned; /* rows of x are 16-byte aligned */
    Packed w;
    int T, K, rows; /* rows of w */
    int padded;     /* inputs of a row of w, padded to whole blocks */
    int64_t w_step;
    const int32_t *bounds;
    int X, count;
};

/* A tile of the weight: HEIGHT rows by WIDTH inputs, as codes and in bf16. In shared memory a row's
 * head precedes its codes. A thread loads 16 bytes of every STEP-th row. */
template <class S, int BITS, bool IS_ACROSS> struct Weights {
    static constexpr int WIDTH = IS_ACROSS ? S::COLUMNS : S::DEEP,
                         HEIGHT = IS_ACROSS ? S::DEEP : S::COLUMNS;
    static constexpr int PITCH = WIDTH + APART, REALS = HEIGHT * PITCH;
    static constexpr int CODES = WIDTH * BITS / 8; /* bytes of a row */
    static constexpr int MOST = CODES / 16 + (BITS == 8 ? 1 : 2);
    static constexpr int PARTS = MOST <= 4 ? 4 : MOST <= 8 ? 8 : 16; /* threads of a row */
    static constexpr int STEP = S::THREADS / PARTS, COUNT = (HEIGHT + STEP - 1) / STEP;
    static_assert(CODES % 16 == 0 && GROUP % WIDTH == 0, "whole pieces, of one group");
    static_assert(COUNT == 1 || HEIGHT % STEP == 0, "all threads of a row bring as much");
    const unsigned char *from[COUNT]; /* at k = 0 */
    int row, place, pitch;            /* of the first piece in the tile; place < 0: no piece */
    int input;                        /* the piece's first input in the tile; 0 for a head */
    bool codes;                       /* the piece has codes */

    /* For rows [0, rows) and inputs [0, padded); columns of y from j0 on. */
    __device__ __forceinline__ Weights(const unsigned char *w, const Packed &p, int j0, int rows,
                                       int padded)
    {
        int at = threadIdx.x % PARTS * 16;
        row = threadIdx.x / PARTS;
        pitch = p.head + CODES;
        codes = at >= p.head;
        input = codes ? (at - p.head) * 8 / BITS : 0;
        bool mine = at < pitch && row < HEIGHT && (!IS_ACROSS || j0 + input < padded);
        place = opaque(mine ? row * pitch + at : -1);
        int64_t first = at + (IS_ACROSS ? group_of(p, j0) : 0);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            int i = row + n * STEP;
            from[n] = opaque(w + first + (IS_ACROSS ? i : min(j0 + i, rows - 1)) * p.row);
        }
    }

    /* The offset in a row of the piece of the tile at input k, minus `at`, in bytes. */
    __device__ __forceinline__ int64_t group_of(const Packed &p, int k) const
    {
        return group_at(p.head, BITS, k) + (codes ? k % GROUP * BITS / 8 : 0);
    }

    /* Starts loading the step at k, with zeros for missing data. */
    __device__ __forceinline__ void load(Shared<unsigned char> raw, const Packed &p, int k,
                                         int rows, int padded) const
    {
        if (place < 0) return;
        int64_t on = IS_ACROSS ? k * p.row : group_of(p, k);
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            int i = row + n * STEP;
            bool valid = IS_ACROSS ? k + i < rows : S::DEEP == BLOCK || k + input < padded;
            cp_async(shared_range(raw, place + n * STEP * pitch, 16), from[n] + on, valid ? 16 : 0);
        }
    }

    /* Widens the step's inputs from k on. */
    __device__ static __forceinline__ void widen(Shared<real> tile, Shared<unsigned char> raw,
                                                 const Packed &p, Shared<float> levels, int k)
    {
        int pitch = p.head + CODES;
        constexpr int PIECES = HEIGHT * (WIDTH / EIGHT) / S::THREADS;
#pragma unroll
        for (int n = 0; n < PIECES; n++) {
            unsigned piece = threadIdx.x + n * S::THREADS;
            unsigned i = piece / (WIDTH / EIGHT), at = piece % (WIDTH / EIGHT) / 4 * BLOCK;
            int block = (int)((k + at) % GROUP / BLOCK), part = piece % 4;
            const unsigned char *head = shared_range(raw, i * pitch, p.head);
            const unsigned char *codes =
                shared_range(raw, i * pitch + p.head + at * BITS / 8, 4 * BITS);
            uint4 eight = widen_eight<BITS>(p, head, block, codes, part, levels);
            const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
            real *to = shared_range(tile, i * PITCH + at + 2 * part, BLOCK - 6);
#pragma unroll
            for (int e = 0; e < 4; e++) *reinterpret_cast<uint32_t *>(to + 8 * e) = two[e];
        }
    }
};

/* Reals of shared memory before the codes: of x, and of two widened tiles. */
template <class S> static constexpr int X_REALS = S::STAGES * S::X_REALS;
template <class W> static constexpr int WIDE_REALS = 2 * W::REALS;
template <class S, class W>
static constexpr int CODES_AT = (X_REALS<S> + WIDE_REALS<W>)*(int)sizeof(real);

template <class S, int BITS, bool IS_ACROSS, class C>
static __global__ void __launch_bounds__(S::THREADS, 2)
    packed_kernel(__grid_constant__ const Tiles<C> p)
{
    typedef Weights<S, BITS, IS_ACROSS> W;
    DYNAMIC_SHARED(bytes);
    SHARED_ARRAY(float, levels, LEVELS);
    ColumnTile place = column_tile(p.result.N, S::COLUMNS, p.count);
    int j0 = place.column, tile = place.tile;
    ExpertTile own = {0, tile * S::ROWS, min((tile + 1) * S::ROWS, p.T)};
    if (p.bounds && !expert_tile(&own, p.bounds, p.X, S::ROWS, tile)) return;
    own.e += place.part * p.X;
    if (threadIdx.x < LEVELS) levels[threadIdx.x] = p.w.levels[threadIdx.x];
    const real *x = p.x + own.begin * p.x_step;
    const unsigned char *w = p.w.data + own.e * p.w_step;
    int rows = own.end - own.begin, steps = (p.K + S::DEEP - 1) / S::DEEP;
    int warp = threadIdx.x / 32, raw_bytes = W::HEIGHT * (p.w.head + W::CODES);
    int i = warp / S::ACROSS_WARPS * S::WARP_ROWS, j = warp % S::ACROSS_WARPS * S::WARP_COLUMNS;
    Shared<real> xs = shared_part<real>(bytes, 0, X_REALS<S>);
    Shared<real> wide = shared_part<real>(bytes, X_REALS<S> * (int64_t)sizeof(real), WIDE_REALS<W>);
    Shared<unsigned char> raw =
        shared_part<unsigned char>(bytes, CODES_AT<S, W>, S::STAGES * raw_bytes);
    XPieces<S> of_x(p.x_step, rows);
    W of_w(w, p.w, j0, p.rows, p.padded);
    auto codes_load = [&](int step, int stage) {
        if (step < steps) of_w.load(raw + stage * raw_bytes, p.w, step * S::DEEP, p.rows, p.padded);
    };
    auto x_start = [&](int step, int stage) {
        if (step < steps && (IS_WIDE<S> || p.aligned))
            x_load<true>(of_x, xs + stage * S::X_REALS, x, step * S::DEEP, p.K);
        else if (step < steps)
            x_load<false>(of_x, xs + stage * S::X_REALS, x, step * S::DEEP, p.K);
    };
    auto stage_widen = [&](int step, int stage) {
        if (step < steps)
            W::widen(wide + step % 2 * W::REALS, raw + stage * raw_bytes, p.w, levels,
                     IS_ACROSS ? j0 : step * S::DEEP);
    };
    Sums<S> sum = {};
    codes_load(0, 0);
    for (int step = 0; step < S::STAGES - 1; step++) {
        x_start(step, step);
        codes_load(step + 1, step + 1);
        cp_async_commit();
    }
    cp_async_wait<S::STAGES - 2>();
    __syncthreads();
    stage_widen(0, 0);
    int before = S::STAGES - 1, now = 0, next = 1; /* the stages of three steps */
    for (int step = 0; step < steps; step++) {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        x_start(step + S::STAGES - 1, before);
        codes_load(step + S::STAGES, now);
        cp_async_commit();
        if (i < rows)
            multiply<S, false, IS_ACROSS>(sum, xs + now * S::X_REALS, wide + step % 2 * W::REALS, i,
                                          j);
        stage_widen(step + 1, next);
        before = now;
        now = next;
        next = next == S::STAGES - 1 ? 0 : next + 1;
    }
    sums_put<S>(bytes, sum, result_of(p.result, own, p.T, place.part), rows, i, j, j0);
}

/* ---- launching ---- */

template <class S> static int64_t tiles_in(const PackedCall &call)
{
    int64_t rows =
        call.bounds ? expert_tiles(call.X, call.T, S::ROWS) : cuda_blocks(call.T, S::ROWS);
    return rows * cuda_blocks(call.N, S::COLUMNS) * call.count;
}

template <class S, int BITS, bool IS_ACROSS, class C>
static void launch(CudaDevice *cuda, const Tiles<C> &tiles, int64_t blocks)
{
    typedef Weights<S, BITS, IS_ACROSS> W;
    size_t stages = (size_t)(CODES_AT<S, W> + S::STAGES * W::HEIGHT * (tiles.w.head + W::CODES));
    size_t out = S::ROWS * S::OUT * sizeof(float);
    LAUNCH(cuda, (packed_kernel<S, BITS, IS_ACROSS, C>), (unsigned)blocks, S::THREADS,
           stages > out ? stages : out, tiles);
}

/* The cheapest tiles. For 64 of k a wide tile moves 1,060 times 128 bytes through shared memory,
 * for any number of live rows, and gemv.cu's of 64 rows 360 times: so a wide one pays off from 129
 * rows on. In backward, a scheduler issues 720 instructions for a wide tile and 780 for a middle
 * one (kernels.csv), so it pays off from 65 rows on. But not if more than half of the card would be
 * idle. Unaligned rows of x use middle tiles. */
template <int BITS, bool IS_ACROSS, class C>
static void run(CudaDevice *cuda, const PackedCall &call, const Tiles<C> &tiles)
{
    int rows = call.bounds ? call.T / call.X : call.T, least = (cuda->processors + 1) / 2;
    bool many = rows > (IS_ACROSS ? 1 : 2) * Middle::ROWS;
    if (many && tiles.aligned && tiles_in<Wide>(call) >= least)
        return launch<Wide, BITS, IS_ACROSS>(cuda, tiles, tiles_in<Wide>(call));
    if constexpr (IS_ACROSS) {
        if (rows <= Few::ROWS || tiles_in<Middle>(call) < least)
            return launch<Few, BITS, IS_ACROSS>(cuda, tiles, tiles_in<Few>(call));
    } else {
        if (tiles.aligned) return packed_few(cuda, call);
    }
    launch<Middle, BITS, IS_ACROSS>(cuda, tiles, tiles_in<Middle>(call));
}

template <class C> static Tiles<C> tiles_of(const PackedCall &c)
{
    Result<C> result = {(C *)c.y, (const C *)c.plus, c.bias, c.y_step, c.N, c.narrow_bias, false};
    int cols = c.across ? c.N : c.K, rows = c.across ? c.K : c.N;
    result.wide = result_is_wide(result);
    bool aligned = c.x_step % PIECE == 0 && (uintptr_t)c.x % 16 == 0;
    return {result,   c.x,      c.x_step,
            aligned,  c.w,      c.T,
            c.K,      rows,     (cols + BLOCK - 1) / BLOCK * BLOCK,
            c.w_step, c.bounds, c.X,
            c.count};
}

template <int BITS> static void run_bits(CudaDevice *cuda, const PackedCall &call)
{
    if (call.across)
        run<BITS, true>(cuda, call, tiles_of<real>(call));
    else if (call.f32_out)
        run<BITS, false>(cuda, call, tiles_of<float>(call));
    else
        run<BITS, false>(cuda, call, tiles_of<real>(call));
}

void packed_product(CudaDevice *cuda, const PackedCall &call)
{
    if (cuda->rehearsing || cuda->status) return;
    if (call.w.bits == 8)
        run_bits<8>(cuda, call);
    else
        run_bits<4>(cuda, call);
}

/* ---- lookup of rows ---- */

template <int BITS>
static __global__ void __launch_bounds__(EMBED_THREADS)
    packed_embed_kernel(real *y, const int32_t *ids, __grid_constant__ const Packed w, int T, int D)
{
    SHARED_ARRAY(float, levels, LEVELS);
    if (threadIdx.x < LEVELS) levels[threadIdx.x] = w.levels[threadIdx.x];
    __syncthreads();
    int per_row = (D + BLOCK - 1) / BLOCK * (BLOCK / EIGHT);
    int64_t piece = (int64_t)blockIdx.x * EMBED_THREADS + threadIdx.x;
    if (piece >= (int64_t)T * per_row) return;
    int64_t t = piece / per_row;
    int k = (int)(piece % per_row) * EIGHT;
    int block = k % GROUP / BLOCK, part = k % BLOCK / EIGHT, first = k - 6 * part;
    const unsigned char *group = w.data + ids[t] * w.row + group_at(w.head, BITS, k);
    const unsigned char *codes = group + w.head + block * BLOCK * BITS / 8;
    uint4 eight = widen_eight<BITS>(w, group, block, codes, part, levels);
    const uint32_t two[4] = {eight.x, eight.y, eight.z, eight.w};
    real *to = y + t * D + first;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (D % 2 == 0 && first + 8 * e < D) *reinterpret_cast<uint32_t *>(to + 8 * e) = two[e];
        if (D % 2 && first + 8 * e < D) to[8 * e] = to_real(low_of(two[e]));
        if (D % 2 && first + 8 * e + 1 < D) to[8 * e + 1] = to_real(high_of(two[e]));
    }
}

void packed_embed(CudaDevice *cuda, real *y, const int32_t *ids, const Packed &w, int T, int D)
{
    auto kernel = w.bits == 8 ? packed_embed_kernel<8> : packed_embed_kernel<4>;
    int64_t pieces = (int64_t)T * cuda_blocks(D, BLOCK) * (BLOCK / EIGHT);
    LAUNCH(cuda, kernel, cuda_blocks(pieces, EMBED_THREADS), EMBED_THREADS, 0, y, ids, w, T, D);
}
