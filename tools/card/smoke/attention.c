/* tools/card/smoke/attention.c - checks of attention and its gradients, against sums in double; and
 * of decoding, whose rows must have the bits of the same rows at the end of a prefill.
 *
 * Pages lie in shuffled order, and what no key was written to is poison. Two sequences are packed
 * into a training step. Those that are decoded have keys in 1, 2, 9 and 40 of attention.cu's
 * chunks. They are decoded together, alone, and so many at once that no block shares a row's
 * chunks. */
#include "smoke.h"

#include <string.h>

enum {
    SEQUENCES = 4,
    SHORT = 47,  /* keys of the step's second sequence */
    CROWD = 132, /* with two key-value heads or more, more tiles than attention.cu gives apart */
};

static const int keys_of[SEQUENCES] = {70, 300, 2100, 30800};

/* Rows of a sequence's end that are scored as a prefill. */
static int prefilled(int sequence)
{
    int most = shape.tiny ? 20 : 300;
    return keys_of[sequence] < most ? keys_of[sequence] : most;
}

typedef struct Attention {
    const float *q, *k, *v;
    const float *y, *dy, *lse; /* of backward */
    double *delta;             /* Σ_e dy·y, (T,H) */
    const int *pos;            /* of row t */
    const int *key;            /* number in k of its sequence's first key */
    int T, H, G, E, window;
} Attention;

static double score(const Attention *a, int t, int h, int key)
{
    size_t E = (size_t)a->E;
    const float *k = a->k + ((size_t)key * (size_t)a->G + (size_t)(h * a->G / a->H)) * E;
    return dot(a->q + ((size_t)t * (size_t)a->H + (size_t)h) * E, k, a->E) / sqrt(a->E);
}

/* The first key that row t sees, of its sequence's. */
static int first_seen(const Attention *a, int t)
{
    return a->window && a->pos[t] >= a->window ? a->pos[t] - a->window + 1 : 0;
}

static void lse_row(double *row, int t, const void *of)
{
    const Attention *a = of;
    for (int h = 0; h < a->H; h++) {
        double most = -INFINITY, total = 0;
        for (int s = first_seen(a, t); s <= a->pos[t]; s++) {
            double one = score(a, t, h, a->key[t] + s), top = fmax(most, one);
            total = total * exp(most - top) + exp(one - top), most = top;
        }
        row[h] = most + log(total);
    }
}

static void attention_row(double *row, int t, const void *of)
{
    const Attention *a = of;
    lse_row(row, t, of); /* its H numbers are read before they are overwritten, the last first */
    for (int h = a->H - 1; h >= 0; h--) {
        double lse = row[h], *sum = row + (size_t)h * (size_t)a->E;
        memset(sum, 0, (size_t)a->E * sizeof *sum);
        for (int s = first_seen(a, t); s <= a->pos[t]; s++) {
            size_t key = (size_t)(a->key[t] + s) * (size_t)a->G + (size_t)(h * a->G / a->H);
            double share = exp(score(a, t, h, a->key[t] + s) - lse);
            add(sum, share, a->v + key * (size_t)a->E, a->E);
        }
    }
}

/* ---- gradients ---- */

static void delta_row(int t, const void *of)
{
    const Attention *a = of;
    for (int h = 0; h < a->H; h++) {
        size_t row = (size_t)t * (size_t)a->H + (size_t)h;
        a->delta[row] = dot(a->dy + row * (size_t)a->E, a->y + row * (size_t)a->E, a->E);
    }
}

/* p and ds of a query's row, head and key */
static double share_of(const Attention *a, int t, int h, int key, double *ds)
{
    size_t row = (size_t)t * (size_t)a->H + (size_t)h, E = (size_t)a->E;
    const float *v = a->v + ((size_t)key * (size_t)a->G + (size_t)(h * a->G / a->H)) * E;
    double p = exp(score(a, t, h, key) - a->lse[row]);
    *ds = p * (dot(a->dy + row * E, v, a->E) - a->delta[row]);
    return p;
}

