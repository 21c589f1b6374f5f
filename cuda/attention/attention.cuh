/* cuda/attention/attention.cuh - shared code of the attention kernels: packed rows, tiles in shared
 * memory, and products of tiles.
 *
 * The H/G heads that share a key-value head are packed as rows: row r of a span is head r % group
 * of its query r / group. So a tile of keys serves all heads of a group, and in decoding, with one
 * query per span, the heads fill the tile.
 *
 * A tile is [row][E_PAD] bf16 in shared memory, zero-padded past the last row and past E. Its
 * pieces of 16 bytes are swizzled (piece ^ row % 8), so that the eight rows of an ldmatrix are in
 * different banks. E_PAD is 64, 128 or 256; EXACT means E = E_PAD, which lets every loop unroll. */
#ifndef TINSMITH_CUDA_ATTENTION_ATTENTION_CUH
#define TINSMITH_CUDA_ATTENTION_ATTENTION_CUH

#include "../runtime/kernel.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

enum { PIECE = 8 }; /* elements of 16 bytes: the unit of a cp.async copy and of a row of ldmatrix */

/* H/G, with a constant for dividing by it: r / size = r·magic >> 32 for r < 2^32 / size. */
typedef struct Group {
    int size;
    unsigned magic;
} Group;

static inline Group group_of(int size)
{
    return {size, size > 1 ? 0xFFFFFFFFu / (unsigned)size + 1 : 0};
}

__device__ static __forceinline__ int group_query(Group group, int row)
{
    return group.size == 1 ? row : (int)__umulhi((unsigned)row, group.magic);
}

/* Rows in memory: row r is at base + r/group·step + r%group·E, for r < count. */
typedef struct Rows {
    const real *base;
    int64_t step;
    Group group;
    int count;
} Rows;

__device__ static __forceinline__ const real *rows_at(const Rows &rows, int row, int E)
{
    int query = group_query(rows.group, row);
    return rows.base + query * rows.step + (row - query * rows.group.size) * E;
}

/* The rows of one group of heads in an array (T,H,E), from row t on. */
__device__ static __forceinline__ Rows rows_of_group(const real *array, int t, int queries,
                                                     Group group, int g, int H, int E)
{
    return {array + ((int64_t)t * H + g * group.size) * E, (int64_t)H * E, group,
            queries * group.size};
}

/* The rows of key-value head g in an array (T,G,E), from row t on. */
__device__ static __forceinline__ Rows rows_of_head(const real *array, int t, int count, int g,
                                                    int G, int E)
{
    return {array + ((int64_t)t * G + g) * E, (int64_t)G * E, {1, 0}, count};
}

/* Piece p of row r of a tile, as an index of elements. */
template <int E_PAD> __device__ static __forceinline__ int tile_at(int r, int p)
{
    return r * E_PAD + (p ^ (r & 7)) * PIECE;
}

/* Copies COUNT rows, from row `first` on, to a tile. The copies are in flight until cp_async_wait.
 * For odd widths, whose rows are not 16-byte aligned, they are synchronous. */
template <int E_PAD, bool EXACT, int COUNT, int THREADS>
__device__ static __forceinline__ void tile_load(Shared<real> tile, const Rows &rows, int first,
                                                 int E)
{
    constexpr int PIECES = E_PAD / PIECE, APART = THREADS / PIECES;
    static_assert(COUNT % APART == 0, "every thread has as many pieces");
    int top = threadIdx.x / PIECES, p = threadIdx.x % PIECES, column = p * PIECE;
    if (!EXACT && column >= (E + 15) / 16 * 16) return; /* no product reads this column */
    int at = tile_at<E_PAD>(top, p), left = EXACT || column < E ? rows.count - first - top : 0;
    bool even = APART % rows.group.size == 0; /* a thread's rows are whole groups apart */
    const real *from = rows_at(rows, first + top, E) + column;
    int64_t apart = APART / rows.group.size * rows.step;
#pragma unroll
    for (int n = 0; n < COUNT / APART; n++) {
        const real *piece = from + n * apart;
        if (!even) piece = rows_at(rows, first + top + n * APART, E) + column;
        real *to = shared_range(tile, (at ^ n * APART % 8 * PIECE) + n * APART * E_PAD, PIECE);
        if (EXACT || E % PIECE == 0)
            cp_async(to, piece, n * APART < left ? 16 : 0);
        else if constexpr (!EXACT)
            for (int e = 0; e < PIECE; e += 2)
                *(uint32_t *)(to + e) =
                    n * APART < left && column + e < E ? *(const uint32_t *)(piece + e) : 0;
    }
}

