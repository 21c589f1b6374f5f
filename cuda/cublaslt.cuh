/* cuda/cublaslt.cuh - matmul.cu's use of cuBLASLt: the library found at run time, a product's
 * description, and one algorithm for each, picked once.
 *
 * Included by matmul.cu alone. cuBLASLt's header is not needed to build: the dozen entry points and
 * the few numbers below are all that is used, and they have been the same since CUDA 11. cuBLASLt
 * counts in columns, so a row-major product c = a·b is cᵀ = bᵀ·aᵀ there. b is its first operand, a
 * its second, and the number of rows T is always a count of columns. */
#ifndef TINSMITH_CUBLASLT_CUH
#define TINSMITH_CUBLASLT_CUH

#include "cuda.cuh"

/* c (M,N) = scale·a (M,K)·b (K,N) [+ bias (N)] [+ c]. An operand that is stored by_column lies
 * there transposed; `stride` is the distance of what is stored as rows. c's rows are N apart. */
typedef struct Gemm {
    void *c;
    bool f32_out; /* else real */
    const real *a, *b, *bias;
    int64_t a_stride, b_stride;
    bool a_by_column, b_by_column;
    int M, N, K;
    float scale;
    int accumulate;
} Gemm;

#ifndef CUDA_EMULATED

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CUBLAS_COMPUTE_32F = 68,
    CUDA_R_32F_ = 0,
    CUDA_R_16BF_ = 14,
    CUBLAS_OP_T = 1,
    DESC_TRANSA = 3, /* CUBLASLT_MATMUL_DESC_… */
    DESC_TRANSB = 4,
    DESC_EPILOGUE = 7,
    DESC_BIAS_POINTER = 8,
    EPILOGUE_BIAS = 4,
    LAYOUT_COLS = 3,            /* CUBLASLT_MATRIX_LAYOUT_… */
    PREF_WORKSPACE_BYTES = 1,   /* CUBLASLT_MATMUL_PREF_… */
    PREF_REDUCTION_SCHEMES = 3, /* a mask; 0: no reduction between blocks */
    PREF_ALIGNMENT_A = 5,       /* and B, C, D behind it */
};

enum {
    PICK_ROWS = 256,   /* the number of rows an algorithm is picked for */
    PICK_DEPTH = 2048, /* the same where the rows are summed over */
};

typedef struct LtAlgorithm {
    uint64_t data[8];
} LtAlgorithm;

typedef struct LtHeuristic {
    LtAlgorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} LtHeuristic;

typedef void *Lt; /* a handle, a description, a layout or a preference */

/* The entry points: X(name, arguments), each cublasLt<name> returning a cublasStatus_t. */
#define LT_FUNCTIONS(X)                                                                          \
    X(Create, (Lt * handle))                                                                     \
    X(Destroy, (Lt handle))                                                                      \
    X(MatmulDescCreate, (Lt * desc, int compute, int scale_type))                                \
    X(MatmulDescDestroy, (Lt desc))                                                              \
    X(MatmulDescSetAttribute, (Lt desc, int attribute, const void *value, size_t bytes))         \
    X(MatrixLayoutCreate, (Lt * layout, int type, uint64_t rows, uint64_t cols, int64_t ld))     \
    X(MatrixLayoutDestroy, (Lt layout))                                                          \
    X(MatrixLayoutSetAttribute, (Lt layout, int attribute, const void *value, size_t bytes))     \
    X(MatmulPreferenceCreate, (Lt * preference))                                                 \
    X(MatmulPreferenceDestroy, (Lt preference))                                                  \
    X(MatmulPreferenceSetAttribute,                                                              \
      (Lt preference, int attribute, const void *value, size_t bytes))                           \
    X(MatmulAlgoGetHeuristic, (Lt handle, Lt desc, Lt a, Lt b, Lt c, Lt d, Lt preference,        \
                               int wanted, LtHeuristic *found, int *count))                      \
    X(Matmul, (Lt handle, Lt desc, const void *alpha, const void *a, Lt a_layout, const void *b, \
               Lt b_layout, const void *beta, const void *c, Lt c_layout, void *d, Lt d_layout,  \
               const LtAlgorithm *algorithm, void *workspace, size_t workspace_bytes,            \
               cudaStream_t stream))

/* The key of a picked algorithm: everything but the number of rows. */
typedef struct PlanKey {
    int64_t a_stride, b_stride;
    int fixed, N;                  /* K of a product of rows; M where the rows are summed over */
    int align_a, align_b, align_c; /* bytes */
    int f32_out, a_by_column, b_by_column, bias, unused;
} PlanKey;

