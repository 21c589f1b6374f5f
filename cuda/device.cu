/* cuda/device.cu - opens the GPU, or the emulated one: memory services on one stream, and the
 * table.
 *
 * All work goes to one stream, in order, and the host waits only in download() and sync(). Uploads
 * up to PINNED bytes are copied into pinned host memory first, so they neither wait nor depend on
 * what the caller does with its array afterwards; larger ones are staged by the runtime. The first
 * failure of an op stays here with its file and line until sync(). cuda_open is the library's only
 * symbol: it is given the number of the seam it was built for, and core's fail(), so that sentences
 * reach the caller's thread. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.cuh"

#ifdef CUDA_EMULATED
#define NAME "cuda-emulated"
#else
#define NAME "cuda"
#endif

enum { PINNED = 1 << 20, SCRATCH_STEP = 1 << 20, SCRATCH_ALIGN = 256 };

static FailFunction *fail_in_core;

/* ---- failures ---- */

void cuda_fail(CudaDevice *cuda, Status status, const char *format, ...)
{
    if (cuda->status) return;
    va_list args;
    va_start(args, format);
    vsnprintf(cuda->text, sizeof cuda->text, format, args);
    va_end(args);
    cuda->status = status;
}

int cuda_check(CudaDevice *cuda, cudaError_t error, const char *what, const char *file, int line)
{
    if (error == cudaSuccess) return 0;
#ifndef CUDA_EMULATED
    cudaGetLastError(); /* the runtime keeps it too, and would show it after the next launch */
#endif
    cuda_fail(cuda, error == cudaErrorMemoryAllocation ? STATUS_MEMORY : STATUS_DEVICE,
              "%s: %s:%d: %s: %s", NAME, file, line, what, cudaGetErrorString(error));
    return 1;
}

/* ---- memory ---- */

void *cuda_scratch(CudaDevice *cuda, size_t bytes)
{
    if (cuda->status) return NULL;
    if (bytes > cuda->scratch_bytes) {
        size_t size = (bytes + bytes / 4 + SCRATCH_STEP - 1) / SCRATCH_STEP * SCRATCH_STEP;
        if (CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream))) return NULL;
        cudaFree(cuda->scratch);
        cuda->scratch = NULL;
        cuda->scratch_bytes = 0;
        if (CUDA_CHECK(cuda, cudaMalloc(&cuda->scratch, size))) return NULL;
        cuda->scratch_bytes = size;
    }
#ifdef CUDA_EMULATED
    memset(cuda->scratch, emulate::POISON, cuda->scratch_bytes);
#endif
    return cuda->scratch;
}

static Status device_alloc(Device *dev, void **memory, size_t bytes)
{
    (void)dev;
    cudaError_t error = cudaMalloc(memory, bytes ? bytes : 1);
    if (error == cudaSuccess) return STATUS_OK;
#ifndef CUDA_EMULATED
    size_t free_bytes = 0, all_bytes = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &all_bytes);
    if (error == cudaErrorMemoryAllocation)
        return fail_in_core(STATUS_MEMORY,
                            "the GPU has no %.1f MiB of memory to give: %.1f of %.1f MiB are free",
                            bytes / 1048576.0, free_bytes / 1048576.0, all_bytes / 1048576.0);
#endif
    return fail_in_core(error == cudaErrorMemoryAllocation ? STATUS_MEMORY : STATUS_DEVICE,
                        NAME " has no %.1f MiB of memory to give: %s", bytes / 1048576.0,
                        cudaGetErrorString(error));
}

static void device_release(Device *dev, void *memory, size_t bytes)
{
    (void)bytes;
    CudaDevice *cuda = cuda_of(dev);
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    CUDA_CHECK(cuda, cudaFree(memory));
}

static void device_copy(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (!bytes || cuda->status) return;
    CUDA_CHECK(cuda, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda->stream));
}

static void device_upload(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (bytes <= PINNED) {
        if (cuda->pinned_used + bytes > PINNED) { /* copies from it may still be under way */
            if (CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream))) return;
            cuda->pinned_used = 0;
        }
        if (bytes) memcpy(cuda->pinned + cuda->pinned_used, from, bytes);
        from = cuda->pinned + cuda->pinned_used;
        cuda->pinned_used = (cuda->pinned_used + bytes + 63) / 64 * 64;
    }
    device_copy(dev, to, from, bytes);
}

static void device_download(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    device_copy(dev, to, from, bytes);
    if (bytes) CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
}

static void device_zero(Device *dev, void *memory, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (!bytes || cuda->status) return;
    CUDA_CHECK(cuda, cudaMemsetAsync(memory, 0, bytes, cuda->stream));
}

/* ---- frozen weights ---- */

static size_t device_frozen_bytes(Device *dev, DType type, int rows, int cols)
{
    (void)dev, (void)type;
    return sizeof(frozen) + (size_t)rows * (size_t)frozen_stride(cols) * sizeof(real);
}

static uint16_t bf16_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t bf16_of_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, bits;
    uint32_t mantissa = half & 1023;
    float value = (float)mantissa * 0x1p-24f;
    memcpy(&bits, &value, 4);
    if (exponent == 31)
        bits = 0x7f800000 | mantissa << 13;
    else if (exponent)
        bits = (exponent + 112) << 23 | mantissa << 13;
    bits |= sign;
    memcpy(&value, &bits, 4);
    return bf16_of_f32(value);
}

