/* tests/support/cublaslt.cpp - a stand-in for libcublasLt.so, which the emulated CUDA device loads.
 *
 * It has the entry points that cublaslt.cuh uses, and computes on the host what they ask for:
 * D = alpha·op(A)·op(B) + beta·C [+ bias], all stored by columns. It is stricter than the real
 * library: every attribute's size, every leading dimension, how the sizes fit together, and the
 * alignment that was promised for each pointer are checked, and a call that breaks a rule gets a
 * status and leaves a sentence in cublaslt_said(). Work goes to the emulated card's stream.
 *
 * The algorithms it offers differ in the order of their sums, and so in their bits. One that splits
 * k comes first wherever it is not forbidden. cublaslt_offer() makes it offer others, and
 * cublaslt_ran() tells which were used. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../../cuda/emulator/stream.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

enum { OK, INVALID = 7, NOT_SUPPORTED = 15 };
enum { F32 = 0, BF16 = 14, COMPUTE_F32 = 68 };
enum { TRANSA = 3, TRANSB = 4, EPILOGUE = 7, BIAS_POINTER = 8, EPILOGUE_BIAS = 4 };
enum { LAYOUT_COLS = 3, PREF_WORKSPACE = 1, PREF_REDUCTIONS = 3, PREF_ALIGNMENT = 5 };
enum { ID = 0, INNER = 7, CLUSTER = 8 }; /* of an algorithm; what is not its ID is its splits */

/* Its data fills cublasLtMatmulAlgo_t. */
enum Sum { FORWARD, BACKWARD, BACKWARD_ODD, BACKWARD_EVEN, BACKWARD_MANY };
enum { MANY = 200 };
typedef struct Algorithm {
    int64_t splits, workspace;
    int32_t sum, name;             /* its order of k, which may depend on the number of columns */
    int32_t least_cols, most_cols; /* that it takes */
    int32_t refused_cols;          /* that it says it takes, and then does not; 0: none */
    int32_t cost;                  /* milliseconds */
    int32_t align[4];              /* of A, B, C and D, as promised when it was found */
    uint64_t magic;
} Algorithm;
static_assert(sizeof(Algorithm) == 64, "cublasLtMatmulAlgo_t has 64 bytes");
static const uint64_t MAGIC = 0x7ca1ab1e;

typedef struct Result {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Result;

typedef struct Desc {
    int32_t transposed[2];
    uint32_t epilogue;
    const void *bias;
} Desc;

typedef struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
} Layout;

typedef struct Preference {
    uint64_t workspace;
    uint32_t reductions;
    uint32_t align[4];
} Preference;

enum Offer { ALL, TEMPTING, NOTHING, FAITHLESS, SEVERAL, UNSTEADY };
static int offer = ALL;
static char said[300];

/* A use of an algorithm. */
typedef struct Run {
    int32_t name, cols, captured;
} Run;
static std::vector<Run> runs;

/* ALL: what the preference allows. TEMPTING: first one that splits k, one that wants memory, and
 * one that does not take single columns, whatever is asked. NOTHING. FAITHLESS: one that is refused
 * when it is used with three columns. SEVERAL: those of several() with the first in front.
 * UNSTEADY: the same with the last one in front, whose bits change with the number of columns. */
EXPORT void cublaslt_offer(int kind)
{
    offer = kind;
    said[0] = 0;
    runs.clear();
}

/* The uses since the last call, at most `room`; returns how many there were. */
EXPORT int cublaslt_ran(Run *out, int room)
{
    int count = (int)runs.size();
    std::copy_n(runs.begin(), std::min(count, room), out);
    runs.clear();
    return count;
}

/* The rule that was broken last, or "". */
EXPORT const char *cublaslt_said(void)
{
    return said;
}

__attribute__((format(printf, 1, 2))) static int refuse(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(said, sizeof said, format, args);
    va_end(args);
    return INVALID;
}

/* ---- what calls describe ---- */

