/* tools/card/smoke.c - opens the CUDA device's library without Python, runs the ops that steps are
 * made of at a real shape, and compares each with loops on the host, in double.
 *
 *     python -m tools.card.smoke            builds and runs it
 *     gpu_smoke libtinsmith_cuda.so [tiny]
 *
 * A line of JSON for each op: its error, relative to the norm of the result, and the bar. `wrong`
 * is there where the error is above. Inputs are rounded to the device's `real` first, so a bar
 * covers the rounding of the result and sums in another order. Long results are compared on ROWS of
 * their rows. Exits 1 if something was wrong, 2 if there is no device. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../csrc/device/device.h"

enum { ROWS = 6, RANK = 32, HOST_MOST = 96 }; /* arrays that a check may make */

static Device *dev;
static int T, D, H, G, E, F, V, bad;

/* ---- arrays on the host, and where the device has them ---- */

static void *held[HOST_MOST], *placed[HOST_MOST];
static size_t placed_bytes[HOST_MOST];
static int helds, placeds;

static void stop(const char *what)
{
    printf("%s: %s\n", what, status_text());
    exit(2);
}

static float *host(size_t n)
{
    float *x = malloc((n ? n : 1) * sizeof *x);
    if (!x || helds == HOST_MOST) abort();
    return held[helds++] = x;
}

static void *device_bytes(size_t bytes)
{
    void *memory;
    if (placeds == HOST_MOST) abort();
    if (dev->alloc(dev, &memory, bytes)) stop("alloc");
    placed_bytes[placeds] = bytes;
    return placed[placeds++] = memory;
}

static void forget(void)
{
    if (dev->sync(dev)) stop("sync");
    while (placeds--) dev->release(dev, placed[placeds], placed_bytes[placeds]);
    while (helds--) free(held[helds]);
    helds = placeds = 0;
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static float of_bf16(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void rounded(float *x, size_t n)
{
    if (dev->real_bytes == 2)
        for (size_t i = 0; i < n; i++) x[i] = of_bf16(to_bf16(x[i]));
}

/* n numbers of a normal distribution's spread, of a generator that starts anew with `seed`. */
static float *numbers(size_t n, unsigned seed, float scale)
{
    uint64_t state = 0x9E3779B97F4A7C15u * (seed + 1);
    float *x = host(n);
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int j = 0; j < 3; j++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) / (1 << 23) - 1;
        }
        x[i] = sum * scale;
    }
    return x;
}

static void *put(const void *from, size_t bytes)
{
    void *memory = device_bytes(bytes);
    dev->upload(dev, memory, from, bytes);
    return memory;
}

static float *put_f32(const float *x, size_t n)
{
    return put(x, n * sizeof *x);
}

/* Rounds x itself to `real`. */
static real *put_real(float *x, size_t n)
{
    rounded(x, n);
    if (dev->real_bytes == 4) return put(x, n * 4);
    uint16_t *half = malloc(n * 2);
    if (!half) abort();
    for (size_t i = 0; i < n; i++) half[i] = to_bf16(x[i]);
    void *memory = put(half, n * 2);
    free(half);
    return memory;
}

/* Memory full of NaN: what is not written is seen. */
static void *room(size_t bytes)
{
    void *memory = device_bytes(bytes);
    unsigned char *poison = malloc(bytes);
    if (!poison) abort();
    memset(poison, 0xFF, bytes);
    dev->upload(dev, memory, poison, bytes);
    free(poison);
    return memory;
}

static real *room_real(size_t n)
{
    return room(n * dev->real_bytes);
}

static float *room_f32(size_t n)
{
    float *nan = host(n);
    memset(nan, 0xFF, n * sizeof *nan);
    return put_f32(nan, n);
}

static frozen *put_frozen(float *w, int rows, int cols)
{
    rounded(w, (size_t)rows * cols);
    frozen *memory = device_bytes(dev->frozen_bytes(dev, DTYPE_F32, rows, cols));
    dev->frozen_load(dev, memory, DTYPE_F32, w, DTYPE_F32, rows, cols);
    return memory;
}

