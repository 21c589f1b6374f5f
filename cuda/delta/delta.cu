/* cuda/delta/delta.cu - the gated delta rule, forward: one state M (N,E) per value head instead of
 * keys.
 *
 *   M ← e^g·M;  w = v − Mᵀk;  M ← M + k·(β·w)ᵀ;  y = Mᵀq
 *
 * Training, prefill and decoding must give the same bits, so none is summed as above. In a page of
 * KV_PAGE rows that begins with state M, with G_i the sum of g over the page's rows up to i, and u
 * = β·w:
 *
 *   w_i = v_i − (e^{G_i}·Mᵀk_i + Σ_{j<i} e^{G_i−G_j}·(k_j·k_i)·u_j)
 *   y_i = e^{G_i}·Mᵀq_i + Σ_{j≤i} e^{G_i−G_j}·(k_j·q_i)·u_j
 *   M ← e^{G_last}·M + Σ_j k_j·(e^{G_last−G_j}·u_j)ᵀ, when the page after it begins
 *
 * A sum over N is split into UNITs, a sum over j into BLOCKs, each from zero and added in order. So
 * rows together (delta_pages_kernel) and a row alone (delta_row_kernel, whose warps share the UNITs
 * and BLOCKs) have the same sums. delta_scores computes the products of rows. Columns of M, u and y
 * are independent: a block has UNIT of them, and its M stays in shared memory. Blocks share keys,
 * sums and header, so a separate launch writes them to the sequence's state.
 *
 * Roofline: 4·N·E + 4·KV_PAGE·E f32 flops per row and value head, and 2·N·E for M; compute bound in
 * training (f32 without tensor cores, so that w and M keep all their digits). Decoding reads M and
 * half a page of u and k: 4·E·(N + KV_PAGE/2) bytes and more; memory bound. */
#include "delta.cuh"
#include "delta_scores.cuh"

typedef struct Delta {
    real *y;
    float *w, *pages, *state, *open;
    const real *q, *k, *v;
    const float *beta, *decay, *scores;
    const Span *spans;
    int S, T, G, H, N, E;
    int64_t step;
} Delta;

/* A value head of a span, and this block's columns of it. */
typedef struct Head {
    Span span;
    int h, g, column;
    int32_t *header;                /* these are the sequence's; NULL if it has no state */
    float *state, *keys, *u, *sums; /* state and u at this block's first column */
} Head;

__device__ static __forceinline__ Head head_of(const Delta &c, int s, int h, int column)
{
    Head head = {c.spans[s], h,       h / (c.H / c.G), column, nullptr,
                 nullptr,    nullptr, nullptr,         nullptr};
    if (head.span.state < 0) return head;
    float *state = c.state + head.span.state * c.step, *open = c.open + head.span.state * c.step;
    head.header = (int32_t *)(state + h * DELTA_HEAD);
    head.state = state + c.H * DELTA_HEAD + (int64_t)h * c.N * c.E + column;
    head.keys = open + (int64_t)head.g * c.N * KV_PAGE;
    head.u = open + open_u(c.G, c.N, c.E, h) + column;
    head.sums = open + open_sums(c.G, c.H, c.N, c.E, h);
    return head;
}

/* Whether M is still that of the page before the span's first one. */
__device__ static __forceinline__ bool is_behind(const Head &head)
{
    return head.header && head.span.pos && *head.header != head.span.pos / KV_PAGE;
}

/* The offset of row t's columns of one value head, in (T,H,E). */
__device__ static __forceinline__ int64_t value_at(const Delta &c, const Head &head, int64_t t)
{
    return (t * c.H + head.h) * c.E + head.column;
}

/* ---- whole pages ---- */

/* A block's shared memory. */
typedef struct DeltaWork {
    Shared<float> m;     /* (N, UNIT) */
    Shared<float> tile;  /* of k or q */
    Shared<float> pairs; /* of k, then of q */
    Shared<float> u, r;  /* (KV_PAGE, UNIT); r: w's missing part, then u decayed to the end */
    Shared<float> sums;  /* (SUMS) */
} DeltaWork;

static size_t work_bytes(int N)
{
    return (size_t)(N * UNIT + TILE + PAIRS + 2 * KV_PAGE * UNIT + SUMS) * sizeof(float);
}

