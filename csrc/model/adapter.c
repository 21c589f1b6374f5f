/* model/adapter.c - LoRA's matrices in flat vectors, their initialization, gradients and snapshots.
 *
 * y = x·wᵀ + (alpha/R)·(x·A)·B for every matrix of the groups that are trained. A (D,R) begins
 * uniform in ±1/√D, as PEFT's kaiming_uniform(a=√5) does, B (R,N) at zero. Weights, gradients and
 * both moments are one flat vector each, so a step is one call (optimizer.c). A call's gradients
 * are summed in a separate vector and added when the call succeeds: a failed or interrupted call
 * leaves no trace. If no gradients precede them, that vector becomes the gradients. Between a step
 * and the next call there is neither. A snapshot shares the weights, copy-on-write: the next change
 * goes to other memory, allocated with the snapshot. So a snapshot copies nothing. */
#include "adapter.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stages.h"

/* ---- layout ---- */

/* Places `count` matrices: all As, then all Bs; or pair by pair if each has its own A and B. */
static Pair pair_place(int64_t *size, int rank, int count, int rows, int cols, Factors factors,
                       int trained)
{
    if (!trained) return (Pair){-1, -1, 0, 0};
    int64_t a = (int64_t)cols * rank, b = (int64_t)rows * rank;
    Pair pair = {*size, *size + a, a + b, a + b};
    int64_t all = count * (a + b);
    if (factors == ONE_A) {
        pair.a_step = 0;
        pair.b_step = b;
        all = a + count * b;
    }
    if (factors == ONE_B) {
        pair.a_step = a;
        pair.b_step = 0;
        pair.b = *size + count * a;
        all = count * a + b;
    }
    *size += all;
    return pair;
}

static void pairs_place(Adapter *adapter)
{
    const Shape *s = &adapter->model->shape;
    int64_t *size = &adapter->size;
    for (int l = 0; l < s->layers; l++) {
        LayerPairs *p = &adapter->layer[l];
        adapter->begin[l] = *size;
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors)    \
    p->slot = pair_place(size, adapter->rank, count, rows, cols, factors, \
                         (present) && (adapter->groups & group));
#include "weights.inc"
    }
    adapter->begin[s->layers] = *size;
    adapter->head =
        pair_place(size, adapter->rank, 1, s->vocab, s->width, EACH, adapter->groups & UNEMBED);
    adapter->begin[s->layers + 1] = *size;
}

/* The last of a stage's entries in `begin`: its last layer, or the head. */
static int stage_end(const Model *model, const Stage *stage)
{
    return stage->end + (stage == stage_last(model));
}

/* Cuts the flat vectors into the stages' pieces. */
static void pieces_cut(Adapter *adapter)
{
    const Model *model = adapter->model;
    for (int k = 0; k < model->stages; k++) {
        const Stage *stage = &model->stage[k];
        int64_t n = adapter->begin[stage_end(model, stage)] - adapter->begin[stage->first];
        adapter->bytes.of[k] = (size_t)n * sizeof(float);
    }
}

static void slot_visit(const Adapter *adapter, VisitMatrix *visit, void *context, Slot slot,
                       int layer, Pair pair)
{
    SlotInfo info = slot_info(&adapter->model->shape, slot, layer);
    if (pair.a < 0) return;
    for (int i = 0; i < info.count; i++, pair.a += pair.a_step, pair.b += pair.b_step)
        visit(context, &info, layer, i, pair);
}

void adapter_visit(const Adapter *adapter, VisitMatrix *visit, void *context)
{
    for (int l = 0; l < adapter->model->shape.layers; l++) {
        const LayerPairs *p = &adapter->layer[l];
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) \
    slot_visit(adapter, visit, context, SLOT_##slot, l, p->slot);
#include "weights.inc"
    }
    slot_visit(adapter, visit, context, SLOT_head, -1, adapter->head);
}

/* ---- the weights, which snapshots share ---- */

struct Weights {
    Arenas memory;
    atomic_int owners; /* adapters */
};

size_t adapter_vector_bytes(const Adapter *adapter)
{
    return (size_t)adapter->size * sizeof(float);
}

static Status weights_make(Weights **out, const Adapter *adapter, const char *what)
{
    Weights *weights = calloc(1, sizeof *weights);
    if (!weights) return fail(STATUS_MEMORY, "no memory for an adapter's weights");
    weights->owners = 1;
    char purpose[64];
    snprintf(purpose, sizeof purpose, "%s of rank %d", what, adapter->rank);
    Status status = flat_reserve(adapter->model, &adapter->bytes, &weights->memory, purpose);
    if (status)
        free(weights);
    else
        *out = weights;
    return status;
}

