/* train/datums.c - a training call's data, checked before any work.
 *
 * Each error names the datum, the expected value and the given one. After the checks no id is out
 * of range, and no input number is NaN or infinite. */
#include "datums.h"

#include <math.h>
#include <stdio.h>

#include "../model/model_tower.h"

enum { IGNORED = -100 }; /* Hugging Face's id for a masked target */

static Status lengths_check(const Datums *d, const Model *model)
{
    int64_t tokens = 0, targets = 0;
    for (int i = 0; i < d->count; i++) {
        if (d->lengths[i] < 1)
            return fail(STATUS_INVALID, "datum %d is empty: it has no tokens", i);
        if (d->lengths[i] > model->shape.context)
            return fail(STATUS_INVALID,
                        "datum %d has %d tokens; the model's context is %d: cut it, or leave it "
                        "out",
                        i, d->lengths[i], model->shape.context);
        if (d->counts[i] < 1)
            return fail(STATUS_INVALID,
                        "datum %d has %d targets a position; it must have at least 1", i,
                        d->counts[i]);
        tokens += d->lengths[i];
        targets += (int64_t)d->lengths[i] * d->counts[i];
    }
    if (tokens != d->token_total)
        return fail(STATUS_INVALID, "the lengths add up to %lld tokens, but %lld came",
                    (long long)tokens, (long long)d->token_total);
    if (targets != d->target_total)
        return fail(STATUS_INVALID, "the datums have room for %lld targets, but %lld came",
                    (long long)targets, (long long)d->target_total);
    return STATUS_OK;
}

static Status targets_check(const int32_t *ids, int64_t count, int vocab, int datum, int row)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return fail(STATUS_INDEX,
                        "datum %d: the target at position %lld is %d; the model's ids are 0 to "
                        "%d%s",
                        datum, (long long)(i / row), ids[i], vocab - 1,
                        ids[i] == IGNORED ? "; to mask it, give it any id and the weight 0" : "");
    return STATUS_OK;
}

static Status tokens_check(const int32_t *ids, int count, const Model *model, int datum)
{
    char who[64];
    int images;
    snprintf(who, sizeof who, "datum %d: the token", datum);
    return model_ids_check(&images, model, ids, count, who);
}

Status datums_check(const Datums *d, const Model *model, const Loss *loss)
{
    if (d->count < 1) return fail(STATUS_INVALID, "no datums: at least one is needed");
    TRY(lengths_check(d, model));
    for (int j = 0; j < LOSS_INPUTS && loss->input[j].name; j++) {
        if (!d->input[j] && loss->input[j].required)
            return fail(STATUS_INVALID, "%s needs %s", loss->name, loss->input[j].name);
        if (d->input[j] && d->input_total[j] != d->target_total)
            return fail(STATUS_INVALID, "%s has %lld numbers for %lld targets", loss->input[j].name,
                        (long long)d->input_total[j], (long long)d->target_total);
    }
    for (int j = 0; j < LOSS_KEYS && loss->key[j].name; j++)
        if (isnan(d->key[j]) && isnan(loss->key[j].initial))
            return fail(STATUS_INVALID, "%s needs %s: a number that has no default", loss->name,
                        loss->key[j].name);
        else if (!isfinite(d->key[j]) && d->key[j] != loss->key[j].initial)
            return fail(STATUS_INVALID, "%s of %s must be finite, not %g", loss->key[j].name,
                        loss->name, d->key[j]);
    int64_t token = 0, target = 0;
    for (int i = 0; i < d->count; i++) {
        int64_t targets = (int64_t)d->lengths[i] * d->counts[i];
        if (d->counts[i] > 1 && !loss->multi)
            return fail(STATUS_INVALID, "datum %d has %d targets a position; %s takes one", i,
                        d->counts[i], loss->name);
        TRY(tokens_check(d->tokens + token, d->lengths[i], model, i));
        TRY(targets_check(d->targets + target, targets, model->shape.vocab, i, d->counts[i]));
        for (int j = 0; j < LOSS_INPUTS && loss->input[j].name; j++)
            for (int64_t x = 0; d->input[j] && x < targets; x++)
                if (!isfinite(d->input[j][target + x]))
                    return fail(STATUS_INVALID,
                                "datum %d: %s at position %lld is %g; it must be finite", i,
                                loss->input[j].name, (long long)(x / d->counts[i]),
                                (double)d->input[j][target + x]);
        token += d->lengths[i];
        target += targets;
    }
    return loss->check ? loss->check(loss, d) : STATUS_OK;
}
