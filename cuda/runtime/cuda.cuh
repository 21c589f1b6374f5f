/* cuda/runtime/cuda.cuh - declarations that the CUDA device's files share.
 *
 * `real` is bf16, everything is computed in f32. A frozen weight has no header: two of one width
 * that lie one behind the other are one. It is row-major bf16, each row filled up with zeros to a
 * multiple of 16 bytes, or blocks (packed.cuh). The same text is compiled by nvcc and, with
 * CUDA_EMULATED, as C++ (emulator.h). Kernels are `static __global__`, started with LAUNCH, and say
 * Shared<T> for a pointer to shared memory: T *, or checked by the emulator. */
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

/* ---- frozen weights ---- */

enum { FROZEN_ALIGN = 8 }; /* a row's elements are a multiple of it */

struct frozen {
    real first;
};

/* Elements from one row of a frozen (rows, cols) to the next. */
__host__ __device__ static inline int64_t frozen_stride(int cols)
{
    return (cols + FROZEN_ALIGN - 1) / FROZEN_ALIGN * FROZEN_ALIGN;
}

/* Row 0. */
__host__ __device__ static inline const real *frozen_data(const frozen *w)
{
    return &w->first;
}

/* ---- the device ---- */

typedef struct Matmul Matmul; /* private to matmul.cu: cuBLASLt and the algorithms it picked */
enum { ARRIVALS = 256, PINNED_PARTS = 4, PART_BYTES = 1 << 20, FETCHES = 2 };
enum { NOTES = 24, NOTE_BYTES = 512 };

/* Pinned host memory that uploads pass through, part after part. A part is used again when the
 * copies out of it are done. */
typedef struct Pinned {
    unsigned char *memory;
    int part;
    size_t used; /* of the part */
    cudaEvent_t done[PINNED_PARTS];
} Pinned;

/* A download under way: to pinned memory, and from there to the caller's. */
typedef struct Fetch {
    unsigned char *pinned;
    void *to;
    size_t bytes;
    cudaEvent_t landed;
} Fetch;

typedef struct Returned Returned; /* private to cuda.cu: what was given back */
typedef struct Keeping Keeping;   /* private to weight_load.cu: which weights have blocks */
typedef struct CudaDevice {
    Device base; /* first: a Device* is a CudaDevice* */
    int ordinal; /* of the card; every entry makes it the thread's current one (ENTRY) */
    char name[32];
    cudaStream_t stream;
    Matmul *matmul;
    int processors;      /* streaming multiprocessors: how many blocks fill the card */
    size_t all_bytes;    /* of the card's memory */
    size_t shared_bytes; /* that a block may have */
    size_t cache_bytes;  /* of the card's cache */
    unsigned *arrived;   /* counters of a kernel's blocks, zero between this stream's launches */
    void *scratch;       /* see cuda_scratch */
    size_t scratch_bytes, rehearsed_bytes;
    unsigned moves; /* of scratch: older graphs use memory that is gone */
    bool rehearsing, recording;
    pthread_mutex_t returning; /* of the list that follows, to which any thread may add */
    Returned *returned;
    Keeping *keeping;
    bool lost; /* for this process: only a new one can use the card again */
    Pinned pinned;
    Fetch fetch[FETCHES];
    int fetched, landed; /* fetches begun and ended */
    Status status;       /* the first failure since the last sync */
    char text[512];
    char note[NOTES][NOTE_BYTES];
    const char *notes[NOTES + 1]; /* those that there are, then NULL */
} CudaDevice;

#ifdef CUDA_EMULATED
#define CUDA_NAME "cuda-emulated" /* of the first card; others have ":" and their ordinal */
#else
#define CUDA_NAME "cuda"
#endif