typedef struct Plan {
    PlanKey key;
    Lt desc, a, b, c;
    LtAlgorithm algorithm;
} Plan;

struct Matmul {
#define X(name, args) int(*name) args;
    LT_FUNCTIONS(X)
#undef X
    Lt handle;
    void *library;
    Plan *plans;
    int plan_count, plan_room;
};

/* A failed call of cuBLASLt, kept with its place. */
static int lt_check(CudaDevice *cuda, int status, const char *what, int line)
{
    if (status)
        cuda_fail(cuda, STATUS_DEVICE, "cuda: %s:%d: cublasLt%s failed with status %d", __FILE__,
                  line, what, status);
    return status;
}
#define LT(cuda, name, ...) lt_check(cuda, (cuda)->matmul->name(__VA_ARGS__), #name, __LINE__)

/* The folder where pip installs the library, beside this package. */
static const char *const lt_folders[] = {"/../nvidia/cu13/lib/", "/../nvidia/cublas/lib/"};
static const char *const lt_names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

/* The system's library, or one that torch has already loaded; then that of pip's nvidia-cublas. */
static void *lt_find(void)
{
    for (const char *name : lt_names) {
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library) return library;
    }
    Dl_info info;
    if (!dladdr((void *)lt_find, &info) || !info.dli_fname) return nullptr;
    const char *slash = strrchr(info.dli_fname, '/');
    for (const char *folder : lt_folders)
        for (const char *name : lt_names) {
            char path[4096];
            snprintf(path, sizeof path, "%.*s%s%s", slash ? (int)(slash - info.dli_fname) : 1,
                     slash ? info.dli_fname : ".", folder, name);
            void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
            if (library) return library;
        }
    return nullptr;
}

void matmul_open(CudaDevice *cuda)
{
    Matmul *m = cuda->matmul = (Matmul *)calloc(1, sizeof *m);
    if (!m) return cuda_fail(cuda, STATUS_MEMORY, "no memory for the CUDA device");
    m->library = lt_find();
    if (!m->library)
        return cuda_fail(cuda, STATUS_DEVICE,
                         "cuda: libcublasLt.so.13 was not found: pip install 'tinsmith[cuda]' (or "
                         "nvidia-cublas)");
#define X(name, args)                                         \
    *(void **)&m->name = dlsym(m->library, "cublasLt" #name); \
    if (!m->name) return cuda_fail(cuda, STATUS_DEVICE, "cuda: libcublasLt has no cublasLt" #name);
    LT_FUNCTIONS(X)
#undef X
    LT(cuda, Create, &m->handle);
}

void matmul_close(CudaDevice *cuda)
{
    Matmul *m = cuda->matmul;
    for (int i = 0; i < m->plan_count; i++) {
        m->MatmulDescDestroy(m->plans[i].desc);
        m->MatrixLayoutDestroy(m->plans[i].a);
        m->MatrixLayoutDestroy(m->plans[i].b);
        m->MatrixLayoutDestroy(m->plans[i].c);
    }
    if (m->handle) m->Destroy(m->handle);
    free(m->plans);
    free(m); /* the library stays loaded, as the runtime must */
}

/* The alignment in bytes, at most 16, of rows `stride` bytes apart if the first one has it. */
static int alignment(uint64_t stride)
{
    return (int)((stride | 16) & -(stride | 16));
}

static PlanKey plan_key(const Gemm &g)
{
    PlanKey key;
    memset(&key, 0, sizeof key);
    key.a_stride = g.a_stride;
    key.b_stride = g.b_stride;
    key.fixed = g.a_by_column ? g.M : g.K;
    key.N = g.N;
    key.align_a = alignment((uintptr_t)g.a | (uint64_t)g.a_stride * sizeof(real));
    key.align_b = alignment((uintptr_t)g.b | (uint64_t)g.b_stride * sizeof(real));
    key.align_c = alignment((uint64_t)g.N * (g.f32_out ? sizeof(float) : sizeof(real)));
    /* A gradient, or a caller's tensor (matmul), may lie anywhere; rows of activations begin where
     * the others do. */
    if (g.a_by_column) key.align_c = alignment((uintptr_t)g.c | (uint64_t)key.align_c);
    key.f32_out = g.f32_out;
    key.a_by_column = g.a_by_column;
    key.b_by_column = g.b_by_column;
    key.bias = g.bias != nullptr;
    return key;
}

/* Asks cuBLASLt for an algorithm; its operands a and b are our b and a. */
static void plan_pick(CudaDevice *cuda, Plan *plan)
{
    Matmul *m = cuda->matmul;
    const PlanKey &key = plan->key;
    Lt preference = nullptr;
    LtHeuristic found;
    int count = 0, none = 0;
    uint64_t workspace = WORKSPACE_BYTES;
    const int align[4] = {key.align_b, key.align_a, key.align_c, key.align_c};
    if (LT(cuda, MatmulPreferenceCreate, &preference)) return;
    LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_WORKSPACE_BYTES, &workspace, 8);
    LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_REDUCTION_SCHEMES, &none, 4);
    for (int i = 0; i < 4; i++)
        LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_ALIGNMENT_A + i, &align[i], 4);
    int status = m->MatmulAlgoGetHeuristic(m->handle, plan->desc, plan->b, plan->a, plan->c,
                                           plan->c, preference, 1, &found, &count);
    m->MatmulPreferenceDestroy(preference);
    if (status || count == 0)
        cuda_fail(cuda, STATUS_DEVICE,
                  "cuda: cuBLASLt has no algorithm for a product of width %d and depth %d (status "
                  "%d)",
                  key.N, key.fixed, status);
    plan->algorithm = found.algorithm;
}

