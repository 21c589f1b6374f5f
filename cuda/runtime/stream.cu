/* cuda/runtime/stream.cu - the device's one stream: copies to and from the card, rehearsals,
 * recordings and their replay.
 *
 * All work goes to one stream, in order. Uploads go through pinned memory, so they neither block
 * nor see later changes of the caller's array. Fetches go to pinned memory, and await() copies them
 * to the caller. The host blocks in await, download and sync, in reserve when scratch grows, and in
 * an upload that is PINNED_PARTS megabytes ahead of the card. */
#include <stdlib.h>
#include <string.h>

#include "stream.cuh"
#include "entry.cuh"

enum {
    SCRATCH_FLOOR = 1 << 20, /* for ops whose scratch does not grow with the work */
    PIECE_ALIGN = 64,        /* of pinned memory */
};

struct Graph {
    cudaGraphExec_t work;
    unsigned moves; /* scratch's moves when it was recorded */
};

/* Whether a service has nothing to do. A service on which the host blocks, or whose bytes change
 * between calls, can't be recorded. */
static bool idle(CudaDevice *cuda, size_t bytes, bool recordable)
{
    if (!bytes || cuda->status || cuda->rehearsing) return true;
    if (cuda->recording && !recordable)
        cuda_fail(cuda, STATUS_DEVICE, "%s: a recording can't hold a copy from the host",
                  cuda->name);
    return cuda->status != STATUS_OK;
}

/* ---- copies ---- */

static void stream_copy(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (idle(cuda, bytes, true)) return;
    CUDA_CHECK(cuda, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cuda->stream));
}

/* The source's stream waits, too: it may not overwrite what was not copied yet. Between cards that
 * can't reach each other's memory, the runtime copies through the host's. */
static void stream_receive(Device *dev, void *to, Device *other, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev), *source = cuda_of(other);
    if (idle(cuda, bytes, false) || source->status) return;
    {
        Current card(source->ordinal);
        CUDA_CHECK(source, cudaEventRecord(source->passed, source->stream));
    }
    CUDA_CHECK(cuda, cudaStreamWaitEvent(cuda->stream, source->passed, 0));
    CUDA_CHECK(cuda,
               cudaMemcpyPeerAsync(to, cuda->ordinal, from, source->ordinal, bytes, cuda->stream));
    CUDA_CHECK(cuda, cudaEventRecord(cuda->passed, cuda->stream));
    Current card(source->ordinal);
    CUDA_CHECK(source, cudaStreamWaitEvent(source->stream, cuda->passed, 0));
}

static void stream_zero(Device *dev, void *memory, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (idle(cuda, bytes, true)) return;
    CUDA_CHECK(cuda, cudaMemsetAsync(memory, 0, bytes, cuda->stream));
}

/* The next pinned bytes, at most `most` of them; waits for the copies that used them. */
static unsigned char *pinned_take(CudaDevice *cuda, size_t most, size_t *bytes)
{
    Pinned *p = &cuda->pinned;
    if (p->used == PART_BYTES) {
        if (CUDA_CHECK(cuda, cudaEventRecord(p->done[p->part], cuda->stream))) return nullptr;
        p->part = (p->part + 1) % PINNED_PARTS;
        p->used = 0;
        if (CUDA_CHECK(cuda, cudaEventSynchronize(p->done[p->part]))) return nullptr;
    }
    unsigned char *at = p->memory + (size_t)p->part * PART_BYTES + p->used;
    *bytes = most < PART_BYTES - p->used ? most : PART_BYTES - p->used;
    p->used += (*bytes + PIECE_ALIGN - 1) / PIECE_ALIGN * PIECE_ALIGN;
    return at;
}

static void stream_upload(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (idle(cuda, bytes, false)) return;
    for (size_t done = 0, piece; done < bytes && !cuda->status; done += piece) {
        unsigned char *at = pinned_take(cuda, bytes - done, &piece);
        if (!at) return;
        memcpy(at, (const char *)from + done, piece);
        stream_copy(dev, (char *)to + done, at, piece);
    }
}

