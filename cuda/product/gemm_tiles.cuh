/* cuda/product/gemm_tiles.cuh - shared by the kernels of products with base weights: tilings, the
 * operand of rows, a warp's multiplication, and a tile's results.
 *
 * An element is one sum over k, from 0 on and 16 of k at a time, in every tiling and for every type
 * of weight. So the choice of a tiling changes no bit. */
#ifndef TINSMITH_CUDA_PRODUCT_GEMM_TILES_CUH
#define TINSMITH_CUDA_PRODUCT_GEMM_TILES_CUH

#include "fragments.cuh"

/* Tiles of ROWS by COLUMNS, DEEP of k between barriers, by WARPS_I by WARPS_J warps; further warps
 * only load operands. */
template <int ROWS_, int COLUMNS_, int DEEP_, int WARPS_I, int WARPS_J, int STAGES_,
          int WARPS = WARPS_I * WARPS_J>
struct Tiling {
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, DEEP = DEEP_, STAGES = STAGES_;
    static constexpr int ACROSS_WARPS = WARPS_J, THREADS = WARPS * 32;
    static constexpr int WARP_ROWS = ROWS / WARPS_I, WARP_COLUMNS = COLUMNS / WARPS_J;
    static constexpr int I = WARP_ROWS / 16, J = WARP_COLUMNS / 16; /* fragments of a warp */
    static constexpr int EIGHTS = WARP_COLUMNS / 8;                 /* 8-column products */
    static constexpr int ALONG = DEEP + APART;                      /* reals per row of x */
    static constexpr int OUT = COLUMNS + APART;                     /* floats per row */
    static constexpr int X_REALS = ROWS * ALONG;
};

/* ---- from memory to shared memory ---- */

