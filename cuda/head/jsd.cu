/* cuda/head/jsd.cu - the generalized Jensen-Shannon divergence of rows of logits, and its gradient.
 *
 *   p = softmax(student / τ), q = softmax(teacher / τ), m = (1−β)·p + β·q
 *   term[v]  = min(clip, β·q·log(q/m) + (1−β)·p·log(p/m)),  KL(q‖p) and KL(p‖q) at β = 0 and 1
 *   slope[v] = d term[v] / d log p[v]:  (1−β)·p·log(p/m),  −q,  p·(1 + log(p/q));  0 when clipped
 *   dstudent[v] = scale/τ·(slope[v] − p[v]·Σ slope)
 *
 * reads 24·T·V bytes, 8 in each of three passes, and writes 2·T·V: both logsumexps; sums of terms
 * and slopes; the gradient. Some 150 operations per term in total: memory bound. A block holds a
 * part of 4096 logits of both rows (logits.cuh explains how the gradient overwrites the student's
 * logits); two kernels with a warp per row combine the parts in a fixed order.
 *
 * csrc/cpu/head/jsd.c explains the arithmetic of a term and its two forms. With top_k, both rows'
 * logits at the teacher's K best ids are gathered first, and the rest sees rows of K. */
#include "logits.cuh"
#include "topk.cuh"

#include <assert.h>

enum {
    EACH = 16,             /* logits per thread, of each row */
    PART = THREADS * EACH, /* logits per block */
    ROW_WARPS = 4,         /* rows per block that combines parts */
};

#define LEAST 1e-8f /* lower bound of probabilities */
#define NEAR 0.34f  /* |gap| below which the series converge: under ln2/2 */

/* A double as the sum of two floats. */
typedef struct Wide {
    float high, low;
} Wide;

/* A row's constants: log p = (logit − base)/τ − rest, likewise log q; the teacher's base and rest
 * minus the student's; Σ slope. */
typedef struct Row {
    float student_base, teacher_base;
    Wide student_rest, teacher_rest, base, rest;
    float slopes, unused;
} Row;

/* The largest logit of a part and its Σ exp, of both rows. */
typedef struct Part {
    float student_top, student_sum, teacher_top, teacher_sum;
} Part;

typedef struct Sums {
    float value, slope;
} Sums;

typedef struct Term {
    float value, slope, p;
} Term;

/* The kernels' arguments: `scale` and `loss` are the op's, rows have n logits. */
typedef struct Divergence {
    float *loss;
    const float *student, *teacher, *scale;
    Row *rows;
    Part *part;
    Sums *sums;
    Jsd how;
    float by; /* 1 / temperature */
    int T, n, parts;
} Divergence;

/* ---- one term ---- */

