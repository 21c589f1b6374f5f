/* model/core.h - READ FIRST: the nouns of the engine.
 *
 *   Model    a frozen base model: kinds of layers (layers.inc), weights by slot (weights.inc)
 *   Adapter  LoRA matrices A and B on it, their gradients and the optimizer's moments, in flat
 *            vectors
 *   Batch    rows of many sequences packed behind one another, with their spans and cache pages
 *   Acts     what a forward pass writes (acts.inc)
 *   Loss     how target log-probabilities become a loss (losses.c)
 *   Sampler  many requests decoded together over one cache of pages
 *
 * Glossary: T tokens (rows), D width, H heads, G key-value heads, E head width, F ffn width, V
 * vocabulary, K targets a token, R rank, L layers, S sequences. */
#ifndef TINSMITH_MODEL_CORE_H
#define TINSMITH_MODEL_CORE_H

#include <stdatomic.h>

#include "../device/arena.h"
#include "../device/dtype.h"

/* ---- layers.c: the kinds of layers, and the layers of a model ---- */

/* A layer is x += mixer(norm(x)), then x += feed(norm(x)). */
typedef enum Part { MIXER, FEED, PARTS } Part;

/* Flags of the kinds of layers. They select the rows of weights.inc and acts.inc. */
enum { ATTENTION = 1, DENSE = 2, DELTA = 4, EXPERTS = 8, SHARED = 16, ANY = ~0 };

/* Kinds in the order of layers.inc. */
typedef enum LayerKind {
#define LAYER_KIND(kind, part, has, token, window, sequence) KIND_##kind,
#include "layers.inc"
    KINDS
} LayerKind;

typedef struct LayerKinds {
    LayerKind kind[PARTS];
} LayerKinds;

/* The dimensions of a model, as numbers that arrive by name. */
#define SHAPE_LIST(X) \
    X(layers)         \
    X(width)          \
    X(heads)          \
    X(kv_heads)       \
    X(head_width)     \
    X(rotary)         \
    X(ffn)            \
    X(vocab)          \
    X(context)        \
    X(window)         \
    X(qkv_bias)       \
    X(qk_norm)        \
    X(q_gate)         \
    X(tied)           \
    X(key_heads)      \
    X(value_heads)    \
    X(key_width)      \
    X(value_width)    \
    X(experts)        \
    X(chosen)         \
    X(expert_ffn)     \
    X(norm_shares)    \
    X(expert_bias)    \
    X(o_bias)         \
    X(sinks)

typedef struct Shape {
#define X(name) int name;
    SHAPE_LIST(X)
#undef X
    float norm_eps;
    float rope_scale;        /* factor of rope's cosine and sine */
    float expert_limit;      /* of experts' gate and up (swiglu_share); 0: none */
    const LayerKinds *layer; /* host array of L */
} Shape;

/* One row of layers.inc for one model. */
typedef struct KindInfo {
    const char *name;
    Part part;
    int has;
    size_t token, sequence; /* elements a token keeps in the pages, bytes a sequence keeps */
    int window;             /* for how many tokens the former are kept; 0: for all */
} KindInfo;

/* Numbers of a row of attention's qkv: q, k and v side by side, or k and v where q has a gate. */
int qkv_width(const Shape *shape);
/* From one row of a gated delta network's products to the next: q, k, v, z, b and a side by side,
 * and so many numbers more that rows begin at multiples of ROW_PIECE. */
enum { ROW_PIECE = 8 };
int delta_width(const Shape *shape);
/* Channels of a gated delta network's convolution: of q, of k, of v. */
int delta_channels(const Shape *shape);
/* Bytes that a sequence keeps of such a layer. */
size_t delta_bytes(const Shape *shape);

KindInfo kind_info(const Shape *shape, LayerKind kind);
Status kind_find(Part part, const char *name, LayerKind *kind);
/* Those of `what` that the layer's kinds have. */
int layer_has(const Shape *shape, int layer, int what);
/* As the tables say it: `s` is the Shape, `l` the layer. */
#define HAS(what) layer_has(s, l, what)
/* The same of both of its kinds together. */
size_t layer_token(const Shape *shape, int layer);
size_t layer_sequence(const Shape *shape, int layer);

