/* cuda/head/sample.cu - draws one token per row of logits, as its Draw says.
 *
 *   temper  logits[t,:] /= temperature   reads and writes 4·T·V bytes; memory bound
 *   sample  ids[t] ~ softmax(logits[t,:]) among the kept, and its logp[t]
 *           reads 4·T·V bytes; with cuts one pass more if few ids can be kept, else four to
 *           eight
 *
 * The uniform number is the CPU's, Philox4x32-10 of (seed, sample, pos), and is used as there: the
 * token is the one at which the mass of the kept, in id order, passes u of their total. A mass is
 * exp(logit − lse) as an integer of 2⁻⁶⁰: sums of integers are the same in any order. So atomics,
 * blocks and lists may add them in any order, and equal masses are counted exactly against top_p.
 * Ids less likely than 2⁻⁶⁰ are never drawn.
 *
 * First all blocks split the row into cells, each with its mass and its best id. Then one block per
 * row does the rest, on the device. Without cuts it picks a cell and an id in it. A cut is found
 * digit by digit (`cut_select`) in a list of the ids that can be kept at all: those at least as
 * good as the k-th best of the cells' best, or too likely to be all cut away. If the list
 * overflows, as on a flat row, the cut is found in the row itself.
 *
 * A row without mass (a NaN, only −inf, or another row's lse) gives its largest logit. Nothing here
 * waits for the host. */
#include "lse.cuh"
#include "rank.cuh"
#include "../../csrc/device/philox.h"

typedef unsigned long long Mass; /* of 2⁻⁶⁰ */

enum {
    THREADS = 256,
    TEMPER_EACH = 16, /* logits per thread of temper */
    CELLS = 256,      /* the most per row */
    CELL_STEP = 128,  /* logits a warp reads at once; a cell is a multiple */
    ROWS = 256,       /* drawn by one pair of launches */
    LONG_ROW = 8192,  /* longer rows are drawn by a block of 1024 threads */
    LONG_THREADS = 1024,
    SHORT_THREADS = 128,
    BATCH = 8,   /* ranks a thread reads at once */
    LIST = 2048, /* ids searched for a cut before the whole row */
};

typedef struct Cell {
    Mass mass;
    Rank best;
} Cell;

/* The source of a row's ranks: its logits, or a list of candidates. */
typedef struct Source {
    const float *x;
    float2 lse;
    Shared<Rank> list;
    int n, listed; /* ids; ranks in the list, or −1 without one */
} Source;

/* ---- masses ---- */

/* A logit may exceed lse by rounding; 4 limits the effect of a wrong lse. */
__device__ static __forceinline__ Mass mass_of(float x, float2 lse)
{
    if (!isfinite(lse.x)) return 0;
    float mass = expf(x - lse.x - lse.y);
    return mass > 0.0f ? (Mass)(fminf(mass, 4.0f) * 0x1p60f) : 0;
}

__device__ static __forceinline__ Rank warp_best(Rank best)
{
    for (int bit = 16; bit; bit >>= 1) best = max(best, __shfl_xor_sync(~0u, best, bit));
    return best;
}

/* ---- cells ---- */

/* Four logits from id `at` on; from n on they are −inf. */
template <int W>
__device__ static __forceinline__ void quad_load(float (&quad)[4], const float *x, int at, int n)
{
    if (W == 4 && at + 4 <= n) return load<4>(quad, x + at);
    for (int i = 0; i < 4; i++) quad[i] = at + i < n ? x[at + i] : -INFINITY;
}

/* A warp per cell: cells[t,c] of the ids [c·size, (c + 1)·size). */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    cell_kernel(Cell *cells, const float *logits, const float *lse, int V, int count, int size)
{
    int blocks = (count + THREADS / 32 - 1) / (THREADS / 32), lane = threadIdx.x % 32;
    int64_t t = blockIdx.x / blocks;
    int cell = (int)(blockIdx.x % blocks) * (THREADS / 32) + (int)threadIdx.x / 32;
    if (cell >= count) return;
    const float *x = logits + t * V;
    int from = cell * size, to = min(V, from + size);
    float2 own_lse = lse_of(lse, t);
    Mass mass = 0;
    Rank best = 0;
    for (int at = from + 4 * lane; at < to; at += CELL_STEP) {
        float quad[4];
        quad_load<W>(quad, x, at, to);
        for (int i = 0; i < 4; i++) {
            mass += mass_of(quad[i], own_lse);
            if (at + i < to) best = max(best, rank_of(quad[i], at + i));
        }
    }
    mass = warp_sum(mass);
    best = warp_best(best);
    if (lane == 0) cells[t * count + cell] = Cell{mass, best};
}

/* ---- the cut of top_k and top_p ---- */