void weights_leave(Weights *weights)
{
    if (!weights || atomic_fetch_sub(&weights->owners, 1) > 1) return;
    arenas_release(&weights->memory);
    free(weights);
}

static int weights_shared(const Adapter *adapter)
{
    return atomic_load(&adapter->weights->owners) > 1;
}

/* The adapter uses these weights from now on; the caller leaves the old ones. A recorded step holds
 * the weights' address, so the new number makes sure that none is found for the new ones. */
static void weights_take(Adapter *adapter, Weights *weights)
{
    static _Atomic uint64_t places;
    adapter->number = ++places;
    adapter->weights = weights;
    adapter->vector[WEIGHTS] = flat_in(&weights->memory);
}

static Status spare_make(Adapter *adapter)
{
    return adapter->spare ? STATUS_OK : weights_make(&adapter->spare, adapter, "a snapshot");
}

/* The weights get a new stamp. */
static void weights_changed(Adapter *adapter)
{
    static _Atomic uint64_t stamps;
    adapter->stamp = ++stamps;
    adapter->weight_norm = NAN;
}

Status weights_change(Adapter *adapter, Weights **before)
{
    *before = adapter->weights;
    if (weights_shared(adapter)) {
        TRY(spare_make(adapter));
        weights_take(adapter, adapter->spare);
        adapter->spare = NULL;
    } else {
        atomic_fetch_add(&adapter->weights->owners, 1);
    }
    weights_changed(adapter);
    return STATUS_OK;
}

size_t adapter_memory(const Adapter *adapter)
{
    size_t one = arenas_size(&adapter->weights->memory);
    int count = 1 + (adapter->spare && !weights_shared(adapter));
    for (int i = 0; i < VECTORS; i++) count += i != WEIGHTS && flat_exists(&adapter->vector[i]);
    for (int i = 0; i < PART_NODES; i++) count += flat_exists(&adapter->sum[i].vector);
    return (size_t)count * one;
}

Status adapter_trainable(const Adapter *adapter)
{
    if (flat_exists(&adapter->vector[MOMENT_1])) return STATUS_OK;
    return fail(STATUS_INVALID, "this adapter is a snapshot: it can be sampled from, not trained");
}

static Status norm_check(const float *weights, int64_t size)
{
    double sum = 0.0;
    for (int64_t i = 0; i < size; i++) sum += (double)weights[i] * (double)weights[i];
    if (sqrt(sum) < WEIGHT_NORM_MAX) return STATUS_OK;
    return fail(STATUS_INVALID, "the weights' norm is %g; it should be below %g", sqrt(sum),
                WEIGHT_NORM_MAX);
}

Status adapter_put(Adapter *adapter, Vector which, const float *values)
{
    if (which == WEIGHTS) TRY(norm_check(values, adapter->size));
    TRY(adapter_take(adapter, which));
    Weights *before = NULL;
    if (which == WEIGHTS) {
        TRY(weights_change(adapter, &before));
        adapter->growth = (Growth){0};
    }
    vector_upload(adapter->model, &adapter->bytes, &adapter->vector[which], values);
    Status status = model_sync(adapter->model);
    weights_leave(before);
    return status;
}

/* ---- initialization ---- */

/* SplitMix64: a counter-based stream, so that a matrix's numbers depend on (seed, position) alone.
 */
