/* tools/card/experiments.cu - what only a card can answer, for designs that wait for it.
 *
 *   experiments            a line of JSON for each answer
 *
 * Whether wgmma (m64nNk16) has the bits of mma.sync (m16n8k16), for sums of several lengths, one
 * step of 16 after another in one accumulator: then both may serve one model. The bits of a few
 * such sums themselves, in hexadecimal, for emulators. How long a node of a replayed graph takes
 * that does nothing, with and without programmatic launch. And how fast memory is only read.
 *
 * For sm_90a alone. Operands are those of `noise`, by their index, so anyone can make them. */
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64, MOST_N = 64, MOST_K = 4096, NODES = 800, WARMUPS = 3, TIMES = 20 };

static void check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    printf("{\"experiment\": \"%s\", \"wrong\": \"%s\"}\n", what, cudaGetErrorString(error));
    exit(1);
}
#define CHECK(call) check(call, #call)

/* ---- operands ---- */

/* A bf16 of any sign, of a magnitude of 2^-4 to 2^4, by number. */
__host__ __device__ static uint16_t noise(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    x ^= x >> 31;
    return (uint16_t)((x >> 11 & 1) << 15 | (123 + (x >> 8 & 7)) << 7 | (x & 127));
}

static float of_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* a (64,K) and b (N,K), both along k. */
static void operands(uint16_t *a, uint16_t *b, int N, int K)
{
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < K; k++) a[i * K + k] = noise((uint64_t)(i * MOST_K + k) * 2 + 1);
    for (int j = 0; j < N; j++)
        for (int k = 0; k < K; k++) b[j * K + k] = noise((uint64_t)(j * MOST_K + k) * 2 + 2);
}

/* ---- sums by mma and by wgmma ---- */

__device__ static uint32_t two(const uint16_t *from)
{
    return from[0] | (uint32_t)from[1] << 16;
}

/* A lane's part of 16 rows and 16 of k of a, as both instructions want it. */
__device__ static void left_of(uint32_t (&left)[4], const uint16_t *a, int K, int k)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint16_t *from = a + (warp * 16 + lane / 4) * K + k + lane % 4 * 2;
    left[0] = two(from);
    left[1] = two(from + 8 * K);
    left[2] = two(from + 8);
    left[3] = two(from + 8 * K + 8);
}

/* A lane's sums to d (64,N). */
template <int N> __device__ static void sums_put(float *d, const float (&sum)[N / 2])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int j = 0; j < N / 8; j++)
        for (int e = 0; e < 4; e++) {
            int row = warp * 16 + lane / 4 + e / 2 * 8, col = j * 8 + lane % 4 * 2 + e % 2;
            d[row * N + col] = sum[4 * j + e];
        }
}

template <int N> __global__ void mma_kernel(float *d, const uint16_t *a, const uint16_t *b, int K)
{
    int lane = threadIdx.x % 32;
    float sum[N / 2] = {};
    for (int k = 0; k < K; k += 16) {
        uint32_t left[4];
        left_of(left, a, K, k);
        for (int j = 0; j < N / 8; j++) {
            const uint16_t *from = b + (j * 8 + lane / 4) * K + k + lane % 4 * 2;
            uint32_t right[2] = {two(from), two(from + 8)};
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(sum[4 * j]), "+f"(sum[4 * j + 1]), "+f"(sum[4 * j + 2]),
                           "+f"(sum[4 * j + 3])
                         : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]),
                           "r"(right[1]));
        }
    }
    sums_put<N>(d, sum);
}

/* A shared-memory matrix without swizzling: eight rows of 16 bytes are one piece of 128. */
__device__ static uint64_t descriptor(const void *at, int leading, int stride)
{
    uint64_t address = (uint64_t)__cvta_generic_to_shared(at);
    return (address & 0x3ffff) >> 4 | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32;
}