__device__ static __forceinline__ DeltaWork work_of(Shared<unsigned char> bytes, int N)
{
    int u = N * UNIT + TILE + PAIRS;
    return {shared_part<float>(bytes, 0, N * UNIT),
            shared_part<float>(bytes, (int64_t)N * UNIT * 4, TILE),
            shared_part<float>(bytes, (int64_t)(N * UNIT + TILE) * 4, PAIRS),
            shared_part<float>(bytes, (int64_t)u * 4, KV_PAGE * UNIT),
            shared_part<float>(bytes, (int64_t)(u + KV_PAGE * UNIT) * 4, KV_PAGE * UNIT),
            shared_part<float>(bytes, (int64_t)(u + 2 * KV_PAGE * UNIT) * 4, SUMS)};
}

/* Columns [n, n + UNIT) of the chunk's rows of k or q; with `open`, also of earlier rows. */
__device__ static __forceinline__ void rows_fill(const DeltaWork &work, const Delta &c,
                                                 const Head &head, const Chunk &chunk,
                                                 const real *from, int n, bool open)
{
    tile_fill(work.tile, KV_PAGE, [&](float (&v)[8], int row, int column) {
        if (chunk_has(chunk, row))
            load<8>(v, from + (chunk_row(chunk, row) * c.G + head.g) * c.N + n + column);
        else if (open && row < chunk.first)
            for (int e = 0; e < 8; e++) v[e] = head.keys[(n + column + e) * KV_PAGE + row];
    });
}

/* e^{G_i}·Mᵀx_i for the chunk's rows of x, k or q. */
__device__ static __forceinline__ void state_read(Sums &total, const DeltaWork &work,
                                                  const Delta &c, const Head &head,
                                                  const Chunk &chunk, const real *x)
{
    clear(total);
    for (int n = 0; n < c.N; n += UNIT) {
        Sums part;
        clear(part);
        rows_fill(work, c, head, chunk, x, n, false);
        __syncthreads();
        tile_product(part, work.tile, work.m + n * UNIT, UNIT);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            for (int e = 0; e < FOUR; e++) total[i][e] += part[i][e];
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        float scale = chunk_has(chunk, row) ? decay_whole(work.sums, row) : 0.0f;
        for (int e = 0; e < FOUR; e++) total[i][e] *= scale;
    }
}

/* Σ_j weights[j]·u_j over rows [j, end) of a page, for four columns. */
__device__ static __forceinline__ void block_sum_of(float (&sum)[FOUR], const DeltaWork &work,
                                                    Shared<float> weights, int j, int end,
                                                    int column)
{
    for (int e = 0; e < FOUR; e++) sum[e] = 0.0f;
#pragma unroll 4
    for (; j < end; j++) {
        float u[FOUR], weight = weights[j];
        load<FOUR>(u, shared_range(work.u, j * UNIT + column, FOUR));
        for (int e = 0; e < FOUR; e++) sum[e] = fmaf(weight, u[e], sum[e]);
    }
}

/* w and u of rows [16·b, 16·b + 16), one lane per column. r has the terms of earlier rows. */
__device__ static __forceinline__ void block_solve(const DeltaWork &work, const Delta &c,
                                                   const Head &head, const Chunk &chunk, int b)
{
    int lane = threadIdx.x;
    float taken[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) taken[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        int row = b * BLOCK + i;
        if (row >= chunk.end) break;
        float u = work.u[row * UNIT + lane];
        if (row >= chunk.first) {
            int64_t t = chunk_row(chunk, row), at = value_at(c, head, t) + lane;
            float w = f32(c.v[at]) - (work.r[row * UNIT + lane] + taken[i]);
            if (c.w) c.w[at] = w;
            u = c.beta[t * c.H + head.h] * w;
            work.u[row * UNIT + lane] = u;
        }
#pragma unroll
        for (int later = i + 1; later < BLOCK; later++)
            taken[later] = fmaf(work.pairs[(b * BLOCK + later) * PAIRS_ROW + row], u, taken[later]);
    }
}

/* u of the chunk's rows, starting from r = e^{G_i}·Mᵀk_i. */
__device__ static __forceinline__ void rows_solve(const DeltaWork &work, const Delta &c,
                                                  const Head &head, const Chunk &chunk)
{
    int column = column_of_thread();
    for (int b = chunk.first / BLOCK; b * BLOCK < chunk.end; b++) {
        int row = b * BLOCK + row_of_thread();
        for (int p = 0; p < b; p++) {
            float sum[FOUR];
            block_sum_of(sum, work, work.pairs + row * PAIRS_ROW, p * BLOCK, p * BLOCK + BLOCK,
                         column);
            for (int e = 0; e < FOUR; e++) work.r[row * UNIT + column + e] += sum[e];
        }
        __syncthreads();
        if (threadIdx.x < UNIT) block_solve(work, c, head, chunk, b);
        __syncthreads();
    }
}

