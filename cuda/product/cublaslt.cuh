/* cuda/product/cublaslt.cuh - matmul.cu's use of cuBLASLt: the library found at run time, a
 * product's description, and its algorithms.
 *
 * Included only by matmul.cu. Building needs no cuBLASLt header: only the entry points and numbers
 * below are used, the same since CUDA 11. cuBLASLt is column-major, so a row-major product c = a·b
 * is cᵀ = bᵀ·aᵀ there: b is its first operand, a its second, and the number of rows T is always a
 * number of columns.
 *
 * A product's reference is the first algorithm that needs no workspace, sums all of k in one block,
 * and is accepted for few and many rows: it serves every number of rows, with the same bits. If
 * there is none, plan_of returns a plan without an algorithm, and our own kernel computes the
 * product (gemm.cu), as it does all products if cuBLASLt is not found. A bucket of rows may have a
 * faster algorithm, with the reference's bits (buckets.cuh).
 *
 * The emulated device loads the tests' stand-in (tests/support/cublaslt.cpp). */
#ifndef TINSMITH_CUDA_PRODUCT_CUBLASLT_CUH
#define TINSMITH_CUDA_PRODUCT_CUBLASLT_CUH

#include "gemm.cuh"

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
    PREF_ALIGNMENT_A = 5,       /* B, C, D follow */
    ALGO_SPLITS = 2,            /* CUBLASLT_ALGO_CONFIG_SPLITK_NUM */
    NOT_SUPPORTED = 15,         /* CUBLAS_STATUS_… */
};

enum {
    PICK_ROWS = 256,   /* a reference is picked for this many rows */
    PICK_DEPTH = 2048, /* the same if the sum is over rows */
    CANDIDATES = 16,   /* algorithms considered for a product */
    LOG_BYTES = 16 << 10,
};

/* Numbers of rows for which a reference must be accepted. */
static const uint64_t lt_rows[] = {1, 2, 16, 64, PICK_ROWS, 1024, PICK_DEPTH, 8192};

enum { BUCKETS = 5 };
/* The most rows of each bucket; the last one also has all larger numbers. */
static const int bucket_rows[BUCKETS] = {16, 64, 256, 1024, 8192};

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
#define LT_FUNCTIONS(X)                                                                           \
    X(Create, (Lt * handle))                                                                      \
    X(Destroy, (Lt handle))                                                                       \
    X(MatmulDescCreate, (Lt * desc, int compute, int scale_type))                                 \
    X(MatmulDescDestroy, (Lt desc))                                                               \
    X(MatmulDescSetAttribute, (Lt desc, int attribute, const void *value, size_t bytes))          \
    X(MatrixLayoutCreate, (Lt * layout, int type, uint64_t rows, uint64_t cols, int64_t ld))      \
    X(MatrixLayoutDestroy, (Lt layout))                                                           \
    X(MatrixLayoutSetAttribute, (Lt layout, int attribute, const void *value, size_t bytes))      \
    X(MatmulPreferenceCreate, (Lt * preference))                                                  \
    X(MatmulPreferenceDestroy, (Lt preference))                                                   \
    X(MatmulPreferenceSetAttribute,                                                               \
      (Lt preference, int attribute, const void *value, size_t bytes))                            \
    X(MatmulAlgoCheck, (Lt handle, Lt desc, Lt a, Lt b, Lt c, Lt d, const LtAlgorithm *algorithm, \
                        LtHeuristic *result))                                                     \
    X(MatmulAlgoConfigGetAttribute,                                                               \
      (const LtAlgorithm *algorithm, int attribute, void *value, size_t bytes, size_t *written))  \
    X(MatmulAlgoGetHeuristic, (Lt handle, Lt desc, Lt a, Lt b, Lt c, Lt d, Lt preference,         \
                               int wanted, LtHeuristic *found, int *count))                       \
    X(Matmul, (Lt handle, Lt desc, const void *alpha, const void *a, Lt a_layout, const void *b,  \
               Lt b_layout, const void *beta, const void *c, Lt c_layout, void *d, Lt d_layout,   \
               const LtAlgorithm *algorithm, void *workspace, size_t workspace_bytes,             \
               cudaStream_t stream))

/* The key of a picked algorithm: everything but the number of rows. */
typedef struct PlanKey {
    int64_t a_stride, b_stride, c_stride;
    int fixed, N;                  /* K of a product of rows; M if the sum is over rows */
    int align_a, align_b, align_c; /* bytes */
    int f32_out, a_by_column, b_by_column, bias, unused;
} PlanKey;

/* A bucket's choice: none yet (then the reference serves), or an algorithm. */
typedef struct Bucket {
    bool wanted, chosen;
    LtAlgorithm algorithm;
} Bucket;

