/* tools/card/smoke/smoke.h - what the checks of the smoke program share: arrays on the host and the
 * device, threads, and the verdict on a result.
 *
 * Inputs are stretches of one random block: it is uploaded once for each scale, and copied on the
 * device. So is the poison that outputs are full of. A check runs its ops, and hands each result to
 * judge() with a function that computes one row of it in double. */
#ifndef SMOKE_H
#define SMOKE_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "../../../csrc/device/device.h"

enum { RANK = 32 };

typedef struct Sizes {
    int T, D, H, G, E, F, V, tiny;
} Sizes;

extern Device *dev;
extern Sizes shape;              /* this run's sizes */
extern unsigned block_seed;      /* of the random block */
extern const char *wrong_folder; /* where wrong arrays are left; NULL: nowhere */
extern int found;                /* whether something was wrong */

/* ---- memory (memory.c) ---- */

typedef enum Kind {
    REAL,     /* the device's real; on the host the f32 that it is */
    F32,      /* all 24 bits of it */
    F32_HALF, /* f32 in memory, but bf16's numbers: for what an op rounds on the way */
    I32,
    F64
} Kind;

typedef struct Input {
    const float *x; /* on the host, as the device has it */
    void *at;
} Input;

/* Tells what failed, with its sentence, and exits with stop_code. */
_Noreturn void stop(const char *what);
extern int stop_code;
/* The text without what JSON would not take, until the call after the next. */
const char *quoted(const char *text);
size_t kind_bytes(Kind kind);
/* Memory of the host, and of the device. forget() frees both. */
void *host(size_t bytes);
void *device_bytes(size_t bytes);
void *put(const void *from, size_t bytes);
void *get(const void *from, size_t bytes);
/* n numbers around 0, of spread `scale`; `seed` says where in the block they begin. */
Input input(size_t n, int seed, float scale, Kind kind);
/* The same as a base weight, whose numbers bf16 holds; and one in memory that exists. */
Input weight(int rows, int cols, int seed, float scale);
const float *weight_load(frozen *to, int rows, int cols, int seed, float scale);
/* Memory full of ones: as a float it is a NaN that no op computes. */
void *room(size_t n, Kind kind);
void forget(void);
/* Gives back the block and the poison too. */
void release(void);
/* An array's numbers as floats, of any kind but F64. */
float *fetched(const void *from, size_t n, Kind kind);
float of_bf16(uint16_t half);
uint16_t to_bf16(float x);

/* Calls work(i, of) for i from 0 to n − 1, in as many threads as there are cores. */
void each(int n, void (*work)(int i, const void *of), const void *of);

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

/* ---- the verdict (judge.c) ---- */

typedef void Exact(double *row, int r, const void *of);

typedef struct Result {
    const char *op, *name; /* the op, and which of its results */
    const void *at;        /* on the device, rows behind one another */
    Kind kind;
    int rows, cols;
    double bar;   /* of ‖got − exact‖ / ‖exact‖ */
    int alone;    /* an element is no sum, so its bar is relative to itself alone */
    int bits;     /* every bit must be as in `exact`, which is another result */
    int together; /* rows that are compared side by side, beside a few others; 0: TOGETHER */
    Exact *exact;
    const void *of;
} Result;

enum { TOGETHER = 64 };

/* The sizes that the lines of the next results show, as JSON without its braces. */
void sizes(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Compares a result, and tells a line. */
void judge(Result r);
/* The seconds since it was called before, as each line tells them. */
double lap(void);
/* The bars: of what is rounded to `real`, and of what is f32 (sums in another order). */
double bar_real(void);
#define BAR_F32 2e-5

/* An Exact whose `of` is another result's numbers, or what was copied. */
typedef struct Same {
    const float *x;
    int cols;
} Same;
Exact same_row;

/* ---- the checks, each of which ends with forget() ---- */

typedef void Check(void);
Check check_rows, check_types, check_norm, check_rotate, check_swiglu, check_optimizer;
Check check_products, check_lora, check_lora_backward, check_experts;
Check check_attention, check_window, check_decoding;
Check check_head, check_logprob;

static inline double dot(const float *a, const float *b, int n)
{
    double sum[4] = {0};
    int i = 0;
    for (; i + 4 <= n; i += 4)
        for (int j = 0; j < 4; j++) sum[j] += (double)a[i + j] * b[i + j];
    for (; i < n; i++) sum[0] += (double)a[i] * b[i];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

/* y += scale·x */
static inline void add(double *y, double scale, const float *x, int n)
{
    for (int i = 0; i < n; i++) y[i] += scale * x[i];
}

#endif
