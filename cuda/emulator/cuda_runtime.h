/* cuda/emulator/cuda_runtime.h - the calls of CUDA's runtime, implemented for simulated cards.
 *
 * There may be several cards. Each has a fixed amount of memory and can be lost in the middle of
 * its work, or fail once (tests set this through controls.h). Work goes to streams, which belong to
 * the card that was current when they were created; a launch with another current card is refused.
 *
 * The host waits inside each launch and copy. In the lazy mode, work stays queued in its stream
 * until the host waits for it: for the stream, for an event, or in a copy from or to memory that is
 * not pinned. Then other streams of the card advance too, and launches of two streams alternate
 * block by block. Memory freed before the work is done is poisoned. So a missing wait, memory freed
 * too early and state shared by two streams all show.
 *
 * A captured stream records its work instead, and a graph runs it. A call that can't be captured
 * (an allocation, a wait) is refused and invalidates the capture. */
#ifndef TINSMITH_CUDA_EMULATOR_CUDA_RUNTIME_H
#define TINSMITH_CUDA_EMULATOR_CUDA_RUNTIME_H

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "stream.h"

enum { CUDART_VERSION = 13000, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventDisableTiming = 2 };

typedef enum cudaError_t {
    cudaSuccess,
    cudaErrorInvalidValue,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
} cudaError_t;
typedef enum cudaMemcpyKind { cudaMemcpyDefault = 4 } cudaMemcpyKind;
typedef enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 } cudaStreamCaptureMode;

namespace emulate {

/* A kernel, or any other work. */
struct Work {
    std::function<void()> task;
    bool is_kernel;
    Launch kernel;
};

} // namespace emulate

typedef std::vector<emulate::Work> *cudaGraph_t, *cudaGraphExec_t;

struct CardStream : EmulatedStream {
    int card;
    std::deque<emulate::Work> queue; /* the lazy mode's */
    uint64_t taken = 0, done = 0;    /* works queued, and works done */
    cudaGraph_t capture = nullptr;
    std::thread::id captor;           /* the thread whose calls the capture restricts */
    std::atomic<bool> spoilt = false; /* the capture is invalid */
    int enqueue(std::function<void()> work) override;
    bool truncates() const override
    {
        return emulate::gpu.truncates;
    }
    bool captures() const override
    {
        return capture != nullptr;
    }
};
typedef CardStream *cudaStream_t;

/* A position in a stream, and the time when it is reached. */
typedef struct EmulatedEvent {
    cudaStream_t stream;
    uint64_t position;
    bool timed;
    double when; /* the stream's clock */
} *cudaEvent_t;

typedef struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem, sharedMemPerBlockOptin;
    int l2CacheSize;
} cudaDeviceProp;

