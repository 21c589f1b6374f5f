/* cpu/head/logprob.h - a row's logΣexp. */
#ifndef TINSMITH_CPU_HEAD_LOGPROB_H
#define TINSMITH_CPU_HEAD_LOGPROB_H

#include "../runtime/cpu.h"

/* logΣ exp(scale·(x[v] − base)) of one row, scale > 0; base is its largest logit, or 0 if that is
 * infinite. */
double CPU(row_lse)(const float *x, int V, float scale, float *base);

/* Splits a row's logΣexp = base + rest into the ops' lse[0] + lse[1]. */
static inline void lse_split(float *lse, float base, double rest)
{
    float nearest = (float)((double)base + rest);
    int whole = fabsf(nearest) < LSE_WHOLE || !isfinite(nearest);
    lse[0] = nearest;
    lse[1] = whole ? 0.0f : (float)((double)base - (double)nearest + rest);
}

#endif