__device__ static void wgmma(float (&d)[4], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ static void wgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                 "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                 : D4(0), D4(4), D4(8), D4(12), D4(16), D4(20), D4(24), D4(28)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <int N>
__global__ void wgmma_kernel(float *d, const uint16_t *a, const uint16_t *b, int K, int leading,
                             int stride)
{
    __shared__ __align__(128) uint16_t tile[N * 16]; /* piece (j/8)·2 + k/8 */
    float sum[N / 2] = {};
    for (int k = 0; k < K; k += 16) {
        __syncthreads();
        for (int at = threadIdx.x; at < N * 16; at += blockDim.x) {
            int j = at / 16, e = at % 16;
            tile[(j / 8 * 2 + e / 8) * 64 + j % 8 * 8 + e % 8] = b[j * K + k + e];
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        uint32_t left[4];
        left_of(left, a, K, k);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        wgmma(sum, left, descriptor(tile, leading, stride));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
    sums_put<N>(d, sum);
}

/* How far results are from the sums in double, relative to their size. */
static double far(const float *d, const uint16_t *a, const uint16_t *b, int N, int K)
{
    double off = 0, size = 0;
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += (double)of_bf16(a[i * K + k]) * of_bf16(b[j * K + k]);
            off += (d[i * N + j] - sum) * (d[i * N + j] - sum);
            size += sum * sum;
        }
    return sqrt(off / size);
}

/* The first sums' bits, of row 0. */
static void bits_tell(const char *of, const float *d, int N, int K)
{
    printf("{\"experiment\": \"bits of %s m64n%dk16\", \"K\": %d, \"row 0\": \"", of, N, K);
    for (int j = 0; j < 8; j++) {
        uint32_t bits;
        memcpy(&bits, &d[j], 4);
        printf("%s%08x", j ? " " : "", bits);
    }
    printf("\"}\n");
}

/* A number as JSON has it, which knows no NaN. */
static double told(double x)
{
    return isfinite(x) ? x : -1;
}

static void bits_tell_all(int N, int K, int differing, double mma_far, double wgmma_far, int layout)
{
    printf("{\"experiment\": \"mma.sync and wgmma, N %d\", \"K\": %d, \"of\": %d, "
           "\"other bits\": %d, \"mma errs by\": %.3g, \"wgmma errs by\": %.3g, \"layout\": %d",
           N, K, ROWS * N, differing, told(mma_far), told(wgmma_far), layout);
    if (!(mma_far < 1e-4))
        printf(", \"wrong\": \"mma.sync is not the product\"");
    else if (!(wgmma_far < 1e-4))
        printf(", \"wrong\": \"wgmma is not the product\"");
    printf("}\n");
}

/* The descriptor's two distances are tried both ways: the right one makes the product. */
template <int N> static void bits_compare(int K)
{
    static uint16_t a[ROWS * MOST_K], b[MOST_N * MOST_K];
    static float by_mma[ROWS * MOST_N], by_wgmma[ROWS * MOST_N];
    uint16_t *da, *db;
    float *d;
    size_t a_bytes = sizeof(uint16_t) * ROWS * K, b_bytes = sizeof(uint16_t) * N * K;
    size_t d_bytes = sizeof(float) * ROWS * N;
    operands(a, b, N, K);
    CHECK(cudaMalloc(&da, a_bytes));
    CHECK(cudaMalloc(&db, b_bytes));
    CHECK(cudaMalloc(&d, d_bytes));
    CHECK(cudaMemcpy(da, a, a_bytes, cudaMemcpyDefault));
    CHECK(cudaMemcpy(db, b, b_bytes, cudaMemcpyDefault));
    mma_kernel<N><<<1, 128>>>(d, da, db, K);
    CHECK(cudaMemcpy(by_mma, d, d_bytes, cudaMemcpyDefault));
    double off = INFINITY;
    int layout = 0;
    for (; layout < 2 && !(off < 1e-4); layout++) {
        wgmma_kernel<N><<<1, 128>>>(d, da, db, K, layout ? 256 : 128, layout ? 128 : 256);
        CHECK(cudaMemcpy(by_wgmma, d, d_bytes, cudaMemcpyDefault));
        off = far(by_wgmma, a, b, N, K);
    }
    int differing = 0;
    for (int i = 0; i < ROWS * N; i++) differing += memcmp(&by_mma[i], &by_wgmma[i], 4) != 0;
    bits_tell_all(N, K, differing, far(by_mma, a, b, N, K), off, layout - 1);
    if (N == 8 && (K <= 1024)) {
        bits_tell("mma", by_mma, N, K);
        bits_tell("wgmma", by_wgmma, N, K);
    }
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(d));
}

/* ---- a graph's node ---- */

__global__ void nothing_kernel(int programmatic)
{
    if (programmatic) {
        asm volatile("griddepcontrol.launch_dependents;");
        asm volatile("griddepcontrol.wait;" ::: "memory");
    }
}

static float milliseconds(cudaGraphExec_t graph, cudaStream_t stream)
{
    cudaEvent_t begin, end;
    float least = INFINITY, took;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < WARMUPS + TIMES; i++) {
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(graph, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&took, begin, end));
        if (i >= WARMUPS && took < least) least = took;
    }
    return least;
}

