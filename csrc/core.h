/* core.h - READ FIRST: the nouns of the engine.
 *
 *   Model    a frozen base model: weights by slot (weights.inc) on one device
 *   Adapter  LoRA matrices A and B on it, their gradients and AdamW's moments, in flat vectors
 *   Batch    rows of many sequences packed behind one another, with their spans and cache pages
 *   Acts     what a forward pass writes (acts.inc)
 *   Loss     how target log-probabilities become a loss (losses.c)
 *   Sampler  many requests decoded together over one cache of pages
 *
 * Glossary: T tokens (rows), D width, H heads, G key-value heads, E head width, F ffn width, V
 * vocabulary, K targets a token, R rank, L layers, S sequences. */
#ifndef TINSMITH_CORE_H
#define TINSMITH_CORE_H

#include "device.h"

/* ---- arena.c: device memory, taken in one block and handed out by walking it ---- */

typedef struct Arena {
    Device *dev;
    char *base; /* NULL while measuring: takes only count */
    size_t size, used;
} Arena;

/* Makes room for `bytes`, dropping what was there if it was smaller; takes begin from the start
 * again. */
Status arena_reserve(Arena *arena, size_t bytes, const char *purpose);
void arena_release(Arena *arena);
/* The next `bytes`, aligned; NULL while measuring. Placing more than was measured is a programmer's
 * error. */
void *arena_take(Arena *arena, size_t bytes);
/* Bytes that the ops of `work` need for themselves; nothing is computed. */
size_t device_rehearse(Device *dev, void (*work)(void *), void *context);
/* Makes room for them. */
Status device_prepare(Device *dev, void (*work)(void *), void *context);

/* ---- model.c ---- */

/* The dimensions of a model, as numbers that arrive by name. */
#define SHAPE_LIST(X) \
    X(layers)         \
    X(width)          \
    X(heads) X(kv_heads) X(head_width) X(ffn) X(vocab) X(context) X(qkv_bias) X(qk_norm) X(tied)

typedef struct Shape {
#define X(name) int name;
    SHAPE_LIST(X)
#undef X
    float norm_eps;
    float rope_scale; /* factor of rope's cosine and sine */
} Shape;

typedef enum Group { NONE = 0, ATTN = 1, MLP = 2, UNEMBED = 4 } Group;

/* Slots in the order of weights.inc. */
typedef enum Slot {
#define MODEL_MATRIX(slot, rows, cols, present, group) SLOT_##slot,
#define MODEL_VECTOR(slot, length, present) SLOT_##slot,
#define LAYER_MATRIX(slot, rows, cols, present, group) SLOT_##slot,
#define LAYER_VECTOR(slot, length, present) SLOT_##slot,
#include "weights.inc"
    SLOT_COUNT
} Slot;

/* One row of weights.inc for one model. */
typedef struct SlotInfo {
    const char *name;
    int per_layer, matrix, present;
    int rows, cols; /* a vector has one row */
    Group group;
} SlotInfo;

typedef struct LayerWeights {
#define LAYER_MATRIX(slot, rows, cols, present, group) frozen *slot;
#define LAYER_VECTOR(slot, length, present) float *slot;
#include "weights.inc"
} LayerWeights;

typedef struct Model {
    Device *dev;
    Shape shape;
    DType type; /* of the matrices: DTYPE_F32 or DTYPE_BF16 */
    Arena weights;
    size_t bytes; /* that the weights take, also before they are there */
    float *inv_freq, *host_freq;
    frozen *embed, *head; /* the same where they are tied */
    float *final_norm;
    LayerWeights *layer;
    unsigned char *loaded; /* [slot · layers + layer] */
    int sealed;
} Model;

SlotInfo slot_info(const Shape *shape, Slot slot);
Status model_open(Model **model, const Shape *shape, const float *inv_freq, DType type,
                  const char *device, int threads);
void model_close(Model *model);
/* Puts one tensor in; `rows`, `cols` and `type` are the array's. Vectors arrive as f32. */
Status model_load(Model *model, const char *slot, int layer, const void *array, DType type,
                  int rows, int cols);
/* Ends loading; an error names what is missing. */
Status model_seal(Model *model);
/* Bytes that the weights of such a model take. */
size_t model_bytes(const Model *model);

/* ---- adapter.c ---- */