static int set(const char *what, void *to, size_t size, const void *from, size_t bytes)
{
    if (bytes != size) return refuse("%s has %zu bytes, not %zu", what, size, bytes);
    memcpy(to, from, size);
    return OK;
}

EXPORT size_t cublasLtGetVersion(void)
{
    return 130207;
}

EXPORT int cublasLtCreate(void **handle)
{
    *handle = new char;
    return OK;
}

EXPORT int cublasLtDestroy(void *handle)
{
    delete (char *)handle;
    return OK;
}

EXPORT int cublasLtMatmulDescCreate(void **desc, int compute, int scale)
{
    if (compute != COMPUTE_F32 || scale != F32)
        return refuse("a product computes in type %d with scales of type %d", compute, scale);
    *desc = new Desc{};
    return OK;
}

EXPORT int cublasLtMatmulDescDestroy(void *desc)
{
    delete (Desc *)desc;
    return OK;
}

EXPORT int cublasLtMatmulDescSetAttribute(void *at, int attribute, const void *value, size_t bytes)
{
    Desc *desc = (Desc *)at;
    switch (attribute) {
    case TRANSA: return set("TRANSA", &desc->transposed[0], 4, value, bytes);
    case TRANSB: return set("TRANSB", &desc->transposed[1], 4, value, bytes);
    case EPILOGUE: return set("EPILOGUE", &desc->epilogue, 4, value, bytes);
    case BIAS_POINTER: return set("BIAS_POINTER", &desc->bias, 8, value, bytes);
    }
    return refuse("a product has no attribute %d here", attribute);
}

EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t cols,
                                      int64_t ld)
{
    if (type != F32 && type != BF16) return refuse("a matrix of type %d", type);
    if (!rows || !cols) return refuse("a matrix of %zu by %zu", (size_t)rows, (size_t)cols);
    if (ld < (int64_t)rows)
        return refuse("columns of %zu elements lie %ld apart", (size_t)rows, (long)ld);
    *layout = new Layout{type, rows, cols, ld};
    return OK;
}

EXPORT int cublasLtMatrixLayoutDestroy(void *layout)
{
    delete (Layout *)layout;
    return OK;
}

EXPORT int cublasLtMatrixLayoutSetAttribute(void *at, int attribute, const void *value,
                                            size_t bytes)
{
    if (attribute != LAYOUT_COLS) return refuse("a matrix has no attribute %d here", attribute);
    int status = set("COLS", &((Layout *)at)->cols, 8, value, bytes);
    return status || ((Layout *)at)->cols ? status : refuse("a matrix without columns");
}

EXPORT int cublasLtMatmulPreferenceCreate(void **preference)
{
    *preference = new Preference{32 << 20, ~0u, {256, 256, 256, 256}}; /* the library's defaults */
    return OK;
}

