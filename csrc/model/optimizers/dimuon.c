/* model/optimizers/dimuon.c - Dimuon's step over an adapter: Muon for the product of LoRA's
 * factors.
 *
 * Thinking Machines named the settings but did not publish the formula. This one is tinsmith's own,
 * after LoRA-Muon (Cesista et al., 2026, arXiv 2606.12921). For a matrix y += scale·(x·A)·B with A
 * (D,R), B (R,N), gradients gA, gB, and moments
 *
 *   M ← beta1·M + (1 − beta1)·g        of A and of B
 *
 * LoRA-Muon moves A along msign(MA·S^-½)·S^-½ with S = B·Bᵀ, where msign makes all singular values
 * 1: the steepest descent of the product in the spectral norm. That is MA·K with
 *
 *   K = S⁻¹ # G⁻¹,  G = MAᵀ·MA         # is the geometric mean of two positive matrices
 *
 * and B is moved along K·MB, of S = Aᵀ·A and G = MB·MBᵀ. S and G are damped: divided by the mean of
 * their eigenvalues, then damping is added to each (S = 0, as of B at the start, counts as the unit
 * matrix). A direction is scaled to the Frobenius norm √R, and a step is
 * learning_rate·(R/32)^exponent times it. If a layer's experts share A, their Bs count as one
 * matrix with X·N columns, and vice versa: experts without rows hardly move.
 *
 * Large products run on the device; R × R matrices are handled here, in double. With Cholesky's S =
 * L·Lᵀ and G = H·Hᵀ, and the orthogonal factor W of L⁻¹·H, K = L⁻ᵀ·W·H⁻¹. W comes by Newton's
 * iteration, scaled after Higham (1986), in about 8 inversions. FRESH and MOMENT_2, which is zero
 * between steps, hold the new moments and weights until all are known to be finite. Only R × R
 * matrices are copied: four per pair to the host, two back. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../stages.h"
#include "optimizer.h"

enum { LEARNING_RATE, BETA1, DAMPING, RANK_EXPONENT, GRAD_CLIP_NORM }; /* the settings */
enum { RANK_PLAIN = 32, NEWTON_MAX = 60 };

/* ---- R × R matrices, row by row ---- */

/* The lower triangle L of a = L·Lᵀ, in place, zeros above; 0 where a is not positive. */
static int cholesky(double *a, int R)
{
    for (int i = 0; i < R; i++) {
        double *row = a + (size_t)i * R;
        for (int j = 0; j <= i; j++) {
            const double *other = a + (size_t)j * R;
            double sum = row[j];
            for (int k = 0; k < j; k++) sum -= row[k] * other[k];
            if (i == j && !(sum > 0.0 && isfinite(sum))) return 0;
            row[j] = i == j ? sqrt(sum) : sum / other[j];
        }
        for (int j = i + 1; j < R; j++) row[j] = 0.0;
    }
    return 1;
}

static void row_subtract(double *row, const double *other, double times, int R)
{
    for (int j = 0; j < R; j++) row[j] -= times * other[j];
}

static void row_divide(double *row, double by, int R)
{
    for (int j = 0; j < R; j++) row[j] /= by;
}

/* x ← L⁻¹·x */
static void lower_solve(const double *l, double *x, int R)
{
    for (int i = 0; i < R; i++) {
        double *row = x + (size_t)i * R;
        for (int k = 0; k < i; k++) row_subtract(row, x + (size_t)k * R, l[(size_t)i * R + k], R);
        row_divide(row, l[(size_t)i * R + i], R);
    }
}

/* x ← L⁻ᵀ·x */
static void upper_solve(const double *l, double *x, int R)
{
    for (int i = R - 1; i >= 0; i--) {
        double *row = x + (size_t)i * R;
        for (int k = i + 1; k < R; k++)
            row_subtract(row, x + (size_t)k * R, l[(size_t)k * R + i], R);
        row_divide(row, l[(size_t)i * R + i], R);
    }
}

static void turn(double *a, int R)
{
    for (int i = 0; i < R; i++)
        for (int j = 0; j < i; j++) {
            double x = a[(size_t)i * R + j];
            a[(size_t)i * R + j] = a[(size_t)j * R + i];
            a[(size_t)j * R + i] = x;
        }
}

/* The row, from k on, with the largest magnitude in column k. */
static int pivot_of(const double *a, int k, int R)
{
    int best = k;
    for (int i = k + 1; i < R; i++)
        if (fabs(a[(size_t)i * R + k]) > fabs(a[(size_t)best * R + k])) best = i;
    return best;
}