/* The layers that keep keys and values, dealt to lists of at most `layers` each: `full` lists of
 * those that read all tokens before a row, then `windowed` lists of those that read a window. A
 * page of a sequence has a frame for each list, the memory for its tokens in the list's layers.
 * Those of the windowed lists are given back when no later row reads them. */
enum { LISTS_MOST = 8 };
typedef struct Lists {
    int full, windowed, layers;
    size_t token; /* elements of a token in one layer */
    int window;   /* of the windowed lists */
} Lists;

/* Where a layer's keys and values are: its list, and its number there. */
typedef struct Region {
    int list, at;
} Region;

/* The lists of a model, and the region of each layer (L). A window that the context does not fill
 * is none. Where layers keep states too, all lists are full: a state needs all pages before it. */
Lists lists_of(const Shape *shape, Region *region);

/* ---- model.c ---- */

typedef enum Group { NONE = 0, ATTN = 1, MLP = 2, UNEMBED = 4 } Group;
typedef enum Factors { EACH, ONE_A, ONE_B } Factors;

/* Slots in the order of weights.inc. */
typedef enum Slot {
#define MODEL_MATRIX(slot, rows, cols, present, group) SLOT_##slot,
#define MODEL_VECTOR(slot, length, present) SLOT_##slot,
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) SLOT_##slot,
#define LAYER_VECTOR(slot, length, present) SLOT_##slot,
#include "weights.inc"
    SLOT_COUNT
} Slot;

/* One row of weights.inc for one layer of one model. */
typedef struct SlotInfo {
    const char *name;
    int per_layer, matrix, present;
    int count;      /* matrices of the layer in this slot, one behind the other */
    int rows, cols; /* a vector has one row */
    Group group;
    Factors factors;
} SlotInfo;

typedef struct LayerWeights {
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    frozen *slot; /* the first                                         \
                   */
#define LAYER_VECTOR(slot, length, present) float *slot;
#include "weights.inc"
} LayerWeights;

typedef struct Model {
    Device *dev;
    Shape shape;
    DType *types; /* of the matrices: [slot · layers + layer] */
    Arena weights;
    size_t bytes;     /* of all weights, also before they are there */
    int mapped;       /* they are a file's, or will be: only what is read takes memory */
    size_t looked_up; /* bytes of a mapped embedding that is no head; 0: there is none */
    float *inv_freq, *host_freq;
    frozen *embed, *head; /* the same where they are tied */
    float *final_norm, *delta_q_unit, *delta_k_unit;
    LayerWeights *layer;
    LayerKinds *kinds;     /* the shape's */
    Lists lists;           /* of the layers that keep keys and values */
    Region *region;        /* [layers] */
    int most;              /* of all slots' counts */
    unsigned char *loaded; /* [(slot · layers + layer) · most + index] */
    int sealed;
} Model;

/* `layer` is ignored for a slot that belongs to no layer. */
SlotInfo slot_info(const Shape *shape, Slot slot, int layer);
/* The slot with that name; SLOT_COUNT: there is none. */
Slot slot_named(const char *name);
/* types [slot · layers + layer]: what each matrix is kept in; one that belongs to no layer has its
 * type in all of them. */
Status model_open(Model **model, const Shape *shape, const float *inv_freq, const DType *types,
                  const char *device, int threads);
void model_close(Model *model);
/* Puts one tensor in, number `index` of those that the layer has in the slot; `rows`, `cols` and
 * `type` are the array's. Vectors arrive as f32. */
Status model_load(Model *model, const char *slot, int layer, int index, const void *array,
                  DType type, int rows, int cols);
/* Makes every matrix that was not loaded of `count` numbers in bf16, again and again, in the order
 * of the slots: for benchmarks, as only one block is uploaded. A GPU's matrices in bf16 alone,
 * whose rows are a multiple of 8 numbers. */
