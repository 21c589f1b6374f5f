/* cuda/device.cu - opens the GPU, or the emulated one: its memory, its frozen weights, and the
 * table.
 *
 * cuda_open is the library's only symbol. It gets the number of the seam it was built for, and
 * core's fail(), so that sentences reach the caller's thread. Copies to the card and back are in
 * stream.cu. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.cuh"

/* Rows of a step that keep a Hopper busy while the host starts the next ones, also at 0.6B. */
enum { STEP_ROWS = 8192, ENCODE_BYTES = 1 << 20 };

FailFunction *fail_in_core;

/* ---- memory ---- */

Status cuda_malloc(CudaDevice *cuda, void **memory, size_t bytes, const char *purpose)
{
    size_t free_bytes = 0, all_bytes = 0;
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error != cudaErrorMemoryAllocation)
        return CUDA_CHECK(cuda, error) ? cuda->base.sync(&cuda->base) : STATUS_OK;
    cudaGetLastError();
    CUDA_CHECK(cuda, cudaMemGetInfo(&free_bytes, &all_bytes));
    return fail_in_core(STATUS_MEMORY,
                        CUDA_NAME ": %s needs %.1f MiB, and the card can give %.1f of its %.1f MiB",
                        purpose, bytes / 1048576.0, free_bytes / 1048576.0, all_bytes / 1048576.0);
}

static Status device_alloc(Device *dev, void **memory, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->lost) return fail_in_core(cuda->status, "%s", cuda->text);
    return cuda_malloc(cuda, memory, bytes ? bytes : 1, "an array");
}

static void device_release(Device *dev, void *memory, size_t bytes)
{
    (void)bytes;
    cuda_give_back(cuda_of(dev), memory, nullptr);
}

/* On a failed query, all memory counts as free. A refusal for lack of memory would otherwise hide
 * that the card is lost. */
static void device_memory(Device *dev, size_t *free_bytes, size_t *all_bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (CUDA_CHECK(cuda, cudaMemGetInfo(free_bytes, all_bytes)))
        *free_bytes = *all_bytes = cuda->all_bytes;
}

/* ---- frozen weights ---- */

/* bf16 alone: what comes wide is rounded to it, and nothing is computed from blocks. */
static size_t device_frozen_bytes(Device *dev, DType kept, int rows, int cols)
{
    (void)dev;
    if (kept > DTYPE_F16) return 0;
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

static void device_frozen_load(Device *dev, frozen *to, DType kept, const void *from, DType type,
                               int rows, int cols)
{
    (void)kept;
    frozen header = {rows, cols, (int32_t)frozen_stride(cols), {0}};
    dev->upload(dev, to, &header, sizeof header);
    char *data = (char *)(to + 1);
    size_t row_bytes = (size_t)header.stride * sizeof(real);
    if (type == DTYPE_BF16 && header.stride == cols)
        return dev->upload(dev, data, from, (size_t)rows * row_bytes);
    int step = row_bytes < ENCODE_BYTES ? (int)(ENCODE_BYTES / (row_bytes ? row_bytes : 1)) : 1;
    uint16_t *block = (uint16_t *)malloc((size_t)step * row_bytes + 1);
    if (!block) return cuda_fail(cuda_of(dev), STATUS_MEMORY, "no memory to convert a weight in");
    for (int first = 0; first < rows; first += step) {
        int count = rows - first < step ? rows - first : step;
        rows_encode(block, from, type, first, count, cols);
        dev->upload(dev, data + (size_t)first * row_bytes, block, (size_t)count * row_bytes);
    }
    free(block);
}

/* ---- opening and closing ---- */

static void device_close(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->matmul) matmul_close(cuda);
    stream_close(cuda);
    cudaFree(cuda->workspace);
    pthread_mutex_destroy(&cuda->recorder);
    free(cuda);
}