/* Where a matrix's A (D,R) and B (R,N) lie in the flat vectors; a = -1: not trained. */
typedef struct Pair {
    int64_t a, b;
} Pair;

typedef struct LayerPairs {
#define LAYER_MATRIX(slot, rows, cols, present, group) Pair slot;
#include "weights.inc"
} LayerPairs;

typedef enum Vector { WEIGHTS, GRADIENTS, MOMENT_1, MOMENT_2, FRESH, VECTORS } Vector;

typedef struct Kept Kept;       /* step.c */
typedef struct Weights Weights; /* adapter.c */

typedef struct Adapter {
    Model *model;
    uint64_t number; /* from 1; no other weights' place in this process has had it */
    int rank, groups;
    float alpha, scale; /* scale = alpha / rank */
    int64_t size;       /* parameters */
    Pair head;
    LayerPairs *layer;
    Weights *weights;         /* shared with the snapshots that were made of them */
    Weights *spare;           /* where they go when they change meanwhile, or NULL */
    Arena memory;             /* of the other vectors */
    float *vector[VECTORS];   /* FRESH: the gradients of the call under way; a snapshot has WEIGHTS
                                 alone */
    uint64_t stamp;           /* of the weights: no others ever had it, and 0 is the base's */
    int step;                 /* optimizer steps taken */
    double loss;              /* sum of the losses behind the gradients */
    double tokens, sequences; /* behind the gradients: those with a gradient that is not zero */
    int step_tokens;          /* rows of a micro-batch */
    size_t step_most;         /* bytes that a step may take */
    size_t keep_bytes;        /* that a kept forward may hold; one micro-batch in any case */
    Arena arena;              /* of a step */
    Kept *kept;               /* the forward that backward may follow, or NULL */
    int held, held_keep;      /* micro-batches of it whose activations still lie in the arena, and
                                 what is kept of each */
    double *total;            /* device: a sum */
    volatile int interrupted; /* set from outside: the step under way stops */
} Adapter;

typedef struct AdapterSpec {
    int rank, groups, step_tokens;
    size_t step_bytes, keep_bytes; /* step_bytes 0: the default of step_most */
    float alpha;
    uint64_t seed;
} AdapterSpec;

Status adapter_open(Adapter **adapter, Model *model, const AdapterSpec *spec);
/* One without memory: its layout. */
Status adapter_measure(Adapter **adapter, Model *model, const AdapterSpec *spec);
void adapter_close(Adapter *adapter);
/* What the vectors of one that is trained take. */
size_t adapter_vector_bytes(const Adapter *adapter);
/* What it holds: its vectors, and the memory of its steps. Weights that are shared count in each.
 */
size_t adapter_memory(const Adapter *adapter);
/* The weights as they are now, without gradients and moments. It shares them: the next change of
 * either goes to memory that is taken now. */
Status adapter_snapshot(Adapter **copy, Adapter *adapter);
/* Puts `size` numbers into a vector. */
Status adapter_put(Adapter *adapter, Vector which, const float *values);
/* Calls visit(context, slot, layer, pair, info) for each trained matrix in the order of the flat
 * vectors. */
void adapter_visit(const Adapter *adapter,
                   void (*visit)(void *context, const SlotInfo *info, int layer, Pair pair),
                   void *context);

typedef struct AdamW {
    double lr, beta1, beta2, eps, weight_decay, clip_norm;
} AdamW;

typedef enum Normalization { BY_NOTHING, BY_LOSS_TOKENS, BY_SEQUENCES } Normalization;

typedef struct StepReport {
    double grad_norm, clipped_norm, weight_norm; /* clipped: what the step was made with */
    double loss, tokens, sequences;
} StepReport;

Status adapter_optim_step(Adapter *adapter, const AdamW *adamw, Normalization by,
                          StepReport *report);
Status adapter_clear(Adapter *adapter);
/* The weights are others from here on: a new stamp, and no kept forward. */
void adapter_changed(Adapter *adapter);
Status adapter_norm(Adapter *adapter, Vector which, double *norm);
/* weights += (1 − decay)·(those of `leader` − weights): an exponential moving average of an adapter
 * of the same layout. */
Status adapter_follow(Adapter *average, const Adapter *leader, double decay);

/* ---- batch.c: rows of many sequences, packed ---- */