/* Eight numbers of an unaligned row of x, zero-padded after the first `valid`. */
__device__ static __forceinline__ uint4 fetch(const real *from, int valid)
{
    float v[PIECE];
#pragma unroll
    for (int e = 0; e < PIECE; e++) v[e] = e < valid ? f32(from[e]) : 0.0f;
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

/* The part of each tile (HEIGHT rows of WIDTH reals) a thread loads: 16 bytes at one place of COUNT
 * rows. Offsets are computed once. Rows past the end repeat the last row; their results are not
 * read. */
template <class S, int HEIGHT, int WIDTH> struct Pieces {
    static constexpr int STEP = S::THREADS / (WIDTH / PIECE), COUNT = HEIGHT / STEP;
    static constexpr int PITCH = WIDTH + APART;
    static_assert(HEIGHT % STEP == 0, "all threads bring as much");
    int row, col;
    unsigned from[COUNT]; /* byte offsets from the tile's first number */

    __device__ __forceinline__ Pieces(int64_t step, int rows)
    {
        row = threadIdx.x / (WIDTH / PIECE);
        col = threadIdx.x % (WIDTH / PIECE) * PIECE;
#pragma unroll
        for (int m = 0; m < COUNT; m++)
            from[m] = opaque((unsigned)(min(row + m * STEP, rows - 1) * (int)step + col) *
                             (int)sizeof(real));
    }

    /* Piece m of the tile at `first`, and its place in shared memory. */
    __device__ __forceinline__ const real *of(const real *first, int m) const
    {
        return reinterpret_cast<const real *>(reinterpret_cast<const char *>(first) + from[m]);
    }

    __device__ __forceinline__ real *place(Shared<real> tile, int m) const
    {
        return shared_range(tile, (row + m * STEP) * PITCH + col, PIECE);
    }
};

/* The shape of an operand's tile: SIDE of the result's rows or columns by DEEP of k, along k, or
 * across it. */
template <class S, int SIDE, bool IS_ACROSS> struct Operand {
    static constexpr int HEIGHT = IS_ACROSS ? S::DEEP : SIDE, WIDTH = IS_ACROSS ? SIDE : S::DEEP;
    static constexpr int PITCH = WIDTH + APART, REALS = HEIGHT * PITCH;
    typedef Pieces<S, HEIGHT, WIDTH> Brought;
};

template <class S> using XPieces = typename Operand<S, S::ROWS, false>::Brought;

/* Starts loading the tile of x at k, zero-padded past K. */
template <bool IS_ALIGNED, class P>
__device__ static __forceinline__ void x_load(const P &piece, Shared<real> tile, const real *x,
                                              int k, int K)
{
    int valid = K - (k + piece.col);
#pragma unroll
    for (int m = 0; m < P::COUNT; m++) {
        if constexpr (IS_ALIGNED)
            cp_async(piece.place(tile, m), piece.of(x + k, m), valid > 0 ? 16 : 0);
        else
            *reinterpret_cast<uint4 *>(piece.place(tile, m)) = fetch(piece.of(x + k, m), valid);
    }
}

/* ---- a tile ---- */

template <class S> struct Sums {
    float at[S::I][S::EIGHTS][4];
};

/* A warp's part of one step of k. */
template <class S, bool X_ACROSS, bool W_ACROSS>
__device__ static __forceinline__ void multiply(Sums<S> &sum, Shared<real> x, Shared<real> w, int i,
                                                int j)
{
    typedef Operand<S, S::ROWS, X_ACROSS> OfX;
    typedef Operand<S, S::COLUMNS, W_ACROSS> OfW;
#pragma unroll
    for (int k = 0; k < S::DEEP; k += 16) {
        uint32_t left[S::I][4], right[S::J][4];
#pragma unroll
        for (int m = 0; m < S::I; m++)
            fragment<X_ACROSS, false>(left[m], x, OfX::PITCH, i + m * 16, k);
#pragma unroll
        for (int n = 0; n < S::J; n++)
            fragment<W_ACROSS, true>(right[n], w, OfW::PITCH, j + n * 16, k);
#pragma unroll
        for (int m = 0; m < S::I; m++)
#pragma unroll
            for (int n = 0; n < 2 * S::J; n++)
                mma(sum.at[m][n], left[m], right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
}

/* Writes a warp's sums to shared memory. */
template <class S>
__device__ static __forceinline__ void sums_keep(Shared<float> out, const Sums<S> &sum, int i,
                                                 int j)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < S::I; m++)
#pragma unroll
        for (int n = 0; n < S::EIGHTS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = i + m * 16 + half * 8 + lane / 4, col = j + n * 8 + lane % 4 * 2;
                *reinterpret_cast<float2 *>(shared_range(out, row * S::OUT + col, 2)) =
                    make_float2(sum.at[m][n][2 * half], sum.at[m][n][2 * half + 1]);
            }
}

/* A tile's result: y (rows,N) = sums + bias + plus; bias and plus may be NULL. y and plus have the
 * row stride `step`. */
template <class C> struct Result {
    C *y;
    const C *plus;
    const float *bias;
    int64_t step;
    int N;
    bool narrow; /* the bias is rounded to bf16 */
    bool wide;   /* 16-byte accesses may be used */
};

template <class C> static inline bool result_is_wide(const Result<C> &r)
{
    uintptr_t all = (uintptr_t)r.y | (uintptr_t)r.plus | (uintptr_t)r.bias;
    return r.N % PIECE == 0 && r.step % PIECE == 0 && all % 16 == 0;
}

/* The same from the tile's first pair on, with its expert's bias, of T pairs in all. */
template <class C>
__device__ static __forceinline__ Result<C> result_of(Result<C> r, const ExpertTile &own, int T,
                                                      int part)
{
    int64_t at = (own.begin + (int64_t)part * T) * r.step;
    r.y += at;
    if (r.plus) r.plus += at;
    if (r.bias) r.bias += (int64_t)own.e * r.N;
    return r;
}

/* W elements of y. */
template <int W, class C>
__device__ static __forceinline__ void put(const Result<C> &r, int64_t at, int j, const float *sum)
{
    float v[W], more[W];
    load<W>(v, sum);
    if (r.bias) {
        load<W>(more, r.bias + j);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] += r.narrow ? f32(to_real(more[e])) : more[e];
    }
    if (r.plus) {
        load<W>(more, r.plus + at);
#pragma unroll
        for (int e = 0; e < W; e++) v[e] += more[e];
    }
    store<W>(r.y + at, v);
}

/* Writes the tile at column j0 to y, whose first row is the tile's. */
template <class S, class C>
__device__ static __forceinline__ void tile_put(const Result<C> &r, Shared<float> out, int rows,
                                                int j0)
{
    for (int piece = threadIdx.x; piece < S::ROWS * S::COLUMNS / PIECE; piece += S::THREADS) {
        int row = piece / (S::COLUMNS / PIECE), col = piece % (S::COLUMNS / PIECE) * PIECE;
        int j = j0 + col;
        if (row >= rows || j >= r.N) continue;
        const float *sum = shared_range(out, row * S::OUT + col, PIECE);
        int64_t at = row * r.step + j;
        if (r.wide) {
            put<PIECE>(r, at, j, sum);
        } else {
            for (int e = 0; e < PIECE && j + e < r.N; e++) put<1>(r, at + e, j + e, sum + e);
        }
    }
}

/* Writes a block's tile at column j0 to y, from the warps' sums; `bytes` held the stages. */
template <class S, class C>
__device__ static __forceinline__ void sums_put(Shared<unsigned char> bytes, const Sums<S> &sum,
                                                const Result<C> &r, int rows, int i, int j, int j0)
{
    cp_async_wait<0>();
    __syncthreads();
    Shared<float> out = shared_part<float>(bytes, 0, S::ROWS * S::OUT);
    if (i < rows) sums_keep<S>(out, sum, i, j);
    __syncthreads();
    tile_put<S>(r, out, rows, j0);
}

#endif