static void dq_row(double *row, int t, const void *of)
{
    const Attention *a = of;
    memset(row, 0, (size_t)(a->H * a->E) * sizeof *row);
    for (int h = 0; h < a->H; h++)
        for (int s = first_seen(a, t); s <= a->pos[t]; s++) {
            size_t key = (size_t)(a->key[t] + s) * (size_t)a->G + (size_t)(h * a->G / a->H);
            double ds;
            share_of(a, t, h, a->key[t] + s, &ds);
            add(row + h * a->E, ds / sqrt(a->E), a->k + key * (size_t)a->E, a->E);
        }
}

/* dk or dv of a key, which is a row of the step too: the sum over the queries that see it. */
static void key_row(double *row, int key, const Attention *a, int of_values)
{
    memset(row, 0, (size_t)(a->G * a->E) * sizeof *row);
    for (int t = key; t < a->T && a->key[t] == a->key[key]; t++) {
        if (first_seen(a, t) > a->pos[key]) break;
        for (int h = 0; h < a->H; h++) {
            size_t at = ((size_t)t * (size_t)a->H + (size_t)h) * (size_t)a->E;
            double ds, p = share_of(a, t, h, key, &ds);
            double *to = row + h * a->G / a->H * a->E;
            if (of_values)
                add(to, p, a->dy + at, a->E);
            else
                add(to, ds / sqrt(a->E), a->q + at, a->E);
        }
    }
}

static void dk_row(double *row, int key, const void *of)
{
    key_row(row, key, of, 0);
}

static void dv_row(double *row, int key, const void *of)
{
    key_row(row, key, of, 1);
}

/* ---- pages ---- */

typedef struct Pages {
    cached *k, *v;
    const int32_t *list;
} Pages;

static int common(int a, int b)
{
    return b ? common(b, a % b) : a;
}

/* Pages of sequences with so many keys, which `first` says where each begins in the list of; their
 * keys and values are rows behind one another. */
static Pages pages_of(const int *keys, int count, int *first, Input k, Input v, int G, int E)
{
    int pages = 0, rows = 0, row = 0, stride = 7;
    for (int i = 0; i < count; i++)
        first[i] = pages, pages += (keys[i] + KV_PAGE - 1) / KV_PAGE, rows += keys[i];
    while (common(stride, pages) != 1) stride++;
    int32_t *list = host((size_t)pages * 4), *slot = host((size_t)rows * 4);
    for (int i = 0; i < pages; i++) list[i] = (int32_t)((i + 1) * stride % pages);
    for (int i = 0; i < count; i++)
        for (int s = 0; s < keys[i]; s++)
            slot[row++] = list[first[i] + s / KV_PAGE] * KV_PAGE + s % KV_PAGE;
    size_t bytes = (size_t)pages * KV_PAGE * (size_t)(G * E) * dev->cached_bytes;
    Pages made = {room(bytes / 4, F32), room(bytes / 4, F32), put(list, (size_t)pages * 4)};
    const int32_t *at = put(slot, (size_t)rows * 4);
    RUN(dev->kv_write(dev, made.k, made.v, k.at, v.at, at, rows, G, E, G * E));
    return made;
}

/* ---- a training step ---- */

