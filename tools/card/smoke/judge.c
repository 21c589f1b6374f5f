/* tools/card/smoke/judge.c - the verdict on a result, and what is told of a wrong one: enough to
 * mend a kernel without the card.
 *
 * A result is right if ‖got − exact‖ ≤ bar·‖exact‖ over the rows that are compared, if each of
 * their elements is, and if no element of the whole result is NaN or was never written. An element
 * is right if
 *
 *   |got − exact| ≤ 4·bar·max(|exact|, rms of its exact row, rms of all exact rows / 64)
 *
 * where only the first counts for results that are no sums; the last is for rows whose terms cancel
 * to 0. The norm sees errors that are small
 * and everywhere, the elements one that is alone among millions.
 *
 * Compared are all rows of a short result. Of a long one: the first and the last three, `together`
 * ones from its middle on, which have all residues of a tile, and those with a NaN or an element
 * that was not written. A line's residues count wrong rows and wrong columns, not elements. */
#include "smoke.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { FIRST = 8, EDGE = 3, BROKEN_ROWS = 16, SIZES_BYTES = 256, LEFT_BYTES = 4 << 20 };

const char *wrong_folder;
int found;

static char said_sizes[SIZES_BYTES];

typedef struct Verdict {
    const Result *r;
    const char *raw; /* the whole result, as the device has it */
    size_t unwritten, nan;
    int *rows, count; /* that are compared */
    double *exact;    /* (count, cols) */
    double error, worst;
    size_t wrong;
    char *bad;  /* (rows, cols): what is wrong */
    int *place; /* of a row among those compared, or −1 */
} Verdict;

double bar_real(void)
{
    return dev->real_bytes == 2 ? 4e-3 : 1e-5;
}

void sizes(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(said_sizes, sizeof said_sizes, format, args);
    va_end(args);
}

void same_row(double *row, int r, const void *of)
{
    const Same *same = of;
    for (int i = 0; i < same->cols; i++)
        row[i] = same->x[(size_t)r * (size_t)same->cols + (size_t)i];
}

static void *zeros(size_t n, size_t bytes)
{
    void *x = calloc(n ? n : 1, bytes);
    if (!x) abort();
    return x;
}

/* ---- elements ---- */

static double element(const Verdict *v, size_t i)
{
    switch (v->r->kind) {
    case REAL:
        if (dev->real_bytes == 2) return of_bf16(((const uint16_t *)v->raw)[i]);
        break;
    case I32: return ((const int32_t *)v->raw)[i];
    case F64: return ((const double *)v->raw)[i];
    default: break;
    }
    return ((const float *)v->raw)[i];
}

/* Whether an element is still what room() left there. */
static int is_unwritten(const Verdict *v, size_t i)
{
    static const unsigned char ones[8] = {0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF};
    size_t bytes = kind_bytes(v->r->kind);
    return !memcmp(v->raw + i * bytes, ones, bytes);
}

static int same_bits(double got, double exact)
{
    float a = (float)got, b = (float)exact;
    return !memcmp(&a, &b, sizeof a);
}

/* Marks each NaN and each element that was not written, and chooses the rows. */
static void choose(Verdict *v)
{
    const Result *r = v->r;
    int middle = r->rows / 2 / TOGETHER * TOGETHER, broken = 0;
    int together = r->together ? r->together : TOGETHER;
    for (int t = 0; t < r->rows; t++) {
        int breaks = 0;
        for (int c = 0; c < r->cols; c++) {
            size_t i = (size_t)t * (size_t)r->cols + (size_t)c;
            int unwritten = is_unwritten(v, i), nan = !unwritten && isnan(element(v, i));
            v->unwritten += (size_t)unwritten, v->nan += (size_t)nan;
            breaks |= v->bad[i] = (char)(unwritten || nan);
        }
        int chosen = t < EDGE || t >= r->rows - EDGE || (t >= middle && t < middle + together);
        if (r->rows <= TOGETHER + 2 * EDGE) chosen = 1;
        if (breaks && !chosen && broken < BROKEN_ROWS) broken++, chosen = 1;
        v->place[t] = chosen ? v->count : -1;
        if (chosen) v->rows[v->count++] = t;
    }
}

static void exact_row(int i, const void *of)
{
    const Verdict *v = of;
    v->r->exact(v->exact + (size_t)i * (size_t)v->r->cols, v->rows[i], v->r->of);
}

static double square_of(const double *x, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    return sum;
}