/* y of the chunk's rows, starting from e^{G_i}·Mᵀq_i. */
__device__ static __forceinline__ void rows_finish(const Sums &read, const DeltaWork &work,
                                                   const Delta &c, const Head &head,
                                                   const Chunk &chunk)
{
    int column = column_of_thread();
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int row = i * BLOCK + row_of_thread();
        if (!chunk_has(chunk, row)) continue;
        float y[FOUR], sum[FOUR];
        for (int e = 0; e < FOUR; e++) y[e] = read[i][e];
        for (int p = 0; p <= i; p++) {
            block_sum_of(sum, work, work.pairs + row * PAIRS_ROW, p * BLOCK,
                         min(p * BLOCK + BLOCK, row + 1), column);
            for (int e = 0; e < FOUR; e++) y[e] += sum[e];
        }
        real *to = c.y + value_at(c, head, chunk_row(chunk, row)) + column;
        *(uint2 *)to = make_uint2(pack(y[0], y[1]), pack(y[2], y[3]));
    }
}

/* Loads a page's u of rows before `end` from the sequence's state. */
__device__ static __forceinline__ void open_load(const DeltaWork &work, const Delta &c,
                                                 const Head &head, int end)
{
    for (int i = threadIdx.x; i < end * UNIT; i += THREADS)
        work.u[i] = head.u[(int64_t)(i / UNIT) * c.E + i % UNIT];
}