static void check_step(int window)
{
    int H = shape.H, G = shape.G, E = 128, keys[2] = {shape.tiny ? 70 : 2048, SHORT}, first[2];
    int T = keys[0] + keys[1];
    size_t nq = (size_t)T * (size_t)(H * E), nk = (size_t)T * (size_t)(G * E);
    Input q = input(nq, 18, 1, REAL), k = input(nk, 19, 1, REAL), v = input(nk, 20, 1, REAL);
    Input dy = input(nq, 33, 1, REAL);
    Pages pages = pages_of(keys, 2, first, k, v, G, E);
    Span both[2] = {{0, keys[0], 0, first[0], -1}, {keys[0], keys[1], 0, first[1], -1}};
    const Span *spans = put(both, sizeof both);
    int *pos = host((size_t)T * sizeof *pos), *key = host((size_t)T * sizeof *key);
    for (int t = 0; t < T; t++) key[t] = t < keys[0] ? 0 : keys[0], pos[t] = t - key[t];
    real *y = room(nq, REAL), *dq = room(nq, REAL), *dk = room(nk, REAL), *dv = room(nk, REAL);
    float *lse = room((size_t)(T * H), F32);
    RUN(dev->attention(dev, y, lse, q.at, pages.k, pages.v, spans, pages.list, 2, T, H, G, E,
                       window, 0));
    RUN(dev->attention_backward(dev, dq, dk, dv, dy.at, y, lse, q.at, k.at, v.at, spans, 2, T, H, G,
                                E, window, H * E, G * E));
    Attention of = {q.x,    k.x,    v.x,    .dy = dy.x, .pos = pos,      .key = key,
                    .T = T, .H = H, .G = G, .E = E,     .window = window};
    of.y = fetched(y, nq, REAL), of.lse = fetched(lse, (size_t)(T * H), F32);
    of.delta = host((size_t)(T * H) * sizeof(double));
    each(T, delta_row, &of);
    sizes("\"T\": %d, \"H\": %d, \"G\": %d, \"E\": %d, \"window\": %d", T, H, G, E, window);
    Result r = {"kv_write, attention", "y", y, REAL, T, H * E, bar_real(), .of = &of};
    r.exact = attention_row, judge(r);
    r.name = "lse", r.at = lse, r.kind = F32, r.cols = H, r.bar = BAR_F32, r.exact = lse_row;
    judge(r);
    r.op = "attention_backward", r.kind = REAL, r.bar = 2 * bar_real();
    r.name = "dq", r.at = dq, r.cols = H * E, r.exact = dq_row, judge(r);
    r.name = "dk", r.at = dk, r.cols = G * E, r.exact = dk_row, judge(r);
    r.name = "dv", r.at = dv, r.exact = dv_row, judge(r);
    forget();
}

void check_attention(void)
{
    check_step(0);
}

void check_window(void)
{
    check_step(shape.tiny ? 24 : 128);
}

/* ---- decoding ---- */

typedef struct Decoding {
    Pages pages;
    const char *q; /* the sequences' last rows, one each */
    const float *y, *lse;
    int H, G, E, first[SEQUENCES];
} Decoding;

/* Decodes one row for each of these sequences in one call, and compares them with the prefill. */
static void decode(const Decoding *d, const char *name, const int *which, int count,
                   const Attention *exact)
{
    int width = d->H * d->E;
    size_t row = (size_t)width * dev->real_bytes;
    Span *spans = host((size_t)count * sizeof *spans);
    float *y_rows = host((size_t)(count * width) * 4), *lse_rows = host((size_t)(count * d->H) * 4);
    char *q = device_bytes(row * (size_t)count);
    real *y = room((size_t)(count * width), REAL);
    float *lse = room((size_t)(count * d->H), F32);
    for (int i = 0; i < count; i++) {
        int s = which[i];
        spans[i] = (Span){i, 1, keys_of[s] - 1, d->first[s], -1};
        dev->copy(dev, q + row * (size_t)i, d->q + row * (size_t)s, row);
        memcpy(y_rows + i * width, d->y + s * width, (size_t)width * 4);
        memcpy(lse_rows + i * d->H, d->lse + s * d->H, (size_t)d->H * 4);
    }
    const Span *at = put(spans, (size_t)count * sizeof *spans);
    RUN(dev->attention(dev, y, lse, (const real *)q, d->pages.k, d->pages.v, at, d->pages.list,
                       count, count, d->H, d->G, d->E, 0, 0));
    Same same_y = {y_rows, width}, same_lse = {lse_rows, d->H};
    sizes("\"S\": %d, \"H\": %d, \"G\": %d, \"E\": %d, \"keys\": %d", count, d->H, d->G, d->E,
          keys_of[which[count - 1]]);
    Result r = {name,         "y's bits", y, REAL, count, width, .bits = 1, .exact = same_row,
                .of = &same_y};
    judge(r);
    r.name = "lse's bits", r.at = lse, r.kind = F32, r.cols = d->H, r.of = &same_lse;
    judge(r);
    if (!exact) return;
    r = (Result){name, "y", y, REAL, count, width, bar_real(), .exact = attention_row, .of = exact};
    judge(r);
}

