/* cpu/attention/rope.c - rotary positions of queries and keys, in Hugging Face's pairing (e, e +
 * W/2), after each head's norm if the model has one.
 *
 *   rope_table       cosine, sine[t,e] = cos, sin(pos[t,axis[e]]·inv_freq[e])·scale
 *   rotate           y = x·rstd·w;  (u, v) → (u·c − v·s, v·c + u·s)
 *   rotate_backward  the transposed map (the same with −s), then the norm's gradient
 *
 * The table writes T·W and is bound by cosf and sinf; rotate reads and writes T·(H+G)·E, and a head
 * stays in L1 between its norm and its rotation; memory bound.
 *
 * The angle is rounded to f32 before its cosine is taken, as transformers does: at position 131072
 * that rounding exceeds all others, and models were trained with it. The table is computed once per
 * step for all layers and heads. Scaled variants (llama3, yarn) are in inv_freq and scale. */
#include <string.h>

#include "../pointwise/norm.h"

enum {
    GRAIN = 1 << 13,       /* elements per job of rotate */
    GRAIN_TABLE = 1 << 10, /* angles per job of rope_table */
};

/* Per element, and per angle's cosine and sine (cpu.h). */
#define NS 0.3
#define NS_TABLE 4.0

typedef struct Angles {
    float *cosine, *sine;  // (T, W/2)
    const int32_t *pos;    // (T, A)
    const int32_t *axis;   // (W/2), or NULL: 0
    const float *inv_freq; // (W/2)
    int T, half, A, grain;
    float scale;
} Angles;

typedef struct Rope {
    float *y[2], *rstd[2];      // (T, heads, E) and (T, heads): of queries, of keys
    const float *x[2], *w[2];   // likewise, and (E) or NULL
    const float *cosine, *sine; // (T, W/2)
    int T, heads[2], step[2];   /* step: row strides of x, and of backward's y, which is in place */
    int E, half, grain;
    float eps;
} Rope;

static void table_job(void *context, int64_t job)
{
    const Angles *r = context;
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++)
        for (int e = 0; e < r->half; e++) {
            int64_t at = (int64_t)t * r->half + e;
            int32_t pos = r->pos[(int64_t)t * r->A + (r->axis ? r->axis[e] : 0)];
            float angle = (float)pos * r->inv_freq[e];
            r->cosine[at] = cosf(angle) * r->scale;
            r->sine[at] = sinf(angle) * r->scale;
        }
}

/* Rotates one head in place; `sign` −1 rotates back. */
static void turn(float *restrict u, const float *restrict cosine, const float *restrict sine,
                 int half, float sign)
{
    float *restrict v = u + half;
    for (int e = 0; e < half; e++) {
        float a = u[e], b = v[e], c = cosine[e], s = sign * sine[e];
        u[e] = a * c - b * s;
        v[e] = b * c + a * s;
    }
}

/* Head h of row t's part `part`. */
typedef void OneHead(const Rope *r, int t, int part, int h);

/* Its index among all rows' heads, and its offset in x. */
static int64_t number_of(const Rope *r, int t, int part, int h)
{
    return (int64_t)t * r->heads[part] + h;
}

static int64_t place_of(const Rope *r, int t, int part, int h)
{
    return (int64_t)t * r->step[part] + (int64_t)h * r->E;
}

static void rotate_head(const Rope *r, int t, int part, int h)
{
    int64_t head = number_of(r, t, part, h);
    float *y = r->y[part] + head * r->E;
    const float *x = r->x[part] + place_of(r, t, part, h);
    if (r->w[part])
        r->rstd[part][head] = norm_row(y, x, r->w[part], r->E, r->eps);
    else
        memcpy(y, x, (size_t)r->E * sizeof *y);
    turn(y, r->cosine + (int64_t)t * r->half, r->sine + (int64_t)t * r->half, r->half, 1.0f);
}

static void rotate_head_backward(const Rope *r, int t, int part, int h)
{
    int64_t at = place_of(r, t, part, h);
    float *restrict d = r->y[part] + at;
    const float *restrict x = r->x[part] + at, *restrict w = r->w[part];
    turn(d, r->cosine + (int64_t)t * r->half, r->sine + (int64_t)t * r->half, r->half, -1.0f);
    if (!w) return;
    float rstd = r->rstd[part][number_of(r, t, part, h)], mean = norm_mean(d, x, w, rstd, r->E);
    for (int e = 0; e < r->E; e++) d[e] = rstd * (d[e] * w[e] - x[e] * rstd * mean);
}

static inline void walk_heads(const Rope *r, int64_t job, OneHead *one)
{
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++)
        for (int part = 0; part < 2; part++)
            for (int h = 0; h < r->heads[part]; h++) one(r, t, part, h);
}

static void rotate_job(void *context, int64_t job)
{
    walk_heads(context, job, rotate_head);
}

static void rotate_backward_job(void *context, int64_t job)
{
    walk_heads(context, job, rotate_head_backward);
}

static void run(Device *dev, Rope *r, void (*work)(void *, int64_t))
{
    int row = (r->heads[0] + r->heads[1]) * r->E;
    r->grain = cpu_rows_of_job(GRAIN, row);
    cpu_run_of(dev, NS * r->T * row, ((int64_t)r->T + r->grain - 1) / r->grain, work, r);
}

void CPU(rope_table)(Device *dev, float *cosine, float *sine, const int32_t *pos,
                     const int32_t *axis, const float *inv_freq, int T, int W, int A, float scale)
{
    int grain = cpu_rows_of_job(GRAIN_TABLE, W / 2);
    Angles r = {cosine, sine, pos, axis, inv_freq, T, W / 2, A, grain, scale};
    cpu_run_of(dev, NS_TABLE * T * r.half, ((int64_t)T + r.grain - 1) / r.grain, table_job, &r);
}

void CPU(rotate)(Device *dev, real *q, real *k, float *q_rstd, float *k_rstd, const real *q_raw,
                 const real *k_raw, const float *q_norm, const float *k_norm, const float *cosine,
                 const float *sine, int T, int H, int G, int E, int W, int q_step, int kv_step,
                 float eps)
{
    Rope r = {{f32(q), f32(k)},
              {q_rstd, k_rstd},
              {f32c(q_raw), f32c(k_raw)},
              {q_norm, k_norm},
              cosine,
              sine,
              T,
              {H, G},
              {q_step, kv_step},
              E,
              W / 2,
              0,
              eps};
    run(dev, &r, rotate_job);
}

void CPU(rotate_backward)(Device *dev, real *dq, real *dk, const real *q_raw, const real *k_raw,
                          const float *q_norm, const float *k_norm, const float *q_rstd,
                          const float *k_rstd, const float *cosine, const float *sine, int T, int H,
                          int G, int E, int W, int q_step, int kv_step)
{
    /* rstd is only read */
    Rope r = {{f32(dq), f32(dk)},
              {(float *)q_rstd, (float *)k_rstd},
              {f32c(q_raw), f32c(k_raw)},
              {q_norm, k_norm},
              cosine,
              sine,
              T,
              {H, G},
              {q_step, kv_step},
              E,
              W / 2,
              0,
              0.0f};
    run(dev, &r, rotate_backward_job);
}