typedef struct Plan {
    PlanKey key;
    Lt desc, a, b, c;
    bool picked; /* else our own kernel computes the product */
    bool steady; /* the reference's rows were found to keep their bits */
    int place;   /* index of the reference in cuBLASLt's list */
    LtAlgorithm reference;
    Bucket bucket[BUCKETS];
} Plan;

struct Matmul {
#define X(name, args) int(*name) args;
    LT_FUNCTIONS(X)
#undef X
    Lt handle;         /* NULL: no cuBLASLt */
    char library[512]; /* its version and file */
    FILE *log;         /* gets the choices, or NULL */
    Plan *plans;
    int plan_count, plan_room;
    bool wanted; /* some bucket is wanted */
};

/* Keeps a failed cuBLASLt call with its place. */
static int lt_check(CudaDevice *cuda, int status, const char *what, int line)
{
    if (status)
        cuda_fail(cuda, STATUS_DEVICE, "%s: %s:%d: cublasLt%s failed with status %d", cuda->name,
                  __FILE__, line, what, status);
    return status;
}
#define LT(cuda, name, ...) lt_check(cuda, (cuda)->matmul->name(__VA_ARGS__), #name, __LINE__)

/* ---- finding the library ---- */

#ifdef CUDA_EMULATED

static const char *const lt_name = "libcublasLt_stand_in.so";

/* In the folder of this code's library. */
static void *lt_find(const DeviceLibraries *)
{
    Dl_info info;
    char path[4096];
    if (!dladdr((void *)lt_find, &info) || !info.dli_fname) return nullptr;
    const char *slash = strrchr(info.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s/%s", slash ? (int)(slash - info.dli_fname) : 1,
             slash ? info.dli_fname : ".", lt_name);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

#else

static const char *const lt_name = "libcublasLt.so.13";
static const char *const lt_names[] = {lt_name, "libcublasLt.so.12"};

/* pip's places in a folder of packages, and that of NVIDIA's installer. */
static const char *const lt_of_pip[] = {"nvidia/cu13/lib", "nvidia/cublas/lib"};
static const char *const lt_of_system = "/usr/local/cuda/lib64";

static void *lt_in(const char *folder, int length, const char *below)
{
    for (const char *name : lt_names) {
        char path[4096];
        snprintf(path, sizeof path, "%.*s/%s/%s", length, folder, below, name);
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library) return library;
    }
    return nullptr;
}

/* First pip's nvidia-cublas, which torch uses too; then one that the loader finds; then the CUDA
 * toolkit's. So it is the same one whether or not torch was imported before. */
static void *lt_find(const DeviceLibraries *where)
{
    for (const char *folder = where->packages; *folder;) {
        int length = (int)strcspn(folder, ":");
        for (const char *below : lt_of_pip) {
            void *library = lt_in(folder, length, below);
            if (library) return library;
        }
        folder += length + (folder[length] == ':');
    }
    for (const char *name : lt_names) {
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library) return library;
    }
    return lt_in(lt_of_system, (int)strlen(lt_of_system), ".");
}

#endif

/* The user's library, or else one that is found. NULL and a note if there is none. */
static void *lt_open(CudaDevice *cuda, const DeviceLibraries *where)
{
    bool unwanted = where->cublaslt && strcmp(where->cublaslt, "none") == 0;
    void *library = unwanted          ? nullptr
                    : where->cublaslt ? dlopen(where->cublaslt, RTLD_NOW | RTLD_LOCAL)
                                      : lt_find(where);
    if (library) return library;
    if (unwanted)
        cuda_note(cuda, "%s: our own kernel makes all products: TINSMITH_CUBLASLT is none",
                  cuda->name);
    else if (where->cublaslt)
        cuda_fail(cuda, STATUS_DEVICE,
                  "%s: TINSMITH_CUBLASLT names a file that can't be loaded: %s", cuda->name,
                  dlerror());
    else
        cuda_note(cuda,
                  "%s: our own kernel makes all products, which is slower, because %s was not "
                  "found: pip install 'tinsmith[cuda]' (or nvidia-cublas), or name its file in "
                  "TINSMITH_CUBLASLT. Looked for it where the loader does, in /usr/local/cuda, and "
                  "in nvidia/cu13/lib and nvidia/cublas/lib of %.160s",
                  cuda->name, lt_name, where->packages);
    return nullptr;
}

/* Records the library's version and file. */
static void lt_tell(CudaDevice *cuda, void *library)
{
    Matmul *m = cuda->matmul;
    Dl_info info = {};
    size_t (*version)(void) = nullptr;
    *(void **)&version = dlsym(library, "cublasLtGetVersion");
    size_t number = version ? version() : 0;
    dladdr(*(void **)&m->Matmul, &info);
    snprintf(m->library, sizeof m->library, "cuBLASLt %zu.%zu.%zu (%s)", number / 10000,
             number / 100 % 100, number % 100, info.dli_fname ? info.dli_fname : "?");
    cuda->base.library = m->library;
}

