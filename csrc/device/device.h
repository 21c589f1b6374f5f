/* device/device.h - the only interface between the maths and the machines that compute it.
 *
 * A Device is a struct of function pointers: one per row of ops.inc, and a few services for memory.
 * Ops return nothing: the first failure stays on the device, with its file and line, until sync()
 * returns it, so that forward.c reads as maths. Memory from alloc may be read for 256 bytes past
 * its end, where the content is undefined: a product loads whole tiles. */
#ifndef TINSMITH_DEVICE_DEVICE_H
#define TINSMITH_DEVICE_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

typedef struct Device Device;
typedef struct Graph Graph;   /* recorded work, to be replayed */
typedef struct real real;     /* an activation's element: f32 on the CPU */
typedef struct frozen frozen; /* a base weight, in the device's own order and element type */
typedef struct cached cached; /* an element of cached keys and values */

enum { KV_PAGE = 64 }; /* keys per page of the KV cache */

enum { EXPERTS_MOST = 1024, CHOSEN_MOST = 32 }; /* per layer; per token */

/* Element types: of arrays that cross this interface, and of base weights in a device's memory.
 * From DTYPE_INT8 on, FROZEN_BLOCK inputs of one output share a scale; dtype.c defines the codes.
 * Their arrays are contiguous blocks, as in files; MXFP4_PAIRS is MXFP4 in Hugging Face's order. */
typedef enum DType {
    DTYPE_F32,
    DTYPE_BF16,
    DTYPE_F16,
    DTYPE_INT8,
    DTYPE_INT4,
    DTYPE_Q4_0,
    DTYPE_Q4_1,
    DTYPE_MXFP4,
    DTYPE_MXFP4_PAIRS,
    DTYPE_FP8,
    DTYPE_NF4,
    DTYPE_Q4_K,
    DTYPE_Q5_K,
    DTYPE_Q6_K,
    DTYPES
} DType;

enum { FROZEN_BLOCK = 32 };

/* One sequence's rows in a packed batch. */
typedef struct Span {
    int32_t row, rows; /* its rows are [row, row + rows) */
    int32_t pos;       /* position of its first row */
    int32_t first; /* index of its first page in the list of pages. Pages that no row's window reads
                      may be missing from the list */
    int32_t state; /* index of its recurrent state; -1: none, and it begins at position 0 */
} Span;

/* How to draw one token. The random number depends only on (seed, sample, pos). */
typedef struct Draw {
    uint64_t seed;
    uint32_t sample, pos;
    float temperature; /* 0: the largest logit */
    float top_p;       /* 1: no cut */
    int32_t top_k;     /* <= 0: no cut */
} Draw;

enum { LORA_GROUP = 4 }; /* the most matrices that read one input: q, k, v, z */

/* LoRA of one frozen matrix (N,D). All matrices of a group read the same x (T,D). */
typedef struct Lora {
    real *y;            /* (T,N): forward adds to it, for backward it is the gradient */
    real *s, *ds;       /* (T,R): x·a, kept for backward, and backward's scratch */
    const float *a, *b; /* (D,R), (R,N) */
    float *da, *db;     /* their gradients; ds, da and db are backward's alone */
    int32_t N, step;    /* step: the stride of y's rows, in elements */
} Lora;

/* Below this, a row's logΣexp is used as one f32, whose rounding error is at most 2^-17. */
#define LSE_WHOLE 256.0f

/* The generalized Jensen-Shannon divergence of two rows of logits. With p and q the softmax of the
 * student's and the teacher's logits / temperature, and m = (1−beta)·p + beta·q, its terms are
 *
 *   min(clip, beta·q·log(q/m) + (1−beta)·p·log(p/m))
 *
 * For beta = 0 and 1 the terms are those of KL(q‖p) and KL(p‖q). A term without mass is 0, even
 * where a logit is −inf. */
typedef struct Jsd {
    float beta, temperature;
    float clip;    /* upper limit of a term, whose gradient is then 0; INFINITY: none */
    int32_t top_k; /* p and q are over the teacher's top_k ids only, best first, ties by lower id;
                      terms have that order. 0: the whole vocabulary */
    int32_t probs; /* the rows are p and q, not logits, clamped to at least 1e-8; no temperature, no
                      top_k */
    int32_t each;  /* loss and scale are per term, (T,V) or (T,top_k), not per row */
} Jsd;

/* An image's patches, as a vision tower reads them: squares of side·side pixels in a grid of
 * rows·cols, in blocks of merge·merge, which become one token. The image has rows·side rows of
 * cols·side pixels, of 3 bytes each. Patch n is row n of an array (rows·cols, 3·frames·side·side):
 *
 *   n = ((block row·(cols/merge) + block column)·merge + row in block)·merge + column in block
 *
 * Such a row has, of each channel c, `frames` equal copies of the patch's pixels by rows, each byte
 * u as (u·rescale − mean[c])/std[c], rounded to f32 after each step. rows and cols are multiples of
 * merge. */
typedef struct Patches {
    int32_t rows, cols, side, merge, frames;
    float rescale, mean[3], std[3];
} Patches;

struct Device {
    const char *name;
    size_t real_bytes;   /* bytes of one `real` */
    size_t cached_bytes; /* bytes of one `cached` */
    size_t own_bytes;    /* allocated for itself when it was opened */
    int step_rows;       /* more rows make a training step no faster */
    size_t chunk_bytes;  /* of logits in memory at once; the head's weight is read once for them */
    int async;           /* ops return before their work is done */
    const char *library; /* the matmul library, its version and file; or NULL */
    const char *const *notes; /* sentences about what runs slower than it could, as ops find out,
                                 NULL-terminated; or NULL */

