/* cuda/device.cu - opens the GPU, or the emulated one: its memory and the table.
 *
 * cuda_open and cuda_card are the library's only symbols. They get core's version of the interface
 * and its fail(), so that sentences reach the caller's thread. Copies to and from the card are in
 * stream.cu. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "product/matmul.cuh"
#include "runtime/entry.cuh"
#include "runtime/stream.cuh"
#include "weights/weight_load.cuh"

/* Rows of a step that keep a Hopper busy while the host launches the next one, even at 0.6B. */
enum { STEP_ROWS = 8192 };
static const size_t CHUNK_MOST = (size_t)1 << 30;
enum { CHUNKS = 64 }; /* a chunk of logits takes at most 1/CHUNKS of the card's memory */

/* ---- memory ---- */

static Status device_alloc(Device *dev, void **memory, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->lost) return fail_in_core(cuda->status, "%s", cuda->text);
    return cuda_malloc(cuda, memory, bytes ? bytes : 1, "an array");
}

static void device_release(Device *dev, void *memory, size_t bytes)
{
    frozen_forget(cuda_of(dev), memory, bytes);
    cuda_give_back(cuda_of(dev), memory, nullptr);
}

/* If the query fails, all memory counts as free: otherwise a refusal for lack of memory would hide
 * that the card is lost. */
static void device_memory(Device *dev, size_t *free_bytes, size_t *all_bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    cuda_clear(cuda);
    if (CUDA_CHECK(cuda, cudaMemGetInfo(free_bytes, all_bytes)))
        *free_bytes = *all_bytes = cuda->all_bytes;
}

/* After a rehearsal: reserves its scratch, and chooses algorithms for products without one. */
static Status device_reserve(Device *dev, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    TRY(stream_reserve(cuda, bytes));
    matmul_choose(cuda);
    return cuda_failure(cuda);
}

/* ---- opening and closing ---- */

static void device_close(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->matmul) matmul_close(cuda);
    stream_close(cuda);
    pthread_mutex_destroy(&cuda->returning);
    frozen_close(cuda);
    free(cuda);
}

/* Counts the cards; fails without a card or a new enough driver. A driver runs programs of its CUDA
 * major version and of older ones. */
static Status cards_count(int *count)
{
    int driver = 0;
    *count = 0;
    cudaError_t error = cudaGetDeviceCount(count);
    cudaDriverGetVersion(&driver);
    if (driver == 0)
        return fail_in_core(STATUS_DEVICE, CUDA_NAME
                            ": no NVIDIA driver (libcuda.so.1) was found on this machine");
    if (error == cudaErrorInsufficientDriver)
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME ": the NVIDIA driver is for CUDA %d.%d, and tinsmith was "
                                      "built with %d.%d: it needs driver %d or newer (nvidia-smi "
                                      "shows which is there)",
                            driver / 1000, driver % 100 / 10, CUDART_VERSION / 1000,
                            CUDART_VERSION % 100 / 10, CUDART_VERSION < 13000 ? 525 : 580);
    if (error == cudaErrorNoDevice || (!error && *count == 0))
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME ": this machine has no NVIDIA GPU that it may use");
    if (!error) return STATUS_OK;
    return fail_in_core(STATUS_DEVICE, CUDA_NAME ": the GPUs can't be looked at: %s",
                        cudaGetErrorString(error));
}

/* The properties of the card with this ordinal. */
static Status card_find(int ordinal, cudaDeviceProp *card)
{
    int count;
    TRY(cards_count(&count));
    if (ordinal >= count)
        return fail_in_core(STATUS_DEVICE,
                            CUDA_NAME ":%d: there is no such GPU: this machine has %d that it may "
                                      "use, counted from 0",
                            ordinal, count);
    cudaError_t error = cudaGetDeviceProperties(card, ordinal);
    if (!error) return STATUS_OK;
    return fail_in_core(STATUS_DEVICE, CUDA_NAME ":%d: the GPU can't be looked at: %s", ordinal,
                        cudaGetErrorString(error));
}