/* (e^r − 1 − r) / r² for |r| ≤ ln2/2: Taylor's series. */
__device__ static __forceinline__ float exp_rest(float r)
{
    float p = fmaf(1.0f / 5040.0f, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    return fmaf(p, r, 0.5f);
}

/* (f − log(1 + f)) / f² for √½ ≤ 1 + f ≤ √2: the polynomial of Cephes' logf. */
__device__ static __forceinline__ float log_rest(float f)
{
    float p = fmaf(7.0376836292e-2f, f, -1.1514610310e-1f);
    p = fmaf(p, f, 1.1676998740e-1f);
    p = fmaf(p, f, -1.2420140846e-1f);
    p = fmaf(p, f, 1.4249322787e-1f);
    p = fmaf(p, f, -1.6668057665e-1f);
    p = fmaf(p, f, 2.0000714765e-1f);
    p = fmaf(p, f, -2.4999993993e-1f);
    p = fmaf(p, f, 3.3333331174e-1f);
    return fmaf(-p, f, 0.5f);
}

/* log of a logit's share of its row. */
__device__ static __forceinline__ float log_share(float logit, float base, float by, Wide rest)
{
    return fmaf(logit - base, by, -rest.high) - rest.low;
}

/* The larger of p and q, and log(q/p). Equal logits have equal shares, even if they are −inf. */
__device__ static __forceinline__ float larger_of(const Divergence &r, const Row &row,
                                                  float student, float teacher, float *gap)
{
    if (r.how.probs) {
        float p = student < LEAST ? LEAST : student, q = teacher < LEAST ? LEAST : teacher;
        *gap = logf(q / p);
        return fmaxf(p, q);
    }
    float apart = student == teacher ? 0.0f : teacher - student;
    float back = teacher - apart, lost = (teacher - (apart + back)) + (back - student);
    if (lost != lost) lost = 0.0f; /* the rounding error of apart */
    apart = (apart - row.base.high) + (lost - row.base.low);
    *gap = fmaf(apart, r.by, -row.rest.high) - row.rest.low;
    return expf(fmaxf(log_share(student, row.student_base, r.by, row.student_rest),
                      log_share(teacher, row.teacher_base, r.by, row.teacher_rest)));
}

/* A term of KL(weight‖other): weight·log(weight/other). The smaller of the two is larger·e. ey is
 * e·y without the NaN of 0·inf. If `other` is 0 and `weight` is not, the term is inf, however small
 * `weight` is. */
__device__ static __forceinline__ float kl_term(float larger, float y, float ey,
                                                bool weight_is_larger)
{
    if (!weight_is_larger) return -(larger * ey);
    return isinf(y) ? y : larger * y;
}

/* A term divided by the larger one, and log(m / larger); w is the weight of the smaller one. */
__device__ static __forceinline__ float mixture(float y, float e, float ey, float w, float rest,
                                                float *log_m)
{
    if (y < NEAR) {
        float a = exp_rest(-y), y2 = y * y, z = w * (y2 * a - y), b = log_rest(z), z2 = z * z;
        *log_m = z - z2 * b;
        return w * y2 * (1.0f - a * (1.0f + y)) - z2 * (1.0f - b * (1.0f + z));
    }
    float u = fmaf(w, e, rest);
    *log_m = logf(u);
    return -(u * *log_m + w * ey);
}

__device__ static __forceinline__ Term term_of(const Divergence &r, const Row &row, float student,
                                               float teacher)
{
    float beta = r.how.beta, gap, larger = larger_of(r, row, student, teacher, &gap);
    float y = fabsf(gap), e = expf(-y), ey = e > 0.0f ? e * y : e;
    bool student_is_larger = gap <= 0.0f;
    Term term;
    term.p = student_is_larger ? larger : larger * e;
    if (beta == 0.0f) {
        term.value = kl_term(larger, y, ey, !student_is_larger);
        term.slope = -(student_is_larger ? larger * e : larger);
    } else if (beta == 1.0f) {
        term.value = kl_term(larger, y, ey, student_is_larger);
        term.slope = term.p + term.value;
    } else {
        float of_p = 1.0f - beta, log_m;
        float w = student_is_larger ? beta : of_p, rest = student_is_larger ? of_p : beta;
        term.value = larger * mixture(y, e, ey, w, rest, &log_m);
        term.slope = of_p * larger * (student_is_larger ? -log_m : -fmaf(e, log_m, ey));
    }
    if (term.value > r.how.clip) {
        term.value = r.how.clip;
        term.slope = 0.0f;
    }
    return term;
}

/* ---- the kernels ---- */

__device__ static void part_lse(const float (&x)[EACH], float by, Shared<float> sums, float *top,
                                float *sum)
{
    float most = -INFINITY, total = 0.0f;
    for (int i = 0; i < EACH; i++) most = fmaxf(most, x[i]);
    *top = block_max(most, sums);
    float shift = shift_of(*top);
    for (int i = 0; i < EACH; i++) total += expf((x[i] - shift) * by);
    *sum = block_sum(total, sums);
}

template <int W> static __global__ void __launch_bounds__(THREADS) jsd_lse_kernel(Divergence r)
{
    SHARED_ARRAY(float, sums, 32);
    int64_t t = blockIdx.x / r.parts;
    int from = (int)(blockIdx.x % r.parts) * PART, count = min(r.n - from, (int)PART);
    float x[EACH], y[EACH];
    Part part;
    part_load<W>(x, r.student + t * r.n + from, count, -INFINITY);
    part_load<W>(y, r.teacher + t * r.n + from, count, -INFINITY);
    part_lse(x, r.by, sums, &part.student_top, &part.student_sum);
    part_lse(y, r.by, sums, &part.teacher_top, &part.teacher_sum);
    if (threadIdx.x == 0) r.part[blockIdx.x] = part;
}

/* logΣ exp((x − base)/τ) of a row from the tops and sums of its parts, by a warp. */
__device__ static double join_lse(const float *top, const float *sum, int parts, float by,
                                  float *base)
{
    enum { STEP = sizeof(Part) / sizeof(float) };
    int lane = threadIdx.x % 32;
    float most = -INFINITY;
    for (int i = lane; i < parts; i += 32) most = fmaxf(most, top[i * STEP]);
    *base = shift_of(warp_max(most));
    double total = 0.0;
    for (int i = lane; i < parts; i += 32) {
        float one = sum[i * STEP];
        double above = (double)shift_of(top[i * STEP]) - (double)*base;
        if (one != 0.0f) total += (double)one * exp((double)by * above);
    }
    return log(warp_sum(total));
}

__device__ static __forceinline__ Wide wide(double x)
{
    return {(float)x, (float)(x - (double)(float)x)};
}

static __global__ void __launch_bounds__(ROW_WARPS * 32) jsd_row_kernel(Divergence r)
{
    int64_t t = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (t >= r.T) return;
    const Part *part = r.part + t * r.parts;
    Row row = {};
    double p = join_lse(&part->student_top, &part->student_sum, r.parts, r.by, &row.student_base);
    double q = join_lse(&part->teacher_top, &part->teacher_sum, r.parts, r.by, &row.teacher_base);
    if (threadIdx.x % 32) return;
    row.student_rest = wide(p);
    row.teacher_rest = wide(q);
    row.base = wide((double)row.teacher_base - (double)row.student_base);
    row.rest = wide(q - p);
    r.rows[t] = row;
}

/* The terms of a part, by fours, with their slopes (times their weights if each term has one).
 * `visit` gets their place in the part and the student's logits. */
template <int W, class Visit>
__device__ static __forceinline__ void part_terms(const Divergence &r, int64_t t, int from,
                                                  int count, Visit visit)
{
    const float *student = r.student + t * r.n + from, *teacher = r.teacher + t * r.n + from;
    const float *weight = r.how.each && r.scale ? r.scale + t * r.n + from : NULL;
    float nothing = r.how.probs ? 0.0f : -INFINITY;
    Row row = {};
    if (!r.how.probs) row = r.rows[t];
#pragma unroll 1
    for (int j = 0; j < EACH / 4; j++) {
        int at = quad_at(j);
        float x[4], y[4], w[4];
        Term term[4];
        quad_load<W>(x, student, at, count, nothing);
        quad_load<W>(y, teacher, at, count, nothing);
        if (weight) quad_load<1>(w, weight, at, count, 0.0f);
        for (int i = 0; i < 4; i++) {
            term[i] = term_of(r, row, x[i], y[i]);
            if (weight) term[i].slope *= w[i];
        }
        visit(at, term, x);
    }
}

template <int W> static __global__ void __launch_bounds__(THREADS) jsd_sum_kernel(Divergence r)
{
    SHARED_ARRAY(float, sums, 32);
    int64_t t = blockIdx.x / r.parts;
    int from = (int)(blockIdx.x % r.parts) * PART, count = min(r.n - from, (int)PART);
    float value = 0.0f, slope = 0.0f;
    part_terms<W>(r, t, from, count, [&](int at, const Term(&term)[4], const float (&)[4]) {
        for (int i = 0; i < 4; i++) {
            if (r.how.each && at + i < count) r.loss[t * r.n + from + at + i] = term[i].value;
            value += term[i].value;
            slope += term[i].slope;
        }
    });
    value = block_sum(value, sums);
    slope = block_sum(slope, sums);
    if (threadIdx.x == 0) r.sums[blockIdx.x] = {value, slope};
}

static __global__ void __launch_bounds__(ROW_WARPS * 32) jsd_total_kernel(Divergence r)
{
    int64_t t = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.x / 32;
    if (t >= r.T) return;
    const Sums *sums = r.sums + t * r.parts;
    double value = 0.0, slope = 0.0;
    for (int i = threadIdx.x % 32; i < r.parts; i += 32) {
        value += (double)sums[i].value;
        slope += (double)sums[i].slope;
    }
    value = warp_sum(value);
    slope = warp_sum(slope);
    if (threadIdx.x % 32) return;
    if (!r.how.each) r.loss[t] = (float)value;
    r.rows[t].slopes = (float)slope;
}

/* A part of the gradient, by fours: `put` gets their place in the part. A row with weight 0, as in
 * prompts, gets zeros whatever its logits. */
template <int W, class Put>
__device__ static __forceinline__ void part_gradient(const Divergence &r, int64_t t, int from,
                                                     int count, Put put)
{
    float scale = r.how.each ? 1.0f : r.scale[t], slopes = r.rows[t].slopes;
    if (scale == 0.0f) {
        for (int j = 0; j < EACH / 4; j++) put(quad_at(j), {0.0f, 0.0f, 0.0f, 0.0f});
        return;
    }
    scale *= r.by;
    part_terms<W>(r, t, from, count, [&](int at, const Term(&term)[4], const float (&x)[4]) {
        float y[4];
        for (int i = 0; i < 4; i++) {
            y[i] = term[i].slope - term[i].p * slopes;
            if (r.how.probs) y[i] = x[i] < LEAST ? 0.0f : term[i].slope / term[i].p;
            y[i] *= scale;
        }
        put(at, y);
    });
}

/* turn[0] is the next ticket, turn[1 + p] whether part p has been read. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    jsd_backward_kernel(real *dstudent, unsigned *turn, Divergence r)
{
    SHARED_ARRAY(unsigned, taken, 1);
    SHARED_ARRAY(real, y, PART);
    if (threadIdx.x == 0) taken[0] = atomicAdd(turn, 1u);
    __syncthreads();
    unsigned ticket = taken[0];
    int64_t t = ticket / r.parts;
    int from = (int)(ticket % r.parts) * PART, count = min(r.n - from, (int)PART);
    part_gradient<W>(r, t, from, count, [&](int at, const float (&quad)[4]) {
        *reinterpret_cast<uint2 *>(shared_range(y, at, 4)) =
            make_uint2(pack(quad[0], quad[1]), pack(quad[2], quad[3]));
    });
    __syncthreads();
    part_turn(turn + 1, ticket, t * r.n + from, count, r.n, PART);
    real *to = dstudent + t * r.n + from;
    for (int i = threadIdx.x * W; i < count; i += THREADS * W) {
        if constexpr (W == 4)
            *reinterpret_cast<uint2 *>(to + i) =
                *reinterpret_cast<const uint2 *>(shared_range(y, i, 4));
        else
            to[i] = y[i];
    }
}

/* ---- the teacher's K best ---- */

static __global__ void __launch_bounds__(THREADS)
    jsd_gather_kernel(float *picked, const float *logits, const int32_t *ids, int V, int K,
                      int64_t count)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) picked[i] = logits[i / K * V + ids[i]];
}

