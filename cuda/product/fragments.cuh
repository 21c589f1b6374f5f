/* cuda/product/fragments.cuh - shared by the kernels of products: fragments of a tile in shared
 * memory, a warp's results, and the expert of a tile in a grouped product. */
#ifndef TINSMITH_CUDA_PRODUCT_FRAGMENTS_CUH
#define TINSMITH_CUDA_PRODUCT_FRAGMENTS_CUH

#include "../runtime/kernel.cuh"

enum {
    PIECE = 8, /* reals of one 16-byte access */
    /* Padding of a tile's rows, in reals: the eight rows of an ldmatrix are then in different banks
     * if a row has a multiple of 32 reals. */
    APART = PIECE,
};

/* Four 8×8 matrices for 16 of i from `i` on and 16 of k from `k` on; a tile's rows, of `pitch`
 * reals, go along k, or across it. mma's left operand has them by i first, its right one by k
 * first. */
template <bool IS_ACROSS, bool IS_RIGHT>
__device__ static __forceinline__ void fragment(uint32_t (&r)[4], Shared<real> tile, int pitch,
                                                int i, int k)
{
    int lane = threadIdx.x % 32, matrix = lane / 8;
    i += (IS_RIGHT ? matrix / 2 : matrix % 2) * 8;
    k += (IS_RIGHT ? matrix % 2 : matrix / 2) * 8;
    if constexpr (IS_ACROSS)
        ldmatrix_transposed(r, shared_range(tile, (k + lane % 8) * pitch + i, PIECE));
    else
        ldmatrix(r, shared_range(tile, (i + lane % 8) * pitch + k, PIECE));
}

/* ---- results ---- */

/* A quad's lanes hold two columns each of the four 8-column tiles of a row: v[2·t..] of tile t.
 * Afterwards lane q holds the eight columns of tile q, in order. */
__device__ static __forceinline__ void transpose_quad(float (&v)[PIECE])
{
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        bool upper = threadIdx.x & bit;
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            if (e / 2 & bit) continue;
            float &low = v[e], &high = v[e + 2 * bit];
            float theirs = __shfl_xor_sync(~0u, upper ? low : high, bit);
            low = upper ? theirs : low;
            high = upper ? high : theirs;
        }
    }
}

/* c = or += value, eight elements of which the first `valid` exist. */
template <class C>
__device__ static __forceinline__ void put(C *c, float (&value)[PIECE], bool adds, int valid,
                                           bool aligned)
{
    float before[PIECE];
    if (valid >= PIECE && aligned) {
        if (adds) {
            load<PIECE>(before, c);
#pragma unroll
            for (int e = 0; e < PIECE; e++) value[e] = before[e] + value[e];
        }
        store<PIECE>(c, value);
        return;
    }
#pragma unroll
    for (int e = 0; e < PIECE; e++) {
        if (e >= valid) continue;
        float one[1] = {0.0f};
        if (adds) load<1>(one, c + e);
        one[0] = adds ? one[0] + value[e] : value[e];
        store<1>(c + e, one);
    }
}

/* ---- experts ---- */

/* The pairs of a tile: [begin, end), all of expert e. */
struct ExpertTile {
    int e, begin, end;
};

/* Tiles of `rows` pairs that cover every expert's pairs, for any distribution of P pairs over X
 * experts. The host does not know it, so a grid has this many row tiles; the last ones may be
 * empty. */
static inline int64_t expert_tiles(int X, int P, int rows)
{
    int chosen = X < P ? X : P;
    return chosen + (P - chosen) / rows;
}

__device__ static __forceinline__ int tiles_of(const int2 *bounds, int e, int rows)
{
    int2 own = bounds[e];
    return (own.y - own.x + rows - 1) / rows;
}

/* A block's place among several weights of one input; blocks of one tile of rows are adjacent. */
struct ColumnTile {
    int part, column, tile; /* which weight; first column; tile of rows */
};

__device__ static __forceinline__ ColumnTile column_tile(int N, int columns, int count)
{
    int each = (N + columns - 1) / columns, across = each * count;
    int at = (int)(blockIdx.x % across);
    return {at / each, at % each * columns, (int)(blockIdx.x / across)};
}

/* Finds tile number `tile` in the order of experts; false past the last one. A whole warp must call
 * it. A lane counts the tiles of a 32nd of the experts, so all loads are in flight at once, and the
 * lane whose part has the tile searches there. */
__device__ static __forceinline__ bool expert_tile(ExpertTile *own, const int32_t *bounds, int X,
                                                   int rows, int tile)
{
    const int2 *pairs = reinterpret_cast<const int2 *>(bounds);
    int lane = threadIdx.x % 32, part = (X + 31) / 32, e = lane * part, tiles = 0;
    for (int i = e; i < e + part && i < X; i++) tiles += tiles_of(pairs, i, rows);
    int behind = tiles;
    for (int by = 1; by < 32; by *= 2) {
        int other = __shfl_up_sync(~0u, behind, by);
        if (lane >= by) behind += other;
    }
    unsigned reach = __ballot_sync(~0u, behind > tile);
    if (!reach) return false;
    int who = __ffs(reach) - 1, at = tile - (behind - tiles);
    if (lane == who)
        for (int n; at >= (n = tiles_of(pairs, e, rows)); e++) at -= n;
    e = __shfl_sync(~0u, e, who);
    at = __shfl_sync(~0u, at, who);
    int2 all = pairs[e];
    own->e = e;
    own->begin = all.x + at * rows;
    own->end = min(own->begin + rows, all.y);
    return true;
}

#endif