/* `blocks` blocks in each node, as a decoding step's kernels have. */
static void graph_time(int programmatic, int blocks)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t work;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < NODES; i++) {
        cudaLaunchAttribute way = {};
        way.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        way.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t launch = {};
        launch.gridDim = dim3((unsigned)blocks);
        launch.blockDim = dim3(128);
        launch.stream = stream;
        launch.attrs = &way;
        launch.numAttrs = programmatic ? 1 : 0;
        CHECK(cudaLaunchKernelEx(&launch, nothing_kernel, programmatic));
    }
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&work, graph, 0));
    printf(
        "{\"experiment\": \"a node of a graph of %d kernels of %d blocks%s\", \"\u00b5s\": %.3f}\n",
        NODES, blocks, programmatic ? ", programmatic launch" : "",
        1e3 * milliseconds(work, stream) / NODES);
    CHECK(cudaGraphExecDestroy(work));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
}

/* ---- memory that is only read ---- */

__global__ void read_kernel(uint4 *out, const uint4 *from, size_t count)
{
    size_t at = (size_t)blockIdx.x * blockDim.x + threadIdx.x,
           step = (size_t)gridDim.x * blockDim.x;
    uint4 sum = {};
#pragma unroll 8
    for (; at < count; at += step) {
        uint4 x = __ldcs(from + at);
        sum.x ^= x.x, sum.y ^= x.y, sum.z ^= x.z, sum.w ^= x.w;
    }
    if (sum.x == 1 && sum.y == 2 && sum.z == 3 && sum.w == 4)
        *out = sum; /* else all of it is dead */
}

static void read_time(int processors, int each)
{
    size_t bytes = (size_t)4 << 30;
    uint4 *from, *out;
    cudaEvent_t begin, end;
    float least = INFINITY, took;
    CHECK(cudaMalloc(&from, bytes));
    CHECK(cudaMalloc(&out, sizeof *out));
    CHECK(cudaMemset(from, 0x5a, bytes));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < WARMUPS + 5; i++) {
        CHECK(cudaEventRecord(begin));
        read_kernel<<<(unsigned)(processors * each), 512>>>(out, from, bytes / sizeof *from);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&took, begin, end));
        if (i >= WARMUPS && took < least) least = took;
    }
    printf("{\"experiment\": \"reading 4 GiB, %d blocks of 512 a processor\", \"GB/s\": %.1f}\n",
           each, 1e-6 * (double)bytes / (double)least);
    CHECK(cudaFree(from));
    CHECK(cudaFree(out));
}

int main(void)
{
    cudaDeviceProp card;
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cudaGetDeviceProperties(&card, 0));
    if (card.major != 9) {
        printf("{\"experiment\": \"none\", \"wrong\": \"%s is no Hopper\"}\n", card.name);
        return 1;
    }
    for (int K = 16; K <= MOST_K; K *= 4) {
        bits_compare<8>(K);
        bits_compare<64>(K);
    }
    for (int blocks : {1, 132})
        for (int programmatic = 0; programmatic < 2; programmatic++)
            graph_time(programmatic, blocks);
    for (int each : {1, 2, 4}) read_time(card.multiProcessorCount, each);
    return 0;
}