/* Rows [row, row + rows) that share an adapter (NULL: none). */
typedef struct Segment {
    const Adapter *adapter;
    int row, rows;
} Segment;

typedef struct Batch {
    int T, S, segments;
    int32_t *tokens, *pos, *slot, *pages; /* device */
    Span *spans;                          /* device */
    Segment *segment;                     /* host */
    Segment whole;                        /* the one of a batch that has one (batch_whole) */
    const volatile int *stop;             /* NULL, or, when set from outside: no further layer */
} Batch;

/* Host arrays that batch_upload sends. */
typedef struct BatchHost {
    int T, S, page_count;
    const int32_t *tokens, *pos, *slot, *pages;
    const Span *spans;
} BatchHost;

/* Places (or measures) the device arrays of a batch. */
void batch_place(Batch *batch, Arena *arena, int T, int S, int page_count);
void batch_upload(Batch *batch, Device *dev, const BatchHost *host);
/* All rows are one adapter's, or nobody's where it is NULL. The batch may not be moved afterwards.
 */
void batch_whole(Batch *batch, const Adapter *adapter, int rows);
/* Whether forward and backward end early; what they wrote is then of no use. */
int batch_stopped(const Batch *batch);

/* ---- forward.c, backward.c: the transformer, once ---- */

/* Of what is made for backward, what is kept of how many layers (acts.inc, acts.c). */
typedef enum Keep { ALWAYS, DEAR, CHEAP, KEEPS } Keep;

typedef struct LayerActs {
#define KEPT_REAL(keep, name, width) real *name;
#define KEPT_F32(keep, name, width) float *name;
#include "acts.inc"
} LayerActs;

typedef struct Acts {
    LayerActs *layer; /* host array of L; all alike when nothing is kept */
    int again[KEEPS]; /* layers below this one share a set with it, and are made again */
    float *q_rstd, *k_rstd, *cosine, *sine, *final_rstd;
#define SCRATCH_REAL(name, width) real *name;
#include "acts.inc"
} Acts;

/* One layer's pages are k + layer·stride: a trainer's stride is 0, for it needs them only once. */
typedef struct Cache {
    real *k, *v;
    size_t stride; /* elements */
} Cache;

/* `keep` that keeps everything; 0 keeps nothing, and 1 the least that backward can do with. */
int keep_all(const Model *model);
/* How many layers then keep what is of this kind. */
int keep_layers(const Model *model, Keep kind, int keep);
/* acts->layer must have room for L entries. */
void acts_place(Acts *acts, Arena *arena, const Model *model, int T, int R, int keep);
/* batch → acts->hidden (T,D), through the cache. */
void forward(const Model *model, const Batch *batch, const Acts *acts, const Cache *cache);
/* One layer, from its x to `next`; or, where that is NULL, to the same bits once more what backward
 * needs of it and was not kept. */
void layer_forward(const Model *model, int l, const Batch *batch, const Acts *acts,
                   const Cache *cache, real *next);

typedef struct Grads {
    real *dx, *dxn, *dq, *dq_raw, *dk, *dk_raw, *dv, *datt, *dact, *ds;
} Grads;

void grads_place(Grads *grads, Arena *arena, const Model *model, int T, int R);
/* grads->dxn = d loss / d hidden → adapter's FRESH gradients of all layers. */
void backward(const Model *model, Adapter *adapter, const Batch *batch, const Acts *acts,
              const Cache *cache, const Grads *grads);

/* acts->q, acts->k of layer l once more, from q_raw and k_raw. */
void layer_rotate(const Model *model, int l, const Acts *acts, int T);

/* The `index`-th element of a device array of real. */
real *real_at(const Device *dev, const real *base, size_t index);

/* ---- losses.c ---- */

enum { JSD_BETA, JSD_TEMPERATURE, JSD_TOP_K, JSD_TOKEN_CLIP }; /* generalized_jsd's keys */

enum { LOSS_INPUTS = 5, LOSS_KEYS = 4, UNGATED = -1 };

#define LOGPROB_NONE (-99999.0f) /* fills up a list of the top K that has fewer */

/* One piece of a batch, as flat arrays over targets: any piece, or one datum if the loss is whole.
 */