static void rows_exchange(double *a, int i, int j, int R)
{
    for (int k = 0; k < R && i != j; k++) {
        double x = a[(size_t)i * R + k];
        a[(size_t)i * R + k] = a[(size_t)j * R + k];
        a[(size_t)j * R + k] = x;
    }
}

static void columns_exchange(double *a, int i, int j, int R)
{
    for (int k = 0; k < R && i != j; k++) {
        double x = a[(size_t)k * R + i];
        a[(size_t)k * R + i] = a[(size_t)k * R + j];
        a[(size_t)k * R + j] = x;
    }
}

/* a ← a⁻¹ in place, by Gauss-Jordan; `order` has R numbers. 0: a is singular. */
static int invert(double *a, double *order, int R)
{
    for (int k = 0; k < R; k++) {
        int best = pivot_of(a, k, R);
        order[k] = best;
        rows_exchange(a, k, best, R);
        double *row = a + (size_t)k * R, pivot = row[k];
        if (pivot == 0.0 || !isfinite(pivot)) return 0;
        row[k] = 1.0;
        row_divide(row, pivot, R);
        for (int i = 0; i < R; i++) {
            double *other = a + (size_t)i * R, times = other[k];
            if (i == k) continue;
            other[k] = 0.0;
            row_subtract(other, row, times, R);
        }
    }
    for (int k = R - 1; k >= 0; k--) columns_exchange(a, k, (int)order[k], R);
    return 1;
}

/* The largest sum of magnitudes of a row, times that of a column. */
static double sums_largest(const double *a, int R)
{
    double rows = 0.0, columns = 0.0;
    for (int i = 0; i < R; i++) {
        double row = 0.0, column = 0.0;
        for (int j = 0; j < R; j++) {
            row += fabs(a[(size_t)i * R + j]);
            column += fabs(a[(size_t)j * R + i]);
        }
        rows = fmax(rows, row);
        columns = fmax(columns, column);
    }
    return rows * columns;
}

/* w ← its orthogonal factor W, w = P·W with P positive; work has R² + R numbers. 0: there is none.
 * After a step that moves w by 1e-6, the error is 1e-12. */
static int orthogonal(double *w, double *work, int R)
{
    size_t all = (size_t)R * (size_t)R;
    double change = INFINITY;
    for (int step = 0; step < NEWTON_MAX && change > 1e-6; step++) {
        memcpy(work, w, all * sizeof *w);
        if (!invert(work, work + all, R)) return 0;
        turn(work, R);
        double g = change > 1e-2 ? pow(sums_largest(work, R) / sums_largest(w, R), 0.25) : 1.0;
        double moved = 0.0;
        for (size_t i = 0; i < all; i++) {
            double next = 0.5 * (g * w[i] + work[i] / g);
            moved += (next - w[i]) * (next - w[i]);
            w[i] = next;
        }
        change = sqrt(moved / R);
    }
    return change <= 1e-6;
}

/* The mean of the diagonal. */
static double mean_of(const double *a, int R)
{
    double sum = 0.0;
    for (int i = 0; i < R; i++) sum += a[(size_t)i * R + i];
    return sum / R;
}

static void damp(double *a, double damping, int R)
{
    double mean = mean_of(a, R);
    for (size_t i = 0; mean > 0.0 && i < (size_t)R * (size_t)R; i++) a[i] /= mean;
    for (int i = 0; i < R; i++) a[(size_t)i * R + i] += mean > 0.0 ? damping : 1.0;
}

/* ‖x·k‖ of a symmetric k, where g = xᵀ·x; work has R numbers. */
static double length_of(const double *k, const double *g, double *work, int R)
{
    double sum = 0.0;
    for (int i = 0; i < R; i++) {
        memset(work, 0, (size_t)R * sizeof *work);
        for (int e = 0; e < R; e++) row_subtract(work, k + (size_t)e * R, -g[(size_t)i * R + e], R);
        for (int j = 0; j < R; j++) sum += work[j] * k[(size_t)i * R + j];
    }
    return sqrt(sum);
}

/* k for moments with Gram matrix g and the other factor's Gram matrix s, scaled so that ‖moments·k‖
 * = length; 0 if g is 0. Overwrites s; work has 4·R² numbers. Returns 0 if a matrix is not positive
 * or not finite. */
