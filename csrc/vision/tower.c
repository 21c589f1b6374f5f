/* vision/tower.c - the vision tower: pixels → patches → blocks → one row of features a token.
 *
 *   x = patch·W + b + position;  each block:  x += attention(LN(x)),  x += fc2(gelu(fc1(LN(x))))
 *   features = fc2(gelu(fc1(LN(x))))  of each token's merge² patches side by side
 *
 * Every patch attends to all patches of its image. A patch's position is blended from the table of
 * positions, and its row and column turn its q and k, each a half of their pairs. Blocks named in
 * `deep` also give features (deepstack), from a merger of their own, which normalizes a token's
 * patches together instead of each alone.
 *
 * It only runs forward: LoRA trains the text model, as the hosted service does. Patches are in an
 * order in which those of a token follow each other, so merging them is another way to read the
 * same memory. One image runs at a time, and its rows run the ops of the text model, which are
 * batch-invariant. So an image's features have the same bits whenever they are computed. */
#include "tower.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../device/finite.h"

#define NORM_EPS 1e-6f
#define ROPE_BASE 10000.0

enum { AXES = 2, CORNERS = 4 };

/* ---- shape ---- */

TowerTensor tower_tensor(const TowerShape *s, TowerSlot slot, int i)
{
    (void)i;
    switch (slot) {
#define TOWER_MATRIX(slot, many, rows, cols) \
    case TOWER_##slot: return (TowerTensor){#slot, 1, many, rows, cols};
#define TOWER_VECTOR(slot, many, length) \
    case TOWER_##slot: return (TowerTensor){#slot, 0, many, 1, length};
#include "tower.inc"
    case TOWER_SLOTS: break;
    }
    return (TowerTensor){0};
}

static Status numbers_check(const TowerShape *s)
{
    if (s->deeps > DEEPS_MOST)
        return fail(STATUS_INVALID, "a tower has at most %d blocks with features, not %d",
                    DEEPS_MOST, s->deeps);
    for (int k = 0; k < s->deeps; k++)
        if (s->deep[k] <= (k ? s->deep[k - 1] : -1) || s->deep[k] >= s->depth)
            return fail(STATUS_INVALID, "deep must be increasing numbers of %d blocks, not %d",
                        s->depth, s->deep[k]);
    for (int c = 0; c < 3; c++)
        if (!isfinite(s->mean[c]) || !isfinite(s->std[c]) || s->std[c] == 0.0f)
            return fail(STATUS_INVALID, "mean and std must be finite, and std not 0");
    if (!isfinite(s->rescale)) return fail(STATUS_INVALID, "rescale must be finite");
    return STATUS_OK;
}