Status model_fill(Model *model, const void *numbers, int64_t count);
/* Ends loading; an error names what is missing. */
Status model_seal(Model *model);
/* Instead of loading: the weights are bytes of an open file, what model_memory() gave of a model
 * with the same shape, frequencies and types. The model is sealed. */
Status model_map(Model *model, int file, size_t at);
/* All bytes of a sealed model's weights, where the device's memory is the host's. */
Status model_memory(const Model *model, const void **memory, size_t *bytes);
/* What the matrices of a slot are kept in. */
DType matrix_type(const Model *model, Slot slot, int layer);
/* Bytes from one matrix of a slot to the next of the same layer's. */
size_t matrix_step(const Model *model, Slot slot, int layer);
/* Bytes of all weights. */
size_t model_bytes(const Model *model);
/* Those of them that take memory: where they are mapped, all but an embedding that is no head. */
size_t model_held(const Model *model);

/* ---- adapter.c ---- */

/* Where a matrix's A (D,R) and B (R,N) lie in the flat vectors; a = -1: not trained. Those of the
 * next matrix of the same slot lie so many numbers further; 0: it has the same. */
typedef struct Pair {
    int64_t a, b, a_step, b_step;
} Pair;

typedef struct LayerPairs {
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) Pair slot; /* the first */
#include "weights.inc"
} LayerPairs;

typedef enum Vector { WEIGHTS, GRADIENTS, MOMENT_1, MOMENT_2, FRESH, VECTORS } Vector;

/* What an adapter is trained with, from its first step to its last. */
typedef enum Optimizer { ADAMW, DIMUON, OPTIMIZERS } Optimizer;

typedef struct Weights Weights; /* adapter.c */

/* A step in which the weights' norm has grown so far that they may have left the range in which the
 * model's sums are finite. step 0: there was none since the weights were put. */
typedef struct Growth {
    int step;
    double before, after;
} Growth;

typedef struct Adapter {
    Model *model;
    uint64_t number; /* from 1; no other place of weights in this process has had it */
    int rank, groups;
    Optimizer optimizer;
    float alpha, scale; /* scale = alpha / rank */
    int64_t size;       /* parameters */
    Pair head;
    LayerPairs *layer;
    Weights *weights;         /* shared with the snapshots that were made of them */
    Weights *spare;           /* where the weights go when they change while shared, or NULL */
    Arena memory;             /* of the other vectors */
    float *vector[VECTORS];   /* FRESH: the gradients of the call under way; a snapshot has WEIGHTS
                                 alone */
    uint64_t stamp;           /* of the weights: no others ever had it, and 0 is the base's */
    int step;                 /* optimizer steps taken */
    double loss;              /* sum of the losses behind the gradients */
    double tokens, sequences; /* behind the gradients: those with a gradient that is not zero */
    double *total;            /* device: a sum */
    int clear;                /* there are no gradients: their vector is zero */
    double weight_norm;       /* of the weights; NaN: not known */
    Growth growth;
} Adapter;

typedef struct AdapterSpec {
    int rank, groups;
    Optimizer optimizer;
    float alpha;
    uint64_t seed;
} AdapterSpec;

/* Whether there can be such an adapter, on any model. */
Status adapter_check(const AdapterSpec *spec);
Status adapter_open(Adapter **adapter, Model *model, const AdapterSpec *spec);
/* One without memory: its layout alone. */
Status adapter_measure(Adapter **adapter, Model *model, const AdapterSpec *spec);
void adapter_close(Adapter *adapter);
/* Bytes of the vectors of a trained adapter. */
size_t adapter_vector_bytes(const Adapter *adapter);
/* Bytes that its vectors hold. Weights that are shared count in each. */
size_t adapter_memory(const Adapter *adapter);
/* The weights as they are now, without gradients and moments. They are shared, copy-on-write: the
 * next change of either goes to memory that is allocated now. */
