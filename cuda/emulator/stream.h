/* cuda/emulator/stream.h - the interface of an emulated card's stream: it takes work. Tensor core
 * sums are here too, for the kernels' mma and for the tests' stand-in for cuBLASLt
 * (tests/support/cublaslt.cpp), which includes only this file.
 *
 * A tensor core adds a few products and the sum so far at once: all are shifted to the largest
 * one's exponent, lower bits are truncated, and so is the sum. Both truncations are towards zero,
 * so their errors add up instead of cancelling. An A100 does this for 8 products, with one bit
 * beyond f32's 24; an H100 for 16, with two (Fasi et al. 2021, Khattak and Mikaitis 2025). This
 * file emulates the first, which is the worse one. */
#ifndef TINSMITH_CUDA_EMULATOR_STREAM_H
#define TINSMITH_CUDA_EMULATOR_STREAM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>

struct EmulatedStream {
    virtual ~EmulatedStream() = default;
    /* Takes work; returns a cudaError_t. */
    virtual int enqueue(std::function<void()> work) = 0;
    /* Whether its card's tensor cores truncate their sums. */
    virtual bool truncates() const = 0;
    /* Whether it is being captured. */
    virtual bool captures() const = 0;
    /* Milliseconds of its work, as stated by its callers. */
    double clock = 0.0;
};

namespace emulate {

enum { TERMS_AT_ONCE = 8, BITS_KEPT = 25 };

/* sum + Σ a[i·a_step]·b[i·b_step] of `count` bf16 values, exact except for the truncations. In
 * units of the last bit kept, a term has 25 bits and a sum 29, so integers suffice. */
inline float tensor_core_sum(float sum, const float *a, int64_t a_step, const float *b,
                             int64_t b_step, int count)
{
    for (int first = 0; first < count; first += TERMS_AT_ONCE) {
        double term[TERMS_AT_ONCE + 1], top = fabs((double)sum);
        int terms = count - first < TERMS_AT_ONCE ? count - first : TERMS_AT_ONCE;
        bool finite = top < INFINITY;
        term[terms] = sum;
        for (int i = 0; i < terms; i++) {
            term[i] = (double)a[(first + i) * a_step] * (double)b[(first + i) * b_step];
            double size = fabs(term[i]);
            finite &= size < INFINITY;
            top = size > top ? size : top;
        }
        if (top == 0.0 || !finite) { /* nothing to truncate; infinities and NaN as usual */
            for (int i = 0; i < terms; i++) sum += (float)term[i];
            continue;
        }
        uint64_t bits;
        memcpy(&bits, &top, 8);
        int64_t exponent = (int64_t)(bits >> 52) - (BITS_KEPT - 1);
        bits = (uint64_t)exponent << 52; /* the weight of the last bit kept */
        double unit;
        memcpy(&unit, &bits, 8);
        double units = 1.0 / unit; /* exact: a power of two */
        int32_t whole = 0;
        for (int i = 0; i <= terms; i++) whole += (int32_t)(term[i] * units);
        double total = whole * unit; /* f32 keeps 24 of its bits */
        float nearest = (float)total;
        bool above = fabs((double)nearest) > fabs(total);
        sum = above ? nextafterf(nearest, 0.0f) : nearest;
    }
    return sum;
}

} // namespace emulate

#endif
