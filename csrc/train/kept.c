/* train/kept.c - what is remembered of a forward that backward may follow: its datums, whose arrays
 * the caller may change meanwhile. Its activations lie in the adapter's arena (step.c). */
#include <stdlib.h>
#include <string.h>

#include "step.h"

#define COPY(to, from, count)                          \
    do {                                               \
        size_t bytes = (size_t)(count) * sizeof *(to); \
        (to) = memcpy(next, from, bytes);              \
        next += bytes;                                 \
    } while (0)

Status kept_copy(Kept **out, const Datums *d)
{
    size_t count = (size_t)d->count, tokens = (size_t)d->token_total,
           targets = (size_t)d->target_total;
    Kept *kept = malloc(sizeof *kept + (tokens + targets + 2 * count) * sizeof(int32_t));
    if (!kept) return fail(STATUS_MEMORY, "no memory to keep %zu tokens", tokens);
    char *next = (char *)(kept + 1);
    kept->datums =
        (Datums){.count = d->count, .token_total = d->token_total, .target_total = d->target_total};
    COPY(kept->datums.tokens, d->tokens, tokens);
    COPY(kept->datums.lengths, d->lengths, count);
    COPY(kept->datums.targets, d->targets, targets);
    COPY(kept->datums.counts, d->counts, count);
    *out = kept;
    return STATUS_OK;
}

void adapter_drop_kept(Adapter *adapter)
{
    free(adapter->kept);
    adapter->kept = NULL;
    adapter->held = 0;
}