typedef struct LossCall {
    int64_t count;
    const float *logp;
    const float *input[LOSS_INPUTS]; /* in the order of the loss's row */
    const double *key;               /* configuration, likewise */
    int rows;
    const int32_t *start; /* (rows + 1): where each row's targets begin, plus start[0]; NULL if the
                             loss is whole */
    float *dlogp;         /* out */
} LossCall;

typedef struct Datums Datums;

typedef struct Loss {
    const char *name;
    int multi;  /* targets may be (N, K) */
    int whole;  /* evaluate needs all targets of a datum in one call */
    int taught; /* compares whole rows with a teacher's: distill.c; or, where this input is there,
                   a row's targets with the teacher's log-probabilities of them: evaluate */
    int linear; /* dlogp does not depend on logp: it is known before the forward */
    struct {
        const char *name;
        int required;
        const char *from; /* the key or the earlier input that stands in for an optional one */
        float missing;    /* or, where `from` is NULL, this number for every element */
    } input[LOSS_INPUTS];
    struct {
        const char *name;
        double initial; /* NAN: there is none, it must come; INFINITY: no bound */
    } key[LOSS_KEYS];
    int gate; /* input whose zeros mean: no gradient here; or UNGATED */
    Status (*check)(const Datums *datums);    /* what the row cannot say; NULL: nothing */
    double (*evaluate)(const LossCall *call); /* returns the loss, writes dlogp */
} Loss;

const Loss *loss_find(const char *name);
const Loss *loss_at(int index); /* NULL past the end */
/* Not of the table: its one input is d loss / d logp itself. */
extern const Loss loss_given;

/* ---- losses.c, datums.c, step.c, head.c: forward_backward ---- */

struct Datums {
    int count;
    const int32_t *tokens, *lengths, *targets, *counts;
    int64_t token_total, target_total; /* lengths of the flat arrays, as they came */
    const float *input[LOSS_INPUTS];   /* NULL: missing */
    int64_t input_total[LOSS_INPUTS];
    double key[LOSS_KEYS];
};

/* Number `target` of the loss's input j, or what stands in for it. */
float loss_input(const Loss *loss, const Datums *datums, int j, int64_t target);
/* Lengths, ids and numbers, against the model and the loss; the sentence names the datum. */
Status datums_check(const Datums *datums, const Model *model, const Loss *loss);

/* How far a call goes: FORWARD_KEEP leaves what backward needs. */
typedef enum Pass { FORWARD, FORWARD_KEEP, FORWARD_BACKWARD } Pass;

/* logp (target_total) and loss are the results; FORWARD_BACKWARD adds to the gradients. On an error
 * nothing was added. */
Status adapter_forward_backward(Adapter *adapter, const Datums *datums, const Loss *loss, Pass pass,
                                float *logp, double *loss_sum);
/* Adds to the gradients what FORWARD_BACKWARD of the kept forward's datums would have added, if the
 * loss had this dlogp (count numbers, like targets); loss is Σ dlogp·logp. Uses the kept forward
 * up; an error leaves it, to be computed again. */
Status adapter_backward(Adapter *adapter, const float *dlogp, int64_t count, double *loss_sum);
/* Forgets the kept forward: the weights have changed. */
void adapter_drop_kept(Adapter *adapter);
/* Bytes of a training step of T rows of one datum with so much kept, and in *scratch (NULL: not
 * asked) those that its ops need for themselves; 0 where the host has no memory. */
size_t step_bytes(Adapter *adapter, int T, int keep, size_t *scratch);
/* Rows of a chunk whose logits exist at one time. */
int head_rows(const Model *model);

/* ---- prefix.c: full pages of the cache, found again by their content ---- */

typedef struct Memory Memory; /* prefix.c's own: what is known of a page */

/* What the last `rows` rows of a page said of the tokens after them; 0: nothing is known. */
typedef struct PageScores {
    int rows, top;       /* of each row the log-probability of its next token, and the `top` best */
    int32_t after;       /* the next token of the page's last row */
    float *logprobs;     /* [KV_PAGE] */
    float *top_logprobs; /* [KV_PAGE · top] */
    int32_t *top_ids;
} PageScores;