/* ---- blocks ---- */

/* How a block of ROW_WARPS·COL_WARPS warps divides its rows and their columns: COL_WARPS warps
 * share 16·M rows, each with its own columns. The kernels' Shapes add the rest of their shared
 * memory. */
template <int PAD, bool EXACT_, int ROW_WARPS, int COL_WARPS_, int M_> struct Layout {
    enum {
        E_PAD = PAD,
        COL_WARPS = COL_WARPS_,
        M = M_,
        ROWS = 16 * M_ * ROW_WARPS,
        THREADS = 32 * ROW_WARPS * COL_WARPS_,
        COLUMNS = PAD / COL_WARPS_,
        TILES = COLUMNS / 8,
        RESIDENT = PAD == 256 ? 1 : 2, /* blocks per multiprocessor that registers must allow */
    };
    static constexpr bool EXACT = EXACT_;
};

/* E, a compile-time constant if tiles have that width. */
template <class S> __device__ static __forceinline__ int width(int E)
{
    return S::EXACT ? (int)S::E_PAD : E;
}

/* ---- products ----
 *
 * A lane computes its index into a tile for ldmatrix once; products only move it, by rows and by
 * pieces. A fragment of the right operand serves all M fragments of the left one. */

/* `at` moved by `pieces` along its row. Only the low three bits of a piece's index are swizzled;
 * where `pieces` has ones, those of the first piece of `at` must be zero. */
__device__ static __forceinline__ int pieces_on(int at, int pieces)
{
    return (at ^ pieces % 8 * PIECE) + pieces / 8 * 8 * PIECE;
}

/* A lane's index for a left operand of 16 rows, from `row` on. */
template <int E_PAD> __device__ static __forceinline__ int left_at(int row)
{
    int lane = threadIdx.x % 32;
    return tile_at<E_PAD>(row + lane % 16, lane / 16);
}

/* For a right operand stored by rows, 16 from `row` on: b of a·bᵀ. */
template <int E_PAD> __device__ static __forceinline__ int right_at(int row)
{
    int lane = threadIdx.x % 32;
    return tile_at<E_PAD>(row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

/* The same for 8 rows and two steps: scores_steps. */
template <int E_PAD> __device__ static __forceinline__ int right_at_8(int row)
{
    int lane = threadIdx.x % 32;
    return tile_at<E_PAD>(row + lane % 8, lane / 8);
}

/* For one stored by columns, 16 from `column` on: b of a·b. */
template <int E_PAD> __device__ static __forceinline__ int across_at(int column)
{
    int lane = threadIdx.x % 32;
    return tile_at<E_PAD>(lane % 16, column / PIECE + lane / 16);
}

/* The fragment of columns [16·k, 16·k+16) of a left operand. */
__device__ static __forceinline__ void fragment_load(uint32_t (&fragment)[4], Shared<real> a,
                                                     int left, int k)
{
    ldmatrix(fragment, shared_range(a, pieces_on(left, 2 * k), PIECE));
}

/* s += a·bᵀ, one step of 16 columns: a is fragments, b 8·TILES rows of a tile. */
template <int E_PAD, int M, int TILES>
__device__ static __forceinline__ void
scores_step(float (&s)[M][TILES][4], const uint32_t (&a)[M][1][4], Shared<real> b, int right, int k)
{
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
        uint32_t pair[4];
        ldmatrix(pair, shared_range(b, pieces_on(right, 2 * k) + j * 8 * E_PAD, PIECE));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma(s[m][j], a[m][0], pair[0], pair[1]);
            mma(s[m][j + 1], a[m][0], pair[2], pair[3]);
        }
    }
}

/* The same for 8 rows of b, and two steps; the second may be past E. */
template <int M>
__device__ static __forceinline__ void scores_steps(float (&s)[M][1][4],
                                                    const uint32_t (&a)[M][2][4], Shared<real> b,
                                                    int right, int k, bool both)
{
    uint32_t pair[4];
    ldmatrix(pair, shared_range(b, pieces_on(right, 2 * k), PIECE));
#pragma unroll
    for (int m = 0; m < M; m++) mma(s[m][0], a[m][0], pair[0], pair[1]);
#pragma unroll
    for (int m = 0; m < M; m++)
        if (both) mma(s[m][0], a[m][1], pair[2], pair[3]);
}