EXPORT int cublasLtMatmulPreferenceDestroy(void *preference)
{
    delete (Preference *)preference;
    return OK;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(void *at, int attribute, const void *value,
                                                size_t bytes)
{
    Preference *p = (Preference *)at;
    if (attribute == PREF_WORKSPACE) return set("WORKSPACE", &p->workspace, 8, value, bytes);
    if (attribute == PREF_REDUCTIONS) return set("REDUCTIONS", &p->reductions, 4, value, bytes);
    int i = attribute - PREF_ALIGNMENT;
    if (i < 0 || i > 3) return refuse("a preference has no attribute %d here", attribute);
    int status = set("ALIGNMENT", &p->align[i], 4, value, bytes);
    uint32_t align = p->align[i];
    if (status || (align && align <= 256 && (align & (align - 1)) == 0)) return status;
    return refuse("an alignment of %u bytes", align);
}

/* ---- a product ---- */

typedef struct Product {
    Desc desc;
    Layout a, b, c;
    uint64_t m, n, k;
} Product;

/* The sizes of the product, if all fit together. */
static int product_of(const void *desc, const void *a, const void *b, const void *c, const void *d,
                      Product *out)
{
    Product p = {*(Desc *)desc, *(Layout *)a, *(Layout *)b, *(Layout *)c, 0, 0, 0};
    const Layout &last = *(Layout *)d;
    bool turned[2] = {p.desc.transposed[0] != 0, p.desc.transposed[1] != 0};
    p.m = turned[0] ? p.a.cols : p.a.rows;
    p.k = turned[0] ? p.a.rows : p.a.cols;
    p.n = turned[1] ? p.b.rows : p.b.cols;
    uint64_t depth = turned[1] ? p.b.cols : p.b.rows;
    if (p.a.type != BF16 || p.b.type != BF16) return refuse("operands that are not bf16");
    if (p.c.type != last.type || p.c.rows != last.rows || p.c.cols != last.cols ||
        p.c.ld != last.ld)
        return refuse("C and D are not alike");
    if (p.k != depth) return refuse("A has %zu k, B has %zu", (size_t)p.k, (size_t)depth);
    if (p.c.rows != p.m || p.c.cols != p.n)
        return refuse("C is %zu by %zu, A and B make %zu by %zu", (size_t)p.c.rows,
                      (size_t)p.c.cols, (size_t)p.m, (size_t)p.n);
    if (p.desc.epilogue && p.desc.epilogue != EPILOGUE_BIAS)
        return refuse("epilogue %u", p.desc.epilogue);
    if (p.desc.epilogue && !p.desc.bias) return refuse("a bias without its pointer");
    *out = p;
    return OK;
}

enum { PLAIN, OTHER, QUICK, MIDDLE, SLOW, LIAR, ODD, EVEN, CHANGING, SPLIT, LARGE, PICKY };

/* Algorithms of one sum, faster and slower ones, beside faster ones that must not be used. */
static std::vector<Algorithm> several(Algorithm plain)
{
    auto like = [&](int name, int cost) {
        Algorithm one = plain;
        one.name = name;
        one.cost = cost;
        return one;
    };
    std::vector<Algorithm> list = {like(PLAIN, 6),  like(OTHER, 1), like(QUICK, 3),
                                   like(MIDDLE, 4), like(SLOW, 9),  like(LIAR, 1),
                                   like(ODD, 1),    like(EVEN, 1),  like(CHANGING, 5)};
    list[OTHER].sum = BACKWARD;
    list[QUICK].most_cols = 64; /* not to be had for more */
    list[LIAR].refused_cols = 16;
    list[ODD].sum = BACKWARD_ODD;
    list[EVEN].sum = BACKWARD_EVEN;
    list[CHANGING].sum = BACKWARD_MANY;
    if (offer == UNSTEADY) std::rotate(list.begin(), list.end() - 1, list.end());
    return list;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *, void *desc, void *a, void *b, void *c, void *d,
                                          void *preference, int wanted, Result *found, int *count)
{
    Product p;
    *count = 0;
    if (int status = product_of(desc, a, b, c, d, &p)) return status;
    if (offer == NOTHING) return NOT_SUPPORTED;
    const Preference &want = *(Preference *)preference;
    Algorithm plain = {1, 0, FORWARD, PLAIN, 1, INT32_MAX, 0, 1, {}, MAGIC};
    for (int i = 0; i < 4; i++) plain.align[i] = (int)want.align[i];
    Algorithm split = plain, large = plain, picky = plain;
    split.name = SPLIT;
    large.name = LARGE;
    picky.name = PICKY;
    split.splits = 4;
    large.workspace = 1 << 20;
    large.sum = picky.sum = BACKWARD;
    picky.least_cols = 2;
    std::vector<Algorithm> list;
    if (offer == TEMPTING || want.reductions) list.push_back(split);
    if (offer == TEMPTING || want.workspace >= 1 << 20) list.push_back(large);
    if (offer == TEMPTING) list.push_back(picky);
    if (offer < SEVERAL)
        list.push_back(plain);
    else
        for (const Algorithm &one : several(plain)) list.push_back(one);
    for (const Algorithm &one : list)
        if (*count < wanted) {
            Result *result = &found[(*count)++];
            *result = {};
            result->algorithm = one;
            result->workspace = (size_t)one.workspace;
        }
    return OK;
}

EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm *algorithm, int attribute,
                                                void *value, size_t bytes, size_t *written)
{
    if (attribute < 0 || attribute > CLUSTER)
        return refuse("an algorithm has no attribute %d here", attribute);
    size_t size = attribute < INNER ? 4 : 2;
    if (bytes != size)
        return refuse("attribute %d of an algorithm has %zu bytes, not %zu", attribute, size, bytes);
    int32_t number = attribute == ID ? algorithm->name : (int32_t)algorithm->splits;
    memcpy(value, &number, *written = size);
    return OK;
}