/* Copies the oldest fetch to the caller. */
static void fetch_land(CudaDevice *cuda)
{
    Fetch *fetch = &cuda->fetch[cuda->landed++ % FETCHES];
    if (CUDA_CHECK(cuda, cudaEventSynchronize(fetch->landed)) || cuda->status) return;
    if (fetch->bytes <= PART_BYTES) memcpy(fetch->to, fetch->pinned, fetch->bytes);
}

/* A fetch larger than a part goes directly to the caller's memory; the runtime may block on it. */
static void stream_fetch(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    if (idle(cuda, bytes, false)) return;
    if (cuda->fetched - cuda->landed == FETCHES) fetch_land(cuda);
    Fetch *fetch = &cuda->fetch[cuda->fetched++ % FETCHES];
    fetch->to = to;
    fetch->bytes = bytes;
    stream_copy(dev, bytes <= PART_BYTES ? fetch->pinned : to, from, bytes);
    CUDA_CHECK(cuda, cudaEventRecord(fetch->landed, cuda->stream));
}

static Status stream_await(Device *dev, int behind)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->rehearsing) return STATUS_OK;
    while (cuda->fetched - cuda->landed > behind) fetch_land(cuda);
    return cuda_failure(cuda);
}

static void stream_download(Device *dev, void *to, const void *from, size_t bytes)
{
    CudaDevice *cuda = cuda_of(dev);
    stream_fetch(dev, to, from, bytes);
    while (cuda->fetched > cuda->landed) fetch_land(cuda);
}

static uintptr_t stream_handle(Device *dev)
{
    return (uintptr_t)cuda_of(dev)->stream;
}

static Status stream_sync(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    if (cuda->rehearsing) return STATUS_OK;
    while (cuda->fetched > cuda->landed) fetch_land(cuda);
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    cuda_clear(cuda);
    return cuda_failure(cuda);
}

/* ---- rehearsals, and the ops' scratch ---- */

static void stream_rehearse(Device *dev)
{
    cuda_of(dev)->rehearsing = true;
    cuda_of(dev)->rehearsed_bytes = SCRATCH_FLOOR;
}

static size_t stream_rehearsed(Device *dev)
{
    cuda_of(dev)->rehearsing = false;
    return cuda_of(dev)->rehearsed_bytes;
}

Status stream_reserve(CudaDevice *cuda, size_t bytes)
{
    if (cuda->status || bytes <= cuda->scratch_bytes) return cuda_failure(cuda);
    CUDA_CHECK(cuda, cudaStreamSynchronize(cuda->stream));
    CUDA_CHECK(cuda, cudaFree(cuda->scratch));
    cuda->scratch = nullptr;
    cuda->scratch_bytes = 0;
    cuda->moves++;
    if (cuda->status) return cuda_failure(cuda);
    Status status = cuda_malloc(cuda, &cuda->scratch, bytes, "the largest op of a step");
    if (status == STATUS_OK) cuda->scratch_bytes = bytes;
    if (status && bytes > SCRATCH_FLOOR) /* so that ops that need no more still work */
        if (cudaMalloc(&cuda->scratch, SCRATCH_FLOOR) == cudaSuccess)
            cuda->scratch_bytes = SCRATCH_FLOOR;
    return status;
}

/* ---- graphs ---- */

static Status stream_record(Device *dev)
{
    CudaDevice *cuda = cuda_of(dev);
    if (!cuda->status)
        cuda->recording = !CUDA_CHECK(
            cuda, cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal));
    return cuda_failure(cuda);
}