static float *get_f32(const float *from, size_t n)
{
    float *x = host(n);
    dev->download(dev, x, from, n * sizeof *x);
    return x;
}

static float *get_real(const real *from, size_t n)
{
    if (dev->real_bytes == 4) return get_f32((const float *)from, n);
    uint16_t *half = malloc(n * 2);
    if (!half) abort();
    dev->download(dev, half, from, n * 2);
    float *x = host(n);
    for (size_t i = 0; i < n; i++) x[i] = of_bf16(half[i]);
    free(half);
    return x;
}

/* An op as a step calls it: its scratch is counted, reserved, and then it runs. */
#define RUN(call)                                                    \
    do {                                                             \
        if (dev->rehearse) {                                         \
            dev->rehearse(dev);                                      \
            call;                                                    \
            if (dev->reserve(dev, dev->rehearsed(dev))) stop(#call); \
        }                                                            \
        call;                                                        \
        if (dev->sync(dev)) stop(#call);                             \
    } while (0)

/* ---- comparing ---- */

static double off, size; /* Σ (got − exact)², Σ exact² */

static void compare(double got, double exact)
{
    off += (got - exact) * (got - exact);
    size += exact * exact;
}

static void tell(const char *op, double bar)
{
    double error = sqrt(off / (size > 0 ? size : 1));
    int wrong = !(error <= bar);
    bad |= wrong;
    printf("{\"op\": \"%s\", \"error\": %.3g, \"bar\": %.3g", op, isfinite(error) ? error : 1e30,
           bar);
    if (wrong) printf(", \"wrong\": \"%s errs by %.3g, the bar is %.3g\"", op, error, bar);
    printf("}\n");
    fflush(stdout);
    off = size = 0;
    forget();
}

/* The bars: of what is rounded to `real`, and of what is f32 (sums in another order). */
static double bar_real(void)
{
    return dev->real_bytes == 2 ? 4e-3 : 1e-5;
}
static const double bar_f32 = 2e-5;

static int row_of(int i, int rows)
{
    return (int)((long long)i * (rows - 1) / (ROWS - 1));
}

#define EACH_ROW(t, rows) for (int i_ = 0, t; i_ < ROWS && (t = row_of(i_, rows), 1); i_++)

/* ---- the checks ---- */

static void check_rows(void)
{
    float *w = numbers((size_t)V * D, 1, 1), *x = numbers((size_t)T * D, 2, 1);
    int32_t *ids = (int32_t *)host((size_t)T), *turned = (int32_t *)host((size_t)T);
    for (int t = 0; t < T; t++) ids[t] = (int32_t)((long long)t * 7919 % V), turned[t] = T - 1 - t;
    frozen *table = put_frozen(w, V, D);
    real *y = room_real((size_t)T * D), *z = room_real((size_t)T * D),
         *from = put_real(x, (size_t)T * D);
    const int32_t *at = put(ids, (size_t)T * 4), *back = put(turned, (size_t)T * 4);
    RUN(dev->embed(dev, y, at, table, T, V, D));
    float *got = get_real(y, (size_t)T * D);
    EACH_ROW(t, T)
    for (int d = 0; d < D; d++) compare(got[(size_t)t * D + d], w[(size_t)ids[t] * D + d]);
    RUN(dev->gather(dev, y, from, back, T, D));
    RUN(dev->scatter(dev, z, y, back, T, D));
    got = get_real(z, (size_t)T * D);
    for (size_t i = 0; i < (size_t)T * D; i++) compare(got[i], x[i]);
    tell("embed, gather, scatter", 0);
}

static void check_types(void)
{
    size_t n = (size_t)T * D + 3;
    float *x = numbers(n, 3, 1);
    void *half = device_bytes(n * 2);
    float *from = put_f32(x, n), *y = room_f32(n);
    RUN(dev->narrow(dev, half, from, (int64_t)n));
    RUN(dev->widen(dev, y, half, (int64_t)n));
    float *got = get_f32(y, n);
    for (size_t i = 0; i < n; i++) compare(got[i], of_bf16(to_bf16(x[i])));
    tell("narrow, widen", 0);
}

static void check_products(void)
{
    int N = F;
    float *w = numbers((size_t)N * D, 4, 1.0f / sqrtf((float)D)), *x = numbers((size_t)T * D, 5, 1);
    float *dy = numbers((size_t)T * N, 6, 1);
    frozen *weight = put_frozen(w, N, D);
    real *from = put_real(x, (size_t)T * D), *y = room_real((size_t)T * N);
    RUN(dev->linear(dev, y, from, weight, NULL, NULL, T, N, D, N));
    float *got = get_real(y, (size_t)T * N);
    EACH_ROW(t, T) for (int n = 0; n < N; n++)
    {
        double sum = 0;
        for (int d = 0; d < D; d++) sum += (double)x[(size_t)t * D + d] * w[(size_t)n * D + d];
        compare(got[(size_t)t * N + n], sum);
    }
    tell("linear", bar_real());

    w = numbers((size_t)N * D, 4, 1.0f / sqrtf((float)D)), dy = numbers((size_t)T * N, 6, 1);
    weight = put_frozen(w, N, D);
    real *back = put_real(dy, (size_t)T * N), *dx = room_real((size_t)T * D);
    RUN(dev->linear_backward(dev, dx, back, weight, T, N, D, N, 0));
    got = get_real(dx, (size_t)T * D);
    EACH_ROW(t, T)
    {
        double *sum = calloc((size_t)D, sizeof *sum);
        for (int n = 0; n < N; n++)
            for (int d = 0; d < D; d++)
                sum[d] += (double)dy[(size_t)t * N + n] * w[(size_t)n * D + d];
        for (int d = 0; d < D; d++) compare(got[(size_t)t * D + d], sum[d]);
        free(sum);
    }
    tell("linear_backward", bar_real());
}

static void check_lora(void)
{
    int N = D, R = RANK;
    float *a = numbers((size_t)D * R, 7, 1.0f / sqrtf((float)D)), *b = numbers((size_t)R * N, 8, 1);
    float *x = numbers((size_t)T * D, 9, 1), *y = numbers((size_t)T * N, 10, 1);
    rounded(a, (size_t)D * R), rounded(b, (size_t)R * N);
    real *from = put_real(x, (size_t)T * D);
    Lora one = {.y = put_real(y, (size_t)T * N), .s = room_real((size_t)T * R), .N = N, .step = N};
    one.a = put_f32(a, (size_t)D * R), one.b = put_f32(b, (size_t)R * N);
    RUN(dev->lora(dev, &one, 1, from, T, D, R, 0.5f));
    float *got = get_real(one.y, (size_t)T * N);
    EACH_ROW(t, T)
    {
        double s[RANK] = {0};
        for (int d = 0; d < D; d++)
            for (int r = 0; r < R; r++) s[r] += (double)x[(size_t)t * D + d] * a[(size_t)d * R + r];
        for (int n = 0; n < N; n++) {
            double sum = y[(size_t)t * N + n];
            for (int r = 0; r < R; r++) sum += 0.5 * s[r] * b[(size_t)r * N + n];
            compare(got[(size_t)t * N + n], sum);
        }
    }
    tell("lora", 2 * bar_real());
}

static void check_norm(void)
{
    size_t n = (size_t)T * D;
    float *x = numbers(n, 11, 1), *w = numbers((size_t)D, 12, 1), *dy = numbers(n, 13, 1);
    real *from = put_real(x, n), *y = room_real(n), *back = put_real(dy, n);
    float *scale = put_f32(w, (size_t)D), *rstd = room_f32((size_t)T);
    real *dx = room_real(n);
    RUN(dev->rmsnorm(dev, y, rstd, from, scale, T, D, 1e-6f));
    RUN(dev->rmsnorm_backward(dev, dx, back, from, scale, rstd, NULL, T, D));
    float *got = get_real(y, n), *grad = get_real(dx, n);
    EACH_ROW(t, T)
    {
        const float *row = x + (size_t)t * D, *up = dy + (size_t)t * D;
        double square = 0, dot = 0;
        for (int d = 0; d < D; d++) square += (double)row[d] * row[d];
        double r = 1 / sqrt(square / D + 1e-6);
        for (int d = 0; d < D; d++) dot += (double)up[d] * w[d] * row[d] * r;
        for (int d = 0; d < D; d++) {
            compare(got[(size_t)t * D + d], row[d] * r * w[d]);
            compare(grad[(size_t)t * D + d], r * ((double)up[d] * w[d] - row[d] * r * dot / D));
        }
    }
    tell("rmsnorm, rmsnorm_backward", bar_real());
}

static void check_rotate(void)
{
    size_t n = (size_t)T * H * E, nk = (size_t)T * G * E, half = (size_t)T * E / 2;
    float *x = numbers(n, 14, 1), *w = numbers((size_t)E, 31, 1), *freq = host((size_t)E / 2);
    float *other = numbers(nk, 32, 1);
    int32_t *pos = (int32_t *)host((size_t)T);
    for (int e = 0; e < E / 2; e++) freq[e] = powf(1e4f, -2.0f * (float)e / (float)E);
    for (int t = 0; t < T; t++) pos[t] = t * 3;
    real *from = put_real(x, n), *keys = put_real(other, nk), *q = room_real(n), *k = room_real(nk);
    float *cosine = room_f32(half), *sine = room_f32(half), *inv = put_f32(freq, (size_t)E / 2);
    float *scale = put_f32(w, (size_t)E), *rstd = room_f32((size_t)T * H);
    const int32_t *at = put(pos, (size_t)T * 4);
    RUN(dev->rope_table(dev, cosine, sine, at, inv, T, E, 1));
    RUN(dev->rotate(dev, q, k, rstd, NULL, from, keys, scale, NULL, cosine, sine, T, H, G, E, E,
                    H * E, G * E, 1e-6f));
    float *got = get_real(q, n), *got_k = get_real(k, nk);
    EACH_ROW(t, T) for (int h = 0; h < H + G; h++)
    {
        size_t at_head = h < H ? ((size_t)t * H + h) * E : ((size_t)t * G + h - H) * E;
        const float *u = (h < H ? x : other) + at_head, *to = (h < H ? got : got_k) + at_head;
        double square = 0, r = 1;
        for (int e = 0; e < E; e++) square += (double)u[e] * u[e];
        if (h < H) r = 1 / sqrt(square / E + 1e-6);
        for (int e = 0; e < E / 2; e++) {
            double angle = (float)pos[t] * freq[e], c = cos(angle), s = sin(angle);
            double a = r * u[e] * (h < H ? w[e] : 1),
                   b = r * u[e + E / 2] * (h < H ? w[e + E / 2] : 1);
            compare(to[e], a * c - b * s);
            compare(to[e + E / 2], b * c + a * s);
        }
    }
    tell("rope_table, rotate", bar_real());
}

static void check_swiglu(void)
{
    size_t n = (size_t)T * F;
    float *g = numbers(n, 15, 1), *u = numbers(n, 16, 1), *dy = numbers(n, 17, 1);
    real *gate = put_real(g, n), *up = put_real(u, n), *y = room_real(n);
    real *back = put_real(dy, n), *dgate = room_real(n), *dup = room_real(n);
    RUN(dev->swiglu(dev, y, gate, up, T, F, F, F));
    RUN(dev->swiglu_backward(dev, dgate, dup, back, gate, up, T, F, F, F));
    float *got = get_real(y, n), *a = get_real(dgate, n), *b = get_real(dup, n);
    for (size_t i = 0; i < n; i += 7) {
        double s = 1 / (1 + exp(-(double)g[i]));
        compare(got[i], g[i] * s * u[i]);
        compare(a[i], dy[i] * (double)u[i] * s * (1 + g[i] * (1 - s)));
        compare(b[i], dy[i] * (double)g[i] * s);
    }
    tell("swiglu, swiglu_backward", bar_real());
}

static void check_attention(void)
{
    int pages = (T + KV_PAGE - 1) / KV_PAGE, keys = pages * KV_PAGE;
    size_t nq = (size_t)T * H * E, nk = (size_t)T * G * E, all = (size_t)keys * G * E;
    float *q = numbers(nq, 18, 1), *k = numbers(nk, 19, 1), *v = numbers(nk, 20, 1);
    int32_t *slot = (int32_t *)host((size_t)T), *list = (int32_t *)host((size_t)pages);
    for (int i = 0; i < pages; i++) list[i] = pages - 1 - i; /* pages in another order */
    for (int t = 0; t < T; t++) slot[t] = list[t / KV_PAGE] * KV_PAGE + t % KV_PAGE;
    Span whole = {0, T, 0, 0, -1};
    real *to = put_real(q, nq), *kr = put_real(k, nk), *vr = put_real(v, nk);
    cached *kp = room(all * dev->cached_bytes), *vp = room(all * dev->cached_bytes);
    real *y = room_real(nq);
    float *lse = room_f32((size_t)T * H);
    const int32_t *at = put(slot, (size_t)T * 4), *order = put(list, (size_t)pages * 4);
    const Span *spans = put(&whole, sizeof whole);
    RUN(dev->kv_write(dev, kp, vp, kr, vr, at, T, G, E, G * E));
    RUN(dev->attention(dev, y, lse, to, kp, vp, spans, order, 1, T, H, G, E, 0));
    float *got = get_real(y, nq), *told = get_f32(lse, (size_t)T * H);
    double *p = malloc((size_t)T * sizeof *p), *sum = malloc((size_t)E * sizeof *sum);
    EACH_ROW(t, T) for (int h = 0; h < H; h++)
    {
        int g = h * G / H;
        double most = -INFINITY, total = 0;
        for (int s = 0; s <= t; s++) {
            double dot = 0;
            for (int e = 0; e < E; e++)
                dot += (double)q[((size_t)t * H + h) * E + e] * k[((size_t)s * G + g) * E + e];
            p[s] = dot / sqrt(E);
            most = fmax(most, p[s]);
        }
        for (int e = 0; e < E; e++) sum[e] = 0;
        for (int s = 0; s <= t; s++) {
            double share = exp(p[s] - most);
            total += share;
            for (int e = 0; e < E; e++) sum[e] += share * v[((size_t)s * G + g) * E + e];
        }
        compare(told[(size_t)t * H + h], most + log(total));
        for (int e = 0; e < E; e++) compare(got[((size_t)t * H + h) * E + e], sum[e] / total);
    }
    free(p), free(sum);
    tell("kv_write, attention", bar_real());
}

static void check_head(void)
{
    int rows = ROWS, K = 8;
    size_t n = (size_t)rows * V;
    float *x = numbers((size_t)rows * D, 21, 1),
          *w = numbers((size_t)V * D, 22, 2 / sqrtf((float)D));
    int32_t *ids = (int32_t *)host((size_t)rows), *start = (int32_t *)host((size_t)rows + 1);
    Draw *draws = (Draw *)host((size_t)rows * sizeof(Draw) / 4);
    for (int t = 0; t <= rows; t++) start[t] = t;
    for (int t = 0; t < rows; t++)
        ids[t] = (t * 7907 + 1) % V, draws[t] = (Draw){.top_p = 1, .limit = V};
    real *from = put_real(x, (size_t)rows * D);
    frozen *weight = put_frozen(w, V, D);
    float *logits = room_f32(n), *lse = room_f32((size_t)rows * 2), *logp = room_f32((size_t)rows);
    float *best = room_f32((size_t)rows * K), *drawn = room_f32((size_t)rows);
    int32_t *top = device_bytes((size_t)rows * K * 4), *chosen = device_bytes((size_t)rows * 4);
    const int32_t *at = put(ids, (size_t)rows * 4), *begins = put(start, ((size_t)rows + 1) * 4);
    const Draw *how = put(draws, (size_t)rows * sizeof *draws);
    RUN(dev->head(dev, logits, from, weight, rows, V, D));
    RUN(dev->logprob(dev, lse, logp, logits, at, begins, rows, V));
    RUN(dev->topk_logprob(dev, top, best, logits, lse, rows, V, K));
    RUN(dev->sample(dev, chosen, drawn, logits, lse, how, rows, V));
    float *shown = get_f32(logits, n), *told = get_f32(logp, (size_t)rows);
    float *scores = get_f32(best, (size_t)rows * K);
    int32_t *tops = (int32_t *)get_f32((float *)top, (size_t)rows * K);
    int32_t *greedy = (int32_t *)get_f32((float *)chosen, (size_t)rows);
    for (int t = 0; t < rows; t++) {
        const float *row = shown + (size_t)t * V;
        double most = -INFINITY, total = 0;
        int first = 0;
        for (int u = 0; u < V; u++) {
            double sum = 0;
            for (int d = 0; d < D; d++) sum += (double)x[(size_t)t * D + d] * w[(size_t)u * D + d];
            compare(row[u], sum);
            if (row[u] > most) most = row[u], first = u;
        }
        for (int u = 0; u < V; u++) total += exp(row[u] - most);
        double whole = most + log(total);
        compare(told[t], row[ids[t]] - whole);
        compare(scores[(size_t)t * K], most - whole);
        if (tops[(size_t)t * K] != first || greedy[t] != first) off = INFINITY;
        for (int i = 1; i < K; i++)
            if (scores[(size_t)t * K + i] > scores[(size_t)t * K + i - 1]) off = INFINITY;
    }
    tell("head, logprob, topk_logprob, greedy sample", bar_f32);
}

static void check_experts(void)
{
    int X = 8, K = 2, P = T * K, N = 64;
    float *l = numbers((size_t)T * X, 23, 1), *x = numbers((size_t)T * D, 24, 1);
    float *w = numbers((size_t)X * N * D, 25, 1.0f / sqrtf((float)D));
    real *logits = put_real(l, (size_t)T * X), *from = put_real(x, (size_t)T * D);
    rounded(w, (size_t)X * N * D);
    size_t one = dev->frozen_bytes(dev, DTYPE_F32, N, D), step = (one + 255) / 256 * 256;
    char *weights = device_bytes(step * (size_t)X);
    for (int e = 0; e < X; e++)
        dev->frozen_load(dev, (frozen *)(weights + step * (size_t)e), DTYPE_F32,
                         w + (size_t)e * N * D, DTYPE_F32, N, D);
    size_t ints = (size_t)P * 4;
    int32_t *chosen = device_bytes(ints), *pair = device_bytes(ints), *row = device_bytes(ints);
    int32_t *place = device_bytes(ints), *bounds = device_bytes((size_t)X * 8);
    float *share = room_f32((size_t)P);
    real *ex = room_real((size_t)P * D), *y = room_real((size_t)P * N),
         *sum = room_real((size_t)T * N);
    RUN(dev->route(dev, chosen, share, logits, T, X, K, 1));
    RUN(dev->group(dev, pair, row, place, bounds, chosen, T, K, X));
    RUN(dev->gather(dev, ex, from, row, P, D));
    RUN(dev->grouped_linear(dev, y, ex, (frozen *)weights, (int64_t)step, NULL, bounds, X, P, N,
                            D, 1));
    RUN(dev->unite(dev, sum, y, place, NULL, T, K, N));
    float *got = get_real(sum, (size_t)T * N);
    int32_t *who = (int32_t *)get_f32((float *)chosen, (size_t)P);
    EACH_ROW(t, T)
    {
        const float *row_l = l + (size_t)t * X;
        int first = 0;
        for (int e = 1; e < X; e++) first = row_l[e] > row_l[first] ? e : first;
        if (who[(size_t)t * K] != first) off = INFINITY;
        for (int n = 0; n < N; n++) {
            double exact = 0;
            for (int i = 0; i < K; i++) {
                const float *m = w + ((size_t)who[(size_t)t * K + i] * N + n) * D;
                for (int d = 0; d < D; d++) exact += (double)x[(size_t)t * D + d] * m[d];
            }
            compare(got[(size_t)t * N + n], exact);
        }
    }
    tell("route, group, grouped_linear, unite", 2 * bar_real());
}

static void check_optimizer(void)
{
    size_t n = (size_t)D * RANK * 7 + 5;
    float *w = numbers(n, 26, 1), *m = numbers(n, 27, 0.1f), *v = numbers(n, 28, 0.1f);
    float *g = numbers(n, 29, 1), *more = numbers(n, 30, 1);
    for (size_t i = 0; i < n; i++) v[i] *= v[i];
    float *dw = put_f32(w, n), *dm = put_f32(m, n), *dv = put_f32(v, n), *dg = put_f32(g, n);
    float *dx = put_f32(more, n);
    double none = 0, *total = put(&none, sizeof none), summed;
    RUN((dev->zero(dev, total, 8), dev->square_sum(dev, total, dg, (int64_t)n)));
    dev->download(dev, &summed, total, 8);
    dev->accumulate(dev, dx, dg, (int64_t)n);
    dev->adamw(dev, dw, dm, dv, dw, dg, (int64_t)n, 3, 1, 1e-2, 0.9, 0.95, 1e-8, 0.01);
    float *got = get_f32(dw, n), *added = get_f32(dx, n);
    double exact = 0;
    for (size_t i = 0; i < n; i++) {
        exact += (double)g[i] * g[i];
        double m1 = 0.9 * m[i] + 0.1 * g[i], v1 = 0.95 * v[i] + 0.05 * g[i] * (double)g[i];
        double step = 1e-2 * (m1 / (1 - pow(0.9, 3))) / (sqrt(v1 / (1 - pow(0.95, 3))) + 1e-8);
        compare(got[i], w[i] * (1 - 1e-2 * 0.01) - step);
        compare(added[i], (double)more[i] + g[i]);
    }
    compare(summed / exact, 1);
    tell("square_sum, accumulate, adamw", bar_f32);
}

static void (*const checks[])(void) = {
    check_rows,   check_types,     check_products, check_lora,    check_norm,      check_rotate,
    check_swiglu, check_attention, check_head,     check_experts, check_optimizer,
};

int main(int argc, char **argv)
{
    if (argc < 2) {
        printf("gpu_smoke LIBRARY [tiny|real [PACKAGES]]: the library is libtinsmith_cuda.so, and "
               "the folders of Python's packages, with ':' between them, may have cuBLASLt\n");
        return 2;
    }
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "cuda_open") : NULL;
    if (!symbol) {
        printf("%s can't be opened: %s\n", argv[1], dlerror());
        return 2;
    }
    DeviceOpen *open;
    memcpy(&open, &symbol, sizeof open);
    DeviceLibraries libraries = {getenv("TINSMITH_CUBLASLT"), argc > 3 ? argv[3] : ""};
    if (open(&dev, 0, DEVICE_ABI, fail, &libraries)) {
        printf("%s\n", status_text());
        return 2;
    }
    int tiny = argc > 2 && strcmp(argv[2], "tiny") == 0;
    T = tiny ? 70 : 1024, D = tiny ? 64 : 2048, H = tiny ? 4 : 16, G = tiny ? 2 : 8;
    E = tiny ? 16 : 128, F = tiny ? 96 : 6144, V = tiny ? 301 : 32768;
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) checks[i]();
    dev->close(dev);
    return bad;
}
