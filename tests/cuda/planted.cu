/* tests/cuda/planted.cu - small kernels, each right, or wrong in one way that the emulator must
 * show.
 *
 * test_emulator.py compiles this as C++ and calls planted(). With `bug` 0 every kernel gives what
 * the test expects; with 1 it has the error that its comment names. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../../cuda/runtime/kernel.cuh"
#include "../../cuda/runtime/entry.cuh"

enum { THREADS = 128, NUMBERED = 16 };

void cuda_fail(CudaDevice *cuda, Status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(cuda->text, sizeof cuda->text, format, args);
    va_end(args);
    cuda->status = status;
}

int cuda_check(CudaDevice *cuda, cudaError_t error, const char *what, const char *file, int line)
{
    if (error != cudaSuccess) cuda_fail(cuda, STATUS_DEVICE, "%s:%d: %s", file, line, what);
    return error != cudaSuccess;
}

/* Each round turns the block's numbers round. 1: no barrier between writing and reading; 2: none
 * between reading and the next round's writing. */
static __global__ void barrier_kernel(float *out, int bug)
{
    SHARED_ARRAY(float, tile, THREADS);
    int i = (int)threadIdx.x;
    float value = (float)i;
    for (int round = 0; round < 3; round++) {
        tile[i] = value + 1.0f;
        if (bug != 1) __syncthreads();
        value = tile[THREADS - 1 - i];
        if (bug != 2) __syncthreads();
    }
    out[i] = value;
}

/* 1: one past the end of a static array; 2: of a part of the dynamic memory; 3: written through a
 * plain pointer, behind the emulator's back; 4: below the beginning. */
static __global__ void bounds_kernel(float *out, int bug)
{
    SHARED_ARRAY(float, tile, THREADS);
    DYNAMIC_SHARED(bytes);
    Shared<float> first = shared_part<float>(bytes, 0, THREADS);
    Shared<float> second = shared_part<float>(bytes, THREADS * sizeof(float), THREADS);
    int i = (int)threadIdx.x;
    tile[i + (bug == 1)] = 1.0f;
    first[i + (bug == 2)] = 2.0f;
    second[i - (bug == 4)] = 3.0f;
    if (bug == 3) shared_range(tile, i, 1)[1] = 4.0f;
    out[i] = tile[i] + first[i] + second[i];
}

/* 1: the last element of out is never written. 2: one of shared memory is read without having been
 * written. */
static __global__ void unwritten_kernel(float *out, int bug)
{
    SHARED_ARRAY(float, tile, THREADS);
    int i = (int)threadIdx.x;
    if (bug != 2 || i != 5) tile[i] = 6.0f;
    if (bug != 1 || i != THREADS - 1) out[i] = tile[i];
}

/* out (16,8) = a (16,16)·b (16,8), a[r,k] = 16·r + k in small steps, b = b[k,n] = k − n. 1: two
 * registers of the fragment are swapped; 2: b is loaded as if it were transposed. */
static __global__ void mma_kernel(float *out, int bug)
{
    SHARED_ARRAY(real, a, 256);
    SHARED_ARRAY(real, b, 128);
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32) a[i] = to_real((float)i / 64.0f);
    for (int i = lane; i < 128; i += 32) b[i] = to_real((float)(i / 8 - i % 8));
    __syncwarp();
    uint32_t af[4], bf[4];
    ldmatrix(af, shared_range(a, lane % 16 * 16 + lane / 16 * 8, 8));
    if (bug == 2)
        ldmatrix(bf, shared_range(b, lane % 16 * 8, 8));
    else
        ldmatrix_transposed(bf, shared_range(b, lane % 16 * 8, 8));
    if (bug == 1) {
        uint32_t other = af[1];
        af[1] = af[2];
        af[2] = other;
    }
    float d[4] = {0, 0, 0, 0};
    mma(d, af, bf[0], bf[1]);
    for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

/* out = in through shared memory in two groups. 1: the first group is read before it is waited for;
 * 2: the second is never waited for, nor read. */