static int mix_of(double *k, double *s, const double *g, double damping, double length,
                  double *work, int R)
{
    size_t all = (size_t)R * (size_t)R;
    double *h = work, *w = work + all, mean = mean_of(g, R);
    memset(k, 0, all * sizeof *k);
    if (mean == 0.0) return 1;
    if (!isfinite(mean) || !isfinite(mean_of(s, R))) return 0;
    memcpy(h, g, all * sizeof *h);
    damp(h, damping, R);
    damp(s, damping, R);
    if (!cholesky(h, R) || !cholesky(s, R)) return 0;
    memcpy(w, h, all * sizeof *w);
    lower_solve(s, w, R);
    if (!orthogonal(w, work + 2 * all, R)) return 0;
    upper_solve(s, w, R);
    turn(w, R);
    upper_solve(h, w, R);
    for (int i = 0; i < R; i++)
        for (int j = 0; j < R; j++)
            k[(size_t)i * R + j] = 0.5 * (w[(size_t)i * R + j] + w[(size_t)j * R + i]);
    double scale = length / length_of(k, g, h, R);
    for (size_t i = 0; i < all; i++) k[i] *= scale;
    return isfinite(scale);
}

/* ---- the adapter's pairs ---- */

enum { OF_A, OF_B, OF_MA, OF_MB, GRAMS };

typedef struct Directions {
    Adapter *adapter;
    double damping, length;
    Arenas grams; /* on each stage, GRAMS of them; then the two mixes */
    double *host; /* the same, and 4 matrices of work */
    Status status;
} Directions;

/* One of a pair's factors: its numbers, and the matrices that share the other factor. */
typedef struct Factor {
    int of_b, count;
    int64_t n, at, step;
} Factor;

static Factor factor_of(const SlotInfo *info, Pair pair, int of_b)
{
    int64_t other = of_b ? pair.a_step : pair.b_step;
    return (Factor){.of_b = of_b,
                    .count = other == 0 ? info->count : 1,
                    .n = of_b ? info->rows : info->cols,
                    .at = of_b ? pair.b : pair.a,
                    .step = of_b ? pair.b_step : pair.a_step};
}

/* The Gram matrix of a factor in a flat vector, summed over all matrices that share the other. */
static void gram_put(const Directions *d, const Stage *stage, double *gram, Vector from, Factor f)
{
    Device *dev = stage->dev;
    int R = d->adapter->rank;
    dev->zero(dev, gram, (size_t)R * (size_t)R * sizeof *gram);
    for (int i = 0; i < f.count; i++, f.at += f.step)
        dev->gram(dev, gram, vector_at(d->adapter, from, stage, f.at), f.n, R, f.of_b);
}

static void factor_mix(const Directions *d, const Stage *stage, const double *mix, Factor f)
{
    Device *dev = stage->dev;
    const Adapter *a = d->adapter;
    for (int i = 0; i < f.count; i++, f.at += f.step)
        dev->mix(dev, vector_at(a, MOMENT_2, stage, f.at), vector_at(a, WEIGHTS, stage, f.at),
                 vector_at(a, FRESH, stage, f.at), mix, f.n, a->rank, f.of_b);
}

/* A pair's new factors. A shared factor is computed with its first pair. */
static void pair_step(void *context, const SlotInfo *info, int layer, int index, Pair pair)
{
    Directions *d = context;
    const Model *model = d->adapter->model;
    const Stage *stage = layer < 0 ? stage_last(model) : stage_of(model, layer);
    Device *dev = stage->dev;
    int R = d->adapter->rank;
    size_t all = (size_t)R * (size_t)R;
    if (d->status || (index > 0 && (pair.a_step == 0 || pair.b_step == 0))) return;
    double *grams = (double *)d->grams.of[stage - model->stage].base;
    const Factor a = factor_of(info, pair, 0), b = factor_of(info, pair, 1);
    gram_put(d, stage, grams + OF_A * all, WEIGHTS, a);
    gram_put(d, stage, grams + OF_B * all, WEIGHTS, b);
    gram_put(d, stage, grams + OF_MA * all, FRESH, a);
    gram_put(d, stage, grams + OF_MB * all, FRESH, b);
    if ((d->status = dev->sync(dev))) return;
    dev->download(dev, d->host, grams, GRAMS * all * sizeof *d->host);
    double *host = d->host, *mixes = host + GRAMS * all, *work = mixes + 2 * all;
    int made =
        mix_of(mixes, host + OF_B * all, host + OF_MA * all, d->damping, d->length, work, R) &&
        mix_of(mixes + all, host + OF_A * all, host + OF_MB * all, d->damping, d->length, work, R);
    if (!made) {
        d->status = STATUS_NUMERIC;
        return;
    }
    dev->upload(dev, grams, mixes, 2 * all * sizeof *mixes);
    factor_mix(d, stage, grams, a);
    factor_mix(d, stage, grams + all, b);
}

