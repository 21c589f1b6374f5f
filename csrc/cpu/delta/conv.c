/* cpu/delta/conv.c - the causal depthwise convolution before the delta rule, and its silu.
 *
 *   s[t,c] = Σ_j w[c,j]·x[t−CONV+1+j, c];  y = s·σ(s);  dx[t,c] = Σ_j w[c,j]·ds[t+CONV−1−j, c]
 *
 * A row reads its own input and the CONV−1 before it along its span. Those before the span are in
 * the sequence's ring, or zeros before position 0. All CONV terms are always summed, in one order,
 * so no result depends on where spans are cut. A job is a block of channels of one span, and owns
 * their part of the ring. Roofline: reads and writes T·C, and the rows before stay in L1: memory
 * bound. */
#include "../../device/delta_state.h"
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { CHANNELS = 512 }; /* of a job; a multiple of every VL */

/* Of an element (cpu.h). */
#define NS 0.3
#define NS_BACKWARD 0.6

typedef struct Conv {
    float *y, *start, *ring; /* y: also dx */
    const float *x, *dy, *w;
    const Span *spans;
    int C, x_step, blocks; /* x_step: also of dx */
    int64_t step;
} Conv;

/* The weights of a job's channels, one array for each j. */
typedef struct Taps {
    _Alignas(64) float w[CONV][CHANNELS], zeros[CHANNELS];
} Taps;

static int taps_open(Taps *taps, const Conv *c, int first)
{
    int channels = c->C - first < CHANNELS ? c->C - first : CHANNELS;
    memset(taps, 0, sizeof *taps);
    for (int i = 0; i < channels; i++)
        for (int j = 0; j < CONV; j++) taps->w[j][i] = c->w[(int64_t)(first + i) * CONV + j];
    return channels;
}

/* The inputs of row i of a span and of the rows before it, from channel `first` on: at[CONV−1] is
 * row i's. `ring` may be NULL. */
static void inputs_of(const float *at[CONV], const Conv *c, const Taps *taps, Span span, int i,
                      int first, const float *ring)
{
    for (int j = 0; j < CONV; j++) {
        int back = CONV - 1 - j, pos = span.pos + i - back;
        if (back <= i)
            at[j] = c->x + (int64_t)(span.row + i - back) * c->x_step + first;
        else
            at[j] =
                ring && pos >= 0 ? ring + (size_t)(pos % CONV) * (size_t)c->C + first : taps->zeros;
    }
}

static inline vf sum_of(const float *const at[CONV], const Taps *taps, int i, int rest)
{
    vf sum = v_set(0.0f);
#pragma GCC unroll 4
    for (int j = 0; j < CONV; j++) {
        sum = v_fma(v_load(taps->w[j] + i), v_load_upto(at[j] + i, rest), sum);
    }
    return sum;
}

/* Updates the ring and the page's start of a job's channels at the end of the span. */
static void leave(const Conv *c, const Taps *taps, Span span, int first, int channels)
{
    float *start = c->start + span.state * c->step, *ring = c->ring + span.state * c->step;
    size_t bytes = (size_t)channels * sizeof *ring, C = (size_t)c->C, at = (size_t)first;
    int last = span.pos + span.rows - 1, page = last / KV_PAGE * KV_PAGE - span.pos;
    if (page >= 0) {
        const float *before[CONV];
        inputs_of(before, c, taps, span, page, first, ring);
        for (size_t j = 0; j < CONV - 1; j++) memcpy(start + j * C + at, before[j], bytes);
    }
    for (int i = span.rows < CONV ? 0 : span.rows - CONV; i < span.rows; i++)
        memcpy(ring + (size_t)((span.pos + i) % CONV) * C + at,
               c->x + (int64_t)(span.row + i) * c->x_step + first, bytes);
}

static void conv_job(void *context, int64_t job)
{
    const Conv *c = context;
    Span span = c->spans[job / c->blocks];
    int first = (int)(job % c->blocks) * CHANNELS;
    Taps taps;
    int channels = taps_open(&taps, c, first);
    const float *ring = span.state < 0 ? NULL : c->ring + span.state * c->step, *at[CONV];
    for (int i = 0; i < span.rows; i++) {
        inputs_of(at, c, &taps, span, i, first, ring);
        float *y = c->y + (int64_t)(span.row + i) * c->C + first;
        for (int k = 0; k < channels; k += VL) {
            vf s = sum_of(at, &taps, k, channels - k);
            v_store_upto(y + k, s / (1.0f + v_exp(-s)), channels - k);
        }
    }
    if (span.state >= 0) leave(c, &taps, span, first, channels);
}

/* Rows from last to first; the gradients of the CONV sums from a row on are kept. */
static void conv_backward_job(void *context, int64_t job)
{
    const Conv *c = context;
    Span span = c->spans[job / c->blocks];
    int first = (int)(job % c->blocks) * CHANNELS;
    Taps taps;
    _Alignas(64) float slopes[CONV][CHANNELS] = {0};
    int channels = taps_open(&taps, c, first);
    const float *at[CONV];
    for (int i = span.rows - 1; i >= 0; i--) {
        inputs_of(at, c, &taps, span, i, first, NULL);
        const float *dys = c->dy + (int64_t)(span.row + i) * c->C + first;
        float *dxs = c->y + (int64_t)(span.row + i) * c->x_step + first;
        for (int k = 0; k < channels; k += VL) {
            int rest = channels - k;
            vf s = sum_of(at, &taps, k, rest), sigma = v_sigmoid(s);
            vf dy = v_load_upto(dys + k, rest);
            v_store(slopes[i % CONV] + k, dy * (sigma * (1.0f + s * (1.0f - sigma))));
            vf dx = v_set(0.0f);
#pragma GCC unroll 4
            for (int j = 0; j < CONV; j++)
                dx =
                    v_fma(v_load(taps.w[j] + k), v_load(slopes[(i + CONV - 1 - j) % CONV] + k), dx);
            v_store_upto(dxs + k, dx, rest);
        }
    }
}

void CPU(conv)(Device *dev, real *y, float *start, float *ring, const real *x, const float *w,
               const Span *spans, int S, int T, int C, int x_step, int64_t step)
{
    int blocks = (C + CHANNELS - 1) / CHANNELS;
    Conv c = {f32(y), start, ring, f32c(x), NULL, w, spans, C, x_step, blocks, step};
    cpu_run_uneven(dev, NS * T * C, (int64_t)S * blocks, conv_job, &c);
}

void CPU(conv_backward)(Device *dev, real *dx, const real *dy, const real *x, const float *w,
                        const Span *spans, int S, int T, int C, int x_step)
{
    int blocks = (C + CHANNELS - 1) / CHANNELS;
    Conv c = {f32(dx), NULL, NULL, f32c(x), f32c(dy), w, spans, C, x_step, blocks, 0};
    cpu_run_uneven(dev, NS_BACKWARD * T * C, (int64_t)S * blocks, conv_backward_job, &c);
}