template <int M, int TILES> __device__ static __forceinline__ void clear(float (&sum)[M][TILES][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
        for (int j = 0; j < TILES; j++)
            for (int i = 0; i < 4; i++) sum[m][j][i] = 0.0f;
}

/* s = a·bᵀ of 16·M rows of tile a and 8·TILES rows of tile b. */
template <int E_PAD, bool EXACT, int M, int TILES>
__device__ static __forceinline__ void tile_scores(float (&s)[M][TILES][4], Shared<real> a,
                                                   int left, Shared<real> b, int right, int E)
{
    clear(s);
#pragma unroll
    for (int k = 0; k < E_PAD / 16; k++) {
        if (!EXACT && k * 16 >= E) break;
        uint32_t fragments[M][1][4];
#pragma unroll
        for (int m = 0; m < M; m++) fragment_load(fragments[m][0], a, left + m * 16 * E_PAD, k);
        scores_step<E_PAD>(s, fragments, b, right, k);
    }
}

/* Columns [16·k, 16·k+16) of an mma's result as the left operand of the next one. */
template <int TILES>
__device__ static __forceinline__ void fragment_of(uint32_t (&p)[4], const float (&s)[TILES][4],
                                                   int k)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        p[i] = pack(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
}

/* sum += p·b[:, column..], one step of 16 rows of b: p is fragments, `across` the lane's index of
 * the tile b. */
template <int E_PAD, bool EXACT, int M, int TILES>
__device__ static __forceinline__ void accumulate_step(float (&sum)[M][TILES][4],
                                                       const uint32_t (&p)[M][4], Shared<real> b,
                                                       int across, int k, int column, int E)
{
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
        if (!EXACT && column + j * 8 >= E) break;
        uint32_t pair[4];
        ldmatrix_transposed(pair, shared_range(b, pieces_on(across, j) + k * 16 * E_PAD, PIECE));
#pragma unroll
        for (int m = 0; m < M; m++) {
            mma(sum[m][j], p[m], pair[0], pair[1]);
            mma(sum[m][j + 1], p[m], pair[2], pair[3]);
        }
    }
}

/* Writes a thread's part of one row of an mma's result (half 0: the upper eight rows, 1: the lower)
 * as bf16, times `scale`; `to` is the row's first column, `column` the result's first. */
template <bool EXACT, int TILES>
__device__ static __forceinline__ void row_store(real *to, const float (&sum)[TILES][4], int half,
                                                 float scale, int column, int E)
{
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        int e = column + j * 8 + threadIdx.x % 4 * 2;
        if (EXACT || e < E)
            *(uint32_t *)(to + e) = pack(sum[j][2 * half] * scale, sum[j][2 * half + 1] * scale);
    }
}

enum { ALL = 1 << 30 }; /* a window longer than any sequence */

/* The most keys that a query sees, its own included. An op's window of 0 means no limit. */
static inline int window_of(int window)
{
    return window ? window : ALL;
}

/* A span's part of the work: rows [first, first + count) of the packed rows. */
typedef struct Tile {
    Span span;
    int first, count;
} Tile;

/* Finds the tile of the grid's slot `slot`. Span s owns the slots from row·group/ROWS + s on, which
 * is always enough without a sum over earlier spans; a surplus slot has no tile. Spans are in the
 * order of their rows. The tile that sees the most keys comes first. */
template <int ROWS>
__device__ static __forceinline__ bool tile_find(Tile *tile, const Span *spans, int S, Group group,
                                                 int slot, bool last_first)
{
    int low = 0, high = S;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (spans[middle].row * group.size / ROWS + middle <= slot)
            low = middle;
        else
            high = middle;
    }
    tile->span = spans[low];
    int rows = tile->span.rows * group.size, tiles = (rows + ROWS - 1) / ROWS;
    int i = slot - (tile->span.row * group.size / ROWS + low);
    if (i < 0 || i >= tiles) return false;
    tile->first = (last_first ? tiles - 1 - i : i) * ROWS;
    tile->count = min(ROWS, rows - tile->first);
    return true;
}

/* The slots of a grid in which tile_find finds all tiles. */
static inline unsigned tile_slots(int T, int S, int group, int ROWS)
{
    return (unsigned)((int64_t)T * group / ROWS + S);
}

#endif