/* Scatters the gathered logits' gradient to its ids, in rows of zeros. */
template <int W>
static __global__ void __launch_bounds__(THREADS)
    jsd_scatter_kernel(real *dstudent, const int32_t *ids, int V, Divergence r)
{
    int64_t t = blockIdx.x / r.parts;
    int from = (int)(blockIdx.x % r.parts) * PART, count = min(r.n - from, (int)PART);
    part_gradient<W>(r, t, from, count, [&](int at, const float (&y)[4]) {
        for (int i = 0; i < 4; i++)
            if (at + i < count) dstudent[t * V + ids[t * r.n + from + at + i]] = to_real(y[i]);
    });
}

/* ---- the op ---- */

/* The op's arrays in one scratch block; with size 0 it only counts. */
typedef struct JsdWork {
    Row *rows;
    Part *part;
    Sums *sums;
    unsigned *turn;
    int32_t *ids;
    float *best, *picked;
    void *topk;
    size_t bytes;
} JsdWork;

static void *cut(char *base, size_t *used, size_t bytes)
{
    size_t at = *used;
    *used += (bytes + 255) / 256 * 256;
    return base ? base + at : NULL;
}

static JsdWork work_of(char *base, size_t T, size_t parts, int V, int K)
{
    JsdWork work = {};
    work.rows = (Row *)cut(base, &work.bytes, T * sizeof(Row));
    work.part = (Part *)cut(base, &work.bytes, T * parts * sizeof(Part));
    work.sums = (Sums *)cut(base, &work.bytes, T * parts * sizeof(Sums));
    work.turn = (unsigned *)cut(base, &work.bytes, (T * parts + 1) * sizeof(unsigned));
    if (!K) return work;
    work.ids = (int32_t *)cut(base, &work.bytes, T * K * sizeof(int32_t));
    work.best = (float *)cut(base, &work.bytes, T * K * sizeof(float));
    work.picked = (float *)cut(base, &work.bytes, T * K * sizeof(float));
    work.topk = cut(base, &work.bytes, topk_bytes((int)T, V, K));
    return work;
}

