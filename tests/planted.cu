/* tests/planted.cu - small kernels, each right, or wrong in one way that the emulator must show.
 *
 * test_emulator.py compiles this as C++ and calls planted(). With `bug` 0 every kernel gives what
 * the test expects; with 1 it has the error that its comment names. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "../cuda/cuda.cuh"

enum { THREADS = 128 };

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

/* Runs a kernel in an order of warps (emulate::Order) into out, and its sentence into text; returns
 * how many floats of out count. */
extern "C" TINSMITH_EXPORT int planted(const char *name, int bug, int order, float *out, char *text)
{
    static CudaDevice device;
    CudaDevice *cuda = &device;
    cuda->status = STATUS_OK;
    cuda->text[0] = 0;
    emulate::gpu.order = (emulate::Order)order;
    int n = THREADS;
    void *memory, *in;
    cudaMalloc(&memory, 4 * THREADS * sizeof(float));
    cudaMalloc(&in, 4 * THREADS * sizeof(float));
    for (int i = 0; i < 4 * THREADS; i++) ((float *)in)[i] = (float)i;
    float *y = (float *)memory;
    if (!strcmp(name, "barrier")) LAUNCH(cuda, barrier_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "bounds")) LAUNCH(cuda, bounds_kernel, 2, THREADS, 8 * THREADS, y, bug);
    if (!strcmp(name, "unwritten")) LAUNCH(cuda, unwritten_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "mma")) LAUNCH(cuda, mma_kernel, 1, 32, 0, y, bug);
    if (!strcmp(name, "divergence")) LAUNCH(cuda, divergence_kernel, 2, THREADS, 0, y, bug);
    if (!strcmp(name, "address")) LAUNCH(cuda, address_kernel, 1, 32, 0, y, bug);
    if (!strcmp(name, "large")) LAUNCH(cuda, bounds_kernel, 1, THREADS, bug ? 200000 : 1024, y, 0);
    if (!strcmp(name, "address")) n = 32;
    if (!strcmp(name, "copy")) {
        LAUNCH(cuda, copy_kernel, 2, THREADS, 0, y, (const float *)in, bug);
        n = 4 * THREADS;
    }
    memcpy(out, y, n * sizeof(float));
    snprintf(text, sizeof cuda->text, "%.500s", cuda->text);
    cudaFree(memory);
    cudaFree(in);
    return n;
}
