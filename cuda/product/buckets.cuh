/* cuda/product/buckets.cuh - the fastest cuBLASLt algorithm for each bucket of rows of a product,
 * among those with the reference's bits.
 *
 * Included only by matmul.cu. A rehearsal collects the coming products and their numbers of rows.
 * Before the step begins, and never during a recording, a bucket without an algorithm gets one: the
 * candidates run on made-up operands of the product's shape, with the bucket's fewest and most
 * rows. Candidates that differ from the reference in a bit, or are refused, are dropped; the
 * fastest of the others is chosen. So time only decides among equal bits: two processes may choose
 * differently, with the same results. A weight's content does not matter, and all weights of a
 * shape share the choice.
 *
 * The sums of the made-up operands cancel: term k + K/2 is the negative of term k. Only rounding
 * errors remain of a sum, so another order of k shows in nearly every element, even if c is bf16.
 * The reference itself is tested like this first: one whose bits change with the number of rows is
 * replaced by the next.
 *
 * The operands use free memory of the card, at most a TRIAL_PART-th of the card, which is freed at
 * once. With less, fewer rows are tried, or none. If the card has no memory at the moment, the next
 * rehearsal retries. Until then, or forever, the reference serves the bucket, with the same
 * bits. */
#ifndef TINSMITH_CUDA_PRODUCT_BUCKETS_CUH
#define TINSMITH_CUDA_PRODUCT_BUCKETS_CUH

#include "choices.cuh"
#include "../runtime/kernel.cuh"

enum {
    TRIED = 24,      /* the most algorithms per bucket */
    TIMES = 3,       /* timings of each, with a cold cache; the minimum counts */
    TRIAL_PART = 32, /* 1/TRIAL_PART of the card's memory is for the operands */
    TRIAL_THREADS = 256,
    LANES = 32, /* threads that hash a row */
    UNIT = 0,   /* exponents of the operands, and of c and bias: like sums' rounding errors */
    SMALL = -18,
};

/* The trial of a product: its operands, and hashes of the reference's rows. */
typedef struct Trial {
    CudaDevice *cuda;
    Plan *plan;
    int most; /* rows that fit in memory */
    char *memory;
    real *a, *b, *bias;
    void *c, *cold;
    size_t cold_bytes;
    unsigned long long *hash;       /* [most] on the card */
    unsigned long long *row, *mine; /* [2·most], [most] of the reference and of a candidate */
    cudaEvent_t begin, end;
} Trial;

/* ---- kernels ---- */

__device__ static __forceinline__ uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* A number of eight random bits, a random sign, and a magnitude of 2^(exponent - 4) up to
 * 2^(exponent + 4). */
__device__ static __forceinline__ real noise(uint64_t seed, int exponent)
{
    uint64_t bits = mix(seed);
    unsigned magnitude = (unsigned)(127 + exponent - 4 + (int)(bits >> 8 & 7));
    real x;
    x.value = __ushort_as_bfloat16(
        (unsigned short)((bits >> 11 & 1) << 15 | magnitude << 7 | (bits & 127)));
    return x;
}

/* An operand whose sums run over K: number (i, k) is at i·stride + k or, turned, at k·stride + i.
 * The second half repeats the first, or its negatives. */
static __global__ void operand_kernel(real *x, int64_t rows, int64_t K, int64_t stride, bool turned,
                                      bool negates)
{
    int64_t at = (int64_t)blockIdx.x * TRIAL_THREADS + threadIdx.x, half = K / 2;
    if (at >= rows * K) return;
    int64_t i = turned ? at % rows : at / K, k = turned ? at / rows : at % K;
    bool second = k >= half;
    real value = noise((uint64_t)i << 32 | (uint64_t)((second ? k - half : k) * 2 + negates), UNIT);
    if (k == 2 * half) value = to_real(0.0f); /* the unpaired one */
    x[turned ? k * stride + i : i * stride + k] = second && negates ? to_real(-f32(value)) : value;
}

/* n numbers as small as the sums' rounding errors. */
template <class T> static __global__ void small_kernel(T *x, int64_t n)
{
    int64_t at = (int64_t)blockIdx.x * TRIAL_THREADS + threadIdx.x;
    if (at >= n) return;
    float value[1] = {f32(noise(~(uint64_t)at, SMALL))};
    store<1>(x + at, value);
}

