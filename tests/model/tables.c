/* A model whose tables have more than any family of today: a layer without attention, which keeps
 * something for each sequence, and layers with several matrices in one slot. test_tables.py adds
 * the rows to a copy of csrc/model's tables, compiles this with them, and runs it: it ends at the
 * first line that does not hold. The device is host memory. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/acts.h"
#include "model/adapter.h"
#include "model/cache.h"
#include "model/memory_share.h"
#include "model/stages.h"
#include "registry/registry.h"

#define CHECK(condition)                                                   \
    do {                                                                   \
        if (condition) break;                                              \
        printf("line %d: %s (%s)\n", __LINE__, #condition, status_text()); \
        exit(1);                                                           \
    } while (0)

/* ---- a device that is host memory ---- */

static Status host_alloc(Device *dev, void **memory, size_t bytes)
{
    (void)dev;
    return (*memory = calloc(1, bytes)) ? STATUS_OK : fail(STATUS_MEMORY, "no memory");
}

static void host_release(Device *dev, void *memory, size_t bytes)
{
    (void)dev, (void)bytes;
    free(memory);
}

static void host_memory(Device *dev, size_t *free_bytes, size_t *all_bytes)
{
    (void)dev;
    *free_bytes = *all_bytes = (size_t)1 << 30;
}

static void host_copy(Device *dev, void *to, const void *from, size_t bytes)
{
    (void)dev;
    memcpy(to, from, bytes);
}

static void host_zero(Device *dev, void *memory, size_t bytes)
{
    (void)dev;
    memset(memory, 0, bytes);
}

static size_t host_frozen_bytes(Device *dev, DType type, int rows, int cols)
{
    (void)dev, (void)type;
    return (size_t)rows * (size_t)cols * sizeof(float);
}

static int host_frozen_load(Device *dev, frozen *to, DType kept, const void *from, DType type,
                            int rows, int cols)
{
    (void)kept;
    memcpy(to, from, host_frozen_bytes(dev, type, rows, cols));
    return 1;
}

static Status host_sync(Device *dev)
{
    (void)dev;
    return STATUS_OK;
}

static void host_close(Device *dev)
{
    (void)dev;
}

Status device_open(Device **dev, const char *name, int threads)
{
    static Device host = {.name = "host",
                          .real_bytes = 4,
                          .cached_bytes = 4,
                          .alloc = host_alloc,
                          .release = host_release,
                          .memory = host_memory,
                          .upload = host_copy,
                          .zero = host_zero,
                          .frozen_bytes = host_frozen_bytes,
                          .frozen_load = host_frozen_load,
                          .sync = host_sync,
                          .close = host_close};
    (void)name, (void)threads;
    *dev = &host;
    return STATUS_OK;
}

/* ---- the model ---- */

enum { L = 3, D = 10, H = 4, G = 2, E = 6, F = 14, R = 3, PART_COUNT = 5, T = 7, BLOCK = 256 };

static const LayerKinds kinds[L] = {{{KIND_full_attention, KIND_mlp}},
                                    {{KIND_recurrent, KIND_parted}},
                                    {{KIND_sliding_attention, KIND_parted}}};
static const Shape shape = {.axes = 1,
                            .layers = L,
                            .width = D,
                            .heads = H,
                            .kv_heads = G,
                            .head_width = E,
                            .ffn = F,
                            .rotary = E,
                            .vocab = 20,
                            .context = 64,
                            .window = 8,
                            .tied = 1,
                            .norm_eps = 1e-6f,
                            .rope_scale = 1.0f,
                            .layer = kinds};

/* What so many numbers take, as the arena hands them out. */
static size_t taken(size_t numbers)
{
    return (numbers * sizeof(float) + BLOCK - 1) / BLOCK * BLOCK;
}

static Model *model_of(void)
{
    static const float inv_freq[E / 2];
    static const DType types[SLOT_COUNT * L]; /* all DTYPE_F32 */
    Model *model = NULL;
    CHECK(model_open(&model, &shape, inv_freq, types, "host", 1) == STATUS_OK);
    return model;
}