/* M becomes the state after the chunk's page, which is full. */
__device__ static __forceinline__ void state_advance(const DeltaWork &work, const Delta &c,
                                                     const Head &head, const Chunk &chunk)
{
    int column = column_of_thread();
    float whole = decay_whole(work.sums, KV_PAGE - 1);
    for (int i = threadIdx.x; i < KV_PAGE * UNIT; i += THREADS)
        work.r[i] = decay_between(work.sums, KV_PAGE - 1, i / UNIT) * work.u[i];
    for (int n = 0; n < c.N; n += UNIT) {
        __syncthreads();
        rows_fill(work, c, head, chunk, c.k, n, true);
        __syncthreads();
        float sum[2][FOUR];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int at = (n + i * BLOCK + row_of_thread()) * UNIT + column;
            for (int e = 0; e < FOUR; e++) sum[i][e] = whole * work.m[at + e];
        }
#pragma unroll 4
        for (int j = 0; j < KV_PAGE; j++) {
            float u[FOUR];
            load<FOUR>(u, shared_range(work.r, j * UNIT + column, FOUR));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float k = work.tile[j * TILE_ROW + i * BLOCK + row_of_thread()];
                for (int e = 0; e < FOUR; e++) sum[i][e] = fmaf(k, u[e], sum[i][e]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            store<FOUR>(
                shared_range(work.m, (n + i * BLOCK + row_of_thread()) * UNIT + column, FOUR),
                sum[i]);
    }
    __syncthreads();
}

/* M of the span's first page; returns whether it differs from the sequence's. */
__device__ static __forceinline__ bool state_begin(const DeltaWork &work, const Delta &c,
                                                   const Head &head)
{
    bool kept = head.header && head.span.pos;
    for (int i = threadIdx.x; i < c.N * UNIT; i += THREADS)
        work.m[i] = kept ? head.state[(int64_t)(i / UNIT) * c.E + i % UNIT] : 0.0f;
    if (!is_behind(head)) return !kept;
    open_load(work, c, head, KV_PAGE);
    work.sums[threadIdx.x] = head.sums[threadIdx.x];
    __syncthreads();
    state_advance(work, c, head, {head.span, 0, KV_PAGE, KV_PAGE, false});
    return true;
}

/* Writes M from shared memory. */
__device__ static __forceinline__ void state_store(float *to, const DeltaWork &work, const Delta &c)
{
    for (int i = threadIdx.x; i < c.N * UNIT; i += THREADS)
        to[(int64_t)(i / UNIT) * c.E + i % UNIT] = work.m[i];
}

static __global__ void __launch_bounds__(THREADS, 3) delta_pages_kernel(Delta c)
{
    DYNAMIC_SHARED(bytes);
    DeltaWork work = work_of(bytes, c.N);
    Head head = head_of(c, blockIdx.x, blockIdx.y, blockIdx.z * UNIT);
    bool moved = state_begin(work, c, head);
    for (int page = head.span.pos / KV_PAGE;; page++) {
        Chunk chunk = chunk_of(head.span, page);
        Sums read;
        if (chunk.first) open_load(work, c, head, chunk.first);
        decay_sums(work.sums, head.sums, c.decay, chunk, c.H, head.h);
        pairs_fill(work.pairs, c.scores, work.sums, chunk, c.G, head.g, 0);
        state_read(read, work, c, head, chunk, c.k);
#pragma unroll
        for (int i = 0; i < BLOCKS; i++)
            store<FOUR>(shared_range(work.r,
                                     (i * BLOCK + row_of_thread()) * UNIT + column_of_thread(),
                                     FOUR),
                        read[i]);
        state_read(read, work, c, head, chunk, c.q);
        rows_solve(work, c, head, chunk);
        pairs_fill(work.pairs, c.scores, work.sums, chunk, c.G, head.g, 1);
        __syncthreads();
        rows_finish(read, work, c, head, chunk);
        bool full = c.pages && !head.header && chunk.end == KV_PAGE;
        if (chunk.last && !full) {
            if (!head.header) return;
            for (int i = chunk.first * UNIT + threadIdx.x; i < chunk.end * UNIT; i += THREADS)
                head.u[(int64_t)(i / UNIT) * c.E + i % UNIT] = work.u[i];
            if (moved) state_store(head.state, work, c);
            return;
        }
        state_advance(work, c, head, chunk);
        moved = true;
        int64_t number = chunk_row(chunk, 0) / KV_PAGE * c.H + head.h;
        if (full) state_store(c.pages + number * c.N * c.E + head.column, work, c);
        if (chunk.last) return;
    }
}

/* ---- one row per span ---- */

/* What a row's warps pass to the first: sums of UNITs of N and of BLOCKs of the page's rows. */
typedef struct Parts {
    Shared<float> of_state, of_rows; /* (…, 2, UNIT) */
} Parts;

/* state_advance in global memory. */
__device__ static __forceinline__ void row_advance(const Delta &c, const Head &head,
                                                   Shared<float> u)
{
    float whole = decay_whole(head.sums, KV_PAGE - 1);
    for (int i = threadIdx.x; i < KV_PAGE * UNIT; i += THREADS)
        u[i] = decay_between(head.sums, KV_PAGE - 1, i / UNIT) *
               head.u[(int64_t)(i / UNIT) * c.E + i % UNIT];
    __syncthreads();
    int lane = threadIdx.x % UNIT;
    for (int n = threadIdx.x / UNIT; n < c.N; n += THREADS / UNIT) {
        float *m = head.state + (int64_t)n * c.E + lane, sum = whole * *m;
#pragma unroll 8
        for (int j = 0; j < KV_PAGE; j++)
            sum = fmaf(head.keys[n * KV_PAGE + j], u[j * UNIT + lane], sum);
        *m = sum;
    }
    __syncthreads();
}

/* The first warp: w, u and y of a row, one lane per column. */
__device__ static __forceinline__ void row_finish(const Delta &c, const Head &head,
                                                  const Parts &parts, float whole, float own)
{
    int lane = threadIdx.x, at = head.span.pos % KV_PAGE;
    float read[2];
    for (int which = 0; which < 2; which++) {
        float total = 0.0f;
        for (int n = 0; n < c.N / UNIT; n++) total += parts.of_state[(n * 2 + which) * UNIT + lane];
        total *= whole;
        for (int p = 0; p < at / BLOCK; p++) total += parts.of_rows[(p * 2 + which) * UNIT + lane];
        read[which] = total;
    }
    int64_t t = head.span.row, to = value_at(c, head, t) + lane;
    Shared<float> nearest = parts.of_rows + at / BLOCK * 2 * UNIT + lane;
    float w = f32(c.v[to]) - (read[0] + nearest[0]);
    float u = c.beta[t * c.H + head.h] * w;
    if (c.w) c.w[to] = w;
    c.y[to] = to_real(read[1] + fmaf(own, u, nearest[UNIT]));
    if (head.header) head.u[(int64_t)at * c.E + lane] = u;
}

static __global__ void __launch_bounds__(THREADS) delta_row_kernel(Delta c)
{
    SHARED_ARRAY(float, kq, 2 * DELTA_MOST);
    SHARED_ARRAY(float, weights, 2 * KV_PAGE);
    SHARED_ARRAY(float, of_state, DELTA_MOST / UNIT * 2 * UNIT);
    SHARED_ARRAY(float, of_rows, BLOCKS * 2 * UNIT);
    SHARED_ARRAY(float, decayed, KV_PAGE *UNIT);
    Head head = head_of(c, blockIdx.x, blockIdx.y, blockIdx.z * UNIT);
    int64_t t = head.span.row;
    int at = head.span.pos % KV_PAGE, lane = threadIdx.x % UNIT, warp = threadIdx.x / UNIT;
    if (is_behind(head)) row_advance(c, head, decayed);
    float sum, lack;
    decay_add(sum, lack, head.sums, at, c.decay[t * c.H + head.h]);
    for (int i = threadIdx.x; i < c.N; i += THREADS) {
        kq[i] = f32(c.k[(t * c.G + head.g) * c.N + i]);
        kq[c.N + i] = f32(c.q[(t * c.G + head.g) * c.N + i]);
    }
    int which = threadIdx.x / KV_PAGE, j = threadIdx.x % KV_PAGE;
    if (j < at + which)
        weights[threadIdx.x] =
            (j < at ? expf((sum - head.sums[j]) + (lack - head.sums[KV_PAGE + j])) : 1.0f) *
            c.scores[((t * c.G + head.g) * 2 + which) * KV_PAGE + j];
    __syncthreads();
    for (int n = warp * UNIT; n < c.N; n += THREADS) {
        float k = 0.0f, q = 0.0f;
        if (head.header && head.span.pos) {
#pragma unroll
            for (int i = n; i < n + UNIT; i++) {
                float m = head.state[(int64_t)i * c.E + lane];
                k = fmaf(kq[i], m, k);
                q = fmaf(kq[c.N + i], m, q);
            }
        } else if (head.header) {
            for (int i = n; i < n + UNIT; i++) head.state[(int64_t)i * c.E + lane] = 0.0f;
        }
        of_state[n * 2 + lane] = k;
        of_state[n * 2 + UNIT + lane] = q;
    }
    float k = 0.0f, q = 0.0f;
    for (int i = warp * BLOCK; i < min(warp * BLOCK + BLOCK, at); i++) {
        float u = head.u[(int64_t)i * c.E + lane];
        k = fmaf(weights[i], u, k);
        q = fmaf(weights[KV_PAGE + i], u, q);
    }
    of_rows[warp * 2 * UNIT + lane] = k;
    of_rows[warp * 2 * UNIT + UNIT + lane] = q;
    __syncthreads();
    if (warp == 0)
        row_finish(c, head, {of_state, of_rows}, expf(sum + lack), weights[KV_PAGE + at]);
}

/* ---- a sequence's state ---- */

/* Writes the keys and sums of decays of the span's last page, and its number. A separate launch,
 * because blocks of the one before read the older ones. */
static __global__ void __launch_bounds__(THREADS) delta_leave_kernel(Delta c)
{
    SHARED_ARRAY(float, sums, SUMS);
    Head head = head_of(c, blockIdx.x, blockIdx.y, 0);
    if (!head.header) return;
    Chunk chunk = chunk_of(head.span, (head.span.pos + head.span.rows - 1) / KV_PAGE);
    decay_sums(sums, head.sums, c.decay, chunk, c.H, head.h);
    int i = threadIdx.x, rows = chunk.end - chunk.first;
    if (i == 0) *head.header = chunk.page;
    if (chunk_has(chunk, i % KV_PAGE)) head.sums[i] = sums[i];
    if (head.h % (c.H / c.G)) return;
    for (; i < c.N * rows; i += THREADS) {
        int n = i / rows, row = chunk.first + i % rows;
        head.keys[n * KV_PAGE + row] = f32(c.k[(chunk_row(chunk, row) * c.G + head.g) * c.N + n]);
    }
}

void cuda_delta(Device *dev, real *y, float *w, float *pages, float *state, float *open,
                const real *q, const real *k, const real *v, const float *beta, const float *decay,
                const Span *spans, int S, int T, int G, int H, int N, int E, int64_t step)
{
    CudaDevice *cuda = cuda_of(dev);
    if (T == 0 || !delta_takes(cuda, N, E)) return;
    float *scores = (float *)cuda_scratch(cuda, delta_scores_floats(T, G) * sizeof(float));
    delta_scores(cuda, scores, open, q, k, spans, S, T, G, N, step);
    Delta c = {y,      w,     pages, state, open, q, k, v, beta, decay,
               scores, spans, S,     T,     G,    H, N, E, step};
    dim3 grid(S, H, E / UNIT);
    if (T > S)
        LAUNCH(cuda, delta_pages_kernel, grid, THREADS, work_bytes(N), c);
    else
        LAUNCH(cuda, delta_row_kernel, grid, THREADS, 0, c);
    if (state) LAUNCH(cuda, delta_leave_kernel, dim3(S, H), THREADS, 0, c);
}