namespace emulate {

enum { CARDS_MOST = 4 };
enum Kind { KERNELS, PRODUCTS, COPIES, KINDS }; /* of counted work */
/* Bytes of shared memory per block on sm_86, sm_89 and sm_120; sm_80 has 163 KB. */
enum { SHARED_LEAST = 99 << 10 };

struct Card {
    size_t bytes = (size_t)2 << 30, used = 0, shared_bytes = SHARED_LEAST;
    int major = 9, minor = 0;
    int64_t lost_in = -1;             /* launches and copies from now, or -1: never */
    int64_t given[KINDS] = {0, 0, 0}; /* so far */
    bool lost = false;
    int64_t fails_in = -1;          /* likewise until one fails */
    std::atomic<int64_t> waits = 0; /* the host's waits for the card */
    std::set<size_t> asked[2];      /* scratch's sizes: by ops that ran, and in rehearsals */
};

struct Block {
    size_t bytes;
    int card; /* -1: pinned memory of the host */
};

/* The machine with its cards. */
struct Machine {
    Card cards[CARDS_MOST];
    int count = 1, driver = CUDART_VERSION;
    bool lazy = false;
    std::mutex lock; /* guards the memory: any thread may free some */
    std::map<const char *, Block> blocks;
    std::map<void *, size_t> freed; /* in the lazy mode, while work is queued */
    std::recursive_mutex work;      /* guards the streams and their queues */
    std::vector<CardStream *> streams;
    uint64_t works = 0, work_now = 0; /* done so far; the number of the current one */
};

inline Machine machine;
inline thread_local int current; /* this thread's card */

inline Card &card()
{
    return machine.cards[current];
}

inline cudaError_t state()
{
    return card().lost ? cudaErrorLaunchFailure : cudaSuccess;
}

/* For calls that are not allowed while this thread captures. */
inline cudaError_t state_uncaptured()
{
    std::lock_guard<std::recursive_mutex> guard(machine.work);
    for (CardStream *stream : machine.streams)
        if (stream->capture && stream->captor == std::this_thread::get_id()) {
            stream->spoilt = true;
            return cudaErrorStreamCaptureUnsupported;
        }
    return state();
}

/* ---- work ---- */

/* Whether the card does the next work: it may be lost at it. */
inline bool card_works(int number)
{
    Card &card = machine.cards[number];
    if (card.lost_in >= 0 && card.lost_in-- == 0) card.lost = true;
    return !card.lost;
}

/* Poisons freed memory that queued work may still use. */
inline void freed_poison()
{
    std::lock_guard<std::mutex> guard(machine.lock);
    for (auto &freed : machine.freed) memset(freed.first, POISON, freed.second);
}

inline void work_do(int number, const Work &work)
{
    if (!card_works(number)) return;
    freed_poison();
    machine.work_now = ++machine.works;
    if (work.is_kernel)
        run(work.kernel);
    else
        work.task();
    machine.work_now = 0;
}

/* Takes a stream's first work out of its queue. */
inline Work work_take(CardStream *stream)
{
    Work work = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->done++;
    return work;
}

/* Another stream of the same card whose next work is a kernel, after doing its work before that. */
inline CardStream *stream_beside(CardStream *stream)
{
    for (CardStream *other : machine.streams) {
        if (other == stream || other->card != stream->card) continue;
        while (!other->queue.empty() && !other->queue.front().is_kernel)
            work_do(other->card, work_take(other));
        if (!other->queue.empty()) return other;
    }
    return nullptr;
}

/* Does a stream's work up to a position, interleaved with other streams' work. */
inline void stream_drive(CardStream *stream, uint64_t until)
{
    std::lock_guard<std::recursive_mutex> guard(machine.work);
    while (stream->done < until && !stream->queue.empty()) {
        Work work = work_take(stream);
        CardStream *other = work.is_kernel ? stream_beside(stream) : nullptr;
        if (!other) {
            work_do(stream->card, work);
            continue;
        }
        Work beside = work_take(other);
        freed_poison();
        if (card_works(stream->card) && card_works(stream->card)) run(work.kernel, &beside.kernel);
    }
    for (CardStream *any : machine.streams)
        if (!any->queue.empty()) return;
    std::lock_guard<std::mutex> memory(machine.lock);
    for (auto &freed : machine.freed) free(freed.first);
    machine.freed.clear();
}

/* Work on a stream: done at once, queued, recorded, lost with the card, or failed. */
[[nodiscard]] inline cudaError_t enqueue(CardStream *stream, Work work)
{
    Card &card = machine.cards[stream->card];
    if (work.is_kernel && current != stream->card) return cudaErrorInvalidResourceHandle;
    if (card.fails_in >= 0 && card.fails_in-- == 0) return cudaErrorInvalidValue;
    if (work.is_kernel) card.given[KERNELS]++;
    if (stream->capture) {
        stream->capture->push_back(std::move(work));
        return cudaSuccess;
    }
    if (!machine.lazy) {
        work_do(stream->card, work);
        return cudaSuccess;
    }
    std::lock_guard<std::recursive_mutex> guard(machine.work);
    stream->queue.push_back(std::move(work));
    stream->taken++;
    return cudaSuccess;
}

[[nodiscard]] inline cudaError_t enqueue(CardStream *stream, std::function<void()> task)
{
    return enqueue(stream, Work{std::move(task), false, {}});
}

/* ---- memory ---- */

enum { UNKNOWN = -2 };

/* The card whose memory this is; -1: pinned memory of the host. */
inline int card_of(const void *memory)
{
    std::lock_guard<std::mutex> guard(machine.lock);
    auto after = machine.blocks.upper_bound((const char *)memory);
    if (after == machine.blocks.begin()) return UNKNOWN;
    auto block = std::prev(after);
    bool inside = (const char *)memory < block->first + block->second.bytes;
    return inside ? block->second.card : UNKNOWN;
}

/* Whether memory is a card's or pinned: copies of other memory are synchronous. */
inline bool is_known(const void *memory)
{
    return card_of(memory) != UNKNOWN;
}

/* Whether a kernel on this card may be given the argument: no other card's memory. */
template <class A> bool is_within_reach(A argument, int number)
{
    if constexpr (std::is_pointer_v<A>) {
        int owner = card_of(argument);
        return owner < 0 || owner == number;
    }
    return true;
}

/* Allocates poisoned memory, so that reads of unwritten data show. */
inline cudaError_t memory_get(void **memory, size_t bytes, int number)
{
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!*memory) return cudaErrorMemoryAllocation;
    memset(*memory, POISON, bytes);
    machine.blocks[(const char *)*memory] = {bytes, number};
    return cudaSuccess;
}