static Status tower_check(const TowerShape *s)
{
    struct {
        const char *name;
        int value, most;
    } size[] = {
        {"depth", s->depth, 1024},   {"width", s->width, 1 << 16}, {"heads", s->heads, 1 << 12},
        {"ffn", s->ffn, 1 << 18},    {"grid", s->grid, 1 << 10},   {"out", s->out, 1 << 20},
        {"patch", s->patch, 1 << 8}, {"merge", s->merge, 1 << 3},  {"frames", s->frames, 1 << 3}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        if (size[i].value < 1 || size[i].value > size[i].most)
            return fail(STATUS_INVALID, "a tower's %s must be at least 1 and at most %d, not %d",
                        size[i].name, size[i].most, size[i].value);
    if (s->width % s->heads || s->width / s->heads % 4 || s->width / s->heads > 256)
        return fail(STATUS_INVALID,
                    "width (%d) must be heads (%d) times a multiple of 4, which is at most 256",
                    s->width, s->heads);
    return numbers_check(s);
}

/* ---- weights ---- */

static size_t tensor_step(const Tower *tower, TowerSlot slot)
{
    TowerTensor one = tower_tensor(&tower->shape, slot, 1); /* the largest of its slot */
    if (!one.matrix) return arena_step((size_t)one.cols * sizeof(float));
    return arena_step(tower->dev->frozen_bytes(tower->dev, tower->type, one.rows, one.cols));
}

static const frozen *matrix(const Tower *tower, TowerSlot slot, int index)
{
    return (const frozen *)(tower->slot[slot] + (size_t)index * tensor_step(tower, slot));
}

static const float *vector(const Tower *tower, TowerSlot slot, int index)
{
    return (const float *)(void *)(tower->slot[slot] + (size_t)index * tensor_step(tower, slot));
}

/* Walks tower.inc: measures while the arena has no base, places when it has one. */
static void tower_place(Tower *tower)
{
    size_t pairs = (size_t)(tower->shape.width / tower->shape.heads / 2);
    tower->weights.used = 0;
    tower->freq = arena_take(&tower->weights, pairs * sizeof *tower->freq);
    tower->axis = arena_take(&tower->weights, pairs * sizeof *tower->axis);
    for (TowerSlot slot = 0; slot < TOWER_SLOTS; slot++) {
        size_t many = (size_t)tower_tensor(&tower->shape, slot, 0).many;
        tower->slot[slot] = arena_take(&tower->weights, many * tensor_step(tower, slot));
    }
}

/* A pair's frequency: the first half of the pairs turn with the row, the others with the column,
 * by the same frequencies. In f32, as the reference computes them. */
static void rope_upload(Tower *tower)
{
    Device *dev = tower->dev;
    int pairs = tower->shape.width / tower->shape.heads / 2, half = pairs / AXES;
    float freq[256];
    int32_t axis[256];
    for (int e = 0; e < pairs; e++) {
        float power = (float)(2 * (e % half)) / (float)pairs;
        freq[e] = 1.0f / (float)pow(ROPE_BASE, (double)power);
        axis[e] = e / half;
    }
    dev->upload(dev, tower->freq, freq, (size_t)pairs * sizeof *freq);
    dev->upload(dev, tower->axis, axis, (size_t)pairs * sizeof *axis);
}

static Status weights_reserve(Tower *tower)
{
    if (tower->weights.base) return STATUS_OK;
    TRY(arena_reserve(&tower->weights, tower->bytes, "the vision tower"));
    tower_place(tower);
    rope_upload(tower);
    return STATUS_OK;
}

Status tower_open(Tower **out, const TowerShape *shape, DType type, Device *dev,
                  Device *const *level)
{
    TRY(tower_check(shape));
    if (type != DTYPE_F32 && type != DTYPE_BF16)
        return fail(STATUS_INVALID, "a tower's matrices are f32 or bf16, not %s",
                    dtype_info(type).name);
    Tower *tower = calloc(1, sizeof *tower);
    if (!tower) return fail(STATUS_MEMORY, "no memory for a vision tower");
    tower->dev = dev;
    tower->shape = *shape;
    tower->type = type;
    tower->weights.dev = dev;
    memcpy(tower->level, level, (size_t)(1 + shape->deeps) * sizeof *level);
    tower->most = shape->depth > 1 + shape->deeps ? shape->depth : 1 + shape->deeps;
    tower->loaded = calloc(TOWER_SLOTS, (size_t)tower->most);
    if (!tower->loaded || !dev->frozen_bytes(dev, type, shape->width, patch_width(shape))) {
        Status status = !tower->loaded ? fail(STATUS_MEMORY, "no memory for a vision tower")
                                       : fail(STATUS_INVALID, "the device %s has no %s weights",
                                              dev->name, dtype_info(type).name);
        tower_close(tower);
        return status;
    }
    tower_place(tower);
    tower->bytes = tower->weights.used;
    *out = tower;
    return STATUS_OK;
}

void tower_close(Tower *tower)
{
    if (!tower) return;
    arena_release(&tower->weights);
    free(tower->loaded);
    free(tower);
}

static TowerSlot slot_of(const char *name)
{
    static const TowerShape none = {0};
    TowerSlot slot = 0;
    while (slot < TOWER_SLOTS && strcmp(tower_tensor(&none, slot, 0).name, name) != 0) slot++;
    return slot;
}

Status tower_load(Tower *tower, const char *name, int index, const void *array, DType type,
                  int rows, int cols)
{
    Device *dev = tower->dev;
    TowerSlot slot = slot_of(name);
    if (tower->sealed)
        return fail(STATUS_INVALID, "the tower is sealed: nothing more can be loaded");
    if (slot == TOWER_SLOTS) return fail(STATUS_INVALID, "no slot of a tower is called '%s'", name);
    TowerTensor one = tower_tensor(&tower->shape, slot, index);
    if (index < 0 || index >= one.many)
        return fail(STATUS_INVALID, "%s: number %d, but there are %d", name, index, one.many);
    if (rows != one.rows || cols != one.cols)
        return fail(STATUS_INVALID, "%s %d: file has (%d, %d), the tower needs (%d, %d)", name,
                    index, rows, cols, one.rows, one.cols);
    if (one.matrix ? !dtype_loads(tower->type, type) : type != DTYPE_F32)
        return fail(STATUS_INVALID, "%s: the array is %s, the tower keeps it in %s", name,
                    dtype_info(type).name, dtype_info(one.matrix ? tower->type : DTYPE_F32).name);
    TRY(weights_reserve(tower));
    char *to = tower->slot[slot] + (size_t)index * tensor_step(tower, slot);
    int finite = one.matrix
                     ? dev->frozen_load(dev, (frozen *)to, tower->type, array, type, rows, cols)
                     : first_bad(array, DTYPE_F32, cols) < 0;
    if (!one.matrix) dev->upload(dev, to, array, (size_t)cols * sizeof(float));
    TRY(dev->sync(dev));
    tower->loaded[(size_t)slot * (size_t)tower->most + (size_t)index] = finite != 0;
    return finite ? STATUS_OK : fail(STATUS_INVALID, "%s %d: a number is not finite", name, index);
}

Status tower_seal(Tower *tower)
{
    for (TowerSlot slot = 0; slot < TOWER_SLOTS; slot++) {
        TowerTensor one = tower_tensor(&tower->shape, slot, 0);
        for (int i = 0; i < one.many; i++)
            if (!tower->loaded[(size_t)slot * (size_t)tower->most + (size_t)i])
                return fail(STATUS_INVALID, "%s %d was not loaded", one.name, i);
    }
    tower->sealed = 1;
    return STATUS_OK;
}

/* ---- one image's run ---- */

typedef struct TowerRun {
    const Tower *tower;
    const Image *image;
    const atomic_int *stop;
    int P, pages; /* patches */
    uint8_t *pixels;
    real *x, *xn, *qkv, *q, *k, *att, *wide; /* wide: patches, fc1's output, a merger's */
    cached *k_pages, *v_pages;
    float *lse, *cosine, *sine;
    real *here; /* features to be moved to another device */
    /* One block on the host, then on the device. */
    int32_t *place, *slot, *page, *corner; /* place (P,2): row and column of a patch */
    float *share;                          /* corner and share (P,4) */
    Span *span;
    real *level[1 + DEEPS_MOST];
} TowerRun;

static void tables_place(TowerRun *r, Arena *arena)
{
    size_t P = (size_t)r->P;
    r->place = arena_take(arena, AXES * P * sizeof(int32_t));
    r->slot = arena_take(arena, P * sizeof(int32_t));
    r->page = arena_take(arena, (size_t)r->pages * sizeof(int32_t));
    r->corner = arena_take(arena, CORNERS * P * sizeof(int32_t));
    r->share = arena_take(arena, CORNERS * P * sizeof(float));
    r->span = arena_take(arena, sizeof(Span));
}

static void run_place(TowerRun *r, Arena *arena)
{
    const TowerShape *s = &r->tower->shape;
    const Device *dev = r->tower->dev;
    size_t P = (size_t)r->P, D = (size_t)s->width, size = dev->real_bytes, wide = (size_t)s->ffn;
    size_t keys = (size_t)r->pages * KV_PAGE * D * dev->cached_bytes;
    if (wide < D) wide = D;
    if (wide < (size_t)patch_width(s)) wide = (size_t)patch_width(s);
    tables_place(r, arena);
    size_t side = (size_t)r->image->side;
    r->pixels = arena_take(arena, (size_t)image_rows(r->image) * side * side * 3);
    r->x = arena_take(arena, P * D * size);
    r->xn = arena_take(arena, P * D * size);
    r->qkv = arena_take(arena, 3 * P * D * size);
    r->q = arena_take(arena, P * D * size);
    r->k = arena_take(arena, P * D * size);
    r->att = arena_take(arena, P * D * size);
    r->wide = arena_take(arena, P * wide * size);
    r->k_pages = arena_take(arena, keys);
    r->v_pages = arena_take(arena, keys);
    r->lse = arena_take(arena, P * (size_t)s->heads * sizeof(float));
    r->cosine = arena_take(arena, P * (D / (size_t)s->heads / 2) * sizeof(float));
    r->sine = arena_take(arena, P * (D / (size_t)s->heads / 2) * sizeof(float));
    r->here = arena_take(arena, (size_t)image_rows(r->image) * (size_t)s->out * size);
}

/* The two places of the table between which coordinate `i` of `count` lies, and their shares. The
 * first and last patch lie on the table's first and last place. In f32, as in the reference. */
static void between(int i, int count, int grid, int32_t at[2], float share[2])
{
    float source = (float)i * (float)(grid - 1) / (float)(count > 1 ? count - 1 : 1);
    float low = floorf(source), part = source - low;
    at[0] = (int32_t)low;
    at[1] = at[0] + 1 < grid ? at[0] + 1 : grid - 1;
    share[0] = 1.0f - part;
    share[1] = fmaxf(1.0f - fabsf(part - 1.0f), 0.0f);
}

/* Patches are ordered by token, within it by row. */
static void tables_fill(const TowerRun *r)
{
    const TowerShape *s = &r->tower->shape;
    int m = s->merge, tall = r->image->high * m, wide = r->image->wide * m;
    for (int n = 0; n < r->P; n++) {
        int32_t row = n / (m * wide) * m + n / m % m, col = n / (m * m) % (wide / m) * m + n % m;
        int32_t rows[2], cols[2], *corner = r->corner + CORNERS * n;
        float down[2], across[2], *share = r->share + CORNERS * n;
        between(row, tall, s->grid, rows, down);
        between(col, wide, s->grid, cols, across);
        for (int c = 0; c < CORNERS; c++) {
            corner[c] = rows[c / 2] * s->grid + cols[c % 2];
            share[c] = down[c / 2] * across[c % 2];
        }
        r->place[AXES * n] = row;
        r->place[AXES * n + 1] = col;
        r->slot[n] = n;
    }
    for (int i = 0; i < r->pages; i++) r->page[i] = i;
    *r->span = (Span){0, r->P, 0, 0, -1};
}

/* Sends the tables and the pixels. */
static Status tables_upload(const TowerRun *r)
{
    Device *dev = r->tower->dev;
    Arena measure = {0};
    TowerRun host = *r;
    tables_place(&host, &measure);
    measure = (Arena){.base = malloc(measure.used), .size = measure.used};
    if (!measure.base) return fail(STATUS_MEMORY, "no memory for an image of %d patches", r->P);
    tables_place(&host, &measure);
    tables_fill(&host);
    dev->upload(dev, r->place, measure.base, measure.used);
    free(measure.base);
    size_t side = (size_t)r->image->side;
    dev->upload(dev, r->pixels, r->image->pixels, (size_t)image_rows(r->image) * side * side * 3);
    return STATUS_OK;
}

static void embed(const TowerRun *r)
{
    const Tower *t = r->tower;
    const TowerShape *s = &t->shape;
    Device *d = t->dev;
    Patches how = {.rows = r->image->high * s->merge,
                   .cols = r->image->wide * s->merge,
                   .side = s->patch,
                   .merge = s->merge,
                   .frames = s->frames,
                   .rescale = s->rescale};
    memcpy(how.mean, s->mean, sizeof how.mean);
    memcpy(how.std, s->std, sizeof how.std);
    d->patches(d, r->wide, r->pixels, how);
    d->linear(d, r->x, r->wide, matrix(t, TOWER_patch, 0), vector(t, TOWER_patch_bias, 0), NULL,
              r->P, s->width, patch_width(s), s->width);
    d->blend(d, r->x, vector(t, TOWER_pos, 0), r->corner, r->share, r->P, CORNERS, s->width);
    d->rope_table(d, r->cosine, r->sine, r->place, t->axis, t->freq, r->P, s->width / s->heads,
                  AXES, 1.0f);
}

static void block(const TowerRun *r, int l)
{
    const Tower *t = r->tower;
    const TowerShape *s = &t->shape;
    Device *d = t->dev;
    int P = r->P, D = s->width, H = s->heads, E = D / H, F = s->ffn;
    const real *k_raw = real_at(d, r->qkv, (size_t)D), *v = real_at(d, r->qkv, 2 * (size_t)D);
    d->layernorm(d, r->xn, r->x, vector(t, TOWER_norm1, l), vector(t, TOWER_norm1_bias, l), P, D,
                 NORM_EPS);
    d->linear(d, r->qkv, r->xn, matrix(t, TOWER_qkv, l), vector(t, TOWER_qkv_bias, l), NULL, P,
              3 * D, D, 3 * D);
    d->rotate(d, r->q, r->k, NULL, NULL, r->qkv, k_raw, NULL, NULL, r->cosine, r->sine, P, H, H, E,
              E, 3 * D, 3 * D, 0.0f);
    d->kv_write(d, r->k_pages, r->v_pages, r->k, v, r->slot, P, H, E, 3 * D);
    d->attention(d, r->att, r->lse, r->q, r->k_pages, r->v_pages, r->span, r->page, 1, P, H, H, E,
                 0, 1);
    d->linear(d, r->x, r->att, matrix(t, TOWER_proj, l), vector(t, TOWER_proj_bias, l), r->x, P, D,
              D, D);
    d->layernorm(d, r->xn, r->x, vector(t, TOWER_norm2, l), vector(t, TOWER_norm2_bias, l), P, D,
                 NORM_EPS);
    d->linear(d, r->wide, r->xn, matrix(t, TOWER_fc1, l), vector(t, TOWER_fc1_bias, l), NULL, P, F,
              D, F);
    d->gelu(d, r->wide, r->wide, (int64_t)P * F, 0);
    d->linear(d, r->x, r->wide, matrix(t, TOWER_fc2, l), vector(t, TOWER_fc2_bias, l), r->x, P, D,
              F, D);
}

/* Merger 0 normalizes each patch, the others all patches of a token together. */
static void merge(const TowerRun *r, int k)
{
    const Tower *t = r->tower;
    const TowerShape *s = &t->shape;
    Device *d = t->dev;
    int rows = image_rows(r->image), M = merged_width(s), one = k ? M : s->width;
    real *to = t->level[k] == d ? r->level[k] : r->here;
    d->layernorm(d, r->xn, r->x, vector(t, TOWER_merge_norm, k),
                 vector(t, TOWER_merge_norm_bias, k), k ? rows : r->P, one, NORM_EPS);
    d->linear(d, r->wide, r->xn, matrix(t, TOWER_merge_fc1, k), vector(t, TOWER_merge_fc1_bias, k),
              NULL, rows, M, M, M);
    d->gelu(d, r->wide, r->wide, (int64_t)rows * M, 1);
    d->linear(d, to, r->wide, matrix(t, TOWER_merge_fc2, k), vector(t, TOWER_merge_fc2_bias, k),
              NULL, rows, s->out, M, s->out);
    if (to == r->here)
        t->level[k]->receive(t->level[k], r->level[k], d, to,
                             (size_t)rows * (size_t)s->out * d->real_bytes);
}

static void run_work(void *context)
{
    const TowerRun *r = context;
    const TowerShape *s = &r->tower->shape;
    int deep = 0;
    embed(r);
    for (int l = 0; l < s->depth && !(r->stop && *r->stop); l++) {
        block(r, l);
        if (deep < s->deeps && s->deep[deep] == l) merge(r, ++deep);
    }
    merge(r, 0);
}

/* In an arena that is placed. */
static Status run_all(TowerRun *r)
{
    Status status = STATUS_OK;
    const Tower *t = r->tower;
    TRY(device_prepare(t->dev, run_work, r));
    TRY(tables_upload(r));
    run_work(r);
    for (int k = 0; k <= t->shape.deeps; k++) {
        Status one = t->level[k]->sync(t->level[k]);
        if (!status) status = one;
    }
    Status own = t->dev->sync(t->dev);
    if (!status) status = own;
    if (!status && r->stop && *r->stop)
        status = fail(STATUS_INTERRUPTED, "the vision tower was interrupted");
    return status;
}

Status tower_run(const Tower *tower, const Image *image, real *const *level, const atomic_int *stop)
{
    const TowerShape *s = &tower->shape;
    if (image->side != s->patch * s->merge)
        return fail(STATUS_INVALID, "an image's tokens are %d pixels wide; the tower's are %d",
                    image->side, s->patch * s->merge);
    if (!image->pixels) return image_gone(image);
    TowerRun run = {.tower = tower, .image = image, .stop = stop};
    run.P = image_rows(image) * s->merge * s->merge;
    run.pages = (run.P + KV_PAGE - 1) / KV_PAGE;
    memcpy(run.level, level, (size_t)(1 + s->deeps) * sizeof *level);
    Arena arena = {.dev = tower->dev};
    run_place(&run, &arena);
    TRY(arena_reserve(&arena, arena.used, "the vision tower's work on an image"));
    run_place(&run, &arena);
    Status status = run_all(&run);
    arena_release(&arena);
    return status;
}