/* The plan of a product, made at its first use. Its layouts are for PICK_ROWS rows. */
static Plan *plan_of(CudaDevice *cuda, const Gemm &g)
{
    Matmul *m = cuda->matmul;
    PlanKey key = plan_key(g);
    for (int i = 0; i < m->plan_count; i++)
        if (memcmp(&m->plans[i].key, &key, sizeof key) == 0) return &m->plans[i];
    if (m->plan_count == m->plan_room) {
        int room = m->plan_room ? 2 * m->plan_room : 64;
        Plan *plans = (Plan *)realloc(m->plans, (size_t)room * sizeof *plans);
        if (!plans) return cuda_fail(cuda, STATUS_MEMORY, "no memory for a product"), nullptr;
        m->plans = plans;
        m->plan_room = room;
    }
    Plan *plan = &m->plans[m->plan_count];
    memset(plan, 0, sizeof *plan);
    plan->key = key;
    int transpose = CUBLAS_OP_T, epilogue = EPILOGUE_BIAS;
    int c_type = g.f32_out ? CUDA_R_32F_ : CUDA_R_16BF_;
    uint64_t rows = g.a_by_column ? PICK_DEPTH : PICK_ROWS;
    uint64_t a_width = (uint64_t)key.fixed, c_rows = g.a_by_column ? (uint64_t)g.M : rows;
    uint64_t b_rows = g.a_by_column ? rows : (uint64_t)(g.b_by_column ? g.N : g.K);
    uint64_t b_width = (uint64_t)(g.b_by_column ? g.K : g.N);
    if (LT(cuda, MatmulDescCreate, &plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F_)) return nullptr;
    LT(cuda, MatrixLayoutCreate, &plan->a, CUDA_R_16BF_, a_width, rows, g.a_stride);
    LT(cuda, MatrixLayoutCreate, &plan->b, CUDA_R_16BF_, b_width, b_rows, g.b_stride);
    LT(cuda, MatrixLayoutCreate, &plan->c, c_type, (uint64_t)g.N, c_rows, g.N);
    if (g.b_by_column) LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_TRANSA, &transpose, 4);
    if (g.a_by_column) LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_TRANSB, &transpose, 4);
    if (g.bias) {
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_EPILOGUE, &epilogue, 4);
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_BIAS_POINTER, &g.bias, sizeof g.bias);
    }
    m->plan_count++; /* from here on closing the device frees a partial plan */
    if (!cuda->status) plan_pick(cuda, plan);
    if (cuda->status) plan->key.N = 0; /* matches nothing: the next call tries again */
    return cuda->status ? nullptr : plan;
}

static void gemm(CudaDevice *cuda, const Gemm &g)
{
    if (cuda->status || cuda->rehearsing) return;
    Plan *plan = plan_of(cuda, g);
    if (!plan) return;
    Matmul *m = cuda->matmul;
    uint64_t rows = (uint64_t)(g.a_by_column ? g.K : g.M);
    LT(cuda, MatrixLayoutSetAttribute, plan->a, LAYOUT_COLS, &rows, sizeof rows);
    LT(cuda, MatrixLayoutSetAttribute, g.a_by_column ? plan->b : plan->c, LAYOUT_COLS, &rows,
       sizeof rows);
    if (g.bias)
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_BIAS_POINTER, &g.bias, sizeof g.bias);
    float beta = g.accumulate ? 1.0f : 0.0f;
    LT(cuda, Matmul, m->handle, plan->desc, &g.scale, g.b, plan->b, g.a, plan->a, &beta, g.c,
       plan->c, g.c, plan->c, &plan->algorithm, cuda->workspace, WORKSPACE_BYTES, cuda->stream);
}

#endif

#endif