/* Hashes the bits of each row, 32 threads per row. (Integer sums: their order does not matter.) */
template <class T>
static __global__ void hash_kernel(unsigned long long *hash, const T *c, int rows, int N,
                                   int64_t step)
{
    int64_t at = (int64_t)blockIdx.x * TRIAL_THREADS + threadIdx.x, row = at / LANES;
    if (row >= rows || at % LANES >= N) return;
    unsigned long long sum = 0;
    for (int64_t j = at % LANES; j < N; j += LANES) {
        float value[1];
        load<1>(value, c + row * step + j);
        sum += mix((uint64_t)j << 32 | __float_as_uint(value[0]));
    }
    atomicAdd(hash + row, sum);
}

/* ---- a trial's memory ---- */

static int64_t weight_rows(const PlanKey &key)
{
    return key.b_by_column ? key.N : key.fixed;
}

/* c's row stride in elements. */
static int64_t c_step(const PlanKey &key)
{
    return key.c_stride;
}

/* Places the operands for `rows` rows at `memory`; returns their bytes. */
static size_t trial_place(Trial *t, int rows, char *memory)
{
    const PlanKey &key = t->plan->key;
    size_t used = 0;
    auto take = [&](size_t bytes) {
        size_t at = used;
        used += (bytes + 255) / 256 * 256;
        return memory + at;
    };
    t->most = rows;
    t->a = (real *)take((size_t)rows * (size_t)key.a_stride * sizeof(real));
    t->b = (real *)take((size_t)(weight_rows(key) * key.b_stride) * sizeof(real));
    t->bias = (real *)take((size_t)key.N * sizeof(real));
    t->c = take((size_t)(rows * c_step(key)) * (key.f32_out ? sizeof(float) : sizeof(real)));
    t->hash = (unsigned long long *)take((size_t)rows * sizeof *t->hash);
    t->cold_bytes = 2 * t->cuda->cache_bytes; /* takes longer than launching a product */
    t->cold = take(t->cold_bytes);
    return used;
}

static void trial_close(Trial *t)
{
    if (t->begin) cudaEventDestroy(t->begin);
    if (t->end) cudaEventDestroy(t->end);
    if (t->memory) cudaFree(t->memory); /* waits for its users */
    free(t->row);
}

enum Opened { OPENED, TOO_LARGE, NO_MEMORY };

/* Makes the operands of `wanted` rows, or fewer, but at least `least`. TOO_LARGE: they never fit;
 * NO_MEMORY: not now. */
static Opened trial_open(Trial *t, int least, int wanted)
{
    CudaDevice *cuda = t->cuda;
    const PlanKey &key = t->plan->key;
    size_t bytes, limit = cuda->all_bytes / TRIAL_PART;
    while ((bytes = trial_place(t, wanted, nullptr)) > limit && wanted > least)
        wanted = wanted / 2 > least ? wanted / 2 : least;
    if (bytes > limit) return TOO_LARGE;
    t->row = (unsigned long long *)malloc(3 * (size_t)wanted * sizeof *t->row);
    if (!t->row) return NO_MEMORY;
    t->mine = t->row + 2 * wanted;
    if (cudaMalloc((void **)&t->memory, bytes) != cudaSuccess) {
        cudaGetLastError();
        t->memory = nullptr;
        return NO_MEMORY;
    }
    trial_place(t, wanted, t->memory);
    CUDA_CHECK(cuda, cudaEventCreateWithFlags(&t->begin, cudaEventDefault));
    CUDA_CHECK(cuda, cudaEventCreateWithFlags(&t->end, cudaEventDefault));
    int64_t K = key.fixed, N = key.N;
    LAUNCH(cuda, operand_kernel, cuda_blocks(wanted * K, TRIAL_THREADS), TRIAL_THREADS, 0, t->a,
           wanted, K, key.a_stride, false, false);
    LAUNCH(cuda, operand_kernel, cuda_blocks(N * K, TRIAL_THREADS), TRIAL_THREADS, 0, t->b, N, K,
           key.b_stride, !key.b_by_column, true);
    LAUNCH(cuda, small_kernel<real>, cuda_blocks(N, TRIAL_THREADS), TRIAL_THREADS, 0, t->bias, N);
    return OPENED;
}

/* ---- trying an algorithm ---- */

/* Computes c with an algorithm; false if it is refused. */
static bool trial_product(Trial *t, const LtAlgorithm *algorithm, int rows, float beta)
{
    CudaDevice *cuda = t->cuda;
    const Plan *plan = t->plan;
    Matmul *m = cuda->matmul;
    float alpha = 1.0f;
    plan_rows(cuda, plan, (uint64_t)rows);
    if (plan->key.bias)
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_BIAS_POINTER, &t->bias, sizeof t->bias);
    if (cuda->status) return false;
    int status = m->Matmul(m->handle, plan->desc, &alpha, t->b, plan->b, t->a, plan->a, &beta, t->c,
                           plan->c, t->c, plan->c, algorithm, nullptr, 0, cuda->stream);
    if (status) cudaGetLastError(); /* else the next launch would report it */
    return !status;
}