template <int W>
static void jsd_launch(CudaDevice *cuda, const Divergence &r, const JsdWork &work, real *dstudent,
                       int V)
{
    unsigned blocks = (unsigned)(r.T * r.parts), row_blocks = cuda_blocks(r.T, ROW_WARPS);
    if (!r.how.probs) {
        LAUNCH(cuda, jsd_lse_kernel<W>, blocks, THREADS, 0, r);
        LAUNCH(cuda, jsd_row_kernel, row_blocks, ROW_WARPS * 32, 0, r);
    }
    LAUNCH(cuda, jsd_sum_kernel<W>, blocks, THREADS, 0, r);
    LAUNCH(cuda, jsd_total_kernel, row_blocks, ROW_WARPS * 32, 0, r);
    if (!r.scale) return;
    if (r.how.top_k) {
        size_t bytes = (size_t)r.T * V * sizeof(real);
        if (CUDA_CHECK(cuda, cudaMemsetAsync(dstudent, 0, bytes, cuda->stream))) return;
        LAUNCH(cuda, jsd_scatter_kernel<W>, blocks, THREADS, 0, dstudent, work.ids, V, r);
        return;
    }
    size_t bytes = ((size_t)blocks + 1) * sizeof(unsigned);
    if (CUDA_CHECK(cuda, cudaMemsetAsync(work.turn, 0, bytes, cuda->stream))) return;
    LAUNCH(cuda, jsd_backward_kernel<W>, blocks, THREADS, 0, dstudent, work.turn, r);
}

