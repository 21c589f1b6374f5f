/* model/memory_share.h - the default memory of a training step and a sampler's cache. */
#ifndef TINSMITH_MODEL_MEMORY_SHARE_H
#define TINSMITH_MODEL_MEMORY_SHARE_H

#include "model.h"

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
