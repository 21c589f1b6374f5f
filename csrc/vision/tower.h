/* vision/tower.h - the vision tower of a base model: an image's pixels become one row of features
 * for each of its tokens. */
#ifndef TINSMITH_VISION_TOWER_H
#define TINSMITH_VISION_TOWER_H

#include <stdatomic.h>

#include "../device/arena.h"
#include "../device/dtype.h"
#include "images.h"

enum { DEEPS_MOST = 8 };

/* The tower's dimensions, passed by name. `grid` is the side of the table of positions, `patch` the
 * pixels of a patch's side, `merge` the patches of a token's side, `frames` how often a patch
 * repeats an image as if it were a film, and `out` the width of the text model. `deeps` blocks also
 * give features, for the first layers of the text model (deepstack). */
#define TOWER_SIZES(X) \
    X(depth)           \
    X(width)           \
    X(heads)           \
    X(ffn)             \
    X(grid)            \
    X(out)             \
    X(patch)           \
    X(merge)           \
    X(frames)          \
    X(deeps)

typedef struct TowerShape {
#define X(name) int name;
    TOWER_SIZES(X)
#undef X
    int deep[DEEPS_MOST];           /* those blocks, increasing */
    float rescale, mean[3], std[3]; /* (pixel · rescale − mean) / std, by channel */
} TowerShape;

/* Slots in the order of tower.inc. */
typedef enum TowerSlot {
#define TOWER_MATRIX(slot, many, rows, cols) TOWER_##slot,
#define TOWER_VECTOR(slot, many, length) TOWER_##slot,
#include "tower.inc"
    TOWER_SLOTS
} TowerSlot;

/* One tensor of a slot. */
typedef struct TowerTensor {
    const char *name;
    int matrix, many, rows, cols; /* many: of the slot; a vector has one row */
} TowerTensor;

/* features.c */
typedef struct FeatureCache {
    struct Features **known; /* by the images' first ids, from 0 down */
    int count, capacity;
    size_t bytes, most; /* held; and the most that those not in use may take */
    uint64_t use;       /* of the step now */
    int64_t computed;   /* images that ran through the tower */
} FeatureCache;

typedef struct Tower {
    Device *dev;
    Device
        *level[1 + DEEPS_MOST]; /* where features are read: the last merger's, then deepstack's */
    TowerShape shape;
    DType type; /* of its matrices */
    Arena weights;
    size_t bytes; /* of its weights, even before they are loaded */
    char *slot[TOWER_SLOTS];
    unsigned char *loaded; /* [TOWER_SLOTS · most] */
    int most;              /* the most tensors of a slot */
    int sealed;
    float *freq; /* rope's, (E/2), and the axis of each pair */
    int32_t *axis;
    FeatureCache features;
} Tower;

TowerTensor tower_tensor(const TowerShape *shape, TowerSlot slot, int index);
/* A tower without weights. level (1 + deeps) are devices of one kind. */
Status tower_open(Tower **tower, const TowerShape *shape, DType type, Device *dev,
                  Device *const *level);
/* Frees it, without its features. */
void tower_close(Tower *tower);
/* Loads tensor `index` of a slot. Vectors must be f32. */
Status tower_load(Tower *tower, const char *slot, int index, const void *array, DType type,
                  int rows, int cols);
/* Ends loading; an error names a missing tensor. */
Status tower_seal(Tower *tower);
/* Computes an image's features: level[k] (rows, out) on the tower's level[k]. `stop` may be set
 * from outside to stop it. */
Status tower_run(const Tower *tower, const Image *image, real *const *level,
                 const atomic_int *stop);

/* Numbers of a patch, and of a token's patches side by side. */
static inline int patch_width(const TowerShape *s)
{
    return 3 * s->frames * s->patch * s->patch;
}

static inline int merged_width(const TowerShape *s)
{
    return s->merge * s->merge * s->width;
}

#endif