static __global__ void copy_kernel(float *out, const float *in, int bug)
{
    SHARED_ARRAY(float, tile, 2 * 4 * THREADS);
    int i = (int)threadIdx.x * 4;
    cp_async(shared_range(tile, i, 4), in + i);
    cp_async_commit();
    cp_async(shared_range(tile, 4 * THREADS + i, 4), in + i);
    cp_async_commit();
    if (bug != 1) cp_async_wait<1>();
    __syncthreads();
    for (int j = 0; j < 4; j++) out[i + j] = tile[(i + 4) % (4 * THREADS) + j];
    if (bug != 2) cp_async_wait<0>();
}

/* 1: only one warp comes to the barrier; 2: half a warp comes to a shuffle, the rest returns; 3:
 * the halves of a warp come to different collectives; 4: a shuffle of a part of the warp; 5: the
 * halves of the block come to different barriers. */
static __global__ void divergence_kernel(float *out, int bug)
{
    int i = (int)threadIdx.x;
    if (bug == 1 && i >= 32) return;
    if (bug == 2 && i % 32 >= 16) return;
    float sum = 0.0f;
    if (bug == 3 && i % 32 < 16)
        __syncwarp();
    else
        sum = bug == 2 || bug == 3 ? __shfl_xor_sync(~0u, 1.0f, 1) : warp_sum(1.0f);
    if (bug == 4) sum = __shfl_sync(0xffffu, sum, 0);
    if (bug == 5 && i < 64)
        __syncthreads();
    else
        __syncthreads();
    out[i] = sum;
}

/* 1: ldmatrix from an address that is no multiple of 16; 2: from outside of shared memory. */
static __global__ void address_kernel(float *out, int bug)
{
    SHARED_ARRAY(real, tile, 32 * 8 + 8);
    static const real elsewhere[8] = {};
    int lane = (int)threadIdx.x;
    for (int i = lane; i < 264; i += 32) tile[i] = to_real(1.0f);
    __syncwarp();
    uint32_t r[4];
    const real *row = shared_range(tile, lane * 8 + (bug == 1), 8);
    ldmatrix(r, bug == 2 ? elsewhere : row);
    out[lane] = low_of(r[0]);
}

/* The first element of a·b (K = 4096), where b is a third and a is 1/3 to 1/9 by turns of 16 k. 1:
 * one sum for all K, which tensor cores cut at each step; 0: 64 terms at a time, added up by
 * themselves. */
static __global__ void cut_kernel(float *out, int bug)
{
    uint32_t third = pack(1.0f / 3.0f, 1.0f / 3.0f);
    float sum = 0.0f;
    for (int k = 0; k < 4096;) {
        float d[4] = {0, 0, 0, 0};
        for (int end = k + (bug ? 4096 : 64); k < end; k += 16) {
            float turn = 1.0f / (float)(3 + k / 16 % 7);
            uint32_t pair = pack(turn, turn), a[4] = {pair, pair, pair, pair};
            mma(d, a, third, third);
        }
        sum += d[0];
    }
    out[threadIdx.x] = sum;
}

/* Each block leaves a number; the last one that comes adds them up. `arrived` counts them. */
static __global__ void last_kernel(float *out, float *parts, unsigned *arrived, float number)
{
    SHARED_ARRAY(unsigned, before, 1);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = number;
        before[0] = atomicAdd(arrived, 1u);
        if (before[0] + 1 == gridDim.x) *arrived = 0;
    }
    __syncthreads();
    if (before[0] + 1 < gridDim.x) return;
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; i++) sum += parts[i];
    out[threadIdx.x] = sum;
}

/* Blocks of one warp, or the warps of one block, each give their number and one more. 1: each goes
 * on from what the one before it has left, which is there where they run forward; 2: each takes the
 * one that ran before it for its neighbour, which it is both forward and in reverse. */
__device__ static void order_step(float *out, float *left, float *latest, int i, int bug)
{
    float one = 1.0f, before = (float)i;
    if (threadIdx.x % 32 == 0) {
        if (bug == 1 && i > 0) before = left[i - 1];
        if (bug == 2 && *latest >= 0.0f) one = fabsf(*latest - (float)i);
        left[i] = before + one;
        *latest = (float)i;
        out[i] = before + one;
    }
}

