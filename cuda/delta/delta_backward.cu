/* cuda/delta/delta_backward.cu - gradients of the gated delta rule, for sequences from position 0.
 *
 * In a page that begins with state M, with dM′ the gradient of the next page's state (delta.cu has
 * the formula), D_ij = e^{G_i−G_j}, D_L the decay up to the page's end, u = β·w and x = β·du:
 *
 *   du_j = Σ_{i≥j} D_ij·(k_j·q_i)·dy_i + D_Lj·dM′ᵀk_j − Σ_{i>j} D_ij·(k_j·k_i)·x_i
 *   dM = e^{G_L}·dM′ + Σ_i e^{G_i}·(q_i·dy_iᵀ − k_i·x_iᵀ);  dv = x;  dβ_j = du_j·w_j
 *   A_ij = D_ij·(u_j·dy_i), j ≤ i;  B_ij = D_ij·(u_j·x_i), j < i
 *   dq_i = e^{G_i}·M·dy_i + Σ_j A_ij·k_j
 *   dk_i = −e^{G_i}·M·x_i + D_Li·dM′·u_i + Σ_j (A_ji·q_j − B_ij·k_j − B_ji·k_j)
 *   dg_m = Σ_{i≥m} e^{G_i}·(q_iᵀM·dy_i − k_iᵀM·x_i) + e^{G_L}·⟨M, dM′⟩ + Σ_{j<m} D_Lj·k_jᵀdM′u_j
 *          + Σ_{i≥m, j<m} (A_ij·(k_j·q_i) − B_ij·(k_j·k_i))
 *
 * du and dM walk the pages from the last (delta_walk.cu), each column independently. The rest is
 * computed for all pages at once: A and B of each value head, with dv and dβ (delta_pairs_kernel);
 * then dq and dk, where a block has UNIT columns of a key head and sums over its value heads in
 * order (delta_heads_kernel); and dg from the results of both (delta_decay_kernel). No sum spans
 * two blocks. A launch takes as many key heads, at least one, as keep du, dM, A and B below
 * SCRATCH_BYTES.
 *
 * Roofline: about 14·N·E + 6·KV_PAGE·(N + E) f32 flops per row and value head; compute bound. */
#include "delta_backward.cuh"
#include "delta_scores.cuh"
#include "delta_walk.cuh"

enum { SCRATCH_BYTES = 256 << 20 };

/* ---- A and B, dv and dβ ---- */

/* Row `row` of u (which 0), dy (1) or x (2): eight numbers from column e on. */
__device__ static __forceinline__ void value_load(float (&v)[8], const DeltaBackward &c,
                                                  const Chunk &chunk, int row, int local, int e,
                                                  int which)
{
    if (row >= chunk.end) return;
    int64_t t = chunk_row(chunk, row), at = value_at(c, t, local) + e;
    if (which == 1) {
        load<8>(v, c.dy + at);
        return;
    }
    float beta = c.beta[t * c.H + head_of_all(c, local)];
    load<8>(v, which ? c.du + (t * c.heads + local) * c.E + e : c.w + at);
    for (int i = 0; i < 8; i++) v[i] *= beta;
}