/* The first GPU, if the driver exists and is new enough and the build supports the card. */
static Status card_find(CudaDevice *cuda)
{
    int count = 0, driver = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaDriverGetVersion(&driver);
    if (driver == 0)
        return fail_in_core(STATUS_DEVICE, CUDA_NAME
                            ": no NVIDIA driver (libcuda.so.1) was found on this machine");
    if (error == cudaErrorInsufficientDriver)
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME ": the NVIDIA driver is for CUDA %d.%d, and tinsmith was "
                                      "built with %d.%d: update the driver",
                            driver / 1000, driver % 100 / 10, CUDART_VERSION / 1000,
                            CUDART_VERSION % 100 / 10);
    if (error == cudaErrorNoDevice || (!error && count == 0))
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME ": this machine has no NVIDIA GPU that it may use");
    cudaDeviceProp card;
    if (!error) error = cudaSetDevice(0);
    if (!error) error = cudaGetDeviceProperties(&card, 0);
    if (error)
        return fail_in_core(STATUS_DEVICE, CUDA_NAME ": the GPU can't be opened: %s",
                            cudaGetErrorString(error));
    if (card.major < 8)
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME
                            ": %s has compute capability %d.%d, and tinsmith needs 8.0 or more",
                            card.name, card.major, card.minor);
    cuda->processors = card.multiProcessorCount;
    cuda->all_bytes = card.totalGlobalMem;
    return STATUS_OK;
}

static Status device_prepare(CudaDevice *cuda)
{
    TRY(card_find(cuda));
    TRY(stream_open(cuda));
    TRY(cuda_malloc(cuda, &cuda->workspace, WORKSPACE_BYTES, "the workspace of products"));
    cuda->base.own_bytes += WORKSPACE_BYTES;
    if (!cuda->status) matmul_open(cuda);
    return cuda->status ? fail_in_core(cuda->status, "%s", cuda->text) : STATUS_OK;
}

#ifdef CUDA_EMULATED

/* How the tests choose the order of warps and blocks: emulate::Order. */
extern "C" TINSMITH_EXPORT void cuda_emulated_order(int order)
{
    emulate::gpu.order = (emulate::Order)order;
}

/* Simulates a card with this much free memory, a driver for that version of CUDA (13000 is 13.0),
 * and that compute capability. */
extern "C" TINSMITH_EXPORT void cuda_emulated_card(size_t free_bytes, int driver, int major,
                                                   int minor)
{
    emulate::card.bytes = emulate::card.used + free_bytes;
    emulate::card.driver = driver;
    emulate::card.major = major;
    emulate::card.minor = minor;
}

/* The number of times that the host has waited for the card. */
extern "C" TINSMITH_EXPORT int64_t cuda_emulated_waits(void)
{
    return emulate::card.waits;
}

/* The scratch sizes of ops since the last call, of those that ran or of those that were rehearsed.
 * Returns how many there are. */
extern "C" TINSMITH_EXPORT int cuda_emulated_scratch(int rehearsed, size_t *sizes, int room)
{
    std::set<size_t> asked;
    asked.swap(emulate::card.asked[rehearsed]);
    for (size_t size : asked)
        if (room-- > 0) *sizes++ = size;
    return (int)asked.size();
}

/* The card is lost at the launch or copy after so many more; −1: the card works again. */
extern "C" TINSMITH_EXPORT void cuda_emulated_lose(int64_t after)
{
    emulate::card.lost_in = after;
    if (after < 0) emulate::card.lost = false;
}

/* The launch or copy after so many more fails, once; −1: none. */
extern "C" TINSMITH_EXPORT void cuda_emulated_fail(int64_t after)
{
    emulate::card.fails_in = after;
}

#endif

extern "C" TINSMITH_EXPORT Status cuda_open(Device **dev, int threads, unsigned abi,
                                            FailFunction *core_fail)
{
    (void)threads; /* the host only starts work */
    fail_in_core = core_fail;
    if (abi != DEVICE_ABI)
        return core_fail(STATUS_DEVICE,
                         CUDA_NAME
                         ": its library was built for another version of tinsmith (%08x, this "
                         "is %08x): install tinsmith again",
                         DEVICE_ABI, abi);
    CudaDevice *cuda = (CudaDevice *)calloc(1, sizeof *cuda);
    if (!cuda) return core_fail(STATUS_MEMORY, "no memory for the CUDA device");
    pthread_mutex_init(&cuda->recorder, nullptr);
    Device *d = &cuda->base;
    d->name = CUDA_NAME;
    d->real_bytes = sizeof(real);
    d->step_rows = STEP_ROWS;
    d->async = 1;
    d->alloc = device_alloc;
    d->release = device_release;
    d->memory = device_memory;
    d->frozen_bytes = device_frozen_bytes;
    d->frozen_load = device_frozen_load;
    d->close = device_close;
#define OP(name, args) d->name = cuda_##name;
#include "../csrc/device/ops.inc"
#undef OP
    Status status = device_prepare(cuda);
    if (status) {
        device_close(d);
        return status;
    }
    *dev = d;
    return STATUS_OK;
}
