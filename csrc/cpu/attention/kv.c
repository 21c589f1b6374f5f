/* cpu/attention/kv.c - the pages of the key-value cache (attention.h): writing rows to their slots,
 * copying a page. Roofline: negligible beside attention. */
#include "attention.h"
#include "../runtime/simd.h"

enum { WRITE_ROWS = 64 }; /* per job that writes keys and values */

#define NS_WRITE 2.0 /* per element written, with a cache miss (cpu.h) */

typedef struct Write {
    cached *k_pages, *v_pages;
    const float *k, *v;
    const int32_t *slot;
    int T, G, E;
    int64_t v_step; /* v's row stride */
} Write;

/* Puts one head's key and value of E numbers at `offset` of a page. */
static void write_row(float *keys, float *values, const float *k, const float *v, int offset, int E)
{
#if defined(__AVX512BF16__)
    /* A value is every other number of its lanes. A neighbour may be written by another thread, so
     * each number is written separately. */
    uint16_t *value = (uint16_t *)(void *)values + (int64_t)(offset / 2) * E * 2 + offset % 2;
    for (int e = 0; e < E; e += VL) {
        int n = E - e < VL ? E - e : VL;
        vu pairs = v_round_pairs(v_load_masked(k + e, n), v_load_masked(v + e, n));
        uint16_t rounded[2 * VL];
        memcpy(rounded, &pairs, sizeof rounded);
        for (int i = 0; i < n; i += 2)
            memcpy(keys + (e + i) / 2 * KV_PAGE + offset, rounded + i, 2 * sizeof *rounded);
        for (int i = 0; i < n; i++) value[2 * (e + i)] = rounded[VL + i];
    }
#else
    for (int e = 0; e < E; e++) keys[e * KV_PAGE + offset] = k[e];
    memcpy(values + (int64_t)offset * E, v, (size_t)E * sizeof *v);
#endif
}

/* One key-value head of some rows: a key is a column of its page, so each of its lanes is in
 * another cache line, and two threads write the same lines only where rows are split. */
static void write_job(void *context, int64_t job)
{
    const Write *w = context;
    int g = (int)(job % w->G), E = w->E, from = (int)(job / w->G) * WRITE_ROWS;
    int to = w->T - from < WRITE_ROWS ? w->T : from + WRITE_ROWS;
    for (int t = from; t < to; t++) {
        int64_t page = w->slot[t] / KV_PAGE;
        write_row(page_lanes(w->k_pages, page, g, w->G, E),
                  page_lanes(w->v_pages, page, g, w->G, E), w->k + ((int64_t)t * w->G + g) * E,
                  w->v + t * w->v_step + g * E, w->slot[t] % KV_PAGE, E);
    }
}

void CPU(kv_write)(Device *dev, cached *k_pages, cached *v_pages, const real *k, const real *v,
                   const int32_t *slot, int T, int G, int E, int v_step)
{
    if (!page_takes(dev, E)) return;
    Write w = {k_pages, v_pages, f32c(k), f32c(v), slot, T, G, E, v_step};
    int64_t jobs = (int64_t)((T + WRITE_ROWS - 1) / WRITE_ROWS) * G;
    cpu_run_of(dev, NS_WRITE * T * G * E, jobs, write_job, &w);
}

void CPU(kv_copy)(Device *dev, cached *k_pages, cached *v_pages, int from, int to, int count, int G,
                  int E)
{
    (void)dev;
    for (int g = 0; g < G; g++) {
        const float *keys = page_lanes(k_pages, from, g, G, E);
        float *copies = page_lanes(k_pages, to, g, G, E);
        for (int e = 0; e < E / JOINED; e++)
            memcpy(copies + e * KV_PAGE, keys + e * KV_PAGE, (size_t)count * sizeof *keys);
        const float *values = page_lanes(v_pages, from, g, G, E);
        float *others = page_lanes(v_pages, to, g, G, E);
        int whole = count / JOINED * E;
        memcpy(others, values, (size_t)whole * sizeof *values);
        for (int e = whole; count % JOINED && e < whole + E; e++) /* the first of a lane's two */
            memcpy(others + e, values + e, CACHED_BYTES);
    }
}