void matmul_open(CudaDevice *cuda, const DeviceLibraries *libraries)
{
    Matmul *m = cuda->matmul = (Matmul *)calloc(1, sizeof *m);
    if (!m) return cuda_fail(cuda, STATUS_MEMORY, "no memory for the CUDA device");
    if (libraries->log && !(m->log = fopen(libraries->log, "a")))
        return cuda_fail(cuda, STATUS_DEVICE,
                         "%s: TINSMITH_CUDA_LOG names a file that can't be written: %s", cuda->name,
                         libraries->log);
    if (m->log) setvbuf(m->log, nullptr, _IOFBF, LOG_BYTES); /* a line is one write */
    void *library = lt_open(cuda, libraries);
    if (!library) return;
#define X(entry, args)                                       \
    *(void **)&m->entry = dlsym(library, "cublasLt" #entry); \
    if (!m->entry)                                           \
        return cuda_fail(cuda, STATUS_DEVICE, "%s: libcublasLt has no cublasLt" #entry, cuda->name);
    LT_FUNCTIONS(X)
#undef X
    lt_tell(cuda, library);
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
    if (m->log) fclose(m->log);
    free(m->plans);
    free(m); /* the library stays loaded, as the runtime must */
}

/* The alignment in bytes, at most 16, of rows with a stride of `stride` bytes if the first one has
 * it. */
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
    key.c_stride = g.c_stride;
    key.fixed = g.a_by_column ? g.M : g.K;
    key.N = g.N;
    key.align_a = alignment((uintptr_t)g.a | (uint64_t)g.a_stride * sizeof(real));
    key.align_b = alignment((uintptr_t)g.b | (uint64_t)g.b_stride * sizeof(real));
    uint64_t c_bytes = (uint64_t)g.c_stride * (g.f32_out ? sizeof(float) : sizeof(real));
    key.align_c = alignment((uintptr_t)g.c | (uintptr_t)g.plus | c_bytes);
    key.f32_out = g.f32_out;
    key.a_by_column = g.a_by_column;
    key.b_by_column = g.b_by_column;
    key.bias = g.bias != nullptr;
    return key;
}

/* Sets the plan's number of rows: of all matrices but the weight, or of those summed over rows. */
static void plan_rows(CudaDevice *cuda, const Plan *plan, uint64_t rows)
{
    Lt other = plan->key.a_by_column ? plan->b : plan->c;
    LT(cuda, MatrixLayoutSetAttribute, plan->a, LAYOUT_COLS, &rows, sizeof rows);
    LT(cuda, MatrixLayoutSetAttribute, other, LAYOUT_COLS, &rows, sizeof rows);
}

/* Whether a candidate sums all of k in one block, and needs no memory. */
static bool candidate_sound(CudaDevice *cuda, const LtHeuristic *found)
{
    int32_t splits = 0;
    size_t written = 0;
    if (found->state || found->workspace) return false;
    return !cuda->matmul->MatmulAlgoConfigGetAttribute(&found->algorithm, ALGO_SPLITS, &splits,
                                                       sizeof splits, &written) &&
           splits <= 1;
}

/* Whether cuBLASLt accepts an algorithm for `rows` rows. */
static bool plan_takes(CudaDevice *cuda, const Plan *plan, const LtAlgorithm *algorithm,
                       uint64_t rows)
{
    Matmul *m = cuda->matmul;
    LtHeuristic checked;
    plan_rows(cuda, plan, rows);
    return !m->MatmulAlgoCheck(m->handle, plan->desc, plan->b, plan->a, plan->c, plan->c, algorithm,
                               &checked) &&
           !checked.workspace;
}

/* Whether a candidate can be the reference: it takes any number of rows. */
static bool plan_accepts(CudaDevice *cuda, const Plan *plan, const LtHeuristic *found)
{
    if (!candidate_sound(cuda, found)) return false;
    for (uint64_t rows : lt_rows)
        if (!plan_takes(cuda, plan, &found->algorithm, rows)) return false;
    return true;
}

/* Notes that our own kernel computes a plan's product. */
static void plan_note(CudaDevice *cuda, const Plan *plan, const char *why)
{
    cuda_note(cuda,
              "%s: products of width %d and depth %d are made by our own kernel, which is slower, "
              "because %s",
              cuda->name, plan->key.N, plan->key.fixed, why);
}

/* Asks cuBLASLt for algorithms, the fastest first by its own estimate; returns their number. Its
 * operands a and b are our b and a. */
static int plan_ask(CudaDevice *cuda, const Plan *plan, LtHeuristic *found, int most)
{
    Matmul *m = cuda->matmul;
    const PlanKey &key = plan->key;
    Lt preference = nullptr;
    int count = 0, none = 0;
    uint64_t workspace = 0;
    const int align[4] = {key.align_b, key.align_a, key.align_c, key.align_c};
    if (LT(cuda, MatmulPreferenceCreate, &preference)) return 0;
    LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_WORKSPACE_BYTES, &workspace, 8);
    LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_REDUCTION_SCHEMES, &none, 4);
    for (int i = 0; i < 4; i++)
        LT(cuda, MatmulPreferenceSetAttribute, preference, PREF_ALIGNMENT_A + i, &align[i], 4);
    int status = m->MatmulAlgoGetHeuristic(m->handle, plan->desc, plan->b, plan->a, plan->c,
                                           plan->c, preference, most, found, &count);
    m->MatmulPreferenceDestroy(preference);
    return status ? 0 : count;
}