static void slots_belong_to_the_layers_that_have_them(const Model *model)
{
    const Shape *s = &model->shape;
    CHECK(slot_info(s, SLOT_wq, 0).present && !slot_info(s, SLOT_wq, 1).present);
    CHECK(slot_info(s, SLOT_wq, 2).present && slot_info(s, SLOT_attn_norm, 1).present);
    CHECK(slot_info(s, SLOT_decay, 1).present && !slot_info(s, SLOT_decay, 2).present);
    CHECK(!slot_info(s, SLOT_part_up, 0).present && slot_info(s, SLOT_part_up, 1).present);
    CHECK(slot_info(s, SLOT_part_up, 2).count == PART_COUNT);
    CHECK(slot_info(s, SLOT_wq, 0).count == 1);
    size_t attention = 2 * taken(H * E * D) + 2 * taken(G * E * D), norms = 2 * taken(D);
    size_t layers[L] = {norms + attention + 3 * taken(F * D),
                        norms + taken(H) + PART_COUNT * taken(F * D),
                        norms + attention + PART_COUNT * taken(F * D)};
    size_t bytes = taken(E / 2) + taken(20 * D) + taken(D);
    for (int l = 0; l < L; l++) bytes += layers[l];
    CHECK(model_bytes(model) == bytes);
}

static void matrices_of_a_slot_are_loaded_by_number(Model *model)
{
    static float array[F * D];
    for (int i = PART_COUNT - 1; i >= 0; i--) {
        for (int j = 0; j < F * D; j++) array[j] = (float)(i + 1);
        CHECK(!model_load(model, "part_up", 2, i, array, DTYPE_F32, F, D));
    }
    const char *first = (const char *)model->layer[2].part_up;
    for (int i = 0; i < PART_COUNT; i++) {
        const float *found = (const float *)(first + (size_t)i * taken(F * D));
        CHECK(found[0] == (float)(i + 1) && found[F * D - 1] == (float)(i + 1));
    }
    CHECK(!model->layer[0].part_up && !model->layer[1].wq);
    CHECK(model_load(model, "part_up", 2, PART_COUNT, array, DTYPE_F32, F, D));
    CHECK(strcmp(status_text(), "part_up: number 5, but there are 5") == 0);
    CHECK(model_load(model, "part_up", 0, 0, array, DTYPE_F32, F, D));
    CHECK(strcmp(status_text(), "layer 0 has no part_up") == 0);
    CHECK(model_load(model, "part_up", 1, 3, array, DTYPE_F32, D, F));
    CHECK(strstr(status_text(), "layer 1 part_up 3: file has (10, 14)"));
}

static void what_is_missing_is_named(Model *model)
{
    static const float array[20 * F * D];
    for (Slot slot = 0; slot < SLOT_COUNT; slot++)
        for (int l = 0; l < L; l++) {
            SlotInfo info = slot_info(&model->shape, slot, l);
            for (int i = 0; info.present && i < info.count; i++)
                if (slot != SLOT_part_up || l == 2 || i != 3)
                    CHECK(!model_load(model, info.name, info.per_layer ? l : -1, i, array,
                                      DTYPE_F32, info.rows, info.cols));
        }
    CHECK(model_seal(model));
    CHECK(strcmp(status_text(), "layer 1 part_up 3 was not loaded") == 0);
    CHECK(!model_load(model, "part_up", 1, 3, array, DTYPE_F32, F, D));
    CHECK(!model_seal(model));
}

typedef struct Seen {
    int64_t size;
    int wq, experts, others;
} Seen;

static void see(void *context, const SlotInfo *info, int layer, int index, Pair pair)
{
    Seen *seen = context;
    int expert = strcmp(info->name, "part_up") == 0;
    CHECK(pair.a == seen->size && pair.b == pair.a + info->cols * R);
    seen->size = pair.b + info->rows * R;
    CHECK(index == (expert ? seen->experts % PART_COUNT : 0));
    CHECK(!expert || layer == 1 + seen->experts / PART_COUNT);
    seen->experts += expert;
    seen->wq += strcmp(info->name, "wq") == 0;
    seen->others += !expert;
}