static bool takes(const Algorithm &algorithm, uint64_t cols)
{
    return cols >= (uint64_t)algorithm.least_cols && cols <= (uint64_t)algorithm.most_cols;
}

EXPORT int cublasLtMatmulAlgoCheck(void *, void *desc, void *a, void *b, void *c, void *d,
                                   const Algorithm *algorithm, Result *result)
{
    Product p;
    if (int status = product_of(desc, a, b, c, d, &p)) return status;
    if (algorithm->magic != MAGIC) return refuse("an algorithm that was never found");
    if (!takes(*algorithm, p.n)) return NOT_SUPPORTED;
    *result = {};
    result->algorithm = *algorithm;
    result->workspace = (size_t)algorithm->workspace;
    return OK;
}

static float of_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* op(X) in f32, its element (i, j) at i·cols + j. */
static std::vector<float> widen(const uint16_t *x, const Layout &layout, bool turned)
{
    uint64_t rows = turned ? layout.cols : layout.rows, cols = turned ? layout.rows : layout.cols;
    std::vector<float> out(rows * cols);
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < cols; j++)
            out[i * cols + j] = of_bf16(x[turned ? j + i * layout.ld : i + j * layout.ld]);
    return out;
}

/* Adds terms [begin, end) of column j of the product to its m sums. */
static void terms_add(std::vector<float> &sum, const Product &p, const std::vector<float> &a_turned,
                      const float *b, int64_t begin, int64_t end, bool backward, bool truncates)
{
    const float *a = a_turned.data();
    int64_t first = backward ? end - 1 : begin, step = backward ? -1 : 1, m = (int64_t)p.m;
    if (truncates) {
        for (int64_t i = 0; i < m; i++)
            sum[i] = emulate::tensor_core_sum(sum[i], a + first * m + i, step * m, b + first, step,
                                              (int)(end - begin));
        return;
    }
    for (int64_t at = begin; at < end; at++) {
        int64_t k = backward ? end - 1 - (at - begin) : at;
        for (uint64_t i = 0; i < p.m; i++) sum[i] += a[k * p.m + i] * b[k];
    }
}

typedef struct Operands {
    const uint16_t *a, *b;
    const void *c;
    void *d;
    float alpha, beta;
} Operands;

/* Whether an algorithm sums from the last term of k to the first. */
static bool is_backward(const Algorithm &algorithm, uint64_t cols)
{
    switch (algorithm.sum) {
    case BACKWARD: return true;
    case BACKWARD_ODD: return cols % 2 == 1;
    case BACKWARD_EVEN: return cols % 2 == 0;
    case BACKWARD_MANY: return cols >= MANY;
    }
    return false;
}

