/* cuda/runtime/cuda.cuh - the CUDA device, and its services for ops.
 *
 * `real` is bf16, everything is computed in f32. The same source is compiled by nvcc and, with
 * CUDA_EMULATED, as C++ (emulator.h). */
#ifndef TINSMITH_CUDA_RUNTIME_CUDA_CUH
#define TINSMITH_CUDA_RUNTIME_CUDA_CUH

#include <pthread.h>
#include <stddef.h>

#include "ptx.cuh"

extern "C" {
#include "../../csrc/device/device.h"
}

struct real {
    __nv_bfloat16 value;
};
struct cached : real {};

typedef struct Matmul Matmul; /* private to matmul.cu: cuBLASLt and its chosen algorithms */
enum { ARRIVALS = 256, PINNED_PARTS = 4, PART_BYTES = 1 << 20, FETCHES = 2 };
enum { NOTES = 24, NOTE_BYTES = 512 };

/* Pinned host memory for uploads, used part after part. A part is reused when the copies out of it
 * are done. */
typedef struct Pinned {
    unsigned char *memory;
    int part;
    size_t used; /* of the part */
    cudaEvent_t done[PINNED_PARTS];
} Pinned;

/* A download in flight: to pinned memory, then to the caller's. */
typedef struct Fetch {
    unsigned char *pinned;
    void *to;
    size_t bytes;
    cudaEvent_t landed;
} Fetch;

typedef struct Returned Returned; /* private to cuda.cu: released memory */
typedef struct Keeping Keeping;   /* private to weight_load.cu: the weights with blocks */
typedef struct CudaDevice {
    Device base; /* first: a Device* is a CudaDevice* */
    int ordinal; /* the card's; every entry makes it the thread's current card (ENTRY) */
    char name[32];
    cudaStream_t stream;
    cudaEvent_t passed; /* of a copy between devices (stream_receive) */
    Matmul *matmul;
    int processors;      /* streaming multiprocessors */
    size_t all_bytes;    /* of the card's memory */
    size_t shared_bytes; /* the most per block */
    size_t cache_bytes;  /* of the card's cache */
    unsigned *arrived;   /* counters of a kernel's blocks, zero between this stream's launches */
    void *scratch;       /* see cuda_scratch */
    size_t scratch_bytes, rehearsed_bytes;
    unsigned moves; /* of scratch: older graphs use freed memory */
    bool rehearsing, recording;
    pthread_mutex_t returning; /* guards the next list, to which any thread may add */
    Returned *returned;
    Keeping *keeping;
    bool lost; /* in this process: only a new one can use the card again */
    Pinned pinned;
    Fetch fetch[FETCHES];
    int fetched, landed; /* fetches begun and ended */
    Status status;       /* the first failure since the last sync */
    char text[512];
    char note[NOTES][NOTE_BYTES];
    const char *notes[NOTES + 1]; /* NULL-terminated */
} CudaDevice;

#ifdef CUDA_EMULATED
#define CUDA_NAME "cuda-emulated" /* the first card's; others add ":" and their ordinal */
#else
#define CUDA_NAME "cuda"
#endif

extern FailFunction *fail_in_core; /* core's fail(), passed to cuda_open */
/* Keeps a failure on the device until sync() returns it; the first one wins. */
void cuda_fail(CudaDevice *cuda, Status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Adds a sentence to the device's notes, unless it is there already or they are full. */
void cuda_note(CudaDevice *cuda, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Device memory; a failure names the bytes that `purpose` needs, and the free ones. */
Status cuda_malloc(CudaDevice *cuda, void **memory, size_t bytes, const char *purpose);

/* Uninitialized memory for one op, 256-byte aligned, until the op returns or calls this again. An
 * op with several arrays takes one block and splits it. NULL with a kept failure if this exceeds
 * what the step's rehearsal reserved. In a rehearsal only NULL, and the op launches no kernel. */
void *cuda_scratch(CudaDevice *cuda, size_t bytes);

/* Queues what to free, in any thread; cuda_clear waits and frees it, in the device's own. */
void cuda_give_back(CudaDevice *cuda, void *memory, cudaGraphExec_t work);
void cuda_clear(CudaDevice *cuda);

/* Returns the failure so far and clears it, unless it is permanent. */
Status cuda_failure(CudaDevice *cuda);

/* Keeps a failed runtime call with its file and line; nonzero if it failed. */
int cuda_check(CudaDevice *cuda, cudaError_t error, const char *what, const char *file, int line);
#define CUDA_CHECK(cuda, call) cuda_check(cuda, call, #call, __FILE__, __LINE__)

static inline CudaDevice *cuda_of(Device *dev)
{
    return (CudaDevice *)dev;
}

/* ---- the ops ---- */

#define OP(name, args) void cuda_##name args;
#include "../../csrc/device/ops.inc"
#undef OP

#endif