/* Picks the first accepted algorithm for PICK_ROWS rows, from index `first` of the list on. */
static void plan_pick(CudaDevice *cuda, Plan *plan, int first)
{
    LtHeuristic found[CANDIDATES];
    plan->picked = false;
    plan_rows(cuda, plan, plan->key.a_by_column ? PICK_DEPTH : PICK_ROWS);
    int count = plan_ask(cuda, plan, found, CANDIDATES);
    for (int i = first; i < count && !plan->picked; i++) {
        plan->picked = plan_accepts(cuda, plan, &found[i]);
        plan->reference = found[i].algorithm;
        plan->place = i;
    }
    if (!plan->picked)
        plan_note(cuda, plan, "cuBLASLt has no algorithm for them that keeps the bits of a row");
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
    LT(cuda, MatrixLayoutCreate, &plan->c, c_type, (uint64_t)g.N, c_rows, g.c_stride);
    if (g.b_by_column) LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_TRANSA, &transpose, 4);
    if (g.a_by_column) LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_TRANSB, &transpose, 4);
    if (g.bias) {
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_EPILOGUE, &epilogue, 4);
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_BIAS_POINTER, &g.narrow_bias,
           sizeof g.narrow_bias);
    }
    m->plan_count++; /* from here on closing the device frees even a partial plan */
    if (!cuda->status) plan_pick(cuda, plan, 0);
    if (cuda->status) plan->key.N = 0; /* matches nothing: the next call tries again */
    return cuda->status ? nullptr : plan;
}

static Bucket *plan_bucket(Plan *plan, int rows)
{
    int i = 0;
    while (i < BUCKETS - 1 && rows > bucket_rows[i]) i++;
    return &plan->bucket[i];
}

/* Called for a product in a rehearsal, so that its bucket's algorithm is chosen before the step. */
static void lt_want(CudaDevice *cuda, const Gemm &g)
{
    Plan *plan = g.a_by_column ? nullptr : plan_of(cuda, g);
    if (!plan || !plan->picked) return;
    Bucket *bucket = plan_bucket(plan, g.M);
    bucket->wanted = !bucket->chosen;
    cuda->matmul->wanted |= bucket->wanted;
}

/* Whether cuBLASLt computes the product. If not, our own kernel does from now on. */
static bool lt_product(CudaDevice *cuda, const Gemm &g)
{
    Plan *plan = plan_of(cuda, g);
    if (!plan) return true; /* it failed; the device has the error */
    if (!plan->picked) return false;
    Matmul *m = cuda->matmul;
    Bucket *bucket = plan_bucket(plan, g.M);
    bool chosen = bucket->chosen && !g.a_by_column;
    plan_rows(cuda, plan, (uint64_t)(g.a_by_column ? g.K : g.M));
    if (g.bias)
        LT(cuda, MatmulDescSetAttribute, plan->desc, DESC_BIAS_POINTER, &g.narrow_bias,
           sizeof g.narrow_bias);
    if (cuda->status) return true;
    float alpha = 1.0f, beta = g.plus ? 1.0f : 0.0f;
    const void *plus = g.plus ? g.plus : g.c;
    auto product = [&](const LtAlgorithm *algorithm) {
        return m->Matmul(m->handle, plan->desc, &alpha, g.b, plan->b, g.a, plan->a, &beta, plus,
                         plan->c, g.c, plan->c, algorithm, nullptr, 0, cuda->stream);
    };
    int status = product(chosen ? &bucket->algorithm : &plan->reference);
    if (status == NOT_SUPPORTED && chosen) { /* the reference has the same bits */
        bucket->algorithm = plan->reference;
        status = product(&plan->reference);
    }
    plan->picked = status != NOT_SUPPORTED;
    if (plan->picked)
        lt_check(cuda, status, "Matmul", __LINE__);
    else
        plan_note(cuda, plan, "cuBLASLt refused its own algorithm for some numbers of rows");
    return plan->picked;
}

#endif