Status adapter_snapshot(Adapter **copy, Adapter *adapter);
/* Whether it can have gradients. */
Status adapter_trainable(const Adapter *adapter);
/* Puts `size` numbers into a vector. */
Status adapter_put(Adapter *adapter, Vector which, const float *values);
/* A trained matrix, number `index` of the layer's in its slot. */
typedef void VisitMatrix(void *context, const SlotInfo *info, int layer, int index, Pair pair);
/* Calls visit for each in the order of the flat vectors. */
void adapter_visit(const Adapter *adapter, VisitMatrix *visit, void *context);

enum { GROWTH_TEXT = 160 }; /* bytes */

/* A sentence about the adapter's growth, or "". */
void growth_text(const Adapter *adapter, char *text);
/* Fails: `what` is not finite, and what is known of the reason. NULL: the base model's. */
Status adapter_overflow(const Adapter *adapter, const char *what);
/* The same of log-probabilities. */
Status logprobs_overflow(const Adapter *adapter);
Status adapter_clear(Adapter *adapter);
/* A call has succeeded, or has not: its FRESH gradients are added to the others, or dropped. */
void adapter_gather(Adapter *adapter);
void adapter_drop(Adapter *adapter);
Status adapter_norm(Adapter *adapter, Vector which, double *norm);
/* weights += (1 − decay)·(those of `leader` − weights): an exponential moving average of an adapter
 * of the same layout. */
Status adapter_follow(Adapter *average, const Adapter *leader, double decay);

/* ---- optimizer.c: the step of the optimizer that an adapter is trained with ---- */

/* The optimizer's name; optimizer_find gives OPTIMIZERS for a name of none. */
const char *optimizer_name(Optimizer optimizer);
Optimizer optimizer_find(const char *name);

/* A setting of an optimizer's step: it lies in [least, below). */
typedef struct Setting {
    const char *name;
    double least, below;
} Setting;

enum { SETTINGS = 8 }; /* of an optimizer, at most */

/* An optimizer's settings, up to one without a name. */
const Setting *optimizer_settings(Optimizer optimizer);

typedef enum Normalization { BY_NOTHING, BY_LOSS_TOKENS, BY_SEQUENCES } Normalization;

typedef struct StepReport {
    double grad_norm, clipped_norm, weight_norm; /* clipped: what the step was made with */
    double loss, tokens, sequences;
    char warning[GROWTH_TEXT]; /* a sentence about a step that nobody can have wanted, or "" */
} StepReport;

/* One step with the gradients so far, which are then cleared. `value` is that of each setting, in
 * the order of optimizer_settings(). */
Status adapter_optim_step(Adapter *adapter, const double *value, Normalization by,
                          StepReport *report);

/* ---- batch.c: rows of many sequences, packed ---- */

/* Rows [row, row + rows) that share an adapter (NULL: none). */
typedef struct Segment {
    const Adapter *adapter;
    int row, rows;
} Segment;

typedef struct Batch {
    int T, S, lists, segments;
    int32_t *tokens, *pos;    /* device */
    int32_t *slot;            /* device, of each list in turn: (lists,T) */
    Span *spans;              /* device, the same: (lists,S), alike but for their pages */
    int32_t *pages;           /* device: the pages' frames */
    Segment *segment;         /* host */
    Segment whole;            /* the one of a batch that has one (batch_whole) */
    const atomic_int *stop;   /* NULL, or, when set from outside: no further layer */
    const struct Batch *read; /* the rows whose hidden states are read; NULL: all */
    int32_t *rows; /* device, of such a batch: which of the other's rows its T rows are */
} Batch;

/* Host arrays that batch_upload sends. */
typedef struct BatchHost {
    int T, S, lists, page_count;
    const int32_t *tokens;
    int32_t *pos, *slot, *pages;
    Span *spans;
} BatchHost;

/* Places (or measures) the device arrays of a batch, whose layers are dealt to so many lists: in
 * training to one. */
