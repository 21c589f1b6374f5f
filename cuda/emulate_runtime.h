/* cuda/emulate_runtime.h - the calls of CUDA's runtime, implemented for a simulated card.
 *
 * The card has a fixed amount of memory, and a driver of a given version. It can be lost in the
 * middle of its work, or fail once (the tests set all this through device.cu's cuda_emulated_card,
 * _lose and _fail). The host waits inside each launch and copy, so streams and events are always
 * finished. A stream that is being captured records its work instead, and a graph runs it. A call
 * that a capture can't hold (an allocation, a wait) is refused and spoils the capture, in any
 * thread. */
#ifndef TINSMITH_EMULATE_RUNTIME_H
#define TINSMITH_EMULATE_RUNTIME_H

#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>

enum { CUDART_VERSION = 13000, cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

typedef enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
} cudaError_t;
typedef enum cudaMemcpyKind { cudaMemcpyDefault = 4 } cudaMemcpyKind;
typedef enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 } cudaStreamCaptureMode;
typedef std::vector<std::function<void()>> *cudaGraph_t, *cudaGraphExec_t;
typedef struct EmulatedStream *cudaStream_t;
typedef struct EmulatedEvent *cudaEvent_t;

typedef struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
} cudaDeviceProp;

namespace emulate {

struct Card {
    size_t bytes = (size_t)2 << 30, used = 0;
    int driver = CUDART_VERSION, major = 9, minor = 0;
    int64_t lost_in = -1; /* launches and copies from now, or -1: never */
    bool lost = false;
    int64_t fails_in = -1;          /* likewise the one that fails */
    std::atomic<int64_t> waits = 0; /* of the host for the stream */
    std::set<size_t> asked[2];      /* scratch's sizes: by ops that ran, and in rehearsals */
    std::mutex lock;                /* of the fields below: any thread may free memory */
    std::unordered_map<void *, size_t> blocks;
    cudaGraph_t capture = nullptr;    /* the recording of the stream's work */
    std::atomic<bool> spoilt = false; /* the capture met a call that it can't hold */
};

inline Card card;

/* A launch or a copy on the stream: done at once, recorded, lost with the card, or failed. */
[[nodiscard]] inline cudaError_t enqueue(std::function<void()> work)
{
    if (card.fails_in >= 0 && card.fails_in-- == 0) return cudaErrorInvalidValue;
    if (card.capture) {
        card.capture->push_back(std::move(work));
        return cudaSuccess;
    }
    if (card.lost_in >= 0 && card.lost_in-- == 0) card.lost = true;
    if (!card.lost) work();
    return cudaSuccess;
}

inline cudaError_t state()
{
    return card.lost ? cudaErrorLaunchFailure : cudaSuccess;
}

/* For calls that a capture does not allow. */
inline cudaError_t state_uncaptured()
{
    if (!card.capture) return state();
    card.spoilt = true;
    return cudaErrorStreamCaptureUnsupported;
}

} // namespace emulate

static inline const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "the driver is older than the runtime";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported: return "not permitted when a stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "failed due to a previous error during capture";
    default: return "no error";
    }
}

static inline cudaError_t cudaGetLastError()
{
    return emulate::state();
}

/* ---- the card ---- */

static inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = emulate::card.driver;
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return emulate::card.driver < CUDART_VERSION ? cudaErrorInsufficientDriver : emulate::state();
}

static inline cudaError_t cudaSetDevice(int)
{
    return emulate::state();
}

static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *card, int)
{
    *card = {"an emulated card", emulate::card.major, emulate::card.minor, 4, emulate::card.bytes};
    return emulate::state();
}

/* ---- memory ---- */

static inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes)
{
    *all_bytes = emulate::card.bytes;
    *free_bytes =
        emulate::card.used < emulate::card.bytes ? emulate::card.bytes - emulate::card.used : 0;
    return emulate::state();
}

static inline cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory ? emulate::state() : cudaErrorMemoryAllocation;
}

/* New memory is poison, so that a read of unwritten memory shows. */
static inline cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    *memory = nullptr;
    emulate::Card &card = emulate::card;
    cudaError_t error = emulate::state_uncaptured();
    if (error) return error;
    std::lock_guard<std::mutex> guard(card.lock);
    if (bytes > card.bytes || card.used > card.bytes - bytes) return cudaErrorMemoryAllocation;
    error = cudaMallocHost(memory, bytes);
    if (error) return error;
    memset(*memory, emulate::POISON, bytes);
    card.blocks[*memory] = bytes;
    card.used += bytes;
    return cudaSuccess;
}

static inline cudaError_t cudaFree(void *memory)
{
    std::lock_guard<std::mutex> guard(emulate::card.lock);
    auto block = emulate::card.blocks.find(memory);
    if (block != emulate::card.blocks.end()) {
        emulate::card.used -= block->second;
        emulate::card.blocks.erase(block);
        free(memory);
    }
    return emulate::state_uncaptured();
}

static inline cudaError_t cudaFreeHost(void *memory)
{
    free(memory);
    return emulate::state();
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                                          cudaStream_t)
{
    cudaError_t error = emulate::enqueue([=] { memmove(to, from, bytes); });
    return error ? error : emulate::state();
}

static inline cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t)
{
    cudaError_t error = emulate::enqueue([=] { memset(memory, value, bytes); });
    return error ? error : emulate::state();
}

/* ---- streams, events and graphs ---- */

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    static char one;
    *stream = (cudaStream_t)&one;
    return emulate::state();
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t)
{
    return emulate::state();
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t)
{
    emulate::card.waits++;
    return emulate::state_uncaptured();
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    static char one;
    *event = (cudaEvent_t)&one;
    return emulate::state();
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t)
{
    return emulate::state();
}

static inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t)
{
    return emulate::state();
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t)
{
    emulate::card.waits++;
    return emulate::state_uncaptured();
}

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode)
{
    cudaError_t error = emulate::state_uncaptured();
    if (!error) emulate::card.capture = new std::vector<std::function<void()>>;
    return error;
}

static inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph)
{
    *graph = emulate::card.capture;
    emulate::card.capture = nullptr;
    return emulate::card.spoilt.exchange(false) ? cudaErrorStreamCaptureInvalidated
                                                : emulate::state();
}

static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *work, cudaGraph_t graph, unsigned)
{
    *work = new std::vector<std::function<void()>>(*graph);
    return emulate::state();
}

static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t work, cudaStream_t)
{
    for (const std::function<void()> &one : *work)
        if (cudaError_t error = emulate::enqueue(one)) return error;
    return emulate::state();
}

static inline cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    delete graph;
    return emulate::state();
}

static inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t work)
{
    delete work;
    return emulate::state();
}

#endif
