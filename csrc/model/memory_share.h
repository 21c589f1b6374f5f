/* model/memory_share.h - the default memory of a training step and a sampler's cache. */
#ifndef TINSMITH_MODEL_MEMORY_SHARE_H
#define TINSMITH_MODEL_MEMORY_SHARE_H

#include "model.h"

enum {
    CACHE_TOKENS_MAX = 1 << 20,
    STEP_SEQUENCES = 256, /* of a sampling step, at most */
    STEP_ROWS = 512,
};

/* All bytes are sums over the stages. Those that a training step may take, ops' scratch included,
 * if memory has `all_bytes` (0: the devices'). */
size_t budget_step(const Model *model, size_t all_bytes);
/* The same for a datum that needs more, beside an adapter of `adapter_bytes`. */
size_t budget_datum(const Model *model, size_t adapter_bytes);
/* The bytes that set the number of a step's rows; mapped weights do not change them. */
size_t budget_rows(const Model *model);
/* Whether a step with this `keep` fits. */
typedef int KeepFits(void *context, int keep);
/* The largest `keep` that fits, or 0. */
int budget_keep(const Model *model, KeepFits *fits, void *context);
/* How many sequences' states a sampler's cache of `tokens` tokens holds. States take as many bytes
 * as pages, but are never fewer than a few, nor more than twice a step's sequences: those of
 * running sequences, and cached ones. 0: no layer has states. */
int budget_states(const Model *model, int64_t tokens);
/* The most pages of a sequence with frames in the windowed lists while a step runs `rows` of its
 * rows. */
int budget_window_pages(const Model *model, int rows);
/* Bytes of such a cache: pages and states. With both kinds of layers, a windowed list counts the
 * frames that one sequence needs, because the lists share all frames. */
size_t budget_cache_bytes(const Model *model, int64_t tokens);
/* One stage's part of it. */
size_t budget_stage_cache(const Model *model, int stage, int64_t tokens);
/* Frames in the pages of `tokens` tokens. */
int64_t budget_frames(const Model *model, int64_t tokens);
/* Bytes of a frame, and of a sequence's states, on one stage. */
size_t frame_bytes(const Model *model, int stage);
size_t state_bytes(const Model *model, int stage);
/* Tokens of a sampler's cache in a memory of `all_bytes`, weights included (0: the device's).
 * `free_bytes` of it are free; more can be freed for the cache of one context. */
int64_t budget_cache_tokens(const Model *model, size_t all_bytes, size_t free_bytes);
/* Bytes of one token in the full lists; of one sequence in the windowed lists while it decodes, at
 * most; and of one sequence's states. */
size_t kv_token_bytes(const Model *model);
size_t kv_window_bytes(const Model *model);
size_t kv_sequence_bytes(const Model *model);

#endif