/* Scores the ends of all sequences as a prefill, of which d gets the last rows; T rows in all. */
static void prefill(Decoding *d, Attention *of, Input q, int T)
{
    int row = 0, width = d->H * d->E;
    Span spans[SEQUENCES];
    real *y = room((size_t)T * (size_t)width, REAL);
    float *lse = room((size_t)(T * d->H), F32);
    float *last_y = host((size_t)(SEQUENCES * width) * 4);
    float *last_q = host((size_t)(SEQUENCES * width) * 4);
    float *last_lse = host((size_t)(SEQUENCES * d->H) * 4);
    char *copied = device_bytes((size_t)(SEQUENCES * width) * dev->real_bytes);
    int ends[SEQUENCES];
    for (int s = 0; s < SEQUENCES; s++) {
        int rows = prefilled(s);
        spans[s] = (Span){row, rows, keys_of[s] - rows, d->first[s], -1};
        row += rows, ends[s] = row - 1;
    }
    const Span *at = put(spans, sizeof spans);
    RUN(dev->attention(dev, y, lse, q.at, d->pages.k, d->pages.v, at, d->pages.list, SEQUENCES, T,
                       d->H, d->G, d->E, 0, 0));
    const float *all_y = fetched(y, (size_t)T * (size_t)width, REAL);
    const float *all_lse = fetched(lse, (size_t)(T * d->H), F32);
    for (int s = 0; s < SEQUENCES; s++) {
        size_t from = (size_t)ends[s] * (size_t)width, to = (size_t)(s * width);
        memcpy(last_y + to, all_y + from, (size_t)width * 4);
        memcpy(last_q + to, q.x + from, (size_t)width * 4);
        memcpy(last_lse + s * d->H, all_lse + ends[s] * d->H, (size_t)d->H * 4);
        dev->copy(dev, copied + to * dev->real_bytes, (char *)q.at + from * dev->real_bytes,
                  (size_t)width * dev->real_bytes);
    }
    d->q = copied, d->y = last_y, d->lse = last_lse, of->q = last_q;
}

void check_decoding(void)
{
    Decoding d = {.H = shape.tiny ? 4 : shape.H, .G = shape.tiny ? 2 : shape.G, .E = 128};
    int keys = 0, T = 0, pos[SEQUENCES], key[SEQUENCES], crowd[CROWD];
    static const int all[SEQUENCES] = {0, 1, 2, 3};
    for (int s = 0; s < SEQUENCES; s++) {
        pos[s] = keys_of[s] - 1, key[s] = keys, keys += keys_of[s];
        T += prefilled(s);
    }
    size_t nk = (size_t)keys * (size_t)(d.G * d.E);
    Input k = input(nk, 34, 1, REAL), v = input(nk, 35, 1, REAL);
    Input q = input((size_t)T * (size_t)(d.H * d.E), 36, 1, REAL);
    d.pages = pages_of(keys_of, SEQUENCES, d.first, k, v, d.G, d.E);
    Attention of = {NULL,           k.x,      v.x,      .pos = pos, .key = key,
                    .T = SEQUENCES, .H = d.H, .G = d.G, .E = d.E};
    prefill(&d, &of, q, T);
    decode(&d, "attention, decoding together", all, SEQUENCES, &of);
    for (int s = 0; s < SEQUENCES; s++) decode(&d, "attention, decoding alone", all + s, 1, NULL);
    for (int i = 0; i < CROWD; i++) crowd[i] = i % 2;
    decode(&d, "attention, decoding a crowd", crowd, CROWD, NULL);
    forget();
}