/* dv and dβ: two threads per row. */
__device__ static __forceinline__ void values_finish(const DeltaBackward &c, const Chunk &chunk,
                                                     int local)
{
    int row = threadIdx.x / 2;
    float sum = 0.0f;
    if (row < chunk.end) {
        int64_t t = chunk_row(chunk, row), at = value_at(c, t, local);
        float beta = c.beta[t * c.H + head_of_all(c, local)];
        for (int e = threadIdx.x % 2 * 8; e < c.E; e += 16) {
            float du[8], w[8];
            load<8>(du, c.du + (t * c.heads + local) * c.E + e);
            load<8>(w, c.w + at + e);
            for (int i = 0; i < 8; i++) {
                sum = fmaf(du[i], w[i], sum);
                du[i] *= beta;
            }
            store<8>(c.dv + at + e, du);
        }
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (row < chunk.end && threadIdx.x % 2 == 0)
        c.dbeta[chunk_row(chunk, row) * c.H + head_of_all(c, local)] = sum;
}

/* Σ_{i≥m, j<m} of the pairs, to ddecay: first along the rows, then down the columns. */
__device__ static __forceinline__ void pairs_cross(Shared<float> pairs, const DeltaBackward &c,
                                                   const Chunk &chunk, int local)
{
    int m = threadIdx.x;
    __syncthreads();
    if (m < chunk.end) {
        float sum = 0.0f;
        for (int j = 0; j < chunk.end; j++) {
            float own = pairs[m * PAIRS_ROW + j];
            pairs[m * PAIRS_ROW + j] = sum;
            sum += own;
        }
    }
    __syncthreads();
    if (m < chunk.end) {
        float sum = 0.0f;
        for (int i = m; i < chunk.end; i++) sum += pairs[i * PAIRS_ROW + m];
        c.ddecay[chunk_row(chunk, m) * c.H + head_of_all(c, local)] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS) delta_pairs_kernel(DeltaBackward c)
{
    DYNAMIC_SHARED(bytes);
    Shared<float> u = shared_part<float>(bytes, 0, TILE);
    Shared<float> rows = shared_part<float>(bytes, TILE * 4, TILE);
    Shared<float> cross = shared_part<float>(bytes, 2 * TILE * 4, PAIRS);
    Shared<float> sums = shared_part<float>(bytes, (2 * TILE + PAIRS) * 4, SUMS);
    Chunk chunk;
    if (!chunk_find(&chunk, c.spans, c.S, blockIdx.x)) return;
    int local = blockIdx.y, g = c.g + local / (c.H / c.G);
    decay_sums(sums, nullptr, c.decay, chunk, c.H, head_of_all(c, local));
    for (int which = 1; which <= 2; which++) { /* A of dy, then B of x */
        float sum[BLOCKS][8] = {};
        for (int e0 = 0; e0 < c.E; e0 += UNIT) {
            __syncthreads();
            tile_fill(u, KV_PAGE, [&](float (&v)[8], int row, int e) {
                value_load(v, c, chunk, row, local, e0 + e, 0);
            });
            tile_fill(rows, KV_PAGE, [&](float (&v)[8], int row, int e) {
                value_load(v, c, chunk, row, local, e0 + e, which);
            });
            __syncthreads();
            for (int e = 0; e < UNIT; e += FOUR) {
                float left[BLOCKS][FOUR], right[FOUR];
#pragma unroll
                for (int i = 0; i < BLOCKS; i++)
                    load<FOUR>(
                        left[i],
                        shared_range(rows, (i * BLOCK + row_of_thread()) * TILE_ROW + e, FOUR));
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    int column = threadIdx.x % 8 + 8 * j;
                    load<FOUR>(right, shared_range(u, column * TILE_ROW + e, FOUR));
#pragma unroll
                    for (int i = 0; i < BLOCKS; i++)
                        for (int f = 0; f < FOUR; f++)
                            sum[i][j] = fmaf(left[i][f], right[f], sum[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
            int row = i * BLOCK + row_of_thread();
            if (row >= chunk.end) continue;
            int64_t t = chunk_row(chunk, row);
            const float *score = c.scores + ((t * c.G + g) * 2 + 2 - which) * KV_PAGE;
            float *to = c.pairs + ((t * c.heads + local) * 2 + which - 1) * KV_PAGE;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int column = threadIdx.x % 8 + 8 * j;
                bool seen = column < row + 2 - which;
                float value = seen ? sum[i][j] * decay_between(sums, row, column) : 0.0f;
                float term = seen ? value * score[column] : 0.0f;
                to[column] = value;
                if (which == 1)
                    cross[row * PAIRS_ROW + column] = term;
                else
                    cross[row * PAIRS_ROW + column] -= term;
            }
        }
    }
    values_finish(c, chunk, local);
    pairs_cross(cross, c, chunk, local);
}

/* ---- dq and dk ---- */

typedef struct LocalHeads {
    Shared<float> a, m, dm; /* a tile of dy, x or u; M's and dM′'s, transposed (UNIT, TILE_ROW) */
    Shared<float> q, k;     /* tiles */
    Shared<float> pairs, sums, total;
} LocalHeads;

enum { TURNED = UNIT * TILE_ROW, HEADS_FLOATS = 3 * TILE + 2 * TURNED + PAIRS + SUMS };

__device__ static __forceinline__ LocalHeads heads_of(Shared<unsigned char> bytes,
                                                      Shared<float> total)
{
    int m = 3 * TILE, pairs = m + 2 * TURNED;
    return {shared_part<float>(bytes, 0, TILE),
            shared_part<float>(bytes, m * 4, TURNED),
            shared_part<float>(bytes, (m + TURNED) * 4, TURNED),
            shared_part<float>(bytes, TILE * 4, TILE),
            shared_part<float>(bytes, 2 * TILE * 4, TILE),
            shared_part<float>(bytes, pairs * 4, PAIRS),
            shared_part<float>(bytes, (pairs + PAIRS) * 4, SUMS),
            total};
}

/* Rows [n, n + UNIT) and columns [e, e + UNIT) of a state, transposed; zeros for NULL. */
__device__ static __forceinline__ void state_fill(Shared<float> to, const float *state, int n,
                                                  int e, int E)
{
    for (int i = threadIdx.x; i < UNIT * UNIT; i += THREADS) {
        int row = i / UNIT, column = i % UNIT;
        to[column * TILE_ROW + row] = state ? state[(int64_t)(n + row) * E + e + column] : 0.0f;
    }
}

/* sums = M·rows of dy (which 1) and x (2), or dM′·u (0), all for UNIT of N. */
__device__ static __forceinline__ void values_read(Sums &sums, const LocalHeads &work,
                                                   const DeltaBackward &c, const Chunk &chunk,
                                                   int local, int e0, Shared<float> state,
                                                   int which)
{
    __syncthreads();
    tile_fill(work.a, KV_PAGE, [&](float (&v)[8], int row, int e) {
        value_load(v, c, chunk, row, local, e0 + e, which);
    });
    __syncthreads();
    tile_product(sums, work.a, state, TILE_ROW);
}

/* Adds the states' terms to dq and dk, and writes the rows' terms of dg. */
__device__ static __forceinline__ void states_add(Sums &dq, Sums &dk, const LocalHeads &work,
                                                  const DeltaBackward &c, const Chunk &chunk,
                                                  int local, int n)
{
    const float *m = nullptr, *dm = nullptr;
    if (chunk.page)
        m = c.pages + page_at(c, chunk_of(chunk.span, chunk.page - 1), c.H, head_of_all(c, local));
    if (!chunk.last) dm = c.dpages + page_at(c, chunk, c.heads, local);
    Sums of_dy, of_x, of_u;
    float product = 0.0f;
    clear(of_dy);
    clear(of_x);
    clear(of_u);
    for (int e = 0; e < c.E; e += UNIT) {
        __syncthreads();
        state_fill(work.m, m, n, e, c.E);
        state_fill(work.dm, dm, n, e, c.E);
        values_read(of_dy, work, c, chunk, local, e, work.m, 1);
        values_read(of_x, work, c, chunk, local, e, work.m, 2);
        values_read(of_u, work, c, chunk, local, e, work.dm, 0);
        for (int i = threadIdx.x; i < UNIT * UNIT; i += THREADS) {
            int at = i / UNIT * TILE_ROW + i % UNIT;
            product = fmaf(work.m[at], work.dm[at], product);
        }
    }
    int units = c.N / UNIT;
    product = block_sum(product, work.total);
    if (dm && threadIdx.x == 0)
        c.of_pages[(chunk_row(chunk, 0) / KV_PAGE * c.heads + local) * units + n / UNIT] =
            decay_whole(work.sums, chunk.end - 1) * product;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        bool inside = row < chunk.end;
        float begin = inside ? decay_whole(work.sums, row) : 0.0f;
        float end = inside ? decay_between(work.sums, chunk.end - 1, row) : 0.0f, of_begin = 0.0f,
              of_end = 0.0f;
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
            int at = row * TILE_ROW + column_of_thread() + e;
            float for_q = begin * of_dy[i][e], for_k = begin * of_x[i][e];
            float behind = end * of_u[i][e];
            of_begin = fmaf(work.q[at], for_q, of_begin);
            of_begin = fmaf(-work.k[at], for_k, of_begin);
            of_end = fmaf(work.k[at], behind, of_end);
            dq[i][e] += for_q;
            dk[i][e] += behind - for_k;
        }
        for (int bit = 1; bit < 8; bit *= 2) {
            of_begin += __shfl_xor_sync(~0u, of_begin, bit);
            of_end += __shfl_xor_sync(~0u, of_end, bit);
        }
        if (inside && threadIdx.x % 8 == 0)
            *(float2 *)(c.of_rows + ((chunk_row(chunk, row) * c.heads + local) * units + n / UNIT) *
                                        2) = make_float2(of_begin, of_end);
    }
}

/* sum += Σ_j weights_j·rows_j for a row's own pairs. */
__device__ static __forceinline__ void row_sum(float (&sum)[FOUR], Shared<float> weights,
                                               Shared<float> rows, int end)
{
    int column = column_of_thread();
#pragma unroll 4
    for (int j = 0; j < end; j++) {
        float v[FOUR], weight = weights[j];
        load<FOUR>(v, shared_range(rows, j * TILE_ROW + column, FOUR));
        for (int e = 0; e < FOUR; e++) sum[e] = fmaf(weight, v[e], sum[e]);
    }
}

/* Adds the terms of pairs of the page's rows to dq and dk: of A (which 0) or B. */
__device__ static __forceinline__ void pairs_add(Sums &dq, Sums &dk, const LocalHeads &work,
                                                 const DeltaBackward &c, const Chunk &chunk,
                                                 int local, int which)
{
    __syncthreads();
    for (int i = threadIdx.x; i < chunk.end * KV_PAGE; i += THREADS) {
        int64_t t = chunk_row(chunk, i / KV_PAGE);
        float weight = c.pairs[((t * c.heads + local) * 2 + which) * KV_PAGE + i % KV_PAGE];
        work.pairs[i / KV_PAGE * PAIRS_ROW + i % KV_PAGE] = which ? -weight : weight;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        if (row >= chunk.end) continue;
        row_sum(which ? dk[i] : dq[i], work.pairs + row * PAIRS_ROW, work.k, row + 1);
        columns_sum(dk[i], work.pairs, which ? work.k : work.q, row, row, chunk.end);
    }
}

static __global__ void __launch_bounds__(THREADS) delta_heads_kernel(DeltaBackward c)
{
    DYNAMIC_SHARED(bytes);
    SHARED_ARRAY(float, total, 32);
    LocalHeads work = heads_of(bytes, total);
    Chunk chunk;
    if (!chunk_find(&chunk, c.spans, c.S, blockIdx.x)) return;
    int group = c.H / c.G, g = c.g + blockIdx.y, n = blockIdx.z * UNIT;
    Sums dq, dk;
    clear(dq);
    clear(dk);
    rows_fill(work.q, c, chunk, c.q, g, n);
    rows_fill(work.k, c, chunk, c.k, g, n);
    for (int i = 0; i < group; i++) {
        int local = blockIdx.y * group + i;
        __syncthreads();
        decay_sums(work.sums, nullptr, c.decay, chunk, c.H, head_of_all(c, local));
        states_add(dq, dk, work, c, chunk, local, n);
        pairs_add(dq, dk, work, c, chunk, local, 0);
        pairs_add(dq, dk, work, c, chunk, local, 1);
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        if (row >= chunk.end) continue;
        int64_t at = (chunk_row(chunk, row) * c.G + g) * c.N + n + column_of_thread();
        *(uint2 *)(c.dq + at) = make_uint2(pack(dq[i][0], dq[i][1]), pack(dq[i][2], dq[i][3]));
        *(uint2 *)(c.dk + at) = make_uint2(pack(dk[i][0], dk[i][1]), pack(dk[i][2], dk[i][3]));
    }
}

/* ---- dg ---- */

static __global__ void __launch_bounds__(KV_PAGE) delta_decay_kernel(DeltaBackward c)
{
    SHARED_ARRAY(float, begins, KV_PAGE);
    SHARED_ARRAY(float, ends, KV_PAGE);
    Chunk chunk;
    if (!chunk_find(&chunk, c.spans, c.S, blockIdx.x)) return;
    int m = threadIdx.x, local = blockIdx.y, units = c.N / UNIT;
    if (m < chunk.end) {
        const float *from = c.of_rows + (chunk_row(chunk, m) * c.heads + local) * units * 2;
        float begin = 0.0f, end = 0.0f;
        for (int n = 0; n < units; n++) {
            begin += from[2 * n];
            end += from[2 * n + 1];
        }
        begins[m] = begin;
        ends[m] = end;
    }
    __syncthreads();
    if (m >= chunk.end) return;
    float *to = c.ddecay + chunk_row(chunk, m) * c.H + head_of_all(c, local), sum = *to;
    for (int i = m; i < chunk.end; i++) sum += begins[i];
    if (!chunk.last) {
        int64_t page = chunk_row(chunk, 0) / KV_PAGE * c.heads + local;
        for (int n = 0; n < units; n++) sum += c.of_pages[page * units + n];
        for (int j = 0; j < m; j++) sum += ends[j];
    }
    *to = sum;
}

/* The floats of scratch per value head of a launch. */
static size_t head_floats(const DeltaBackward &c)
{
    size_t T = (size_t)c.T, N = (size_t)c.N, E = (size_t)c.E, pages = T / KV_PAGE;
    return T * (E + 2 * KV_PAGE + N / UNIT * 2) + pages * (N * E + N / UNIT);
}

static void backward_launch(CudaDevice *cuda, DeltaBackward c, int key_heads, float *scratch)
{
    int64_t T = c.T, heads = c.heads = key_heads * (c.H / c.G), pages = T / KV_PAGE;
    c.du = scratch;
    c.dpages = c.du + T * heads * c.E;
    c.pairs = c.dpages + pages * heads * c.N * c.E;
    c.of_rows = c.pairs + T * heads * 2 * KV_PAGE;
    c.of_pages = c.of_rows + T * heads * (c.N / UNIT) * 2;
    unsigned slots = chunk_slots(c.T, c.S), units = (unsigned)(c.N / UNIT);
    dim3 all(slots, (unsigned)heads);
    size_t pairs_bytes = (size_t)(2 * TILE + PAIRS + SUMS) * sizeof(float);
    delta_walk(cuda, c);
    LAUNCH(cuda, delta_pairs_kernel, all, THREADS, pairs_bytes, c);
    LAUNCH(cuda, delta_heads_kernel, dim3(slots, (unsigned)key_heads, units), THREADS,
           HEADS_FLOATS * sizeof(float), c);
    LAUNCH(cuda, delta_decay_kernel, all, KV_PAGE, 0, c);
}

void cuda_delta_backward(Device *dev, real *dq, real *dk, real *dv, float *dbeta, float *ddecay,
                         const real *dy, const float *w, const float *pages, const real *q,
                         const real *k, const real *v, const float *beta, const float *decay,
                         const Span *spans, int S, int T, int G, int H, int N, int E)
{
    (void)v; /* w has what backward needs from v */
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0 || !delta_takes(cuda, N, E)) return;
    DeltaBackward c = {};
    c.dq = dq;
    c.dk = dk;
    c.dv = dv;
    c.dbeta = dbeta;
    c.ddecay = ddecay;
    c.dy = dy;
    c.q = q;
    c.k = k;
    c.w = w;
    c.pages = pages;
    c.beta = beta;
    c.decay = decay;
    c.spans = spans;
    c.S = S;
    c.T = T;
    c.G = G;
    c.H = H;
    c.N = N;
    c.E = E;
    size_t each = head_floats(c) * (size_t)(H / G), most = SCRATCH_BYTES / sizeof(float) / each;
    int at_once = most < 1 ? 1 : most < (size_t)G ? (int)most : G;
    size_t floats = delta_scores_floats(T, G) + each * (size_t)at_once;
    float *scores = (float *)cuda_scratch(cuda, floats * sizeof(float));
    if (!scores) return;
    c.scores = scores;
    delta_scores(cuda, scores, nullptr, q, k, spans, S, T, G, N, 0);
    for (c.g = 0; c.g < G; c.g += at_once)
        backward_launch(cuda, c, G - c.g < at_once ? G - c.g : at_once,
                        scores + delta_scores_floats(T, G));
}