/* Rows [first, first + count) of the host's array in the device's order. */
static void rows_encode(uint16_t *to, const void *from, DType type, int first, int count, int cols)
{
    int64_t stride = frozen_stride(cols);
    for (int row = 0; row < count; row++)
        for (int col = 0; col < stride; col++) {
            int64_t at = (int64_t)(first + row) * cols + col;
            uint16_t value = 0;
            if (col < cols && type == DTYPE_BF16) value = ((const uint16_t *)from)[at];
            if (col < cols && type == DTYPE_F16) value = bf16_of_f16(((const uint16_t *)from)[at]);
            if (col < cols && type == DTYPE_F32) value = bf16_of_f32(((const float *)from)[at]);
            to[row * stride + col] = value;
        }
}

static void device_frozen_load(Device *dev, frozen *to, const void *from, DType type, int rows,
                               int cols)
{
    CudaDevice *cuda = cuda_of(dev);
    frozen header = {rows, cols, (int32_t)frozen_stride(cols), {0}};
    device_upload(dev, to, &header, sizeof header);
    char *data = (char *)(to + 1);
    size_t row_bytes = (size_t)header.stride * sizeof(real);
    if (type == DTYPE_BF16 && header.stride == cols) {
        device_copy(dev, data, from, (size_t)rows * row_bytes);
        CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream)); /* the caller's array may go */
        return;
    }
    int step = row_bytes < PINNED ? (int)(PINNED / (row_bytes ? row_bytes : 1)) : 1;
    uint16_t *block = (uint16_t *)malloc((size_t)step * row_bytes + 1);
    if (!block) return cuda_fail(cuda, STATUS_MEMORY, "no memory to convert a weight in");
    for (int first = 0; first < rows; first += step) {
        int count = rows - first < step ? rows - first : step;
        rows_encode(block, from, type, first, count, cols);
        device_upload(dev, data + (size_t)first * row_bytes, block, (size_t)count * row_bytes);
    }
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    free(block);
}

/* ---- opening and closing ---- */

static Status device_sync(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    cuda->pinned_used = 0;
    Status status = cuda->status;
    cuda->status = STATUS_OK;
    return status ? fail_in_core(status, "%s", cuda->text) : STATUS_OK;
}

static void device_close(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->matmul) matmul_close(cuda);
    cudaFree(cuda->scratch);
    cudaFreeHost(cuda->pinned);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
    free(cuda);
}

#ifdef CUDA_EMULATED

static Status card_find(CudaDevice *cuda)
{
    cuda->processors = 4;
    return STATUS_OK;
}

/* How the tests choose the order of warps and blocks: emulate::Order. */
extern "C" TINSMITH_EXPORT void cuda_emulated_order(int order)
{
    emulate::gpu.order = (emulate::Order)order;
}

#else

/* The first GPU, if the driver is there and new enough and the card is one that we build for. */
static Status card_find(CudaDevice *cuda)
{
    int count = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    if (driver == 0)
        return fail_in_core(STATUS_DEVICE,
                            "cuda: no NVIDIA driver (libcuda.so.1) was found on this machine");
    if (error == cudaErrorInsufficientDriver)
        return fail_in_core(
            STATUS_DEVICE,
            "cuda: the NVIDIA driver is for CUDA %d.%d, and tinsmith was built with "
            "%d.%d: update the driver",
            driver / 1000, driver % 100 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 100 / 10);
    if (error == cudaErrorNoDevice || (!error && count == 0))
        return fail_in_core(STATUS_DEVICE, "cuda: this machine has no NVIDIA GPU that it may use");
    cudaDeviceProp card;
    if (!error) error = cudaSetDevice(0);
    if (!error) error = cudaGetDeviceProperties(&card, 0);
    if (error)
        return fail_in_core(STATUS_DEVICE, "cuda: the GPU can't be opened: %s",
                            cudaGetErrorString(error));
    if (card.major < 8)
        return fail_in_core(STATUS_DEVICE,
                            "cuda: %s has compute capability %d.%d, and tinsmith needs 8.0 or more",
                            card.name, card.major, card.minor);
    cuda->processors = card.multiProcessorCount;
    return STATUS_OK;
}

#endif

static Status device_prepare(CudaDevice *cuda)
{
    TRY(card_find(cuda));
    CUDA_CHECK(cuda, cudaStreamCreateWithFlags(&cuda->stream, 1 /* apart from stream 0 */));
    CUDA_CHECK(cuda, cudaMallocHost((void **)&cuda->pinned, PINNED + 64));
    if (!cuda->status) matmul_open(cuda);
    return cuda->status ? fail_in_core(cuda->status, "%s", cuda->text) : STATUS_OK;
}

extern "C" TINSMITH_EXPORT Status cuda_open(Device **dev, int threads, unsigned abi,
                                            FailFunction *core_fail)
{
    (void)threads; /* the host only starts work */
    fail_in_core = core_fail;
    if (abi != DEVICE_ABI)
        return core_fail(STATUS_DEVICE,
                         NAME ": its library was built for another version of tinsmith (%08x, this "
                              "is %08x): install tinsmith again",
                         DEVICE_ABI, abi);
    CudaDevice *cuda = (CudaDevice *)calloc(1, sizeof *cuda);
    if (!cuda) return core_fail(STATUS_MEMORY, "no memory for the CUDA device");
    Device *d = &cuda->base;
    d->name = NAME;
    d->real_bytes = sizeof(real);
    d->alloc = device_alloc;
    d->release = device_release;
    d->upload = device_upload;
    d->download = device_download;
    d->copy = device_copy;
    d->zero = device_zero;
    d->frozen_bytes = device_frozen_bytes;
    d->frozen_load = device_frozen_load;
    d->sync = device_sync;
    d->close = device_close;
#define OP(name, args) d->name = cuda_##name;
#include "../csrc/ops.inc"
#undef OP
    Status status = device_prepare(cuda);
    if (status) {
        device_close(d);
        return status;
    }
    *dev = d;
    return STATUS_OK;
}
