/* device/device.h - the only seam between the maths and the machines that do it.
 *
 * A Device is a struct of function pointers: one per row of ops.inc, and the few services that
 * memory needs. Ops return nothing: the first failure stays on the device, with its file and line,
 * until sync() returns it, so that forward.c reads as maths. Memory from alloc may be read for 256
 * bytes past its end, where the content is undefined: a product loads whole tiles. */
#ifndef TINSMITH_DEVICE_DEVICE_H
#define TINSMITH_DEVICE_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

typedef struct Device Device;
typedef struct Graph Graph;   /* work that was recorded, to be run again and again */
typedef struct real real;     /* an activation's element: f32 on the CPU */
typedef struct frozen frozen; /* a base weight, in the device's own order and element type */
typedef struct cached cached; /* an element of cached keys and values */

enum { KV_PAGE = 64 }; /* keys a page of the KV cache holds */

enum { EXPERTS_MOST = 1024, CHOSEN_MOST = 32 }; /* of a layer, and of them for one token */

/* Element types: of arrays that cross the seam, and of base weights in a device's memory. From
 * DTYPE_INT8 on, FROZEN_BLOCK inputs of one output share a scale, and dtype.h says what a code
 * means. Arrays of these come as files have them, block behind block; MXFP4_PAIRS is MXFP4 as
 * Hugging Face's files order it. */
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
    int32_t first; /* where its pages begin in the list of pages, which may lack those that no row
                      reads because of a window */
    int32_t state; /* number of what the sequence keeps beside them; -1: nothing is kept, and it
                      begins at position 0 */
} Span;

/* How to draw one token. The number drawn depends on (seed, sample, pos) and on nothing else. */
typedef struct Draw {
    uint64_t seed;
    uint32_t sample, pos;
    float temperature; /* 0: the largest logit */
    float top_p;       /* 1: no cut */
    int32_t top_k;     /* <= 0: no cut */
} Draw;

enum { LORA_GROUP = 4 }; /* matrices that read one input, at most: q, k, v, z */

/* LoRA's part beside one frozen matrix (N,D) of a group that reads the same x (T,D). */
typedef struct Lora {
    real *y;            /* (T,N): forward adds to it, backward reads its gradient there */
    real *s, *ds;       /* (T,R): x·a, kept for backward, and backward's scratch */
    const float *a, *b; /* (D,R), (R,N) */
    float *da, *db;     /* their gradients; ds, da and db are backward's alone */
    int32_t N, step;    /* y's rows are `step` numbers apart */
} Lora;

/* A row's logΣexp whose f32 is below this is used as it was rounded, to 2^-17 at most. */
#define LSE_WHOLE 256.0f

/* The generalized Jensen-Shannon divergence of two rows of logits. With p and q the softmax of the
 * student's and the teacher's logits / temperature, and m = (1−beta)·p + beta·q, its terms are
 *
 *   min(clip, beta·q·log(q/m) + (1−beta)·p·log(p/m))
 *
 * and those of KL(q‖p) and KL(p‖q) for beta = 0 and 1. A term without mass is 0, also where a logit
 * is −inf. */
typedef struct Jsd {
    float beta, temperature;
    float clip;    /* of a term, which is a constant above it; INFINITY: none */
    int32_t top_k; /* p and q over the teacher's top_k ids alone (the lower id first among equals),
                      terms in their order, best first; 0: over the whole vocabulary */
    int32_t probs; /* the rows are not logits but p and q, raised to 1e-8; no temperature, no top_k
                    */
    int32_t each;  /* loss and scale are (T,V), or (T,top_k): each term by itself, not their sum */
} Jsd;

struct Device {
    const char *name;
    size_t real_bytes;   /* bytes of one `real` */
    size_t cached_bytes; /* bytes of one `cached` */
    size_t own_bytes;    /* that the device allocated for itself when it was opened */
    int step_rows;       /* rows of a training step above which it would not become faster */
    size_t chunk_bytes;  /* of logits that are in memory at once, which a weight is read for */
    int async;           /* the host goes on while ops run */
    const char *library; /* the library that makes its products, its version and file; or NULL */
    const char *const *notes; /* sentences on what is slower than it could be, as ops find out, with
                                 NULL behind them; or NULL */