__device__ static __forceinline__ int source_count(const Source *from)
{
    return from->listed < 0 ? from->n : from->listed;
}

/* The ranks of a thread's next places from `i` on, 0 past the end. All are loaded before the first
 * is used, so that a single block keeps the memory busy. */
__device__ static __forceinline__ void source_ranks(Rank (&rank)[BATCH], const Source *from, int i)
{
    if (from->listed < 0) {
        float x[BATCH];
        for (int j = 0; j < BATCH; j++) {
            int at = i + j * (int)blockDim.x;
            x[j] = at < from->n ? from->x[at] : 0.0f;
        }
        for (int j = 0; j < BATCH; j++) {
            int at = i + j * (int)blockDim.x;
            rank[j] = at < from->n ? rank_of(x[j], at) : 0;
        }
    } else {
        for (int j = 0; j < BATCH; j++) {
            int at = i + j * (int)blockDim.x;
            rank[j] = at < from->listed ? from->list[at] : 0;
        }
    }
}

/* The highest rank such that the ranks from it up, among those from `bound` on, have the mass or
 * count `need`: 11 bits per pass, the logit's first. Ends early if all of the last bucket is
 * needed. */
__device__ static Rank cut_select(const Source *from, Rank bound, Mass need, bool by_mass)
{
    SHARED_ARRAY(Mass, bucket, BUCKETS);
    SHARED_ARRAY(Mass, pick, 2);
    Rank prefix = 0, decided = 0;
    int count = source_count(from);
    for (int shift = 64 - DIGIT_BITS; ~decided;) {
        uint32_t digits = (uint32_t)((~decided >> shift) & (DIGITS - 1));
        for (int i = threadIdx.x; i < BUCKETS; i += blockDim.x) bucket[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += BATCH * blockDim.x) {
            Rank rank[BATCH];
            source_ranks(rank, from, i);
            for (int j = 0; j < BATCH; j++) {
                if (!rank[j] || rank[j] < bound || (rank[j] & decided) != prefix) continue;
                Mass one = by_mass ? mass_of(rank_logit(rank[j]), from->lse) : 1;
                if (one) atomicAdd(&bucket[bucket_at((int)((rank[j] >> shift) & digits))], one);
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) digit_pick<Mass>(pick, bucket, need);
        __syncthreads();
        Mass here = bucket[bucket_at((int)pick[0])], least = 1;
        prefix |= pick[0] << shift;
        decided |= (Rank)digits << shift;
        need = pick[1];
        if (by_mass && decided >> 32 == 0xffffffffu) least = mass_of(rank_logit(prefix), from->lse);
        __syncthreads();
        if (need > here - least) break;
        shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
    }
    return max(prefix, bound);
}

/* The sum of the masses of ranks from `bound` on. */
__device__ static Mass mass_from(const Source *from, Rank bound)
{
    SHARED_ARRAY(Mass, sums, 32);
    Mass mass = 0;
    int count = source_count(from);
    for (int i = threadIdx.x; i < count; i += BATCH * blockDim.x) {
        Rank rank[BATCH];
        source_ranks(rank, from, i);
        for (int j = 0; j < BATCH; j++)
            if (rank[j] && rank[j] >= bound) mass += mass_of(rank_logit(rank[j]), from->lse);
    }
    return block_sum(mass, sums);
}

/* A rank below which nothing can be kept. For top_k: the k-th best of the cells' best, since at
 * least k ids reach it. For top_p: the rank below which all ids together have no more mass than is
 * cut away, minus a hundredth for rounding. */
__device__ static Rank cut_floor(const Source *from, Shared<Cell> cells, int count, int top_k,
                                 float top_p, Mass total)
{
    SHARED_ARRAY(Rank, floor, 1);
    if (top_k <= 0) {
        Mass away = total - (Mass)fmin((double)top_p * (double)total, (double)total);
        double each = fmax((double)away / from->n, 1.0);
        float margin = 0.01f + 1e-6f * fabsf(from->lse.x);
        return (Rank)key_of(from->lse.x + (float)log(each * 0x1p-60) - margin) << 32;
    }
    if (threadIdx.x == 0) floor[0] = 0;
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += blockDim.x) {
        int better = 0;
        for (int other = 0; other < count; other++) better += cells[other].best > cells[c].best;
        if (better == top_k - 1) floor[0] = cells[c].best;
    }
    __syncthreads();
    return floor[0];
}

/* Lists the row's ranks from `bound` on, unless there are too many. */
__device__ static void source_list(Source *from, Rank bound)
{
    SHARED_ARRAY(int, listed, 1);
    if (threadIdx.x == 0) listed[0] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < from->n; i += BATCH * blockDim.x) {
        Rank rank[BATCH];
        source_ranks(rank, from, i);
        for (int j = 0; j < BATCH; j++) {
            if (rank[j] < bound) continue;
            int at = atomicAdd(&listed[0], 1);
            if (at < LIST) from->list[at] = rank[j];
        }
    }
    __syncthreads();
    if (listed[0] <= LIST) from->listed = listed[0];
}