static double uniform(uint64_t seed, uint64_t index)
{
    uint64_t z = seed * 0x9e3779b97f4a7c15u + (index + 1) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

typedef struct Beginning {
    float *weights;
    int rank;
    uint64_t seed;
} Beginning;

static void begin_matrix(void *context, const SlotInfo *info, int layer, int index, Pair pair)
{
    (void)layer;
    const Beginning *c = context;
    if (index > 0 && pair.a_step == 0) return; /* the A is shared */
    double bound = 1.0 / sqrt((double)info->cols);
    for (int64_t i = 0; i < (int64_t)info->cols * c->rank; i++)
        c->weights[pair.a + i] =
            (float)((2.0 * uniform(c->seed, (uint64_t)(pair.a + i)) - 1.0) * bound);
}

Status adapter_measure(Adapter **out, Model *model, const AdapterSpec *spec)
{
    Adapter *adapter = calloc(1, sizeof *adapter);
    if (!adapter) return fail(STATUS_MEMORY, "no memory for an adapter");
    adapter->model = model;
    adapter->rank = spec->rank;
    adapter->groups = spec->groups;
    adapter->optimizer = spec->optimizer;
    adapter->alpha = spec->alpha;
    adapter->scale = spec->alpha / (float)spec->rank;
    adapter->layer = calloc((size_t)model->shape.layers, sizeof *adapter->layer);
    adapter->begin = calloc((size_t)model->shape.layers + 2, sizeof *adapter->begin);
    if (!adapter->layer || !adapter->begin) {
        adapter_close(adapter);
        return fail(STATUS_MEMORY, "no memory for an adapter");
    }
    pairs_place(adapter);
    pieces_cut(adapter);
    *out = adapter;
    return STATUS_OK;
}

/* An adapter with its vectors in place. */
static Status adapter_make(Adapter **out, Model *model, const AdapterSpec *spec)
{
    Adapter *adapter = NULL;
    Weights *weights = NULL;
    TRY(adapter_measure(&adapter, model, spec));
    Arenas measured = {0};
    for (int k = 0; k < model->stages; k++) measured.of[k].used = sizeof(double);
    Status status = arenas_reserve(model, &adapter->total, &measured, "an adapter");
    if (!status) status = weights_make(&weights, adapter, "an adapter");
    if (!status) {
        weights_take(adapter, weights);
        weights_changed(adapter);
        status = adapter_take(adapter, MOMENT_1);
    }
    if (!status) status = adapter_take(adapter, MOMENT_2);
    if (status) {
        adapter_close(adapter);
        return status;
    }
    *out = adapter;
    return STATUS_OK;
}

/* A step of Dimuon costs rank³ on one core, and all others wait for it. */
enum { RANK_MAX = 4096, DIMUON_RANK_MAX = 256 };

Status adapter_check(const AdapterSpec *spec)
{
    if (spec->rank < 1) return fail(STATUS_INVALID, "rank must be at least 1, not %d", spec->rank);
    if (spec->rank > RANK_MAX)
        return fail(STATUS_INVALID, "rank %d is more than %d", spec->rank, RANK_MAX);
    if (spec->optimizer == DIMUON && spec->rank > DIMUON_RANK_MAX)
        return fail(STATUS_INVALID, "rank %d is more than %d, which dimuon takes", spec->rank,
                    DIMUON_RANK_MAX);
    if (!(spec->alpha > 0.0f) || !isfinite(spec->alpha))
        return fail(STATUS_INVALID, "alpha must be a positive number, not %g", (double)spec->alpha);
    if (!(spec->groups & (ATTN | MLP | UNEMBED)))
        return fail(STATUS_INVALID,
                    "nothing to train: train_attn, train_mlp and train_unembed are all false");
    return STATUS_OK;
}

Status adapter_open(Adapter **out, Model *model, const AdapterSpec *spec)
{
    if (!model->sealed)
        return fail(STATUS_INVALID, "the model is not sealed: load every slot, then seal it");
    TRY(adapter_check(spec));
    Adapter *adapter = NULL;
    TRY(adapter_make(&adapter, model, spec));
    float *weights = calloc((size_t)adapter->size, sizeof *weights);
    if (!weights) {
        Status status =
            fail(STATUS_MEMORY, "no memory for %lld LoRA parameters", (long long)adapter->size);
        adapter_close(adapter);
        return status;
    }
    adapter_visit(adapter, begin_matrix, &(Beginning){weights, spec->rank, spec->seed});
    vector_upload(model, &adapter->bytes, &adapter->vector[WEIGHTS], weights);
    free(weights);
    Status status = model_sync(model);
    if (status)
        adapter_close(adapter);
    else
        *out = adapter;
    return status;
}

Status adapter_snapshot(Adapter **copy, Adapter *adapter)
{
    AdapterSpec spec = {.rank = adapter->rank,
                        .groups = adapter->groups,
                        .optimizer = adapter->optimizer,
                        .alpha = adapter->alpha};
    TRY(model_sync(adapter->model));
    TRY(spare_make(adapter));
    TRY(adapter_measure(copy, adapter->model, &spec));
    atomic_fetch_add(&adapter->weights->owners, 1);
    weights_take(*copy, adapter->weights);
    (*copy)->step = adapter->step;
    (*copy)->stamp = adapter->stamp;
    (*copy)->growth = adapter->growth;
    return STATUS_OK;
}

void adapter_close(Adapter *adapter)
{
    if (!adapter) return;
    weights_leave(adapter->weights);
    weights_leave(adapter->spare);
    for (int i = 0; i < VECTORS; i++)
        if (i != WEIGHTS) vector_free(adapter->model, &adapter->bytes, &adapter->vector[i]);
    for (int i = 0; i < PART_NODES; i++)
        vector_free(adapter->model, &adapter->bytes, &adapter->sum[i].vector);
    arenas_release(&adapter->total);
    free(adapter->layer);
    free(adapter->begin);
    free(adapter);
}

/* ---- gradients, norms and averages ---- */

Status adapter_take(Adapter *adapter, Vector which)
{
    if (flat_exists(&adapter->vector[which])) return STATUS_OK;
    return vector_take(adapter->model, &adapter->bytes, &adapter->vector[which]);
}

void adapter_give(Adapter *adapter, Vector which)
{
    vector_give(adapter->model, &adapter->bytes, &adapter->vector[which]);
}

Status adapter_clear(Adapter *adapter)
{
    adapter_give(adapter, GRADIENTS);
    adapter->loss = adapter->tokens = adapter->sequences = 0.0;
    return model_sync(adapter->model);
}

void adapter_blank(const Adapter *adapter, Vector which)
{
    vector_blank(adapter->model, &adapter->bytes, &adapter->vector[which]);
}

void adapter_gather(Adapter *adapter)
{
    Flat *gradients = &adapter->vector[GRADIENTS], *fresh = &adapter->vector[FRESH];
    if (flat_exists(gradients)) {
        vector_add(adapter->model, &adapter->bytes, gradients, fresh);
        adapter_give(adapter, FRESH);
        return;
    }
    *gradients = *fresh;
    *fresh = (Flat){0};
}

/* A stage goes on with the total of the one before. */
Status layers_root(const Adapter *adapter, LayerSum *sum, const void *context, double *root)
{
    const Model *model = adapter->model;
    double all;
    for (int k = 0; k < model->stages; k++) {
        const Stage *stage = &model->stage[k];
        double *total = (double *)adapter->total.of[k].base;
        if (k == 0)
            stage->dev->zero(stage->dev, total, sizeof *total);
        else
            stage_copy(stage, total, stage - 1, adapter->total.of[k - 1].base, sizeof *total);
        for (int l = stage->first; l < stage_end(model, stage); l++) {
            int64_t from = adapter->begin[l], n = adapter->begin[l + 1] - from;
            if (n) sum(adapter, stage, total, from, n, context);
        }
    }
    TRY(model_sync(model));
    model->dev->download(model->dev, &all, adapter->total.of[model->stages - 1].base, sizeof all);
    *root = sqrt(all);
    return STATUS_OK;
}

static void squares_add(const Adapter *adapter, const Stage *stage, double *total, int64_t from,
                        int64_t n, const void *which)
{
    const Vector *vector = which;
    stage->dev->square_sum(stage->dev, total, vector_at(adapter, *vector, stage, from), n);
}

/* √Σ g² of one of the flat vectors. */
Status adapter_norm(Adapter *adapter, Vector which, double *norm)
{
    return layers_root(adapter, squares_add, &which, norm);
}

void growth_text(const Adapter *adapter, char *text)
{
    const Growth *growth = &adapter->growth;
    text[0] = '\0';
    if (growth->step)
        snprintf(text, GROWTH_TEXT,
                 "the weights' norm grew from %.3g to %.3g in step %d; load a checkpoint from "
                 "before it",
                 growth->before, growth->after, growth->step);
}

Status adapter_overflow(const Adapter *adapter, const char *what)
{
    char text[GROWTH_TEXT] = "";
    if (adapter) growth_text(adapter, text);
    return fail(STATUS_NUMERIC, "%s%s%s", what, text[0] ? "; " : "", text);
}

Status logprobs_overflow(const Adapter *adapter)
{
    return adapter_overflow(adapter,
                            "the model's log-probabilities are not numbers here: its weights, or "
                            "the adapter's, are so large that sums overflow");
}

Status adapter_ema_update(Adapter *average, const Adapter *leader, double decay)
{
    const Model *model = average->model;
    if (!(decay >= 0.0 && decay < 1.0))
        return fail(STATUS_INVALID, "an average's decay must be in [0, 1), not %g", decay);
    if (average->model != leader->model || average->rank != leader->rank ||
        average->groups != leader->groups)
        return fail(STATUS_INVALID, "an average follows an adapter of the same model and layout");
    Weights *before;
    TRY(weights_change(average, &before));
    for (int k = 0; k < model->stages; k++) {
        Device *dev = model->stage[k].dev;
        size_t bytes = average->bytes.of[k];
        float *to = average->vector[WEIGHTS].of[k];
        if (before != average->weights) dev->copy(dev, to, before->memory.of[k].base, bytes);
        dev->average(dev, to, leader->vector[WEIGHTS].of[k], (int64_t)(bytes / sizeof *to), 1.0f,
                     (float)(1.0 - decay));
    }
    Status status = model_sync(model);
    weights_leave(before);
    return status;
}
