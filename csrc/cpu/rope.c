/* cpu/rope.c - rotary positions, in Hugging Face's pairing (e, e + E/2).
 *
 *   rope_table     cosine, sine[t,e] = cos, sin(pos[t]·inv_freq[e])·scale
 *   rope           (u, v) → (u·c − v·s, v·c + u·s)
 *   rope_backward  the transposed map: the same with −s
 *
 * The table writes T·E and is bound by cosf and sinf; rope reads and writes T·H·E; memory bound.
 *
 * The angle is rounded to f32 before its cosine is taken, as transformers does: at position
 * 131072 that rounding is larger than all others, and a model was trained with it. The table is
 * made once a step and shared by all layers and heads. Scaled variants (llama3, yarn) live in
 * inv_freq and scale. */
#include <math.h>

#include "cpu.h"

enum {
    GRAIN = 1 << 13,       /* elements of a job that rotates */
    GRAIN_TABLE = 1 << 10, /* angles of a job that makes the table */
};

/* Of an element, and of an angle's cosine and sine (cpu.h). */
#define NS 0.15
#define NS_TABLE 4.0

typedef struct Table {
    float *cosine, *sine;  // (T, W/2)
    const int32_t *pos;    // (T)
    const float *inv_freq; // (W/2)
    int T, half, grain;
    float scale;
} Table;

typedef struct Rope {
    float *x;                   // (T, H, E)
    const float *cosine, *sine; // (T, W/2)
    int T, H, E, half, grain;
    float sign; /* of the sine: −1 turns back */
} Rope;

static void table_job(void *context, int64_t job)
{
    const Table *r = context;
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    for (int t = from; t < to; t++)
        for (int e = 0; e < r->half; e++) {
            int64_t at = (int64_t)t * r->half + e;
            float angle = (float)r->pos[t] * r->inv_freq[e];
            r->cosine[at] = cosf(angle) * r->scale;
            r->sine[at] = sinf(angle) * r->scale;
        }
}

static void rope_job(void *context, int64_t job)
{
    const Rope *r = context;
    int from = (int)job * r->grain, to = r->T - from < r->grain ? r->T : from + r->grain;
    int half = r->half;
    for (int t = from; t < to; t++) {
        const float *restrict cosine = r->cosine + (int64_t)t * half;
        const float *restrict sine = r->sine + (int64_t)t * half;
        for (int h = 0; h < r->H; h++) {
            float *restrict u = r->x + ((int64_t)t * r->H + h) * r->E, *restrict v = u + half;
            for (int e = 0; e < half; e++) {
                float a = u[e], b = v[e], c = cosine[e], s = r->sign * sine[e];
                u[e] = a * c - b * s;
                v[e] = b * c + a * s;
            }
        }
    }
}

static void rotate(Device *dev, float *x, const float *cosine, const float *sine, int T, int H,
                   int E, int W, float sign)
{
    Rope r = {x, cosine, sine, T, H, E, W / 2, cpu_rows_of_job(GRAIN, H * W), sign};
    cpu_run_of(dev, NS * T * H * W, ((int64_t)T + r.grain - 1) / r.grain, rope_job, &r);
}

void CPU(rope_table)(Device *dev, float *cosine, float *sine, const int32_t *pos,
                     const float *inv_freq, int T, int W, float scale)
{
    Table r = {cosine, sine, pos, inv_freq, T, W / 2, cpu_rows_of_job(GRAIN_TABLE, W / 2), scale};
    cpu_run_of(dev, NS_TABLE * T * r.half, ((int64_t)T + r.grain - 1) / r.grain, table_job, &r);
}

void CPU(rope)(Device *dev, real *x, const float *cosine, const float *sine, int T, int H, int E,
               int W)
{
    rotate(dev, f32(x), cosine, sine, T, H, E, W, 1.0f);
}

void CPU(rope_backward)(Device *dev, real *dx, const float *cosine, const float *sine, int T, int H,
                        int E, int W)
{
    rotate(dev, f32(dx), cosine, sine, T, H, E, W, -1.0f);
}