typedef struct Prefix {
    int pages;
    Memory *memory;     /* [pages] */
    PageScores *scores; /* [pages] scores.c's */
    size_t scores_bytes, scores_most;
    int32_t *bucket; /* [buckets] the first page of each, or -1 */
    int buckets;
    int32_t oldest, newest; /* remembered pages that no sequence holds */
    uint64_t numbers;       /* given so far */
    int64_t reused;         /* tokens that were found here instead of computed */
} Prefix;

/* For a cache of so many pages, of so many bytes in all. */
Status prefix_open(Prefix *prefix, int pages, size_t bytes);
void prefix_close(Prefix *prefix);
/* A page that no sequence holds any more: kept if its content is known, else 0. */
int prefix_lay(Prefix *prefix, int32_t page);
/* A page that prefix_lay kept is held again. */
void prefix_lift(Prefix *prefix, int32_t page);
/* The page that has lain longest, forgotten; -1 if there is none. */
int32_t prefix_evict(Prefix *prefix);
/* Forgets those that are held. */
void prefix_clear(Prefix *prefix);

/* ---- distill.c: a loss between two distributions over the vocabulary ---- */

/* What a teacher reads: a sequence for each datum, its own prompt and then the datum's completion.
 */
typedef struct Lesson {
    const Model *model;     /* of the student's vocabulary */
    const Adapter *adapter; /* on that model; NULL: none */
    const int32_t *tokens, *lengths;
    int64_t token_total, count; /* lengths of the two arrays, as they came */
} Lesson;

/* As adapter_forward_backward, for a taught loss; also the divergence of each row, (token_total), 0
 * where its weight is. */
Status adapter_distill(Adapter *adapter, const Datums *datums, const Loss *loss,
                       const Lesson *lesson, int with_backward, float *logp, float *divergence,
                       double *loss_sum);

/* ---- plan.c: what is taken where nothing else is said ---- */

/* Bytes of everything, before anything is allocated. */
typedef struct Plan {
    size_t weights, adapter, step, own, kv_token, cache, free, all;
    size_t scratch, step_most; /* of `own`, a step's; what a step may take, that among it */
    int step_tokens, keep;
    int longest; /* tokens of the longest datum that a step can train */
} Plan;

/* `tokens` of a training step; 0: the default. */
Status plan_make(Plan *plan, Model *model, const AdapterSpec *spec, int tokens);
/* Bytes that a step may take, its ops' own among them, in so many bytes of memory; 0: in the
 * device's. */
size_t plan_step_most(const Model *model, size_t all_bytes);
/* Rows of a micro-batch: as many as the device has use for, if it has the memory. */
int plan_step_tokens(Adapter *adapter);
/* The bytes of one arena as a function of what is kept in it. */
typedef size_t KeepBytes(void *context, int keep);
/* The most that fits in so many bytes, or 0. */
int plan_keep(const Model *model, size_t most, KeepBytes *bytes, void *context);
/* The same of a step of T rows before it begins, also in what is free just now; fails where it does
 * not fit at all. `scratch` is what its ops need for themselves. */
Status step_keep(int *keep, const Adapter *adapter, int T, size_t scratch, KeepBytes *bytes,
                 void *context);
/* Tokens of a sampler's cache in so many bytes of memory, the weights among them, of which so many
 * are free and more can be made free for the context's; 0: in the device's. */
int64_t plan_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes);

/* ---- kv.c: pages of the cache ---- */

enum { CACHE_TOKENS_MAX = 1 << 20 };

typedef struct Kv {
    Model *model;
    Arena arena;
    Cache cache;
    int pages, free_count; /* page number `pages` is nobody's: rows that only fill up write there */
    int32_t *free_list;
    int32_t *users; /* of each page: sequences that hold it */
    Prefix prefix;
} Kv;

Status kv_open(Kv *kv, Model *model, int64_t tokens);
void kv_close(Kv *kv);
/* A page for new content, or -1. */
int32_t kv_take(Kv *kv);
void kv_share(Kv *kv, int32_t page);
void kv_drop(Kv *kv, int32_t page);
/* Forgets what every page holds; sequences keep theirs. */
void kv_forget(Kv *kv);
/* A page with the first `count` keys of `page`, for a sequence that goes its own way; -1 if there
 * is none. */
int32_t kv_fork(Kv *kv, int32_t page, int count);
/* Bytes of one token's keys and values in all layers. */
size_t kv_token_bytes(const Model *model);

#endif
