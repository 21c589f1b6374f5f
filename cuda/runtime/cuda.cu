/* cuda/runtime/cuda.cu - services for every op: the device's failures, memory, and scratch.
 *
 * The first failure stays here with its file and line until sync() or await() returns it. After
 * some failures the runtime refuses everything (an illegal address, a card that fell off the bus).
 * Such a failure is permanent: each later call gets the same sentence, which says to restart the
 * server. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.cuh"

FailFunction *fail_in_core;

/* Released device memory, or a recording, that work in flight may still use. */
struct Returned {
    void *memory;
    cudaGraphExec_t work;
    Returned *next;
};

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

void cuda_note(CudaDevice *cuda, const char *format, ...)
{
    char text[NOTE_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (int i = 0; i < NOTES; i++) {
        if (cuda->notes[i] && strcmp(cuda->notes[i], text) == 0) return;
        if (cuda->notes[i]) continue;
        memcpy(cuda->note[i], text, sizeof text);
        cuda->notes[i] = cuda->note[i];
        return;
    }
}

/* After a failed call the context is alive or permanently dead: it is dead if it can't
 * synchronize. */
int cuda_check(CudaDevice *cuda, cudaError_t error, const char *what, const char *file, int line)
{
    if (error == cudaSuccess) return 0;
    cudaGetLastError(); /* clears the runtime's copy, which the next launch would report */
    if (cuda->status) return 1;
    if (!cuda->recording && error != cudaErrorMemoryAllocation && cuda->stream)
        cuda->lost = cudaStreamSynchronize(cuda->stream) != cudaSuccess;
    cuda_fail(cuda, error == cudaErrorMemoryAllocation ? STATUS_MEMORY : STATUS_DEVICE,
              "%s: %s:%d: %s: %s%s", cuda->name, file, line, what, cudaGetErrorString(error),
              cuda->lost ? ". The GPU is lost to this process: start the server again, and go on "
                           "from a checkpoint"
                         : "");
    return 1;
}

Status cuda_failure(CudaDevice *cuda)
{
    Status status = cuda->status;
    if (!cuda->lost) cuda->status = STATUS_OK;
    return status ? fail_in_core(status, "%s", cuda->text) : STATUS_OK;
}

/* ---- memory ---- */

Status cuda_malloc(CudaDevice *cuda, void **memory, size_t bytes, const char *purpose)
{
    size_t free_bytes = 0, all_bytes = 0;
    cuda_clear(cuda);
    cudaError_t error = cudaMalloc(memory, bytes);
    if (error != cudaErrorMemoryAllocation)
        return CUDA_CHECK(cuda, error) ? cuda->base.sync(&cuda->base) : STATUS_OK;
    cudaGetLastError();
    CUDA_CHECK(cuda, cudaMemGetInfo(&free_bytes, &all_bytes));
    return fail_in_core(
        STATUS_MEMORY, "%s: %s needs %.1f MiB, and the card can give %.1f of its %.1f MiB",
        cuda->name, purpose, bytes / 1048576.0, free_bytes / 1048576.0, all_bytes / 1048576.0);
}

void *cuda_scratch(CudaDevice *cuda, size_t bytes)
{
#ifdef CUDA_EMULATED
    emulate::machine.cards[cuda->ordinal].asked[cuda->rehearsing].insert(bytes);
#endif
    if (cuda->rehearsing) {
        if (bytes > cuda->rehearsed_bytes) cuda->rehearsed_bytes = bytes;
        return nullptr;
    }
    if (bytes > cuda->scratch_bytes)
        cuda_fail(cuda, STATUS_DEVICE,
                  "%s: an op needs %zu bytes for itself, %zu were reserved: its step was not "
                  "rehearsed with these sizes",
                  cuda->name, bytes, cuda->scratch_bytes);
    if (cuda->status) return nullptr;
#ifdef CUDA_EMULATED
    void *scratch = cuda->scratch;
    CUDA_CHECK(cuda, cudaMemsetAsync(scratch, emulate::POISON, bytes, cuda->stream));
#endif
    return cuda->scratch;
}

/* ---- calls from other threads ---- */

/* Any thread may collect garbage while the device's thread is recording, and synchronizing with a
 * recorded stream would end the recording. So this only queues what to free. Without memory for the
 * entry it leaks: nothing else works then either. */
void cuda_give_back(CudaDevice *cuda, void *memory, cudaGraphExec_t work)
{
    Returned *returned = (Returned *)malloc(sizeof *returned);
    if (!returned) return;
    *returned = {memory, work, nullptr};
    pthread_mutex_lock(&cuda->returning);
    returned->next = cuda->returned;
    cuda->returned = returned;
    pthread_mutex_unlock(&cuda->returning);
}

/* A failure here is ignored: the next call on a lost card reports it. */
void cuda_clear(CudaDevice *cuda)
{
    if (cuda->recording) return;
    pthread_mutex_lock(&cuda->returning);
    Returned *list = cuda->returned;
    cuda->returned = nullptr;
    pthread_mutex_unlock(&cuda->returning);
    if (list) cudaStreamSynchronize(cuda->stream);
    while (list) {
        Returned *one = list;
        if (one->memory) cudaFree(one->memory);
        if (one->work) cudaGraphExecDestroy(one->work);
        list = one->next;
        free(one);
        cudaGetLastError();
    }
}