    Status (*alloc)(Device *dev, void **memory, size_t bytes);
    /* Any thread may call this at any time. The same holds for graph_close(). */
    void (*release)(Device *dev, void *memory, size_t bytes);
    /* Maps an open file read-only from byte `at` on, which is page-aligned on any machine.
     * Processes share the mapping, and untouched pages take no memory. release() unmaps it. The
     * file has 256 more bytes. NULL where a device computes from its own memory. */
    Status (*map)(Device *dev, void **memory, int file, size_t at, size_t bytes);
    /* Says that few of the `bytes` of a mapping will be read, at random, and drops the pages read
     * so far from this process's memory. Exists where map does. */
    void (*rarely)(Device *dev, void *memory, size_t bytes);
    /* Bytes that alloc can still give, and bytes in total. */
    void (*memory)(Device *dev, size_t *free_bytes, size_t *all_bytes);
    /* `from` may change when upload returns; download has filled `to` when it returns. */
    void (*upload)(Device *dev, void *to, const void *from, size_t bytes);
    void (*download)(Device *dev, void *to, const void *from, size_t bytes);
    void (*copy)(Device *dev, void *to, const void *from, size_t bytes);
    /* Copies from the memory of another device of the same kind, in the order of both devices'
     * work. */
    void (*receive)(Device *dev, void *to, Device *other, const void *from, size_t bytes);
    void (*zero)(Device *dev, void *memory, size_t bytes);
    /* zero() for memory from alloc() that may stay zero for long: it takes no memory until it is
     * written. NULL where the device has only zero(). */
    void (*blank)(Device *dev, void *memory, size_t bytes);
    /* Bytes of a base weight that is kept in that type; 0: the device can't compute with it. */
    size_t (*frozen_bytes)(Device *dev, DType kept, int rows, int cols);
    /* Whether the weight `next` directly follows w (rows, cols) in memory. Both then serve as one
     * weight: w's rows, then those of `next`. NULL: weights never do. */
    int (*frozen_continues)(Device *dev, const frozen *w, const frozen *next, int rows, int cols);
    /* Converts a row-major (rows, cols) host array of `type` to the device's own layout and to the
     * type `kept` (dtype_loads says which conversions exist). Returns 0 if a number is not finite,
     * before or after: then the weight must not be used. */
    int (*frozen_load)(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                       int cols);
    /* The handle of the stream that runs all work, in the form of DLPack's `stream`. NULL where ops
     * are synchronous. */
    uintptr_t (*stream)(Device *dev);
    /* Waits for all work and returns the first failure since the last sync. */
    Status (*sync)(Device *dev);
    void (*close)(Device *dev);

    /* Begins a download; await() ends it. `to` must stay valid until then, or until sync(). */
    void (*fetch)(Device *dev, void *to, const void *from, size_t bytes);
    /* Waits for all fetches but the last `behind` (0 or 1); returns the first failure, as sync
     * does. */
    Status (*await)(Device *dev, int behind);

    /* Between rehearse() and rehearsed(), ops and services only count the scratch that ops need.
     * rehearsed() returns the largest op's scratch, and reserve() allocates it. An op that finds
     * less fails. NULL where ops need none. */
    void (*rehearse)(Device *dev);
    size_t (*rehearsed)(Device *dev);
    Status (*reserve)(Device *dev, size_t bytes);

    /* Between record() and recorded(), ops and copies on the device are recorded instead of run.
     * replay() runs them with the same addresses and sizes. It returns 0 and does nothing if
     * reserve() has moved their scratch: record again. NULL where a recording saves nothing. */
    Status (*record)(Device *dev);
    Status (*recorded)(Device *dev, Graph **graph);
    int (*replay)(Device *dev, Graph *graph);
    void (*graph_close)(Device *dev, Graph *graph);

#define OP(name, args) void(*name) args;
#include "ops.inc"
#undef OP
};

/* ---- devices in separate libraries ---- */

/* The version of this interface: setup.py's checksum of ops.inc and this file, for core and
 * library. */
#ifndef DEVICE_ABI
#define DEVICE_ABI 0u
#endif

/* core's fail(), passed to the library so that its sentences reach the caller's thread. */
typedef Status FailFunction(Status code, const char *format, ...);

/* Where a device finds the libraries that it can use, and where it logs its use of them. */
typedef struct DeviceLibraries {
    const char *cublaslt; /* the user's choice of cuBLASLt's file, "none", or NULL */
    const char *packages; /* folders of Python's packages, separated by ':' */
    const char *log; /* a file that gets a line of JSON for each choice of an algorithm; NULL */
} DeviceLibraries;

/* The library's `cuda_open`. It refuses an `abi` other than its own. */
typedef Status DeviceOpen(Device **dev, int ordinal, unsigned abi, FailFunction *fail,
                          const DeviceLibraries *libraries);

typedef struct DeviceCard {
    char name[256];
    size_t bytes;     /* of memory */
    int major, minor; /* its compute capability */
    int count;        /* cards in this machine */
} DeviceCard;

/* The library's `cuda_card`: a card's properties, without opening it. */
typedef Status DeviceCardOf(DeviceCard *card, int ordinal, unsigned abi, FailFunction *fail);

#endif