static Status stream_recorded(Device *dev, Graph **graph)
{
    CudaDevice *cuda = cuda_of(dev);
    cudaGraph_t written = nullptr;
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &written);
    cuda->recording = false;
    CUDA_CHECK(cuda, error);
    *graph = cuda->status ? nullptr : (Graph *)calloc(1, sizeof **graph);
    if (*graph) {
        (*graph)->moves = cuda->moves;
        CUDA_CHECK(cuda, cudaGraphInstantiate(&(*graph)->work, written, 0));
    } else {
        cuda_fail(cuda, STATUS_MEMORY, "no memory for a recording");
    }
    if (written) cudaGraphDestroy(written);
    if (cuda->status && *graph) {
        free(*graph);
        *graph = nullptr;
    }
    return cuda_failure(cuda);
}

static int stream_replay(Device *dev, Graph *graph)
{
    CudaDevice *cuda = cuda_of(dev);
    if (graph->moves != cuda->moves) return 0;
    if (!cuda->status) CUDA_CHECK(cuda, cudaGraphLaunch(graph->work, cuda->stream));
    return 1;
}

static void stream_graph_close(Device *dev, Graph *graph)
{
    cuda_give_back(cuda_of(dev), nullptr, graph->work);
    free(graph);
}

/* ---- opening and closing ---- */

Status stream_open(CudaDevice *cuda)
{
    Device *d = &cuda->base;
    d->upload = ENTRY(stream_upload);
    d->download = ENTRY(stream_download);
    d->copy = ENTRY(stream_copy);
    d->receive = ENTRY(stream_receive);
    d->zero = ENTRY(stream_zero);
    d->stream = stream_handle;
    d->sync = ENTRY(stream_sync);
    d->fetch = ENTRY(stream_fetch);
    d->await = ENTRY(stream_await);
    d->rehearse = stream_rehearse;
    d->rehearsed = stream_rehearsed;
    d->record = ENTRY(stream_record);
    d->recorded = ENTRY(stream_recorded);
    d->replay = ENTRY(stream_replay);
    d->graph_close = stream_graph_close;
    CUDA_CHECK(cuda, cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking));
    CUDA_CHECK(cuda, cudaEventCreateWithFlags(&cuda->passed, cudaEventDisableTiming));
    size_t pinned_bytes = (size_t)(PINNED_PARTS + FETCHES) * PART_BYTES;
    CUDA_CHECK(cuda, cudaMallocHost((void **)&cuda->pinned.memory, pinned_bytes));
    for (int i = 0; i < PINNED_PARTS; i++)
        CUDA_CHECK(cuda, cudaEventCreateWithFlags(&cuda->pinned.done[i], cudaEventDisableTiming));
    for (int i = 0; i < FETCHES; i++) {
        cuda->fetch[i].pinned = cuda->pinned.memory + (size_t)(PINNED_PARTS + i) * PART_BYTES;
        CUDA_CHECK(cuda, cudaEventCreateWithFlags(&cuda->fetch[i].landed, cudaEventDisableTiming));
    }
    if (cuda->status) return cuda_failure(cuda);
    TRY(stream_reserve(cuda, SCRATCH_FLOOR));
    size_t bytes = ARRIVALS * sizeof *cuda->arrived;
    TRY(cuda_malloc(cuda, (void **)&cuda->arrived, bytes, "the device itself"));
    stream_zero(d, cuda->arrived, bytes);
    return cuda_failure(cuda);
}

void stream_close(CudaDevice *cuda)
{
    if (cuda->stream) cudaStreamSynchronize(cuda->stream);
    cuda_clear(cuda);
    cudaFree(cuda->arrived);
    cudaFree(cuda->scratch);
    cudaFreeHost(cuda->pinned.memory);
    for (int i = 0; i < PINNED_PARTS; i++)
        if (cuda->pinned.done[i]) cudaEventDestroy(cuda->pinned.done[i]);
    for (int i = 0; i < FETCHES; i++)
        if (cuda->fetch[i].landed) cudaEventDestroy(cuda->fetch[i].landed);
    if (cuda->passed) cudaEventDestroy(cuda->passed);
    if (cuda->stream) cudaStreamDestroy(cuda->stream);
}