static void compute(const Product &p, const Algorithm &algorithm, const Operands &x, bool truncates)
{
    /* op(A) turned, so that a term's m elements lie together; op(B) turned: a column together. */
    std::vector<float> a = widen(x.a, p.a, !p.desc.transposed[0]);
    std::vector<float> b = widen(x.b, p.b, !p.desc.transposed[1]);
    std::vector<float> sum(p.m), part(p.m);
    for (uint64_t j = 0; j < p.n; j++) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        int64_t splits = algorithm.splits, k = (int64_t)p.k;
        for (int64_t s = 0; s < splits; s++) {
            std::fill(part.begin(), part.end(), 0.0f);
            terms_add(part, p, a, &b[j * p.k], k * s / splits, k * (s + 1) / splits,
                      is_backward(algorithm, p.n), truncates);
            for (uint64_t i = 0; i < p.m; i++) sum[i] = s ? sum[i] + part[i] : part[i];
        }
        for (uint64_t i = 0; i < p.m; i++) {
            int64_t at = (int64_t)i + (int64_t)j * p.c.ld;
            float value = x.alpha * sum[i];
            if (p.desc.epilogue && p.c.type == F32) value += ((const float *)p.desc.bias)[i];
            if (p.desc.epilogue && p.c.type == BF16)
                value += of_bf16(((const uint16_t *)p.desc.bias)[i]);
            if (x.beta != 0.0f) {
                float c = p.c.type == F32 ? ((const float *)x.c)[at]
                                          : of_bf16(((const uint16_t *)x.c)[at]);
                value = x.beta * c + value;
            }
            if (p.c.type == F32)
                ((float *)x.d)[at] = value;
            else
                ((uint16_t *)x.d)[at] = to_bf16(value);
        }
    }
}

EXPORT int cublasLtMatmul(void *, void *desc, const float *alpha, const void *a, void *a_layout,
                          const void *b, void *b_layout, const float *beta, const void *c,
                          void *c_layout, void *d, void *d_layout, const Algorithm *algorithm,
                          void *workspace, size_t workspace_bytes, EmulatedStream *stream)
{
    Product p;
    if (int status = product_of(desc, a_layout, b_layout, c_layout, d_layout, &p)) return status;
    if (algorithm->magic != MAGIC) return refuse("an algorithm that was never found");
    uintptr_t apart = c < d ? (uintptr_t)d - (uintptr_t)c : (uintptr_t)c - (uintptr_t)d;
    if (apart && apart < p.c.cols * (uint64_t)p.c.ld * (p.c.type == F32 ? 4 : 2))
        return refuse("C overlaps D, which begins %zu bytes from it", (size_t)apart);
    const void *pointers[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (!pointers[i] || (uintptr_t)pointers[i] % (uintptr_t)algorithm->align[i])
            return refuse("%c is at %p, not a multiple of the %d bytes that were promised",
                          "ABCD"[i], pointers[i], algorithm->align[i]);
    const int64_t size[3] = {2, 2, p.c.type == F32 ? 4 : 2}, ld[3] = {p.a.ld, p.b.ld, p.c.ld};
    for (int i = 0; i < 3; i++)
        if (ld[i] * size[i] % algorithm->align[i])
            return refuse("columns of %c are %ld bytes apart, not a multiple of the %d that were "
                          "promised",
                          "ABC"[i], (long)(ld[i] *size[i]), algorithm->align[i]);
    if (algorithm->workspace > (int64_t)workspace_bytes || (workspace_bytes && !workspace))
        return refuse("%ld bytes of workspace are needed, %zu came", (long)algorithm->workspace,
                      workspace_bytes);
    if (!takes(*algorithm, p.n) || (offer == FAITHLESS && p.n == 3) ||
        (algorithm->refused_cols && p.n % (uint64_t)algorithm->refused_cols == 0))
        return NOT_SUPPORTED;
    runs.push_back({algorithm->name, (int32_t)p.n, stream->captures()});
    stream->clock += algorithm->cost;
    Operands x = {(const uint16_t *)a, (const uint16_t *)b, c, d, *alpha, *beta};
    Algorithm used = *algorithm;
    bool truncates = stream->truncates();
    return stream->enqueue([=] { compute(p, used, x, truncates); });
}