void batch_place(Batch *batch, Arena *arena, int T, int S, int lists, int page_count);
void batch_upload(Batch *batch, Device *dev, const BatchHost *host);
/* A whole sequence behind the others, on pages of its own; its tokens are the caller's to put. */
void batch_add(BatchHost *host, int length);
/* All rows belong to one adapter, or to none where it is NULL. The batch may not be moved
 * afterwards. */
void batch_whole(Batch *batch, const Adapter *adapter, int rows);
/* Whether forward and backward ended early; their outputs are then of no use. */
int batch_stopped(const Batch *batch);

/* ---- forward.c, backward.c: the transformer, once ---- */

/* How many layers keep the activations of each kind for backward (acts.inc, acts.c). */
typedef enum Keep { ALWAYS, DEAR, CHEAP, KEEPS } Keep;

typedef struct LayerActs {
#define KEPT(keep, type, name, width, has) type *name;
#define FIXED(type, name, count, has) type *name;
#include "acts.inc"
} LayerActs;

typedef struct Acts {
    LayerActs *layer; /* host array of L; all alike when nothing is kept */
    int again[KEEPS]; /* layers below this one share a set with it, and are recomputed */
#define SCRATCH(type, name, width, has) type *name;
#include "acts.inc"
} Acts;

/* The pages that attention reads. A frame is memory for a page in the layers of one list, each of
 * which has a region with room for `tokens` tokens of all frames (cache_at). In training `tokens`
 * is 0: all layers share one list and one region, because each needs them only once. */
typedef struct Cache {
    cached *k, *v;
    size_t tokens;
    char *states;       /* what sequences keep beside their pages; NULL in training */
    size_t state_bytes; /* of one sequence: all layers */
} Cache;

/* A pass's pages, which all layers share. */
Cache cache_place(Arena *arena, const Model *model, int pages);
/* Where a layer's region begins, in k and in v alike: bytes. */
size_t cache_at(const Model *model, const Cache *cache, int layer);

static inline cached *cached_at(cached *pages, size_t bytes)
{
    return (cached *)((char *)pages + bytes);
}

/* The list of its frames. */
int cache_list(const Model *model, const Cache *cache, int layer);

/* What sequence number 0 keeps of a layer; that of the next is state_bytes behind. NULL in
 * training.
 */
float *cache_state(const Model *model, const Cache *cache, int layer);
/* Takes what a sequence keeps of all layers back to the beginning of the page of its newest row:
 * the next row that it runs is that page's first. */
void cache_rewind(const Model *model, const Cache *cache, int number);

/* The `keep` that keeps everything; 0 keeps nothing, and 1 the least that backward needs. */
int keep_all(const Model *model);
/* How many layers then keep the rows of this kind. */
int keep_layers(const Model *model, Keep kind, int keep);
/* acts->layer must have room for L entries. */
void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep);
/* Whether any layer has experts. */
int has_experts(const Model *model);
/* Adds to counts (L,X) how many rows of the last forward pass went to each expert. */
void acts_count(const Model *model, const Acts *acts, int64_t *counts);
/* batch → acts->hidden (T,D), through the cache. */
void forward(const Model *model, const Batch *batch, const Acts *acts, const Cache *cache);

typedef struct Grads {
    real *dxn; /* (T,D): of the hidden rows, which the head computes, and of norms' outputs */
#define GRADIENT(type, name, width, has) type *name;
#include "acts.inc"
} Grads;

/* Returns where dxn ends; the memory behind it is the head's until backward begins. */
size_t grads_place(Grads *grads, Arena *arena, const Model *model, int T, int R);
/* grads->dxn = d loss / d hidden → adapter's FRESH gradients of all layers. */
void backward(const Model *model, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *grads);

#define LOGPROB_NONE (-99999.0f) /* fills up a list of the top K that has fewer */

/* ---- head.c: rows → logits → log-probabilities, in chunks ---- */

/* Rows of a chunk whose logits exist at one time. */
int head_rows(const Model *model);

