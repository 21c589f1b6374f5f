/* cpu/head/sample.c - draws one token per row of logits, as its Draw says.
 *
 *   temper  logits[t,:] /= temperature   reads T·V, writes T·V; memory bound
 *   sample  ids[t] ~ softmax(logits[t,:]) among the kept, and its logp[t]
 *           reads T·V once or twice, up to five times more if top_k or top_p keeps many ids;
 *           bound by the exponentials
 *
 * The uniform number is Philox4x32-10 of (seed, sample, pos), so a draw depends neither on its
 * row's index nor on other rows. top_k and top_p keep everything above one Cut in the order "larger
 * logit, then lower id". The cut is found first, among the 256 best or else by radix select, never
 * by sorting the vocabulary. Then the kept ids are walked in order until their mass passes u. The
 * input logits are tempered, and lse is the whole row's. A row without mass (a NaN, or only −inf)
 * gives its largest logit. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "../../device/philox.h"
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum {
    BLOCK = 1024,     /* logits worked on at a time */
    PARTS_MAX = 512,  /* parts of a row whose masses are stored for the walk */
    SHORT_LIST = 256, /* ids searched for a cut before the whole vocabulary */
    RADIX_BITS = 11,  /* bits of a logit's 32 decided per pass */
    BUCKETS = 1 << RADIX_BITS,
    GRAIN = 1 << 14, /* logits per job of temper */
};

/* Per logit divided, and per logit of a draw (cpu.h). */
#define NS_TEMPER 0.15
#define NS 0.6

typedef float vn __attribute__((vector_size(2 * VL)));  /* half a register of floats … */
typedef double vd __attribute__((vector_size(4 * VL))); /* … is a whole one of doubles */

/* Keeps the logits above `logit`, and those equal to it with an id up to `id`. For ids up to `id`
 * that means above `before`, the next float below `logit`. */
typedef struct Cut {
    float logit, before;
    int32_t id;
} Cut;

static const Cut NO_CUT = {-INFINITY, -INFINITY, INT32_MAX};

/* One row of n ids, and the row's lse. */
typedef struct DrawRow {
    const float *x;
    int n;
    const float *lse; // (2)
} DrawRow;

typedef struct Temper {
    float *logits; // (T, V)
    const Draw *draws;
    int V, parts;
} Temper;

typedef struct Sample {
    Device *dev;
    int32_t *ids;              // (T)
    float *logp;               // (T)
    const float *logits, *lse; // (T, V), (T, 2)
    const Draw *draws;         // (T)
    int V;
} Sample;

/* ---- the largest, and masses ---- */

static Cut cut_after(float logit, int32_t id)
{
    return (Cut){logit, nextafterf(logit, -INFINITY), id};
}

/* The id of the largest logit, ties by lower id; 0 if all are NaN. */
static int row_argmax(const float *x, int n)
{
    float top = -INFINITY;
    int place = 0;
    for (int from = 0; from < n; from += BLOCK) {
        int to = n - from < BLOCK ? n : from + BLOCK, i = from;
        vf a = v_set(-INFINITY), b = a;
        for (; i + 2 * VL <= to; i += 2 * VL) {
            a = v_max(v_load(x + i), a);
            b = v_max(v_load(x + i + VL), b);
        }
        float best = v_top(v_max(a, b));
        for (; i < to; i++) best = x[i] > best ? x[i] : best;
        if (best > top) {
            top = best;
            place = from;
        }
    }
    for (int i = place; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

/* The bound that each of VL logits from id `first` on must exceed to be kept. */
static inline vf bar_at(Cut cut, int first)
{
    if (first > cut.id) return v_set(cut.logit);
    vf bar = v_set(cut.before);
    if (cut.id - first < VL - 1)
        for (int lane = cut.id - first + 1; lane < VL; lane++) bar[lane] = cut.logit;
    return bar;
}

/* The masses exp(x − lse) of VL logits, 0 if not kept. */
static inline vf masses(vf x, vf bar, const float *lse)
{
    return v_select(x > bar, v_exp(x - lse[0] - lse[1]), v_set(0.0f));
}

/* The same for one kept logit. */
static inline float mass_of(const DrawRow *row, float x)
{
    return f_exp(x - row->lse[0] - row->lse[1]);
}

/* Whether none of VL logits is kept, so that their exponentials can be skipped. */
static inline int none_above(vf x, vf bar)
{
    vi above = x > bar;
    int64_t word[VL / 2], any = 0;
    memcpy(word, &above, sizeof word);
    for (int i = 0; i < VL / 2; i++) any |= word[i];
    return !any;
}

/* The sums of both halves' lanes, in double. */
static inline vd widen(vf x)
{
    vn low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char *)&x + sizeof low, sizeof high);
    return __builtin_convertvector(low, vd) + __builtin_convertvector(high, vd);
}