static __global__ void blocks_kernel(float *out, float *left, int bug)
{
    order_step(out, left, left + gridDim.x, (int)blockIdx.x, bug);
}

static __global__ void warps_kernel(float *out, int bug)
{
    SHARED_ARRAY(float, left, 33);
    float *memory = shared_range(left, 0, 33);
    order_step(out, memory, memory + 32, (int)threadIdx.x / 32, bug);
}

/* out = in + 1 */
static __global__ void next_kernel(float *out, const float *in)
{
    out[threadIdx.x] = in[threadIdx.x] + 1.0f;
}

static void planted_open(CudaDevice *cuda, int ordinal)
{
    cuda->ordinal = ordinal;
    cuda->status = STATUS_OK;
    cuda->text[0] = 0;
    cuda->shared_bytes = emulate::machine.cards[ordinal].shared_bytes;
    Current current(ordinal);
    if (!cuda->stream) cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
}

/* Runs a kernel in an order of warps (emulate::Order), from a seed on, into out, and its sentence
 * into text; returns how many floats of out count. */
extern "C" TINSMITH_EXPORT int planted(const char *name, int bug, int order, uint64_t seed,
                                       float *out, char *text)
{
    static CudaDevice device;
    CudaDevice *cuda = &device;
    planted_open(cuda, 0);
    emulate::order_begin((emulate::Order)order, seed);
    int n = THREADS;
    void *memory, *in;
    cudaMalloc(&memory, 4 * THREADS * sizeof(float));
    cudaMalloc(&in, 4 * THREADS * sizeof(float));
    for (int i = 0; i < 4 * THREADS; i++) ((float *)in)[i] = (float)i;
    float *y = (float *)memory, *left = y + THREADS;
    if (!strcmp(name, "barrier")) LAUNCH(cuda, barrier_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "bounds")) LAUNCH(cuda, bounds_kernel, 2, THREADS, 8 * THREADS, y, bug);
    if (!strcmp(name, "unwritten")) LAUNCH(cuda, unwritten_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "mma")) LAUNCH(cuda, mma_kernel, 1, 32, 0, y, bug);
    if (!strcmp(name, "divergence")) LAUNCH(cuda, divergence_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "address")) LAUNCH(cuda, address_kernel, 1, 32, 0, y, bug);
    if (!strcmp(name, "cut")) LAUNCH(cuda, cut_kernel, 1, 32, 0, y, bug);
    if (!strcmp(name, "large"))
        LAUNCH(cuda, bounds_kernel, 1, THREADS, bug ? 100 << 10 : 1024, y, 0);
    if (!strcmp(name, "address")) n = 32;
    if (!strcmp(name, "blocks") || !strcmp(name, "warps")) n = NUMBERED;
    if (!strcmp(name, "blocks")) LAUNCH(cuda, blocks_kernel, NUMBERED, 32, 0, y, left, bug);
    if (!strcmp(name, "warps")) LAUNCH(cuda, warps_kernel, 1, 32 * NUMBERED, 0, y, bug);
    if (!strcmp(name, "copy")) {
        LAUNCH(cuda, copy_kernel, 2, THREADS, 0, y, (const float *)in, bug);
        n = 4 * THREADS;
    }
    cudaStreamSynchronize(cuda->stream);
    memcpy(out, y, n * sizeof(float));
    snprintf(text, sizeof cuda->text, "%.500s", cuda->text);
    cudaFree(memory);
    cudaFree(in);
    return n;
}

/* ---- what the host does: right, or wrong in one way that the lazy mode must show ---- */

/* Arrays of THREADS floats: two of the card's, and two of the host's that are pinned. */
typedef struct Arrays {
    float *in, *out, *from, *to;
} Arrays;

static void arrays_open(Arrays *arrays)
{
    size_t bytes = THREADS * sizeof(float);
    cudaMalloc((void **)&arrays->in, bytes);
    cudaMalloc((void **)&arrays->out, bytes);
    cudaMallocHost((void **)&arrays->from, bytes);
    cudaMallocHost((void **)&arrays->to, bytes);
    for (int i = 0; i < THREADS; i++) arrays->from[i] = (float)i;
}

