/* cuda/runtime/launch.cuh - kernel launches, and shared memory.
 *
 * Kernels are `static __global__` and launched with LAUNCH. Shared<T> is a pointer to shared
 * memory: T *, or checked in the emulator. */
#ifndef TINSMITH_CUDA_RUNTIME_LAUNCH_CUH
#define TINSMITH_CUDA_RUNTIME_LAUNCH_CUH

#include "cuda.cuh"

/* The number of blocks of `size` that cover n. */
static inline unsigned cuda_blocks(int64_t n, int64_t size)
{
    return (unsigned)((n + size - 1) / size);
}

/* Launches kernel(args...) on the device's stream; does nothing for an empty grid or after a
 * failure. Put a template kernel with commas in parentheses. */
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
    if (!(emulate::is_within_reach(args, cuda->ordinal) && ...))
        return cuda_fail(cuda, STATUS_DEVICE, "%s:%d: %s is given another card's memory", file,
                         line, name);
    auto failed = [=](const char *said) {
        cuda_fail(cuda, STATUS_DEVICE, "%s:%d: %s", file, line, said);
    };
    emulate::Launch launch = {
        name, grid, block, shared_bytes, cuda->shared_bytes, [=] { kernel(args...); }, failed};
    cuda_check(cuda, emulate::enqueue(cuda->stream, {{}, true, launch}), name, file, line);
#else
    if (shared_bytes > 48 << 10) { /* the maximum: other threads launch the kernel too */
        cudaFuncAttributes has;
        if (cuda_check(cuda, cudaFuncGetAttributes(&has, kernel), name, file, line)) return;
        int most = (int)(cuda->shared_bytes - has.sharedSizeBytes);
        cudaFuncAttribute which = cudaFuncAttributeMaxDynamicSharedMemorySize;
        if (cuda_check(cuda, cudaFuncSetAttribute(kernel, which, most), name, file, line)) return;
    }
    cudaGetLastError(); /* clears the error of an earlier call that may fail */
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

/* A pointer with its array's bounds: every [] and * is checked. */
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

#endif