/* The hashes of an algorithm's rows, c = a·b (accumulate: or c += a·b); false if it is refused. */
static bool trial_rows(Trial *t, unsigned long long *to, const LtAlgorithm *algorithm, int rows,
                       int accumulate)
{
    CudaDevice *cuda = t->cuda;
    int N = t->plan->key.N;
    int64_t step = c_step(t->plan->key), count = rows * step;
    unsigned blocks = cuda_blocks(count, TRIAL_THREADS),
             hashes = cuda_blocks((int64_t)rows * LANES, TRIAL_THREADS);
    float *wide = (float *)t->c;
    real *half = (real *)t->c;
    bool f32_out = t->plan->key.f32_out;
    if (f32_out) LAUNCH(cuda, small_kernel<float>, blocks, TRIAL_THREADS, 0, wide, count);
    if (!f32_out) LAUNCH(cuda, small_kernel<real>, blocks, TRIAL_THREADS, 0, half, count);
    if (cuda->status || !plan_takes(cuda, t->plan, algorithm, (uint64_t)rows) ||
        !trial_product(t, algorithm, rows, (float)accumulate))
        return false;
    CUDA_CHECK(cuda, cudaMemsetAsync(t->hash, 0, (size_t)rows * sizeof *to, cuda->stream));
    if (f32_out)
        LAUNCH(cuda, hash_kernel<float>, hashes, TRIAL_THREADS, 0, t->hash, wide, rows, N, step);
    if (!f32_out)
        LAUNCH(cuda, hash_kernel<real>, hashes, TRIAL_THREADS, 0, t->hash, half, rows, N, step);
    CUDA_CHECK(cuda, cudaMemcpyAsync(to, t->hash, (size_t)rows * sizeof *to, cudaMemcpyDefault,
                                     cuda->stream));
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    return !cuda->status;
}

/* Whether an algorithm's rows equal the reference's (of `most` rows), for c = a·b and c += a·b. */
static bool trial_same(Trial *t, const LtAlgorithm *algorithm, int rows)
{
    for (int accumulate = 0; accumulate < 2; accumulate++)
        if (!trial_rows(t, t->mine, algorithm, rows, accumulate) ||
            memcmp(t->mine, t->row + accumulate * t->most, (size_t)rows * sizeof *t->mine) != 0)
            return false;
    return true;
}

/* Milliseconds of an algorithm that is not refused. */
static float trial_time(Trial *t, const LtAlgorithm *algorithm, int rows)
{
    CudaDevice *cuda = t->cuda;
    float least = INFINITY, took = INFINITY;
    for (int i = 0; i < TIMES && !cuda->status; i++) {
        CUDA_CHECK(cuda, cudaMemsetAsync(t->cold, 0, t->cold_bytes, cuda->stream));
        CUDA_CHECK(cuda, cudaEventRecord(t->begin, cuda->stream));
        if (!trial_product(t, algorithm, rows, 0.0f)) return INFINITY;
        CUDA_CHECK(cuda, cudaEventRecord(t->end, cuda->stream));
        CUDA_CHECK(cuda, cudaEventSynchronize(t->end));
        CUDA_CHECK(cuda, cudaEventElapsedTime(&took, t->begin, t->end));
        if (took < least) least = took;
    }
    return least;
}

/* ---- the choice ---- */

static int bucket_fewest(int i)
{
    return i ? bucket_rows[i - 1] + 1 : 1;
}

/* Stores the hashes of the reference's rows; false if it is refused. */
static bool reference_rows(Trial *t)
{
    return trial_rows(t, t->row, &t->plan->reference, t->most, 0) &&
           trial_rows(t, t->row + t->most, &t->plan->reference, t->most, 1);
}

/* Checks that the reference's rows keep their bits in all buckets, as far as memory allows. One
 * that fails is replaced by the next in cuBLASLt's list. */
