/* model/optimizers/optimizer.c - the optimizers (`rows` is the table), and the shared part of their
 * steps: check settings, normalize and clip the gradient, clear it after use.
 *
 * The norm of the weights is watched. If a step makes it grow a thousandfold, the adapter and its
 * snapshots remember the step, and later overflow errors name it (adapter_overflow). */
#include "optimizer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define GROWTH 1e3 /* of the weights' norm in one step: no training needs more */

static const OptimizerRow *const rows[OPTIMIZERS] = {[ADAMW] = &adamw_row, [DIMUON] = &dimuon_row};

const char *optimizer_name(Optimizer optimizer)
{
    return rows[optimizer]->name;
}

Optimizer optimizer_find(const char *name)
{
    int i = 0;
    while (i < OPTIMIZERS && strcmp(rows[i]->name, name) != 0) i++;
    return (Optimizer)i;
}

const Setting *optimizer_settings(Optimizer optimizer)
{
    return rows[optimizer]->setting;
}

/* A sentence for the first setting that is out of its range. */
static Status settings_check(const OptimizerRow *row, const double *value)
{
    for (const Setting *one = row->setting; one->name; one++, value++) {
        if (isfinite(*value) && *value >= one->least && *value < one->below) continue;
        return fail(STATUS_INVALID, "%s must be %s, not %g", one->name,
                    !isinf(one->below)  ? "in [0, 1)"
                    : isinf(one->least) ? "finite"
                    : one->least == 0.0 ? "0 or more and finite"
                                        : "above 0 and finite",
                    *value);
    }
    return STATUS_OK;
}

/* The factor that normalizes and clips the gradients (clip_norm above 0 clips), and the step's
 * report except the weights. */
static Status step_begin(Adapter *adapter, double clip_norm, Normalization by, float *scale,
                         StepReport *report)
{
    if (adapter->step == INT32_MAX)
        return fail(STATUS_INVALID, "the adapter has taken %d steps, which is the most",
                    adapter->step);
    double norm, divisor = by == BY_LOSS_TOKENS ? adapter->tokens
                           : by == BY_SEQUENCES ? adapter->sequences
                                                : 1.0;
    double by_all = divisor > 0.0 ? 1.0 / divisor : 1.0;
    TRY(adapter_norm(adapter, GRADIENTS, &norm));
    norm *= by_all;
    *report = (StepReport){.grad_norm = norm,
                           .clipped_norm = norm,
                           .loss = adapter->loss,
                           .tokens = adapter->tokens,
                           .sequences = adapter->sequences};
    if (clip_norm > 0.0 && clip_norm < norm + 1e-6) {
        by_all *= clip_norm / (norm + 1e-6);
        report->clipped_norm *= clip_norm / (norm + 1e-6);
    }
    *scale = (float)by_all;
    return STATUS_OK;
}

static Status step_refused(const OptimizerRow *row, const double *value)
{
    char text[SETTINGS * 48];
    size_t used = 0;
    for (int i = 0; row->setting[i].name && used < sizeof text; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s %g", i ? ", " : "",
                                 row->setting[i].name, value[i]);
    return fail(STATUS_NUMERIC,
                "the step with %s would leave numbers that float32 can't hold%s: it was not taken, "
                "and weights, moments and gradients are as they were; take it with a lower "
                "learning_rate, with grad_clip_norm or with %s; a client made from the last "
                "save_state has none of these gradients, and zero_grad drops them in process",
                text, row->fails, row->other);
}

/* Warns if the norm grew too much in the step just taken; it was `before`. clear: there were no
 * gradients. */
static void step_watch(Adapter *adapter, double before, int clear, StepReport *report)
{
    double after = report->weight_norm;
    if (before > 0.0 && after > GROWTH * before) {
        adapter->growth = (Growth){adapter->step, before, after};
        growth_text(adapter, report->warning);
    } else if (clear) {
        snprintf(report->warning, sizeof report->warning,
                 "step %d had no gradient: no forward_backward came before it, so that momentum "
                 "and weight decay alone have moved the weights",
                 adapter->step);
    }
}

/* A step with the adapter's GRADIENTS, which stay. *before is the old weights' norm. */
static Status step_take(Adapter *adapter, const double *value, Normalization by, double *before,
                        StepReport *report)
{
    const OptimizerRow *row = rows[adapter->optimizer];
    float scale = 0.0f;
    *before = adapter->weight_norm;
    TRY(step_begin(adapter, value[row->clip_norm], by, &scale, report));
    if (isnan(*before)) TRY(adapter_norm(adapter, WEIGHTS, before));
    adapter->weight_norm = *before;
    TRY(row->take(adapter, value, scale, &report->weight_norm));
    return report->weight_norm < WEIGHT_NORM_MAX ? STATUS_OK : step_refused(row, value);
}

Status adapter_optim_step(Adapter *adapter, const double *value, Normalization by,
                          StepReport *report)
{
    int clear = !flat_exists(&adapter->vector[GRADIENTS]);
    double before;
    TRY(settings_check(rows[adapter->optimizer], value));
    TRY(adapter_take(adapter, GRADIENTS));
    Status status = step_take(adapter, value, by, &before, report);
    if (status && clear) adapter_give(adapter, GRADIENTS);
    if (status) return status;
    adapter->step++;
    adapter->weight_norm = report->weight_norm;
    step_watch(adapter, before, clear, report);
    return adapter_clear(adapter);
}