/* Behind one another, each with its A and its B, of the layers that have it. */
static void lora_has_a_pair_for_each_matrix(Model *model)
{
    Adapter *adapter;
    AdapterSpec spec = {.rank = R, .groups = ATTN | MLP, .alpha = 1.0f};
    CHECK(!adapter_measure(&adapter, model, &spec));
    Seen seen = {0};
    adapter_visit(adapter, see, &seen);
    CHECK(seen.size == adapter->size && seen.wq == 2);
    CHECK(seen.experts == 2 * PART_COUNT && seen.others == 4 + 3 + 4);
    CHECK(adapter->layer[1].part_up.a_step == (F + D) * R && adapter->layer[1].wq.a == -1);
    adapter_close(adapter);
}

/* Layer 1 alone has `state`; layers 0 and 2 share `att` where only one set is kept. */
static void activations_lie_where_a_layer_has_them(Model *model)
{
    LayerActs layers[L];
    Acts acts = {.layer = layers};
    size_t bytes[2];
    for (int all = 0; all < 2; all++) {
        Arenas measured = {0}, arenas = {0};
        acts_place(&acts, &measured, model, T, R, all ? keep_all(model) : 1);
        CHECK(!arenas_reserve(model, &arenas, &measured, "activations"));
        acts_place(&acts, &arenas, model, T, R, all ? keep_all(model) : 1);
        CHECK((bytes[all] = arenas.of[0].used) == measured.of[0].used);
        CHECK(!layers[0].state && layers[1].state && !layers[2].state);
        CHECK(layers[0].att && !layers[1].att && layers[2].att && !layers[1].gate_up && acts.q);
        CHECK((layers[0].att == layers[2].att) == !all && (layers[0].mid == layers[1].mid) == !all);
        CHECK(layers[0].x != layers[1].x && layers[1].x != layers[2].x);
        arenas_release(&arenas);
    }
    size_t attention =
        taken(T * (H + 2 * G) * E) + taken(T * H * E) + taken(T * H) + 4 * taken(T * R);
    CHECK(bytes[1] - bytes[0] == attention + 2 * (taken(T * D) + 2 * taken(T)));
}

static void layers_keep_what_their_kinds_keep(const Model *model)
{
    Arenas arenas = {0};
    Cache cache = {.tokens = 64}, step;
    cache_place(&step, &arenas, model, 2);
    CHECK(arenas.of[0].used == 2 * taken(2 * 64 * G * E) && step.tokens == 0);
    CHECK(cache_at(model, &cache, 0) == 0 && cache_list(model, &cache, 2) == 0);
    CHECK(model->lists.windowed == 0 && model->lists.layers == 2 && kv_window_bytes(model) == 0);
    CHECK(cache_at(model, &cache, 2) == 64 * G * E * sizeof(float));
    CHECK(cache_at(model, &step, 2) == 0);
    CHECK(kv_token_bytes(model) == 2 * (2 * G * E) * sizeof(float));
    CHECK(kv_sequence_bytes(model) == STATE_BYTES);
    size_t room = ((size_t)1 << 18) + model_bytes(model), token = kv_token_bytes(model);
    int64_t tokens = budget_cache_tokens(model, room, (size_t)1 << 30);
    CHECK(tokens == 128 && budget_states(model, tokens) == (int)(tokens * token / STATE_BYTES));
    CHECK(budget_cache_bytes(model, 192) > (1 << 16) && budget_cache_bytes(model, 128) < (1 << 16));
    CHECK(budget_states(model, 0) == 4 && budget_states(model, 1 << 20) == 2 * STEP_SEQUENCES);
    size_t many = ((size_t)1 << 24) - 2 * STEP_SEQUENCES * STATE_BYTES;
    tokens = budget_cache_tokens(model, ((size_t)1 << 26) + model_bytes(model), (size_t)1 << 30);
    CHECK(tokens == (int64_t)(many / token / 64 * 64));
}

int main(void)
{
    Model *model = model_of();
    slots_belong_to_the_layers_that_have_them(model);
    matrices_of_a_slot_are_loaded_by_number(model);
    what_is_missing_is_named(model);
    lora_has_a_pair_for_each_matrix(model);
    activations_lie_where_a_layer_has_them(model);
    layers_keep_what_their_kinds_keep(model);
    model_close(model);
    printf("all of it holds\n");
    return 0;
}
