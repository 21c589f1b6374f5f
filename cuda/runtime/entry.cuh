/* cuda/runtime/entry.cuh - the entry of core's calls into the CUDA device.
 *
 * A thread has one current card, which other libraries change too. ENTRY(function) calls function
 * with its device's card current: core calls everything through it. */
#ifndef TINSMITH_CUDA_RUNTIME_ENTRY_CUH
#define TINSMITH_CUDA_RUNTIME_ENTRY_CUH

#include "cuda.cuh"

/* Whether a card has a context, which takes memory there: making the card current would create one.
 * True if unknown. */
static inline bool has_context(int card)
{
#ifdef CUDA_EMULATED
    (void)card;
    return true;
#else
    typedef int (*State)(int card, unsigned *flags, int *active); /* cuDevicePrimaryCtxGetState */
    static void *const found = [] {
        void *function = nullptr;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 7000,
                                         cudaEnableDefault, &result);
#else
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function, cudaEnableDefault,
                                &result);
#endif
        return function;
    }();
    unsigned flags;
    int active = 1;
    return !found || ((State)found)(card, &flags, &active) != 0 || active;
#endif
}

struct Current {
    int before = -1;
    explicit Current(int ordinal)
    {
        int now = ordinal;
        if (cudaGetDevice(&now) != cudaSuccess || now == ordinal) return;
        if (cudaSetDevice(ordinal) == cudaSuccess)
            before = now;
        else
            cudaGetLastError(); /* the next launch would report it */
    }
    ~Current()
    {
        if (before < 0 || !has_context(before)) return; /* this process does not use that card */
        if (cudaSetDevice(before) != cudaSuccess) cudaGetLastError();
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
