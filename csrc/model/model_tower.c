/* model/model_tower.c - a base model's vision tower: on which devices it computes and leaves its
 * features, how much of the memory these may take, and which ids it makes legal.
 *
 * The tower is opened when the first image comes: who sends text pays nothing for it. It computes
 * on the first stage, whose embedding its features replace. Features of deepstack are left on the
 * stage of the layer after which they are added. */
#include "model_tower.h"

#include "memory_share.h"
#include "stages.h"

/* Features may take this share of what the weights leave, of the part that is neither a training
 * step's nor a cache's. */
enum { FEATURES_SHARE = 16 };

Status model_tower_open(Model *model, const TowerShape *shape, DType type, size_t all_bytes)
{
    Device *level[1 + DEEPS_MOST] = {model->stage[0].dev};
    if (model->tower) return fail(STATUS_INVALID, "the model has a vision tower already");
    if (shape->out != model->shape.width)
        return fail(STATUS_INVALID, "the tower's features have %d numbers, the model's width is %d",
                    shape->out, model->shape.width);
    if (shape->deeps >= model->shape.layers)
        return fail(STATUS_INVALID,
                    "%d blocks give features for layers: the model must have more, not %d",
                    shape->deeps, model->shape.layers);
    for (int k = 0; k < shape->deeps && k < DEEPS_MOST; k++) level[1 + k] = stage_of(model, k)->dev;
    TRY(tower_open(&model->tower, shape, type, level[0], level));
    model->tower->features.most = budget_step(model, all_bytes) * 2 / FEATURES_SHARE;
    return STATUS_OK;
}

void model_tower_close(Model *model)
{
    if (!model->tower) return;
    model_features_drop(model);
    tower_close(model->tower);
    model->tower = NULL;
}

size_t model_features_bytes(const Model *model)
{
    return model->tower ? model->tower->features.bytes : 0;
}

void model_features_drop(Model *model)
{
    if (model->tower) features_drop(model->tower);
}

Status model_ids_check(int *images, const Model *model, const int32_t *ids, int count,
                       const char *who)
{
    int vocab = model->shape.vocab, bad = 0, below = 0;
    for (int i = 0; i < count; i++) {
        below |= ids[i] < 0;
        if (ids[i] < vocab && (ids[i] >= 0 || image_of(ids[i]))) continue;
        return fail(STATUS_INDEX, "%s at position %d is %d; the model's ids are 0 to %d", who, i,
                    ids[i], vocab - 1);
    }
    *images = 0;
    if (!below) return STATUS_OK;
    *images = image_runs(NULL, ids, count, &bad);
    if (*images < 0)
        return fail(STATUS_INVALID,
                    "%s at position %d is a row of an image whose other rows are "
                    "not beside it",
                    who, bad);
    if (!model->tower || !model->tower->sealed)
        return fail(STATUS_INVALID, "%s is an image's; the model's vision tower is not loaded",
                    who);
    return STATUS_OK;
}
