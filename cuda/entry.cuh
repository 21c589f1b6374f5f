/* cuda/entry.cuh - how core's calls enter the CUDA device.
 *
 * A thread has one current card, which other libraries in it choose too. ENTRY(function) is
 * function, with its device's card current meanwhile: whatever core calls is called through it. */
#ifndef TINSMITH_ENTRY_CUH
#define TINSMITH_ENTRY_CUH

#include "cuda.cuh"

struct Current {
    int before = -1;
    explicit Current(int ordinal)
    {
        int now = ordinal;
        if (cudaGetDevice(&now) != cudaSuccess || now == ordinal) return;
        if (cudaSetDevice(ordinal) == cudaSuccess)
            before = now;
        else
            cudaGetLastError(); /* the next launch would show it */
    }
    ~Current()
    {
        if (before >= 0) cudaSetDevice(before);
    }
};

template <auto Function> struct Entry;
template <class R, class... A, R (*Function)(Device *, A...)> struct Entry<Function> {
    static R call(Device *dev, A... args)
    {
        Current current(cuda_of(dev)->ordinal);
        return Function(dev, args...);
    }
};
#define ENTRY(function) Entry<function>::call

#endif