static Opened reference_try(CudaDevice *cuda, Plan *plan)
{
    Trial t = {};
    t.cuda = cuda;
    t.plan = plan;
    Opened opened = trial_open(&t, 1, bucket_rows[BUCKETS - 1]);
    while (!opened && plan->picked && !plan->steady && !cuda->status) {
        plan->steady = reference_rows(&t);
        for (int i = 0; i < BUCKETS && plan->steady; i++) {
            int fewest = bucket_fewest(i), most = bucket_rows[i];
            if (most <= t.most) plan->steady = trial_same(&t, &plan->reference, most);
            if (plan->steady && fewest <= t.most)
                plan->steady = trial_same(&t, &plan->reference, fewest);
        }
        if (!plan->steady && !cuda->status) plan_pick(cuda, plan, plan->place + 1);
    }
    trial_close(&t);
    for (Bucket &bucket : plan->bucket) bucket.algorithm = plan->reference;
    return opened;
}

/* Tries a bucket's candidates and the reference; returns the time of the one it keeps. */
static float candidates_try(Trial *t, Bucket *bucket, const LtHeuristic *found, int count,
                            int fewest, Choice *choice)
{
    CudaDevice *cuda = t->cuda;
    float least = trial_time(t, &t->plan->reference, t->most);
    choice_trial(cuda, choice, &t->plan->reference, "reference", least);
    for (int j = 0; j < count && !cuda->status; j++) {
        const LtAlgorithm *one = &found[j].algorithm;
        if (!candidate_sound(cuda, &found[j])) {
            choice_trial(cuda, choice, one, "splits k or needs memory", INFINITY);
        } else if (!trial_same(t, one, fewest) || !trial_same(t, one, t->most)) {
            choice_trial(cuda, choice, one, "other bits, or refused", INFINITY);
        } else {
            float took = trial_time(t, one, t->most);
            choice_trial(cuda, choice, one, "same bits", took);
            if (!(took < least)) continue;
            least = took;
            bucket->algorithm = *one;
        }
    }
    return least;
}

/* Chooses the algorithm of plan->bucket[i]; returns the reason. */
static const char *bucket_try(CudaDevice *cuda, Plan *plan, int i, Choice *choice, float *least)
{
    LtHeuristic found[TRIED];
    Bucket *bucket = &plan->bucket[i];
    int fewest = bucket_fewest(i), wanted = bucket_rows[i], others = 0;
    plan_rows(cuda, plan, (uint64_t)wanted);
    int count = plan_ask(cuda, plan, found, TRIED);
    for (int j = 0; j < count; j++)
        if (memcmp(&found[j].algorithm, &plan->reference, sizeof plan->reference) != 0)
            found[others++] = found[j];
    if (!others) return "the reference is the only one";
    Opened opened = plan->steady ? OPENED : reference_try(cuda, plan);
    Trial t = {};
    t.cuda = cuda;
    t.plan = plan;
    if (!opened && plan->steady && !cuda->status) opened = trial_open(&t, fewest, wanted);
    const char *why = "the fastest of the reference's bits";
    if (opened == TOO_LARGE)
        why = "its operands are too large to be tried";
    else if (opened == NO_MEMORY)
        why = "no memory to try others: the next rehearsal tries again";
    else if (!plan->steady || cuda->status)
        why = "no reference keeps its bits";
    else if (!reference_rows(&t))
        why = "the reference was refused";
    else
        *least = candidates_try(&t, bucket, found, others, fewest, choice);
    trial_close(&t);
    bucket->chosen = opened != NO_MEMORY;
    return why;
}

static void bucket_choose(CudaDevice *cuda, Plan *plan, int i)
{
    Bucket *bucket = &plan->bucket[i];
    float least = INFINITY;
    Choice *choice = (Choice *)malloc(sizeof *choice);
    if (!choice) return cuda_fail(cuda, STATUS_MEMORY, "no memory for a product");
    choice_begin(cuda, choice, plan, bucket_fewest(i), bucket_rows[i]);
    bucket->wanted = false;
    bucket->chosen = true;
    bucket->algorithm = plan->reference;
    const char *why = bucket_try(cuda, plan, i, choice, &least);
    choice_end(cuda, choice, why, plan->picked ? &bucket->algorithm : nullptr, least);
    free(choice);
}

/* Chooses the algorithms that the last rehearsal found missing. */
void matmul_choose(CudaDevice *cuda)
{
    Matmul *m = cuda->matmul;
    if (!m || !m->wanted || cuda->recording) return;
    m->wanted = false;
    for (int p = 0; p < m->plan_count; p++)
        for (int i = 0; i < BUCKETS && !cuda->status; i++)
            if (m->plans[p].bucket[i].wanted) bucket_choose(cuda, &m->plans[p], i);
}

#endif