extern FailFunction *fail_in_core; /* core's fail(), given by cuda_open */
/* Keeps a failure on the device until sync() returns it; the first one wins. */
void cuda_fail(CudaDevice *cuda, Status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Adds a sentence to the device's notes, unless it is there already or they are full. */
void cuda_note(CudaDevice *cuda, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Memory of the card; a refusal tells the bytes that `purpose` needs, and the free ones. */
Status cuda_malloc(CudaDevice *cuda, void **memory, size_t bytes, const char *purpose);

/* Undefined memory for one op, until it returns or asks again: 256-byte aligned. An op that needs
 * several arrays takes one and cuts it. NULL, and a kept failure, if the op asks for more than the
 * step's rehearsal reserved; in the rehearsal NULL alone, and the op starts no kernel. */
void *cuda_scratch(CudaDevice *cuda, size_t bytes);

/* Notes what is to be freed, in any thread; cuda_clear waits and frees it, in the device's own. */
void cuda_give_back(CudaDevice *cuda, void *memory, cudaGraphExec_t work);
void cuda_clear(CudaDevice *cuda);

/* The failure so far, which is then forgotten, unless it is for ever. */
Status cuda_failure(CudaDevice *cuda);

/* A failed call of the runtime, kept with its place; nonzero when it failed. */
int cuda_check(CudaDevice *cuda, cudaError_t error, const char *what, const char *file, int line);
#define CUDA_CHECK(cuda, call) cuda_check(cuda, call, #call, __FILE__, __LINE__)

static inline CudaDevice *cuda_of(Device *dev)
{
    return (CudaDevice *)dev;
}

/* ---- launching ---- */

/* Blocks of `size` that cover n. */
static inline unsigned cuda_blocks(int64_t n, int64_t size)
{
    return (unsigned)((n + size - 1) / size);
}

/* Starts kernel(args...) on the device's stream; nothing happens for an empty grid or after a
 * failure. A template's kernel with commas goes in parentheses. */
#define LAUNCH(cuda, kernel, grid, block, shared_bytes, ...) \
    cuda_launch(cuda, #kernel, __FILE__, __LINE__, kernel, grid, block, shared_bytes, __VA_ARGS__)

template <class... P, class... A>
static void cuda_launch(CudaDevice *cuda, const char *name, const char *file, int line,
                        void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A... args)
{
    if (cuda->status || cuda->rehearsing || !grid.x || !grid.y || !grid.z) return;
    if (shared_bytes > cuda->shared_bytes)
        return cuda_fail(cuda, STATUS_DEVICE,
                         "%s:%d: %s asks for %zu bytes of shared memory, a block may have %zu",
                         file, line, name, shared_bytes, cuda->shared_bytes);
#ifdef CUDA_EMULATED
    auto failed = [=](const char *said) {
        cuda_fail(cuda, STATUS_DEVICE, "%s:%d: %s", file, line, said);
    };
    emulate::Launch launch = {
        name, grid, block, shared_bytes, cuda->shared_bytes, [=] { kernel(args...); }, failed};
    cuda_check(cuda, emulate::enqueue(cuda->stream, {{}, true, launch}), name, file, line);
#else
    if (shared_bytes > 48 << 10) { /* all that there is: other threads launch the kernel too */
        cudaFuncAttributes has;
        if (cuda_check(cuda, cudaFuncGetAttributes(&has, kernel), name, file, line)) return;
        int most = (int)(cuda->shared_bytes - has.sharedSizeBytes);
        cudaFuncAttribute which = cudaFuncAttributeMaxDynamicSharedMemorySize;
        if (cuda_check(cuda, cudaFuncSetAttribute(kernel, which, most), name, file, line)) return;
    }
    cudaGetLastError(); /* of a call that may fail, and did, before */
    kernel<<<grid, block, shared_bytes, cuda->stream>>>(args...);
    cuda_check(cuda, cudaGetLastError(), name, file, line);
#endif
}

/* ---- shared memory ----
 *
 *   SHARED_ARRAY(float, sums, 32);       a block's array, a Shared<float>
 *   DYNAMIC_SHARED(bytes);               the launch's shared_bytes, a Shared<unsigned char>
 *   Shared<real> tile = shared_part<real>(bytes, offset_bytes, count);
 *   shared_range(tile, i, 8)             a plain pointer to elements [i, i + 8), checked */

#ifdef CUDA_EMULATED

/* A pointer that knows its array: every [] and * is checked. */
template <class T> struct Shared {
    T *base;
    int64_t count, at;
    T *range(int64_t i, int64_t n) const
    {
        if (at + i < 0 || at + i + n > count)
            emulate::fault("index %ld of shared memory, which has %ld elements here",
                           (long)(at + i + n - 1), (long)count);
        return base + at + i;
    }
    T &operator[](int64_t i) const
    {
        return *range(i, 1);
    }
    T &operator*() const
    {
        return *range(0, 1);
    }
    T *operator->() const
    {
        return range(0, 1);
    }
    Shared operator+(int64_t i) const
    {
        return {base, count, at + i};
    }
    Shared operator-(int64_t i) const
    {
        return {base, count, at - i};
    }
    Shared &operator+=(int64_t i)
    {
        at += i;
        return *this;
    }
};

template <class T> static inline T *shared_range(Shared<T> p, int64_t i, int64_t n)
{
    return p.range(i, n);
}

template <class T>
static inline Shared<T> shared_part(Shared<unsigned char> bytes, int64_t offset, int64_t count)
{
    return {(T *)bytes.range(offset, count * (int64_t)sizeof(T)), count, 0};
}

#define SHARED_ARRAY(type, name, n)       \
    static emulate::Region name##_region; \
    Shared<type> name = {                 \
        (type *)emulate::region_of_block(&name##_region, #name, (n) * sizeof(type)), n, 0}
#define DYNAMIC_SHARED(name) \
    Shared<unsigned char> name = {emulate::gpu.dynamic.base, (int64_t)emulate::gpu.dynamic.bytes, 0}

#else

template <class T> using Shared = T *;

template <class T> __device__ static __forceinline__ T *shared_range(T *p, int64_t i, int64_t)
{
    return p + i;
}

template <class T>
__device__ static __forceinline__ T *shared_part(unsigned char *bytes, int64_t offset, int64_t)
{
    return reinterpret_cast<T *>(bytes + offset);
}

#define SHARED_ARRAY(type, name, n) __shared__ __align__(128) type name[n]
#define DYNAMIC_SHARED(name)                                     \
    extern __shared__ __align__(128) unsigned char all_shared[]; \
    unsigned char *name = all_shared

#endif

/* ---- numbers ---- */

__device__ static __forceinline__ float f32(real x)
{
    return __bfloat162float(x.value);
}

/* To the nearest, ties to even. */
__device__ static __forceinline__ real to_real(float x)
{
    return real{__float2bfloat16_rn(x)};
}

__device__ static __forceinline__ uint32_t real_bits(real x)
{
    return __bfloat16_as_ushort(x.value);
}

/* Two reals as one register, `low` at the lower address: the form of mma's operands. */
__device__ static __forceinline__ uint32_t pack(float low, float high)
{
    return real_bits(to_real(low)) | real_bits(to_real(high)) << 16;
}

/* N elements at once: W = 8 reals or 4 floats are one access of 16 bytes, and need that alignment;
 * W = 1 fits any. It is a kernel's template argument, chosen by the row's width. */
template <int W> __device__ static __forceinline__ void load(float (&out)[W], const real *p)
{
    static_assert(W == 1 || W == 8, "one element or 16 bytes");
    if constexpr (W == 1) {
        out[0] = f32(*p);
    } else {
        uint4 bits = *reinterpret_cast<const uint4 *>(p);
        const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int i = 0; i < W; i++) out[i] = i % 2 ? high_of(pair[i / 2]) : low_of(pair[i / 2]);
    }
}

template <int W> __device__ static __forceinline__ void store(real *p, const float (&in)[W])
{
    static_assert(W == 1 || W == 8, "one element or 16 bytes");
    if constexpr (W == 1) {
        *p = to_real(in[0]);
    } else {
        *reinterpret_cast<uint4 *>(p) = make_uint4(pack(in[0], in[1]), pack(in[2], in[3]),
                                                   pack(in[4], in[5]), pack(in[6], in[7]));
    }
}

template <int W> __device__ static __forceinline__ void load(float (&out)[W], const float *p)
{
    static_assert(W == 1 || W % 4 == 0, "one element or multiples of 16 bytes");
    if constexpr (W == 1) {
        out[0] = *p;
    } else {
        for (int i = 0; i < W; i += 4) {
            float4 v = *reinterpret_cast<const float4 *>(p + i);
            out[i] = v.x;
            out[i + 1] = v.y;
            out[i + 2] = v.z;
            out[i + 3] = v.w;
        }
    }
}

template <int W> __device__ static __forceinline__ void store(float *p, const float (&in)[W])
{
    static_assert(W == 1 || W % 4 == 0, "one element or multiples of 16 bytes");
    if constexpr (W == 1) {
        *p = in[0];
    } else {
        for (int i = 0; i < W; i += 4)
            *reinterpret_cast<float4 *>(p + i) =
                make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
    }
}

/* e^x, likewise (fast_exp2). */
__device__ static __forceinline__ float fast_exp(float x)
{
    return fast_exp2(x * 1.4426950408889634f);
}

/* 1 / (1 + e^-x), as exact as fast_exp. */
__device__ static __forceinline__ float fast_sigmoid(float x)
{
    return 1.0f / (1.0f + fast_exp(-x));
}

/* ---- warps and blocks: the same order of sums in every lane, so all get the same bits ---- */

template <class T> __device__ static __forceinline__ T warp_sum(T x)
{
    for (int bit = 16; bit; bit >>= 1) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

__device__ static __forceinline__ float warp_max(float x)
{
    for (int bit = 16; bit; bit >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
    return x;
}

/* The block's sum in every thread. `sums` is a SHARED_ARRAY of 32; all threads must come. */
template <class T> __device__ static inline T block_sum(T x, Shared<T> sums)
{
    int warps = (int)(blockDim.x / 32);
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    T total = sums[0];
    for (int i = 1; i < warps; i++) total += sums[i];
    return total;
}

__device__ static inline float block_max(float x, Shared<float> sums)
{
    int warps = (int)(blockDim.x / 32);
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float top = sums[0];
    for (int i = 1; i < warps; i++) top = fmaxf(top, sums[i]);
    return top;
}

/* ---- the ops ---- */

#define OP(name, args) void cuda_##name args;
#include "../../csrc/device/ops.inc"
#undef OP

#endif