/* Takes the card, if the build supports it, and makes it the thread's current one. */
static Status card_take(CudaDevice *cuda)
{
    cudaDeviceProp card;
    TRY(card_find(cuda->ordinal, &card));
    if (card.major < 8)
        return fail_in_core(STATUS_DEVICE,
                            "%s: %s has compute capability %d.%d, and tinsmith needs 8.0 or more",
                            cuda->name, card.name, card.major, card.minor);
    if (cudaError_t error = cudaSetDevice(cuda->ordinal))
        return fail_in_core(STATUS_DEVICE, "%s: the GPU can't be opened: %s", cuda->name,
                            cudaGetErrorString(error));
    cuda->processors = card.multiProcessorCount;
    cuda->all_bytes = card.totalGlobalMem;
    size_t chunk = cuda->all_bytes / CHUNKS;
    cuda->base.chunk_bytes = chunk < CHUNK_MOST ? chunk : CHUNK_MOST;
    cuda->shared_bytes = card.sharedMemPerBlockOptin;
    cuda->cache_bytes = (size_t)card.l2CacheSize;
    return STATUS_OK;
}

static Status device_prepare(CudaDevice *cuda, const DeviceLibraries *libraries)
{
    TRY(card_take(cuda));
    TRY(frozen_open(cuda));
    TRY(stream_open(cuda));
    matmul_open(cuda, libraries);
    return cuda->status ? fail_in_core(cuda->status, "%s", cuda->text) : STATUS_OK;
}

static Status seam_check(unsigned abi)
{
    if (abi == DEVICE_ABI) return STATUS_OK;
    return fail_in_core(STATUS_DEVICE,
                        CUDA_NAME ": its library was built for another version of tinsmith (%08x, "
                                  "this is %08x): install tinsmith again",
                        DEVICE_ABI, abi);
}

static void device_fill(CudaDevice *cuda)
{
    Device *d = &cuda->base;
    d->name = cuda->name;
    d->notes = cuda->notes;
    d->real_bytes = sizeof(real);
    d->cached_bytes = sizeof(cached);
    d->step_rows = STEP_ROWS;
    d->async = 1;
    d->alloc = ENTRY(device_alloc);
    d->release = device_release;
    d->memory = ENTRY(device_memory);
    d->reserve = ENTRY(device_reserve);
    d->frozen_bytes = device_frozen_bytes;
    d->frozen_continues = device_frozen_continues;
    d->frozen_load = ENTRY(device_frozen_load);
    d->close = ENTRY(device_close);
#define OP(name, args) d->name = ENTRY(cuda_##name);
#include "../csrc/device/ops.inc"
#undef OP
}

extern "C" TINSMITH_EXPORT Status cuda_open(Device **dev, int ordinal, unsigned abi,
                                            FailFunction *core_fail,
                                            const DeviceLibraries *libraries)
{
    fail_in_core = core_fail;
    TRY(seam_check(abi));
    CudaDevice *cuda = (CudaDevice *)calloc(1, sizeof *cuda);
    if (!cuda) return core_fail(STATUS_MEMORY, "no memory for the CUDA device");
    pthread_mutex_init(&cuda->returning, nullptr);
    cuda->ordinal = ordinal;
    snprintf(cuda->name, sizeof cuda->name, ordinal ? CUDA_NAME ":%d" : CUDA_NAME, ordinal);
    device_fill(cuda);
    Current current(ordinal);
    Status status = device_prepare(cuda, libraries);
    if (status) {
        device_close(&cuda->base);
        return status;
    }
    *dev = &cuda->base;
    return STATUS_OK;
}

extern "C" TINSMITH_EXPORT Status cuda_card(DeviceCard *card, int ordinal, unsigned abi,
                                            FailFunction *core_fail)
{
    cudaDeviceProp found;
    fail_in_core = core_fail;
    TRY(seam_check(abi));
    TRY(cards_count(&card->count));
    TRY(card_find(ordinal, &found));
    snprintf(card->name, sizeof card->name, "%s", found.name);
    card->bytes = found.totalGlobalMem;
    card->major = found.major;
    card->minor = found.minor;
    return STATUS_OK;
}

#ifdef CUDA_EMULATED
#include "emulator/controls.h"
#endif