/* The kept mass of ids [from, to). Summed in double like all masses here, so that sums of the same
 * masses agree and equally likely ids are counted exactly against top_p. */
static double mass_between(const DrawRow *row, int from, int to, Cut cut)
{
    vd even = {0}, odd = {0};
    int sparse = cut.logit > -INFINITY, i = from;
    for (; i + 2 * VL <= to; i += 2 * VL) {
        vf x = v_load(row->x + i), y = v_load(row->x + i + VL);
        vf bar_x = bar_at(cut, i), bar_y = bar_at(cut, i + VL);
        if (sparse && none_above(x, bar_x) && none_above(y, bar_y)) continue;
        even += widen(masses(x, bar_x, row->lse));
        odd += widen(masses(y, bar_y, row->lse));
    }
    for (; i < to; i += VL) {
        vf x = to - i < VL ? v_load_part(row->x + i, to - i, -INFINITY) : v_load(row->x + i);
        even += widen(masses(x, bar_at(cut, i), row->lse));
    }
    even += odd;
    double total = 0.0;
    for (int lane = 0; lane < VL / 2; lane++) total += even[lane];
    return total;
}

/* ---- the cut of top_k and top_p ---- */

/* A logit's bits as an integer of the same order; NaN is lowest, and −0 equals 0. Branchless,
 * because signs are unpredictable and loops over this can be vectorized. */
static inline uint32_t sort_key(float x)
{
    x += 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t key = bits ^ ((0u - (bits >> 31)) | 0x80000000u);
    return x == x ? key : 0;
}

