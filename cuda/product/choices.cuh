/* cuda/product/choices.cuh - the log of cuBLASLt's trials: a line of JSON per choice of an
 * algorithm, in the file TINSMITH_CUDA_LOG.
 *
 * Included only by buckets.cuh. A line has the product, the library, each candidate with its
 * result, and the choice: enough to see on another machine why a product is slow. */
#ifndef TINSMITH_CUDA_PRODUCT_CHOICES_CUH
#define TINSMITH_CUDA_PRODUCT_CHOICES_CUH

#include <stdarg.h>
#include <unistd.h>

#include "cublaslt.cuh"

/* A line being written; what does not fit is left out. */
typedef struct Choice {
    FILE *log; /* NULL: nothing is written */
    size_t used;
    int trials;
    char text[LOG_BYTES];
} Choice;

__attribute__((format(printf, 2, 3))) static void choice_add(Choice *c, const char *format, ...)
{
    if (!c->log) return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(c->text + c->used, sizeof c->text - c->used, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < sizeof c->text - c->used) c->used += (size_t)n;
}

/* An algorithm's attributes, by cuBLASLt's numbers. */
static void choice_algorithm(CudaDevice *cuda, Choice *c, const LtAlgorithm *algorithm)
{
    static const struct {
        const char *name;
        int attribute;
        size_t bytes;
    } known[] = {{"id", 0, 4},     {"tile", 1, 4},   {"split k", 2, 4}, {"swizzle", 4, 4},
                 {"custom", 5, 4}, {"stages", 6, 4}, {"inner", 7, 2},   {"cluster", 8, 2}};
    for (const auto &one : known) {
        uint32_t value = 0;
        size_t written = 0;
        if (c->log && !cuda->matmul->MatmulAlgoConfigGetAttribute(algorithm, one.attribute, &value,
                                                                  one.bytes, &written))
            choice_add(c, ", \"%s\": %u", one.name, value);
    }
}

/* Begins a line on a plan's product of `fewest` to `most` rows. */
static void choice_begin(CudaDevice *cuda, Choice *c, const Plan *plan, int fewest, int most)
{
    const PlanKey &key = plan->key;
    c->log = cuda->matmul->log;
    c->used = 0;
    c->trials = 0;
    choice_add(
        c,
        "{\"process\": %d, \"library\": \"%s\", \"width\": %d, \"depth\": %d, \"rows\": [%d, %d], "
        "\"weight\": \"%s\", \"result\": \"%s\", \"bias\": %d, \"strides\": "
        "[%lld, %lld, %lld], \"align\": [%d, %d, %d], \"reference\": {\"place\": %d",
        (int)getpid(), cuda->matmul->library, key.N, key.fixed, fewest, most,
        key.b_by_column ? "turned" : "as it is", key.f32_out ? "f32" : "bf16", key.bias,
        (long long)key.a_stride, (long long)key.b_stride, (long long)key.c_stride, key.align_a,
        key.align_b, key.align_c, plan->place);
    if (plan->picked) choice_algorithm(cuda, c, &plan->reference);
    choice_add(c, "}, \"trials\": [");
}

/* Adds a candidate's result: `how`, and its milliseconds if it was timed. */
static void choice_trial(CudaDevice *cuda, Choice *c, const LtAlgorithm *algorithm, const char *how,
                         float ms)
{
    choice_add(c, "%s{\"how\": \"%s\"", c->trials++ ? ", " : "", how);
    choice_algorithm(cuda, c, algorithm);
    if (ms < INFINITY) choice_add(c, ", \"us\": %.2f", 1e3 * (double)ms);
    choice_add(c, "}");
}

/* Ends the line: the reason for the choice, its milliseconds and the algorithm. */
static void choice_end(CudaDevice *cuda, Choice *c, const char *why, const LtAlgorithm *chosen,
                       float ms)
{
    choice_add(c, "], \"why\": \"%s\", \"chosen\": {\"trials\": %d", why, c->trials);
    if (chosen) choice_algorithm(cuda, c, chosen);
    if (ms < INFINITY) choice_add(c, ", \"us\": %.2f", 1e3 * (double)ms);
    choice_add(c, "}}\n");
    if (!c->log) return;
    fwrite(c->text, 1, c->used, c->log);
    fflush(c->log);
}

#endif