static void arrays_close(Arrays *arrays)
{
    cudaFree(arrays->in);
    cudaFree(arrays->out);
    cudaFreeHost(arrays->from);
    cudaFreeHost(arrays->to);
}

/* to = from + 1, through the card. 1: the host reads `to` before it has waited; 2: it changes
 * `from` while it may still be read; 3: it frees memory of the card while a kernel uses it; 4: it
 * waits for an event that lies before the copy. */
static void host_copy(CudaDevice *cuda, float *out, int bug)
{
    Arrays x;
    cudaEvent_t done;
    size_t bytes = THREADS * sizeof(float);
    arrays_open(&x);
    cudaEventCreateWithFlags(&done, cudaEventDisableTiming);
    cudaMemcpyAsync(x.in, x.from, bytes, cudaMemcpyDefault, cuda->stream);
    if (bug == 2) x.from[3] = -1.0f;
    LAUNCH(cuda, next_kernel, 1, THREADS, 0, x.out, (const float *)x.in);
    if (bug == 3) cudaFree(x.in);
    if (bug == 4) cudaEventRecord(done, cuda->stream);
    cudaMemcpyAsync(x.to, x.out, bytes, cudaMemcpyDefault, cuda->stream);
    if (bug != 4) cudaEventRecord(done, cuda->stream);
    if (bug != 1) cudaEventSynchronize(done);
    memcpy(out, x.to, bytes);
    cudaStreamSynchronize(cuda->stream);
    if (bug == 3) x.in = nullptr;
    cudaEventDestroy(done);
    arrays_close(&x);
}

/* Two streams of one card, each with a sum that its last block makes. 1: they count their blocks in
 * the same place. */
static void host_streams(CudaDevice *a, CudaDevice *b, float *out, int bug)
{
    void *counts;
    cudaMalloc(&counts, 256);
    memset(counts, 0, 256);
    unsigned *count[2] = {(unsigned *)counts, (unsigned *)counts + (bug == 1 ? 0 : 1)};
    CudaDevice *devices[2] = {a, b};
    Arrays x[2];
    for (int i = 0; i < 2; i++) {
        arrays_open(&x[i]);
        LAUNCH(devices[i], last_kernel, 8, 32, 0, x[i].out, x[i].in, count[i], 1.0f + (float)i);
    }
    for (int i = 0; i < 2; i++) {
        cudaStreamSynchronize(devices[i]->stream);
        memcpy(out + i * 32, x[i].out, 32 * sizeof(float));
        arrays_close(&x[i]);
    }
    cudaFree(counts);
}

/* Two cards in one thread. 1: the second one's kernel is launched while the first is current. */
static void host_cards(CudaDevice *a, CudaDevice *b, float *out, int bug)
{
    CudaDevice *devices[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        Current current(bug ? 0 : devices[i]->ordinal);
        Arrays x;
        arrays_open(&x);
        memcpy(x.in, x.from, THREADS * sizeof(float));
        LAUNCH(devices[i], next_kernel, 1, 32, 0, x.out, (const float *)x.in);
        cudaStreamSynchronize(devices[i]->stream);
        memcpy(out + i * 32, x.out, 32 * sizeof(float));
        arrays_close(&x);
    }
}

extern "C" TINSMITH_EXPORT void planted_mode(int lazy, int truncates)
{
    emulate::machine.lazy = lazy;
    emulate::gpu.truncates = truncates;
    emulate::machine.count = 2;
}

extern "C" TINSMITH_EXPORT void planted_host(const char *name, int bug, float *out, char *text)
{
    static CudaDevice devices[3]; /* two of the first card, one of the second */
    for (int i = 0; i < 3; i++) planted_open(&devices[i], i / 2);
    if (!strcmp(name, "copy")) host_copy(&devices[0], out, bug);
    if (!strcmp(name, "streams")) host_streams(&devices[0], &devices[1], out, bug);
    if (!strcmp(name, "cards")) host_cards(&devices[0], &devices[2], out, bug);
    snprintf(text, sizeof devices->text, "%.250s%.250s", devices[0].text, devices[2].text);
}
