/* benchmarks/chunks.c - the gated delta rule summed in two ways, on one thread (chunks.py).
 *
 * `pages` is the engine's own (csrc/cpu/delta/delta.c): each row's sums over the rows before it are
 * made one by one, so that a row has the same bits however many are run at once. `chunks` sums as
 * one would who need not care: a page's rows are solved for in blocks of `block` rows, where all
 * that lies outside of the block is a product of matrices, and y is one product more. */
#include "../csrc/cpu/delta/delta.c"
#include "../csrc/cpu/product/gemm.h"

/* The products of frozen weights name it; none is made here. */
void CPU(product_stream)(Device *dev, const Product *p)
{
    (void)dev;
    (void)p;
}

/* w, u and y of a page's rows. `strict` weighs u for w below the diagonal; `upto` for y. */
static void page_solve(const Rule *c, DeltaWork *work, const DeltaHead *head, int t, int rows,
                       int block)
{
    int E = c->E, H = c->H, h = head->h;
    const float *strict = work->weights, *upto = strict + rows * KV_PAGE;
    float *from_k = work->read, *from_q = from_k + rows * E;
    for (int i = 0; i < rows; i++) {
        vf first = v_set(sums_factor(head->sums, i));
        for (int e = 0; e < E; e += VL) {
            int at = i * E + e;
            vf v = v_load(c->v + ((int64_t)(t + i) * H + h) * E + e);
            v_store(from_k + at, v - first * v_load(from_k + at));
            v_store(from_q + at, first * v_load(from_q + at));
        }
    }
    for (int b = 0; b < rows; b += block) {
        int end = b + block < rows ? b + block : rows;
        if (b)
            CPU(product)(from_k + b * E, E, strict + b * KV_PAGE, KV_PAGE, 1, head->u, E, end - b,
                         E, b, -1.0f, 1);
        for (int i = b; i < end; i++) {
            vf beta = v_set(c->beta[(int64_t)(t + i) * H + h]);
            for (int e = 0; e < E; e += VL) {
                vf left = v_load(from_k + i * E + e);
                for (int j = b; j < i; j++)
                    left =
                        v_fma(v_set(-strict[i * KV_PAGE + j]), v_load(head->u + j * E + e), left);
                if (c->w) v_store(c->w + ((int64_t)(t + i) * H + h) * E + e, left);
                v_store(head->u + i * E + e, beta * left);
            }
        }
        CPU(product)(from_q + b * E, E, upto + b * KV_PAGE, KV_PAGE, 1, head->u, E, end - b, E, end,
                     1.0f, 1);
    }
    for (int i = 0; i < rows; i++)
        memcpy(c->y + ((int64_t)(t + i) * H + h) * E, from_q + i * E, (size_t)E * sizeof *c->y);
}

/* The rows of one sequence from position 0 on, of one key head. */
static void head_chunks(const Rule *c, DeltaWork *work, int g, int T, int block)
{
    int N = c->N, E = c->E, group = c->H / c->G;
    for (int t = 0, rows; t < T; t += rows) {
        rows = KV_PAGE < T - t ? KV_PAGE : T - t;
        rows_gather(work->kq, c->k + ((int64_t)t * c->G + g) * N, (int64_t)c->G * N, rows, N);
        rows_gather(work->kq + rows * N, c->q + ((int64_t)t * c->G + g) * N, (int64_t)c->G * N,
                    rows, N);
        keys_turn(work->keys, 0, work->kq, N, rows, N);
        CPU(product)(work->within, KV_PAGE, work->kq, N, 1, work->keys, KV_PAGE, 2 * rows,
                     page_columns(rows), N, 1.0f, 0);
        for (int h = g * group; h < (g + 1) * group; h++) {
            DeltaHead head = {t ? page_state(c, t - KV_PAGE, h) : NULL, work->u, work->sums,
                              work->keys, h};
            sums_add(head.sums, c->decay + (int64_t)t * c->H + h, c->H, 0, rows);
            for (int i = 0; i < 2 * rows; i++)
                for (int j = 0; j < page_columns(rows); j += VL) {
                    int at = i * KV_PAGE + j;
                    vf decay = sums_decay(head.sums, i % rows, j);
                    v_store(work->weights + at, decay * v_load(work->within + at));
                }
            for (int i = 0; i < rows; i++) /* y's product takes whole blocks */
                for (int j = i + 1; j < rows; j++) work->weights[(rows + i) * KV_PAGE + j] = 0;
            if (head.state)
                CPU(product)(work->read, E, work->kq, N, 1, head.state, E, 2 * rows, E, N, 1.0f, 0);
            else
                memset(work->read, 0, (size_t)(2 * rows * E) * sizeof *work->read);
            page_solve(c, work, &head, t, rows, block);
            if (rows == KV_PAGE) advance(c, work, &head, page_state(c, t, h));
        }
    }
}

/* One sequence of T rows; block 0: as the engine sums. Returns 0, or 1 where no
 * memory is. */
__attribute__((visibility("default"))) int delta_run(float *y, float *w, float *pages,
                                                     const float *q, const float *k, const float *v,
                                                     const float *beta, const float *decay, int T,
                                                     int G, int H, int N, int E, int block)
{
    CpuDevice device = {0};
    if (pool_open(&device.pool, 1)) return 1;
    Span span = {.rows = T, .state = -1};
    Rule rule = {&device.base, y, w, pages, NULL, NULL, q, k, v, beta, decay, &span, G, H, N, E, 0};
    for (int g = 0; g < G; g++) {
        if (block)
            head_chunks(&rule, cpu_scratch(&device.base), g, T, block);
        else
            rule_piece(&rule, g);
    }
    pool_close(device.pool);
    return 0;
}