/* The head's arrays on the device for T rows, of which it sees `chunk` at a time. */
typedef struct Head {
    int T, chunk;
    real *x, *s, *dx, *ds;       /* (chunk,D), (chunk,R) */
    float *logits, *lse;         /* (chunk,V), (chunk,2) */
    int32_t *rows, *start, *ids; /* (T), (T+1), (targets), in the order of the head */
    float *logp, *dlogp;         /* (targets), in the order of the head */
} Head;

/* Places (or measures) what lasts as long as the rows; and what only the head uses, a chunk's. */
void head_place(Head *head, Arena *arena, const Model *model, int T, int64_t targets);
void head_place_chunk(Head *head, Arena *arena, const Model *model, int R);
/* The order of the rows (T), where each one's targets begin (T + 1), and their ids. */
void head_upload(Head *head, Device *dev, const int32_t *rows, const int32_t *start,
                 const int32_t *ids, int64_t targets);
/* Rows of the chunk that begins at `row`. */
int head_chunk(const Head *head, int row);
/* logits (rows,V) of hidden rows x (rows,D), with an adapter's part (NULL: none), which leaves x·A
 * in s. */
void rows_logits(const Model *model, const Adapter *adapter, float *logits, real *s, const real *x,
                 int rows);
/* Logits of rows [row, row + rows) in head order out of hidden (T,D); then lse, and logp of their
 * targets. */
void head_logits(const Head *head, const Adapter *adapter, const real *hidden, int row, int rows);
void head_logprob(const Head *head, const Model *model, int row, int rows);
/* dlogp → d loss / d logits, in the memory of the logits that head_logits has just written. */
void head_logprob_backward(const Head *head, const Model *model, int row, int rows);
/* d loss / d logits, which lie there → those rows of dhidden (T,D), and the adapter's FRESH
 * gradients. */
void head_logits_backward(const Head *head, Adapter *adapter, real *dhidden, int row, int rows);

/* ---- memory_share.c: the default memory of a step and a cache ---- */

enum {
    CACHE_TOKENS_MAX = 1 << 20,
    STEP_SEQUENCES = 256, /* of a sampling step, at most */
    STEP_ROWS = 512,
};

/* Bytes that a training step may take, its ops' scratch included, in so many bytes of memory; 0: in
 * the device's. */
size_t budget_step(const Model *model, size_t all_bytes);
/* The same for a datum that needs more, where an adapter takes so many bytes. */
size_t budget_datum(const Model *model, size_t adapter_bytes);
/* The bytes that decide about a step's rows: the same whether or not the weights are mapped. */
size_t budget_rows(const Model *model);
/* The bytes of one arena as a function of `keep`. */
typedef size_t KeepBytes(void *context, int keep);
/* The largest `keep` that fits in so many bytes, or 0. */
int budget_keep(const Model *model, size_t most, KeepBytes *bytes, void *context);
/* Sequences whose states a sampler's cache of so many tokens has room for. Their states take as
 * many bytes as the pages do, but there are a few in any case, and twice as many as a step runs at
 * most: those of the running sequences, and others that are kept. 0: the layers keep none. */
int budget_states(const Model *model, int64_t tokens);
/* Pages of a sequence that have frames in the windowed lists, at most, while a step runs so many of
 * its rows. */
int budget_window_pages(const Model *model, int rows);
/* Bytes of such a cache: its pages and states. Where layers of both kinds are, a windowed list has
 * as many frames as one sequence needs, because the lists share all frames. */
size_t budget_cache_bytes(const Model *model, int64_t tokens);
/* Frames in the pages of so many tokens. */
int64_t budget_frames(const Model *model, int64_t tokens);
size_t frame_bytes(const Model *model);
/* Tokens of a sampler's cache in so many bytes of memory, which include the weights; 0: in the
 * device's. Of them `free_bytes` are free, and more can be freed for the context's cache. */
int64_t budget_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes);
/* Bytes that one token keeps in the full lists; that one sequence has in the windowed ones while it
 * decodes, at most; and that it keeps beside its pages. */
size_t kv_token_bytes(const Model *model);
size_t kv_window_bytes(const Model *model);
size_t kv_sequence_bytes(const Model *model);

#endif