inline void memory_free(void *memory)
{
    std::lock_guard<std::recursive_mutex> work(machine.work);
    std::lock_guard<std::mutex> guard(machine.lock);
    auto block = machine.blocks.find((const char *)memory);
    if (block == machine.blocks.end()) return;
    if (block->second.card >= 0) machine.cards[block->second.card].used -= block->second.bytes;
    size_t bytes = block->second.bytes;
    machine.blocks.erase(block);
    for (CardStream *stream : machine.streams)
        if (!stream->queue.empty()) { /* it may still be read: this must show */
            machine.freed[memory] = bytes;
            return;
        }
    free(memory);
}

} // namespace emulate

inline int CardStream::enqueue(std::function<void()> work)
{
    emulate::machine.cards[card].given[emulate::PRODUCTS]++;
    return emulate::enqueue(this, std::move(work));
}

static inline const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInsufficientDriver: return "the driver is older than the runtime";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
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

/* ---- cards ---- */

static inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = emulate::machine.driver;
    return cudaSuccess;
}

static inline cudaError_t cudaGetDeviceCount(int *count)
{
    *count = emulate::machine.count;
    if (emulate::machine.driver < CUDART_VERSION) return cudaErrorInsufficientDriver;
    return *count ? emulate::state() : cudaErrorNoDevice;
}

static inline cudaError_t cudaGetDevice(int *number)
{
    *number = emulate::current;
    return cudaSuccess;
}

static inline cudaError_t cudaSetDevice(int number)
{
    if (number < 0 || number >= emulate::machine.count) return cudaErrorInvalidDevice;
    emulate::current = number;
    return emulate::state();
}

static inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int number)
{
    if (number < 0 || number >= emulate::machine.count) return cudaErrorInvalidDevice;
    const emulate::Card &card = emulate::machine.cards[number];
    *out = {"an emulated card", card.major, card.minor, 4, card.bytes, card.shared_bytes, 4096};
    return card.lost ? cudaErrorLaunchFailure : cudaSuccess;
}

/* ---- memory ---- */

static inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes)
{
    const emulate::Card &card = emulate::card();
    *all_bytes = card.bytes;
    *free_bytes = card.used < card.bytes ? card.bytes - card.used : 0;
    return emulate::state();
}

static inline cudaError_t cudaMallocHost(void **memory, size_t bytes)
{
    std::lock_guard<std::mutex> guard(emulate::machine.lock);
    cudaError_t error = emulate::memory_get(memory, bytes, -1);
    return error ? error : emulate::state();
}

static inline cudaError_t cudaMalloc(void **memory, size_t bytes)
{
    *memory = nullptr;
    emulate::Card &card = emulate::card();
    cudaError_t error = emulate::state_uncaptured();
    if (error) return error;
    std::lock_guard<std::mutex> guard(emulate::machine.lock);
    if (bytes > card.bytes || card.used > card.bytes - bytes) return cudaErrorMemoryAllocation;
    error = emulate::memory_get(memory, bytes, emulate::current);
    if (!error) card.used += bytes;
    return error;
}