/* FRESH = the new moments. */
static void moments_mix(const Adapter *adapter, float scale, float rate)
{
    for (int k = 0; k < adapter->model->stages; k++) {
        Device *dev = adapter->model->stage[k].dev;
        float *to = adapter->vector[FRESH].of[k];
        size_t bytes = adapter->bytes.of[k];
        if (!bytes) continue;
        dev->copy(dev, to, adapter->vector[MOMENT_1].of[k], bytes);
        dev->average(dev, to, adapter->vector[GRADIENTS].of[k], (int64_t)(bytes / sizeof *to),
                     scale, rate);
    }
}

/* The moments and weights after the step, in FRESH and MOMENT_2, and the weights' norm; NaN: no
 * step is possible. */
static Status step_try(Adapter *adapter, const double *o, float scale, double *norm)
{
    const Model *model = adapter->model;
    int R = adapter->rank;
    size_t all = (size_t)R * (size_t)R * sizeof(double);
    Arenas measured = {0};
    Directions d = {.adapter = adapter, .damping = o[DAMPING]};
    *norm = NAN;
    d.length = o[LEARNING_RATE] * pow((double)R / RANK_PLAIN, o[RANK_EXPONENT]) * sqrt(R);
    if (!isfinite(d.length)) return STATUS_OK;
    for (int k = 0; k < model->stages; k++) measured.of[k].used = GRAMS * all;
    d.status = arenas_reserve(model, &d.grams, &measured, "a step of Dimuon");
    d.host = malloc((GRAMS + 2 + 4) * all);
    if (!d.host && !d.status)
        d.status = fail(STATUS_MEMORY, "no memory for a step of Dimuon with rank %d", R);
    if (!d.status) {
        moments_mix(adapter, scale, (float)(1.0 - o[BETA1]));
        adapter_visit(adapter, pair_step, &d);
    }
    if (!d.status) d.status = adapter_norm(adapter, MOMENT_2, norm);
    if (d.status == STATUS_NUMERIC) d.status = STATUS_OK;
    Status last = model_sync(model);
    free(d.host);
    arenas_release(&d.grams);
    return d.status ? d.status : last;
}

static Status step_take(Adapter *adapter, const double *o, float scale, double *norm)
{
    Weights *before = NULL;
    TRY(adapter_take(adapter, FRESH));
    Status status = step_try(adapter, o, scale, norm);
    int taken = !status && *norm < WEIGHT_NORM_MAX;
    if (taken) status = weights_change(adapter, &before);
    if (taken && !status) {
        Flat *moment = &adapter->vector[MOMENT_1], *fresh = &adapter->vector[FRESH], old = *moment;
        *moment = *fresh;
        *fresh = old;
        for (int k = 0; k < adapter->model->stages; k++) {
            Device *dev = adapter->model->stage[k].dev;
            dev->copy(dev, adapter->vector[WEIGHTS].of[k], adapter->vector[MOMENT_2].of[k],
                      adapter->bytes.of[k]);
        }
    }
    adapter_give(adapter, FRESH);
    adapter_blank(adapter, MOMENT_2);
    Status last = model_sync(adapter->model);
    weights_leave(before);
    return status ? status : last;
}

const OptimizerRow dimuon_row = {
    .name = "dimuon",
    .setting = {[LEARNING_RATE] = {"learning_rate", 0.0, INFINITY},
                [BETA1] = {"beta1", 0.0, 1.0},
                [DAMPING] = {"damping", 0x1p-1022, INFINITY},
                [RANK_EXPONENT] = {"rank_lr_correction_exponent", -INFINITY, INFINITY},
                [GRAD_CLIP_NORM] = {"grad_clip_norm", -INFINITY, INFINITY}},
    .clip_norm = GRAD_CLIP_NORM,
    .fails = ", or divides by a matrix that has no inverse",
    .other = "more damping",
    .take = step_take,
};
