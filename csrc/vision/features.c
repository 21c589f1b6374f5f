/* vision/features.c - images' features, kept on the devices while there is room.
 *
 * Features depend on the tower's weights and the pixels alone: they are the same for every run,
 * step and adapter. So an image runs through the tower once, and again only after its features were
 * evicted, to the same bits. Those of the step in flight are never evicted. */
#include "features.h"

#include <stdlib.h>
#include <string.h>

/* How many known images have that first id or a higher one. */
static int known_to(const FeatureCache *cache, int32_t first)
{
    int low = 0, high = cache->count;
    while (low < high) {
        int middle = low + (high - low) / 2;
        if (cache->known[middle]->image->first >= first)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static Features *find(const Tower *tower, const Image *image)
{
    const FeatureCache *cache = &tower->features;
    int at = known_to(cache, image->first);
    return at && cache->known[at - 1]->image == image ? cache->known[at - 1] : NULL;
}

int features_keep(Tower *tower, const Image *image)
{
    Features *features = find(tower, image);
    if (features) features->used = tower->features.use;
    return features != NULL;
}

void features_begin(Tower *tower)
{
    tower->features.use++;
}

/* ---- memory ---- */

static size_t level_bytes(const Tower *tower, const Image *image)
{
    return arena_step((size_t)image_rows(image) * (size_t)tower->shape.out *
                      tower->dev->real_bytes);
}

static void features_free(const Tower *tower, Features *features)
{
    size_t bytes = level_bytes(tower, features->image);
    for (int k = 0; k <= tower->shape.deeps; k++)
        if (features->level[k])
            tower->level[k]->release(tower->level[k], features->level[k], bytes);
    free(features);
}

/* Evicts the features that no step wanted for longest; 0: all are in use. */
static int evict(Tower *tower)
{
    FeatureCache *cache = &tower->features;
    int oldest = -1;
    uint64_t used = cache->use;
    for (int i = 0; i < cache->count; i++) {
        if (cache->known[i]->used >= used) continue;
        used = cache->known[i]->used;
        oldest = i;
    }
    if (oldest < 0) return 0;
    cache->bytes -= cache->known[oldest]->bytes;
    features_free(tower, cache->known[oldest]);
    cache->count--;
    memmove(cache->known + oldest, cache->known + oldest + 1,
            (size_t)(cache->count - oldest) * sizeof *cache->known);
    return 1;
}

void features_drop(Tower *tower)
{
    FeatureCache *cache = &tower->features;
    while (cache->count) features_free(tower, cache->known[--cache->count]);
    free(cache->known);
    *cache = (FeatureCache){.most = cache->most, .use = cache->use, .computed = cache->computed};
}

static Status levels_alloc(const Tower *tower, Features *features)
{
    size_t bytes = level_bytes(tower, features->image);
    for (int k = 0; k <= tower->shape.deeps; k++) {
        Device *dev = tower->level[k];
        void *memory;
        TRY(dev->alloc(dev, &memory, bytes));
        features->level[k] = memory;
    }
    return STATUS_OK;
}

/* Features without numbers yet, for which others are evicted. */
static Status features_make(Features **out, Tower *tower, const Image *image)
{
    FeatureCache *cache = &tower->features;
    size_t bytes = level_bytes(tower, image) * (size_t)(1 + tower->shape.deeps);
    while (cache->bytes + bytes > cache->most && evict(tower)) {
    }
    if (cache->count == cache->capacity) {
        int capacity = cache->capacity ? 2 * cache->capacity : 64;
        Features **grown = realloc(cache->known, (size_t)capacity * sizeof *grown);
        if (!grown) return fail(STATUS_MEMORY, "no memory for another image's features");
        cache->known = grown;
        cache->capacity = capacity;
    }
    Features *features = calloc(1, sizeof *features);
    if (!features) return fail(STATUS_MEMORY, "no memory for another image's features");
    features->image = image;
    features->bytes = bytes;
    Status status = levels_alloc(tower, features);
    while (status == STATUS_MEMORY && evict(tower)) {
        for (int k = 0; k <= tower->shape.deeps; k++)
            if (features->level[k])
                tower->level[k]->release(tower->level[k], features->level[k],
                                         level_bytes(tower, image));
        memset(features->level, 0, sizeof features->level);
        status = levels_alloc(tower, features);
    }
    if (status)
        features_free(tower, features);
    else
        *out = features;
    return status;
}

Status features_want(const Features **out, Tower *tower, const Image *image, const atomic_int *stop)
{
    FeatureCache *cache = &tower->features;
    Features *features = find(tower, image);
    if (!features) {
        TRY(features_make(&features, tower, image));
        Status status = tower_run(tower, image, features->level, stop);
        if (status) {
            features_free(tower, features);
            return status;
        }
        int at = known_to(cache, image->first);
        memmove(cache->known + at + 1, cache->known + at,
                (size_t)(cache->count - at) * sizeof *cache->known);
        cache->known[at] = features;
        cache->count++;
        cache->bytes += features->bytes;
        cache->computed++;
    }
    features->used = cache->use;
    *out = features;
    return STATUS_OK;
}