static void compare(Verdict *v)
{
    const Result *r = v->r;
    double off = 0, size = 0;
    for (int i = 0; i < v->count; i++)
        size += square_of(v->exact + (size_t)i * (size_t)r->cols, r->cols);
    double least = sqrt(size / ((double)v->count * r->cols)) / 64;
    for (int i = 0; i < v->count; i++) {
        const double *exact = v->exact + (size_t)i * (size_t)r->cols;
        size_t at = (size_t)v->rows[i] * (size_t)r->cols;
        double spread = fmax(sqrt(square_of(exact, r->cols) / r->cols), least);
        for (int c = 0; c < r->cols; c++) {
            double got = element(v, at + (size_t)c), by = fabs(got - exact[c]);
            double bar = 4 * r->bar * (r->alone ? fabs(exact[c]) : fmax(fabs(exact[c]), spread));
            if (by > 0) v->worst = fmax(v->worst, by / bar);
            if (!(by <= bar) || (r->bits && !same_bits(got, exact[c]))) v->bad[at + (size_t)c] = 1;
            off += by * by;
        }
    }
    v->error = sqrt(off / (size > 0 ? size : 1));
    for (size_t i = 0; i < (size_t)r->rows * (size_t)r->cols; i++) v->wrong += (size_t)v->bad[i];
}

/* ---- telling ---- */

/* JSON has no infinities. */
static const char *number(char text[32], double x)
{
    if (isfinite(x))
        snprintf(text, 32, "%.9g", x);
    else
        snprintf(text, 32, isnan(x) ? "\"nan\"" : x > 0 ? "\"inf\"" : "\"-inf\"");
    return text;
}

/* How many of n are wrong with each residue; "all" where every residue has as many. */
static void tell_residues(FILE *to, const char *name, const char *wrong, int n, int modulus)
{
    int count[64] = {0}, told = 0, differs = 0;
    for (int i = 0; i < n; i++) count[i % modulus] += wrong[i];
    for (int i = 1; i < modulus; i++) differs |= count[i] != count[0];
    fprintf(to, ", \"%s_%d\": {", name, modulus);
    if (!differs && count[0]) fprintf(to, "\"all\": %d", count[0]);
    for (int i = 0; i < modulus; i++)
        if (differs && count[i]) fprintf(to, "%s\"%d\": %d", told++ ? ", " : "", i, count[i]);
    fprintf(to, "}");
}

static void tell_first(FILE *to, const Verdict *v)
{
    const Result *r = v->r;
    char got[32], exact[32];
    int told = 0;
    fprintf(to, ", \"first\": [");
    for (size_t i = 0; told < FIRST && i < (size_t)r->rows * (size_t)r->cols; i++) {
        if (!v->bad[i]) continue;
        int place = v->place[i / (size_t)r->cols];
        number(got, element(v, i));
        snprintf(exact, sizeof exact, "null"); /* there is a NaN in more rows than are compared */
        if (place >= 0)
            number(exact, v->exact[(size_t)place * (size_t)r->cols + i % (size_t)r->cols]);
        const char *written = is_unwritten(v, i) ? "\"unwritten\"" : got;
        fprintf(to, "%s[%zu, %s, %s]", told++ ? ", " : "", i, written, exact);
    }
    fprintf(to, "]");
}

static void tell_map(FILE *to, const Verdict *v)
{
    const Result *r = v->r;
    char *rows = zeros((size_t)r->rows, 1), *cols = zeros((size_t)r->cols, 1);
    int wrong_rows = 0, wrong_cols = 0;
    for (int t = 0; t < r->rows; t++)
        for (int c = 0; c < r->cols; c++)
            if (v->bad[(size_t)t * (size_t)r->cols + (size_t)c]) rows[t] = cols[c] = 1;
    for (int t = 0; t < r->rows; t++) wrong_rows += rows[t];
    for (int c = 0; c < r->cols; c++) wrong_cols += cols[c];
    fprintf(to, ", \"wrong_elements\": %zu, \"wrong_rows\": %d, \"wrong_columns\": %d", v->wrong,
            wrong_rows, wrong_cols);
    fprintf(to, ", \"nan\": %zu, \"unwritten\": %zu", v->nan, v->unwritten);
    tell_residues(to, "rows", rows, r->rows, 16);
    tell_residues(to, "rows", rows, r->rows, 64);
    tell_residues(to, "columns", cols, r->cols, 8);
    tell_residues(to, "columns", cols, r->cols, 64);
    fprintf(to, ", \"shape\": [%d, %d], \"compared_rows\": %d, \"seed\": %u", r->rows, r->cols,
            v->count, block_seed);
    free(rows), free(cols);
}

