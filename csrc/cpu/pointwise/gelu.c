/* cpu/pointwise/gelu.c - the Gaussian error linear unit, in both of its forms.
 *
 *   tanh   y = x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2
 *   exact  y = x·Φ(x),  Φ(x) = (1 + erf(x/√2))/2
 *
 * Since (1 + tanh(u))/2 = σ(2u), the first is x·σ(x·(c₀ + c₁·x²)). For the second, Φ(−a) is
 * e^(−a²/2) times a smooth function of a ≥ 0, which is a polynomial of s = 1/(1 + a/2) within
 * 5·10⁻⁹. In f32 both are within 2·10⁻⁷·|x|. Reads and writes n numbers; bound by a vector's
 * exponential and one or two divisions: 0.4 and 0.5 ns an element on a Xeon with AVX-512. An
 * element's result is the same in any lane, so jobs are flat ranges; each vector is loaded before
 * it is stored, so y may overwrite x. */
#include "../runtime/cpu.h"
#include "../runtime/simd.h"

enum { GRAIN = 1 << 13 }; /* elements of one job */

#define NS 0.4 /* of an element (cpu.h) */

typedef struct Gelu {
    float *y;
    const float *x;
    int64_t n;
    int exact;
} Gelu;

/* 2·√(2/π), and 0.044715 times that. */
#define LINEAR 1.5957691216f
#define CUBIC 0.07135481627f

static inline vf unit_tanh(vf x)
{
    return x * v_sigmoid(x * v_fma(x * x, v_set(CUBIC), v_set(LINEAR)));
}

/* e^(a²/2)·Φ(−a) for 0 ≤ a ≤ 6.5, where Φ(−a) falls below 10⁻¹⁰: the polynomial of s with the
 * least error, weighted by e^(−a²/2). Behind that it stays between 0 and ½ as far as the
 * exponential is not 0. */
static inline vf tail(vf a)
{
    vf s = 1.0f / v_fma(a, v_set(0.5f), v_set(1.0f));
    vf p = v_set(-0.026433401791698917f);
    p = v_fma(p, s, v_set(0.12038139044349604f));
    p = v_fma(p, s, v_set(-0.1551321888450248f));
    p = v_fma(p, s, v_set(-0.0995635434871126f));
    p = v_fma(p, s, v_set(0.32812257932935796f));
    p = v_fma(p, s, v_set(0.1157831399660946f));
    p = v_fma(p, s, v_set(0.21860991978107114f));
    return v_fma(p, s, v_set(-0.0017679003596908676f));
}

static inline vf unit_exact(vf x)
{
    vf h = v_exp(x * x * -0.5f) * tail(v_max(-x, x));
    return x * v_select(x < 0.0f, h, 1.0f - h);
}

static void gelu_job(void *context, int64_t job)
{
    const Gelu *g = context;
    int64_t i = job * GRAIN, to = g->n - i < GRAIN ? g->n : i + GRAIN;
    for (; i < to; i += VL) {
        int rest = to - i < VL ? (int)(to - i) : VL;
        vf x = v_load_upto(g->x + i, rest);
        v_store_upto(g->y + i, g->exact ? unit_exact(x) : unit_tanh(x), rest);
    }
}

void CPU(gelu)(Device *dev, real *y, const real *x, int64_t n, int exact)
{
    Gelu g = {f32(y), f32c(x), n, exact};
    cpu_run_of(dev, NS * (double)n, (n + GRAIN - 1) / GRAIN, gelu_job, &g);
}