/* The lowest kept rank. Leaves the list in `from` for the search among kept ids. */
__device__ static Rank cut_find(Source *from, Shared<Cell> cells, int count, const Draw *draw,
                                Mass total)
{
    int top_k = draw->top_k < from->n ? draw->top_k : 0;
    float top_p = draw->top_p;
    Rank bound = cut_floor(from, cells, count, top_k, top_p, total);
    if (bound) source_list(from, bound);
    if (top_k > 0) {
        bound = cut_select(from, bound, (Mass)top_k, false);
        if (top_p < 1.0f) total = mass_from(from, bound);
    }
    if (top_p >= 1.0f) return bound;
    double need = ceil((double)top_p * (double)total);
    Mass least = need >= 1.0 ? (Mass)need : 1;
    return cut_select(from, bound, min(least, total), true);
}

/* ---- the draw ---- */

/* The mass of the kept among four ids from `at` on, below `to`. */
__device__ static __forceinline__ Mass quad_mass(const Source *from, Rank cut, int at, int to)
{
    float quad[4];
    Mass mass = 0;
    quad_load<1>(quad, from->x, at, to);
    for (int i = 0; i < 4; i++)
        if (rank_of(quad[i], at + i) >= cut) mass += mass_of(quad[i], from->lse);
    return mass;
}

/* Sets each cell's mass to that of its ranks from `cut` on. */
__device__ static void cells_cut(Shared<Cell> cells, int count, int size, const Source *from,
                                 Rank cut)
{
    int n = source_count(from);
    __syncthreads();
    for (int c = threadIdx.x; c < count; c += blockDim.x) cells[c].mass = 0;
    __syncthreads();
    if (from->listed >= 0) {
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            Rank rank = from->list[i];
            if (rank >= cut)
                atomicAdd(&cells[rank_id(rank) / size].mass, mass_of(rank_logit(rank), from->lse));
        }
    } else {
        int lane = threadIdx.x % 32;
        for (int c = threadIdx.x / 32; c < count; c += blockDim.x / 32) {
            Mass mass = 0;
            int to = min(n, (c + 1) * size);
            for (int at = c * size + 4 * lane; at < to; at += CELL_STEP)
                mass += quad_mass(from, cut, at, to);
            mass = warp_sum(mass);
            if (lane == 0) cells[c].mass = mass;
        }
    }
    __syncthreads();
}

/* The sum over the lanes before this one; *all gets the warp's sum. */
__device__ static __forceinline__ Mass warp_before(Mass own, Mass *all)
{
    Mass sum = own;
    for (int by = 1; by < 32; by *= 2) {
        Mass other = __shfl_up_sync(~0u, sum, by);
        if ((int)(threadIdx.x % 32) >= by) sum += other;
    }
    *all = __shfl_sync(~0u, sum, 31);
    return sum - own;
}

/* Warp 0: the cell in which the mass in id order passes `target`; subtracts the mass before it. */
__device__ static int cell_pick(Shared<Cell> cells, int count, Mass *target)
{
    Mass before = 0;
    for (int from = 0;; from += 32) {
        int c = from + (int)threadIdx.x;
        Mass own = c < count ? cells[c].mass : 0, all;
        Mass low = before + warp_before(own, &all);
        unsigned past = __ballot_sync(~0u, low + own > *target);
        if (past || from + 32 >= count) {
            int lane = past ? __ffs(past) - 1 : 0;
            *target -= __shfl_sync(~0u, low, lane);
            return from + lane;
        }
        before += all;
    }
}

/* Warp 0: the id in [first, last) at which the kept mass passes `target`; every lane returns it. */
__device__ static int id_pick(const Source *from, Rank cut, int first, int last, Mass target)
{
    Mass before = 0;
    for (; first < last; first += CELL_STEP) {
        int at = first + 4 * (int)threadIdx.x;
        Mass own = quad_mass(from, cut, at, last), all;
        Mass low = before + warp_before(own, &all);
        unsigned past = __ballot_sync(~0u, low + own > target);
        before += all;
        if (!past) continue;
        for (int fourth = at + 3; at < fourth; at++) {
            low += quad_mass(from, cut, at, min(at + 1, last));
            if (low > target) break;
        }
        return __shfl_sync(~0u, at, __ffs(past) - 1);
    }
    return last - 1;
}