static inline float key_logit(uint32_t key)
{
    uint32_t bits = key & 0x80000000u ? key & 0x7FFFFFFFu : ~key;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Adds the mass (or the count, 1) of every logit whose decided bits are `prefix` to the bucket of
 * its next digits. The first pass takes all logits, so it computes their exponentials in blocks. */
static void buckets_fill(double *bucket, const DrawRow *row, int by_mass, uint32_t prefix,
                         uint32_t decided, int shift, uint32_t digits)
{
    float mass[BLOCK];
    uint32_t key[BLOCK];
    for (int from = 0; from < row->n; from += BLOCK) {
        const float *x = row->x + from;
        int n = row->n - from < BLOCK ? row->n - from : BLOCK;
        if (by_mass && !decided)
            for (int i = 0; i < n; i += VL) {
                vf part = n - i < VL ? v_load_part(x + i, n - i, -INFINITY) : v_load(x + i);
                v_store(mass + i, v_exp(part - row->lse[0] - row->lse[1]));
            }
        for (int i = 0; i < n; i++) key[i] = sort_key(x[i]);
        for (int i = 0; i < n; i++) {
            if ((key[i] & decided) != prefix) continue;
            float one = !by_mass ? 1.0f : decided ? mass_of(row, x[i]) : mass[i];
            bucket[key[i] >> shift & digits] += (double)one;
        }
    }
}

/* Cuts after the fewest most likely ids whose mass, or count, reaches `need`: three passes over the
 * row decide 11, 11 and 10 bits of the cut's logit, a fourth its id. If rounding makes `need`
 * unreachable, the cut is at the last id with mass. */
static Cut cut_by_radix(const DrawRow *row, int by_mass, double need)
{
    uint32_t prefix = 0, decided = 0;
    double above = 0.0;
    for (int shift = 32 - RADIX_BITS; decided != 0xFFFFFFFFu;) {
        double bucket[BUCKETS] = {0}, above_low = above;
        uint32_t digits = ~decided >> shift, low = digits;
        buckets_fill(bucket, row, by_mass, prefix, decided, shift, digits);
        for (int64_t b = digits; b >= 0; b--) {
            if (!(bucket[b] > 0.0)) continue;
            low = (uint32_t)b;
            above_low = above;
            if (above + bucket[b] >= need) break;
            above += bucket[b];
        }
        above = above_low;
        prefix |= low << shift;
        decided |= digits << shift;
        shift = shift > RADIX_BITS ? shift - RADIX_BITS : 0;
    }
    Cut cut = cut_after(key_logit(prefix), row->n - 1);
    double mass = by_mass ? (double)mass_of(row, cut.logit) : 1.0;
    for (int i = 0; i < row->n; i++) {
        if (row->x[i] != cut.logit) continue;
        above += mass;
        cut.id = i;
        if (above >= need) break;
    }
    return cut;
}

/* The cut of a row by top_k (0: none) and then top_p. The short list suffices for top_k to 256 and
 * for the top_p of a confident model; on a flat row top_p searches the whole vocabulary. */
static Cut cut_find(Device *dev, const DrawRow *row, int top_k, float top_p)
{
    int wanted = top_k > 0 && top_k < row->n ? top_k : row->n;
    int listed = wanted < SHORT_LIST ? wanted : SHORT_LIST;
    int32_t id[SHORT_LIST];
    float logp[SHORT_LIST];
    CPU(topk_logprob)(dev, id, logp, row->x, row->lse, 1, row->n, listed);

    Cut bound = cut_after(row->x[id[listed - 1]], id[listed - 1]);
    if (listed < wanted) bound = wanted < row->n ? cut_by_radix(row, 0, wanted) : NO_CUT;
    if (top_p >= 1.0f) return bound;

    double need = 0.0, reached = 0.0;
    if (listed < wanted)
        need = mass_between(row, 0, row->n, bound);
    else
        for (int i = 0; i < listed; i++) need += (double)f_exp(logp[i]);
    need *= (double)top_p;
    for (int i = 0; i < listed; i++) {
        reached += (double)f_exp(logp[i]);
        if (reached >= need) return cut_after(row->x[id[i]], id[i]);
    }
    if (listed == wanted) return bound;
    Cut cut = cut_by_radix(row, 1, need);
    int looser = cut.logit < bound.logit || (cut.logit == bound.logit && cut.id > bound.id);
    return looser ? bound : cut; /* rounding may move the mass past top_k's cut */
}

/* ---- the draw ---- */

/* The kept id at which the kept mass, summed in id order, passes u of its total; −1 if there is no
 * mass. */
static int draw_id(const DrawRow *row, Cut cut, double u, double *kept)
{
    double part[PARTS_MAX], total = 0.0, below = 0.0;
    int size = BLOCK, parts = 0, place = 0;
    while ((int64_t)size * PARTS_MAX < row->n) size *= 2;
    for (int from = 0; from < row->n; from += size, parts++) {
        part[parts] = mass_between(row, from, row->n - from < size ? row->n : from + size, cut);
        total += part[parts];
    }
    *kept = total;
    if (!(total > 0.0) || isinf(total)) return -1;

    double target = u * total;
    for (int i = 0; i < parts; i++) {
        if (part[i] <= 0.0) continue;
        place = i;
        if (below + part[i] > target) break;
        below += part[i];
    }
    int last = -1, from = place * size, to = row->n - from < size ? row->n : from + size;
    for (int i = from; i < to; i += VL) {
        vf x = to - i < VL ? v_load_part(row->x + i, to - i, -INFINITY) : v_load(row->x + i);
        vf mass = masses(x, bar_at(cut, i), row->lse);
        for (int lane = 0; lane < VL; lane++) {
            if (!(mass[lane] > 0.0f)) continue;
            last = i + lane;
            if (below + (double)mass[lane] > target) return last;
            below += (double)mass[lane];
        }
    }
    return last; /* sums in another order round differently */
}

static void sample_job(void *context, int64_t t)
{
    const Sample *s = context;
    const Draw *draw = &s->draws[t];
    const float *x = s->logits + t * s->V;
    DrawRow row = {x, s->V, s->lse + 2 * t};
    assert(row.n > 0);
    int cuts = (draw->top_k > 0 && draw->top_k < row.n) || draw->top_p < 1.0f, id = -1;
    double kept = 1.0;
    if (draw->temperature > 0.0f) {
        Cut cut = cuts ? cut_find(s->dev, &row, draw->top_k, draw->top_p) : NO_CUT;
        id = draw_id(&row, cut, draw_uniform(draw), &kept);
    }
    if (id < 0) {
        id = row_argmax(x, row.n);
        cuts = 0;
    }
    s->ids[t] = id;
    const float *lse = row.lse;
    s->logp[t] = cuts ? (float)((double)x[id] - (double)lse[0] - (double)lse[1] - log(kept))
                      : x[id] - lse[0] - lse[1];
}

static void temper_job(void *context, int64_t job)
{
    const Temper *r = context;
    int64_t t = job / r->parts;
    int from = (int)(job % r->parts) * GRAIN, n = r->V - from < GRAIN ? r->V - from : GRAIN;
    float temperature = r->draws[t].temperature;
    if (temperature == 0.0f || temperature == 1.0f) return;
    float *x = r->logits + t * r->V + from;
    for (int i = 0; i < n; i++) x[i] /= temperature;
}

void CPU(temper)(Device *dev, float *logits, const Draw *draws, int T, int V)
{
    Temper r = {logits, draws, V, (V + GRAIN - 1) / GRAIN};
    int rows = 0;
    for (int t = 0; t < T; t++)
        rows += draws[t].temperature != 0.0f && draws[t].temperature != 1.0f;
    cpu_run_of(dev, NS_TEMPER * rows * V, (int64_t)T * r.parts, temper_job, &r);
}

void CPU(sample)(Device *dev, int32_t *ids, float *logp, const float *logits, const float *lse,
                 const Draw *draws, int T, int V)
{
    Sample s = {dev, ids, logp, logits, lse, draws, V};
    cpu_run_uneven(dev, NS * T * V, T, sample_job, &s);
}