/* Leaves an array of f32 (count, cols), as NumPy reads it. */
static void leave_npy(const char *path, const float *x, int count, int cols)
{
    FILE *to = fopen(path, "wb");
    if (!to) return;
    char head[119];
    snprintf(head, sizeof head, "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d), }",
             count, cols);
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, to);
    fprintf(to, "%-117s\n", head);
    fwrite(x, sizeof *x, (size_t)count * (size_t)cols, to);
    fclose(to);
}

/* The rows to leave of those compared: from the first wrong one on, as many as there is room for.
 * An op's results share LEFT_BYTES. */
static int left_of(const Verdict *v, int *first)
{
    static const char *op;
    static size_t left;
    const Result *r = v->r;
    size_t row_bytes = 2 * 4 * (size_t)r->cols;
    if (op != r->op) op = r->op, left = LEFT_BYTES;
    *first = 0;
    for (size_t i = 0; i < (size_t)r->rows * (size_t)r->cols; i++)
        if (v->bad[i] && v->place[i / (size_t)r->cols] >= 0) {
            *first = v->place[i / (size_t)r->cols];
            break;
        }
    size_t most = left / row_bytes;
    if ((size_t)v->count <= most) *first = 0;
    int count = v->count - *first;
    if ((size_t)count > most) count = (int)most;
    left -= row_bytes * (size_t)count;
    return count;
}

static void leave_arrays(const Verdict *v, const char *line)
{
    static int number_of_files;
    const Result *r = v->r;
    int first, count = left_of(v, &first);
    size_t n = (size_t)count * (size_t)r->cols;
    float *got = zeros(n, 4), *exact = zeros(n, 4);
    for (size_t i = 0; i < n; i++) {
        size_t row = i / (size_t)r->cols, at = i % (size_t)r->cols;
        got[i] = (float)element(v, (size_t)v->rows[first + (int)row] * (size_t)r->cols + at);
        exact[i] = (float)v->exact[((size_t)first + row) * (size_t)r->cols + at];
    }
    char name[512], path[600];
    snprintf(name, sizeof name, "%s/%02d-%s-%s", wrong_folder, ++number_of_files, r->op, r->name);
    for (char *c = name + strlen(wrong_folder) + 1; *c; c++)
        if (strchr(" ,/", *c)) *c = '-';
    snprintf(path, sizeof path, "%s.got.npy", name);
    leave_npy(path, got, count, r->cols);
    snprintf(path, sizeof path, "%s.exact.npy", name);
    leave_npy(path, exact, count, r->cols);
    snprintf(path, sizeof path, "%s.json", name);
    FILE *to = fopen(path, "w");
    if (to) {
        fprintf(to, "%s, \"rows\": [", line);
        for (int i = 0; i < count; i++) fprintf(to, "%s%d", i ? ", " : "", v->rows[first + i]);
        fprintf(to, "]}\n");
        fclose(to);
    }
    free(got), free(exact);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double lap(void)
{
    static double before;
    double now = seconds_now(), took = before > 0 ? now - before : 0;
    before = now;
    return took;
}

static void tell(const Verdict *v)
{
    const Result *r = v->r;
    int wrong = v->wrong || !(v->error <= r->bar);
    char *line = NULL, error[32], worst[32];
    size_t bytes = 0;
    FILE *to = open_memstream(&line, &bytes);
    if (!to) abort();
    number(error, v->error), number(worst, v->worst);
    fprintf(to, "{\"op\": \"%s\", \"result\": \"%s\", \"error\": %s, \"bar\": %.3g", r->op, r->name,
            error, r->bar);
    fprintf(to, ", \"worst\": %s, \"seconds\": %.3f, \"sizes\": {%s}", worst, lap(), said_sizes);
    if (wrong) {
        fprintf(to, ", \"wrong\": \"%s: %s errs by %.3g, the bar is %.3g; %zu elements are wrong\"",
                r->op, r->name, v->error, r->bar, v->wrong);
        tell_first(to, v), tell_map(to, v);
    }
    fclose(to);
    printf("%s}\n", line);
    fflush(stdout);
    if (wrong && wrong_folder) leave_arrays(v, line);
    free(line);
    found |= wrong;
}

void judge(Result r)
{
    size_t n = (size_t)r.rows * (size_t)r.cols;
    Verdict v = {.r = &r, .raw = get(r.at, n * kind_bytes(r.kind))};
    if (dev->sync(dev)) stop(r.op);
    v.rows = zeros((size_t)r.rows, sizeof *v.rows),
    v.place = zeros((size_t)r.rows, sizeof *v.place);
    v.bad = zeros(n, 1);
    choose(&v);
    v.exact = zeros((size_t)v.count * (size_t)r.cols, sizeof *v.exact);
    each(v.count, exact_row, &v);
    compare(&v);
    tell(&v);
    free(v.rows), free(v.place), free(v.bad), free(v.exact);
}