/* A block per row: the cut, if there is one, and the id. */
template <int COUNT>
static __global__ void __launch_bounds__(COUNT, 1)
    draw_kernel(int32_t *ids, float *logp, const float *logits, const float *lse, const Draw *draws,
                const Cell *row_cells, int V, int count, int size)
{
    SHARED_ARRAY(Cell, cells, CELLS);
    SHARED_ARRAY(Rank, list, LIST);
    SHARED_ARRAY(Mass, sums, 32);
    int64_t t = blockIdx.x;
    const Draw *draw = &draws[t];
    Source from = {logits + t * V, lse_of(lse, t), list, V, -1};
    Mass total = 0;
    Rank best = 0, cut = 0;
    for (int c = threadIdx.x; c < count; c += COUNT) {
        cells[c] = row_cells[t * count + c];
        total += cells[c].mass;
    }
    total = block_sum(total, sums);
    for (int c = threadIdx.x % 32; c < count; c += 32) best = max(best, cells[c].best);
    best = warp_best(best);
    bool drawn = draw->temperature > 0.0f && total > 0;
    bool cuts = (draw->top_k > 0 && draw->top_k < from.n) || draw->top_p < 1.0f;
    if (drawn && cuts) {
        cut = cut_find(&from, cells, count, draw, total);
        cells_cut(cells, count, size, &from, cut);
        Mass kept = 0;
        for (int c = threadIdx.x; c < count; c += COUNT) kept += cells[c].mass;
        total = block_sum(kept, sums);
    }
    if (threadIdx.x >= 32) return;
    int id = rank_id(best);
    if (drawn) {
        Mass target = min((Mass)(draw_uniform(draw) * (double)total), total - 1);
        int cell = cell_pick(cells, count, &target);
        id = id_pick(&from, cut, cell * size, min(from.n, (cell + 1) * size), target);
    }
    if (threadIdx.x > 0) return;
    float value = from.x[id] - from.lse.x - from.lse.y;
    if (drawn && cuts)
        value = (float)((double)from.x[id] - (double)from.lse.x - (double)from.lse.y -
                        log((double)total * 0x1p-60));
    ids[t] = id;
    logp[t] = value;
}

/* ---- temper ---- */

static __global__ void __launch_bounds__(THREADS)
    temper_kernel(float *logits, const Draw *draws, int V, int parts)
{
    int64_t t = blockIdx.x / parts;
    float temperature = draws[t].temperature;
    if (temperature == 0.0f || temperature == 1.0f) return;
    int64_t from = (int64_t)(blockIdx.x % parts) * (THREADS * TEMPER_EACH) + threadIdx.x;
    float *x = logits + t * V, value[TEMPER_EACH];
    for (int i = 0; i < TEMPER_EACH; i++)
        value[i] = from + i * THREADS < V ? x[from + i * THREADS] : 0.0f;
    for (int i = 0; i < TEMPER_EACH; i++)
        if (from + i * THREADS < V) x[from + i * THREADS] = value[i] / temperature;
}

/* ---- the ops ---- */

void cuda_temper(Device *dev, float *logits, const Draw *draws, int T, int V)
{
    unsigned parts = cuda_blocks(V, THREADS * TEMPER_EACH);
    LAUNCH(cuda_of(dev), temper_kernel, T * parts, THREADS, 0, logits, draws, V, (int)parts);
}

void cuda_sample(Device *dev, int32_t *ids, float *logp, const float *logits, const float *lse,
                 const Draw *draws, int T, int V)
{
    CudaDevice *cuda = cuda_of(dev);
    int size = CELL_STEP * (int)cuda_blocks(V, CELL_STEP * CELLS);
    int count = (int)cuda_blocks(V, size), warps = THREADS / 32;
    size_t most = (size_t)min(T, (int)ROWS);
    if (T == 0) return;
    Cell *cells = (Cell *)cuda_scratch(cuda, most * count * sizeof *cells);
    if (!cells) return;
    bool quads = V % 4 == 0 && (uintptr_t)logits % 16 == 0;
    for (int t = 0; t < T; t += ROWS) {
        int rows = min(T - t, (int)ROWS);
        const float *x = logits + (int64_t)t * V;
        unsigned blocks = rows * cuda_blocks(count, warps);
        if (quads)
            LAUNCH(cuda, cell_kernel<4>, blocks, THREADS, 0, cells, x, lse + 2 * t, V, count, size);
        else
            LAUNCH(cuda, cell_kernel<1>, blocks, THREADS, 0, cells, x, lse + 2 * t, V, count, size);
        if (V > LONG_ROW)
            LAUNCH(cuda, draw_kernel<LONG_THREADS>, rows, LONG_THREADS, 0, ids + t, logp + t, x,
                   lse + 2 * t, draws + t, cells, V, count, size);
        else
            LAUNCH(cuda, draw_kernel<SHORT_THREADS>, rows, SHORT_THREADS, 0, ids + t, logp + t, x,
                   lse + 2 * t, draws + t, cells, V, count, size);
    }
}