    Status (*alloc)(Device *dev, void **memory, size_t bytes);
    /* May be called in any thread, at any time. So may graph_close(). */
    void (*release)(Device *dev, void *memory, size_t bytes);
    /* Memory that is an open file's bytes, from byte `at` on, whole pages of any machine. It is
     * only read, processes share it, what is not touched takes none, and release() gives it back.
     * The file has 256 bytes more. NULL where a device computes from memory of its own. */
    Status (*map)(Device *dev, void **memory, int file, size_t at, size_t bytes);
    /* Of such memory, says that only few of so many bytes will be read, here and there; what was
     * read takes no memory from here on. Where there is map. */
    void (*rarely)(Device *dev, void *memory, size_t bytes);
    /* Bytes that alloc can still give, and bytes in all. */
    void (*memory)(Device *dev, size_t *free_bytes, size_t *all_bytes);
    /* `from` may change when upload returns; download has filled `to` when it returns. */
    void (*upload)(Device *dev, void *to, const void *from, size_t bytes);
    void (*download)(Device *dev, void *to, const void *from, size_t bytes);
    void (*copy)(Device *dev, void *to, const void *from, size_t bytes);
    void (*zero)(Device *dev, void *memory, size_t bytes);
    /* The same, of memory from alloc() that may stay zero for long: until it is written, it takes
     * none. NULL where zero() is all there is. */
    void (*blank)(Device *dev, void *memory, size_t bytes);
    /* Bytes of a base weight that is kept in that type; 0: the device can't compute from it. */
    size_t (*frozen_bytes)(Device *dev, DType kept, int rows, int cols);
    /* Whether the weight `next` continues w (rows, cols): both are one weight then, with the rows
     * of w and behind them those of `next`. NULL where none does. */
    int (*frozen_continues)(Device *dev, const frozen *w, const frozen *next, int rows, int cols);
    /* Puts a row-major (rows, cols) host array of some type in the device's own order, in the type
     * it is kept in (dtype_loads says which can become which). 0 where a number is not finite, in
     * the array or as it is kept: then the weight must not be used. */
    int (*frozen_load)(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                       int cols);
    /* The handle of the stream that all work goes to, as DLPack's `stream` has it. NULL where ops
     * are done when they return. */
    uintptr_t (*stream)(Device *dev);
    /* Waits for all work and returns the first failure since the last sync. */
    Status (*sync)(Device *dev);
    void (*close)(Device *dev);

    /* Begins a download, whose result the host has after await(). `to` must live until then, or
     * until sync(). */
    void (*fetch)(Device *dev, void *to, const void *from, size_t bytes);
    /* Waits for all fetches but the last `behind`, 0 or 1; returns the first failure, as sync does.
     */
    Status (*await)(Device *dev, int behind);

    /* Between rehearse() and rehearsed(), ops and services only count the scratch that the ops
     * need. rehearsed() returns the largest op's, and reserve() makes room for it. An op that finds
     * less scratch fails. NULL where ops need none. */
    void (*rehearse)(Device *dev);
    size_t (*rehearsed)(Device *dev);
    Status (*reserve)(Device *dev, size_t bytes);

    /* Between record() and recorded(), ops and copies on the device are recorded instead of done.
     * replay() does them again, on the same addresses and with the same sizes. It returns 0, and
     * does nothing, if reserve() has moved their scratch: the work must be recorded anew. NULL
     * where a recording would save nothing. */
    Status (*record)(Device *dev);
    Status (*recorded)(Device *dev, Graph **graph);
    int (*replay)(Device *dev, Graph *graph);
    void (*graph_close)(Device *dev, Graph *graph);

#define OP(name, args) void(*name) args;
#include "ops.inc"
#undef OP
};

/* ---- devices that are libraries of their own ---- */

/* The number of this seam: setup.py's checksum of ops.inc and this file, for core and library. */
#ifndef DEVICE_ABI
#define DEVICE_ABI 0u
#endif

/* core's fail(): the library gets it, so that its sentences reach the caller's thread. */
typedef Status FailFunction(Status code, const char *format, ...);

/* Where a device finds the libraries that it can use, and where it leaves what it did with them. */
typedef struct DeviceLibraries {
    const char *cublaslt; /* the file of cuBLASLt that the user named, "none", or NULL */
    const char *packages; /* folders of Python's packages, with ':' between them */
    const char *log; /* a file that gets a line of JSON for each choice of an algorithm; NULL */
} DeviceLibraries;

/* The library's `cuda_open`. It refuses an `abi` other than its own. */
typedef Status DeviceOpen(Device **dev, int ordinal, unsigned abi, FailFunction *fail,
                          const DeviceLibraries *libraries);

typedef struct DeviceCard {
    char name[256];
    size_t bytes;     /* of memory */
    int major, minor; /* its compute capability */
    int count;        /* of cards in this machine */
} DeviceCard;

/* The library's `cuda_card`: what a card is, without opening it. */
typedef Status DeviceCardOf(DeviceCard *card, int ordinal, unsigned abi, FailFunction *fail);

#endif