void cuda_jsd(Device *dev, float *loss, real *dstudent, const float *student, const float *teacher,
              const float *scale, Jsd how, int T, int V)
{
    CudaDevice *cuda = cuda_of(dev);
    int K = how.top_k, n = K ? K : V, parts = parts_of(n, PART);
    assert(K >= 0 && K <= V && !(K && how.probs));
    if (T == 0) return;
    char *memory = (char *)cuda_scratch(cuda, work_of(NULL, T, parts, V, K).bytes);
    if (!memory) return;
    JsdWork work = work_of(memory, T, parts, V, K);
    if (K) {
        topk_rows(cuda, work.ids, work.best, teacher, NULL, work.topk, T, V, K);
        LAUNCH(cuda, jsd_gather_kernel, cuda_blocks((int64_t)T * K, THREADS), THREADS, 0,
               work.picked, student, work.ids, V, K, (int64_t)T * K);
        student = work.picked;
        teacher = work.best;
    }
    float by = how.probs ? 1.0f : 1.0f / how.temperature;
    Divergence r = {loss,      student, teacher, scale, work.rows, work.part,
                    work.sums, how,     by,      T,     n,         parts};
    if (quads_fit(student, n) && quads_fit(teacher, n) && (uintptr_t)dstudent % 8 == 0)
        jsd_launch<4>(cuda, r, work, dstudent, V);
    else
        jsd_launch<1>(cuda, r, work, dstudent, V);
}