static inline cudaError_t cudaFree(void *memory)
{
    emulate::memory_free(memory);
    return emulate::state_uncaptured();
}

static inline cudaError_t cudaFreeHost(void *memory)
{
    emulate::memory_free(memory);
    return emulate::state();
}

static inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind,
                                          cudaStream_t stream)
{
    emulate::machine.cards[stream->card].given[emulate::COPIES]++;
    cudaError_t error = emulate::enqueue(stream, [=] { memmove(to, from, bytes); });
    if (!error && !stream->capture && !(emulate::is_known(to) && emulate::is_known(from)))
        emulate::stream_drive(stream, stream->taken);
    return error ? error : emulate::state();
}

/* The memory must be the cards'. */
static inline cudaError_t cudaMemcpyPeerAsync(void *to, int to_card, const void *from,
                                              int from_card, size_t bytes, cudaStream_t stream)
{
    if (emulate::card_of(to) != to_card || emulate::card_of(from) != from_card)
        return cudaErrorInvalidValue;
    emulate::machine.cards[stream->card].given[emulate::COPIES]++;
    cudaError_t error = emulate::enqueue(stream, [=] { memmove(to, from, bytes); });
    return error ? error : emulate::state();
}

static inline cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes,
                                          cudaStream_t stream)
{
    cudaError_t error = emulate::enqueue(stream, [=] { memset(memory, value, bytes); });
    return error ? error : emulate::state();
}

/* ---- streams, events and graphs ---- */

static inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned)
{
    *stream = new CardStream;
    (*stream)->card = emulate::current;
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    emulate::machine.streams.push_back(*stream);
    return emulate::state();
}

static inline cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    emulate::stream_drive(stream, stream->taken);
    std::vector<CardStream *> &all = emulate::machine.streams;
    all.erase(std::find(all.begin(), all.end(), stream));
    delete stream;
    return emulate::state();
}

static inline cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    emulate::Card &card = emulate::machine.cards[stream->card];
    card.waits++;
    if (stream->capture) {
        stream->spoilt = true;
        return cudaErrorStreamCaptureUnsupported;
    }
    emulate::stream_drive(stream, stream->taken);
    return card.lost ? cudaErrorLaunchFailure : emulate::state_uncaptured();
}

static inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = new EmulatedEvent{nullptr, 0, flags != cudaEventDisableTiming, 0.0};
    return emulate::state();
}

static inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return emulate::state();
}

static inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    if (emulate::current != stream->card) return cudaErrorInvalidResourceHandle;
    *event = {stream, stream->taken, event->timed, stream->clock};
    return emulate::state();
}

/* The stream's next work waits for the event as it is now. */
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    EmulatedEvent now = *event;
    cudaError_t error = emulate::enqueue(stream, [=] {
        if (now.stream) emulate::stream_drive(now.stream, now.position);
    });
    return error ? error : emulate::state();
}

static inline cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    emulate::card().waits++;
    if (event->stream) emulate::stream_drive(event->stream, event->position);
    return emulate::state_uncaptured();
}

static inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    if (!begin->timed || !end->timed || !begin->stream || !end->stream)
        return cudaErrorInvalidResourceHandle;
    *ms = (float)(end->when - begin->when);
    return emulate::state();
}

static inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode)
{
    cudaError_t error = emulate::state_uncaptured();
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    if (error || stream->capture) return error ? error : cudaErrorStreamCaptureUnsupported;
    stream->capture = new std::vector<emulate::Work>;
    stream->captor = std::this_thread::get_id();
    return cudaSuccess;
}

static inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    std::lock_guard<std::recursive_mutex> guard(emulate::machine.work);
    *graph = stream->capture;
    stream->capture = nullptr;
    return stream->spoilt.exchange(false) ? cudaErrorStreamCaptureInvalidated : emulate::state();
}

static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *work, cudaGraph_t graph, unsigned)
{
    *work = new std::vector<emulate::Work>(*graph);
    return emulate::state();
}

static inline cudaError_t cudaGraphLaunch(cudaGraphExec_t work, cudaStream_t stream)
{
    for (const emulate::Work &one : *work)
        if (cudaError_t error = emulate::enqueue(stream, one)) return error;
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
