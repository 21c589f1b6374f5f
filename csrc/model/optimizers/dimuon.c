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
    double *grams; /* device, GRAMS of them; then the two mixes */
    double *host;  /* the same, and 4 matrices of work */
    Status status;
} Directions;

/* The Gram matrix of a pair's A or B in a flat vector, summed over all parts that share the other
 * factor. */
static void gram_put(Directions *d, int which, const float *from, const SlotInfo *info, Pair pair)
{
    Device *dev = d->adapter->model->dev;
    int R = d->adapter->rank, of_b = which == OF_B || which == OF_MB;
    int64_t n = of_b ? info->rows : info->cols, step = of_b ? pair.b_step : pair.a_step;
    int64_t at = of_b ? pair.b : pair.a, other = of_b ? pair.a_step : pair.b_step;
    double *gram = d->grams + (size_t)which * R * R;
    dev->zero(dev, gram, (size_t)R * (size_t)R * sizeof *gram);
    for (int i = 0; i < (other == 0 ? info->count : 1); i++)
        dev->gram(dev, gram, from + at + i * step, n, R, of_b);
}

static void factor_mix(Directions *d, const double *mix, const SlotInfo *info, Pair pair, int of_b)
{
    Device *dev = d->adapter->model->dev;
    float *const *vector = d->adapter->vector;
    int64_t n = of_b ? info->rows : info->cols, step = of_b ? pair.b_step : pair.a_step;
    int64_t at = of_b ? pair.b : pair.a, other = of_b ? pair.a_step : pair.b_step;
    for (int i = 0; i < (other == 0 ? info->count : 1); i++, at += step)
        dev->mix(dev, vector[MOMENT_2] + at, vector[WEIGHTS] + at, vector[FRESH] + at, mix, n,
                 d->adapter->rank, of_b);
}

/* A pair's new factors. A shared factor is computed with its first pair. */
static void pair_step(void *context, const SlotInfo *info, int layer, int index, Pair pair)
{
    (void)layer;
    Directions *d = context;
    Device *dev = d->adapter->model->dev;
    int R = d->adapter->rank;
    size_t all = (size_t)R * (size_t)R;
    if (d->status || (index > 0 && (pair.a_step == 0 || pair.b_step == 0))) return;
    float *const *vector = d->adapter->vector;
    for (int which = 0; which < GRAMS; which++)
        gram_put(d, which, vector[which < OF_MA ? WEIGHTS : FRESH], info, pair);
    if ((d->status = dev->sync(dev))) return;
    dev->download(dev, d->host, d->grams, GRAMS * all * sizeof *d->host);
    double *host = d->host, *mixes = host + GRAMS * all, *work = mixes + 2 * all;
    int made =
        mix_of(mixes, host + OF_B * all, host + OF_MA * all, d->damping, d->length, work, R) &&
        mix_of(mixes + all, host + OF_A * all, host + OF_MB * all, d->damping, d->length, work, R);
    if (!made) {
        d->status = STATUS_NUMERIC;
        return;
    }
    dev->upload(dev, d->grams, mixes, 2 * all * sizeof *mixes);
    factor_mix(d, d->grams, info, pair, 0);
    factor_mix(d, d->grams + all, info, pair, 1);
}

/* The moments and weights after the step, in FRESH and MOMENT_2, and the weights' norm; NaN: no
 * step is possible. */
static Status step_try(Adapter *adapter, const double *o, float scale, double *norm)
{
    Device *dev = adapter->model->dev;
    int R = adapter->rank;
    size_t all = (size_t)R * (size_t)R * sizeof(double), bytes = (size_t)adapter->size * 4;
    Arena grams = {.dev = dev};
    Directions d = {.adapter = adapter, .damping = o[DAMPING]};
    *norm = NAN;
    d.length = o[LEARNING_RATE] * pow((double)R / RANK_PLAIN, o[RANK_EXPONENT]) * sqrt(R);
    if (!isfinite(d.length)) return STATUS_OK;
    TRY(arena_reserve(&grams, GRAMS * all, "a step of Dimuon"));
    d.grams = (double *)grams.base;
    d.host = malloc((GRAMS + 2 + 4) * all);
    dev->copy(dev, adapter->vector[FRESH], adapter->vector[MOMENT_1], bytes);
    dev->average(dev, adapter->vector[FRESH], adapter->vector[GRADIENTS], adapter->size, scale,
                 (float)(1.0 - o[BETA1]));
    if (!d.host)
        d.status = fail(STATUS_MEMORY, "no memory for a step of Dimuon with rank %d", R);
    else
        adapter_visit(adapter, pair_step, &d);
    if (!d.status) d.status = adapter_norm(adapter, MOMENT_2, norm);
    if (d.status == STATUS_NUMERIC) d.status = STATUS_OK;
    Status last = dev->sync(dev);
    free(d.host);
    arena_release(&grams);
    return d.status ? d.status : last;
}

static Status step_take(Adapter *adapter, const double *o, float scale, double *norm)
{
    Device *dev = adapter->model->dev;
    Weights *before = NULL;
    TRY(adapter_take(adapter, FRESH));
    Status status = step_try(adapter, o, scale, norm);
    int taken = !status && *norm < WEIGHT_NORM_MAX;
    if (taken) status = weights_change(adapter, &before);
    if (taken && !status) {
        float **moment = &adapter->vector[MOMENT_1], **fresh = &adapter->vector[FRESH];
        float *old = *moment;
        *moment = *fresh;
        *fresh = old;
        dev->copy(dev, adapter->vector[WEIGHTS], adapter->vector[MOMENT_2],
                  (size_t)adapter->size * sizeof(float));
    }
    adapter_give(adapter, FRESH);
    adapter_blank(adapter, MOMENT_2);
    Status last = dev->sync(dev);
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
