/* cpu/product/lora.c - LoRA's narrow products, for all matrices of a group that read the same
 * input.
 *
 *   forward   s_i = x·a_i (T,R);  y_i += scale·s_i·b_i (T,N_i)
 *   backward  ds_i = scale·dy_i·b_iᵀ;  db_i += scale·s_iᵀ·dy_i;  da_i += xᵀ·ds_i;
 *             dx += Σ ds_i·a_iᵀ
 *
 * The group's columns are concatenated, count·R of them, so three matrices of rank 8 fill one panel
 * instead of a quarter of three. A block of x is packed once for all a_i, a panel of x is copied
 * once for all da_i, and dx is read and written once. s and ds are already k-major for the
 * gradients. A block of dy that fits into L2 gives its part of ds, then its part of db: whole
 * blocks of DEPTH in both directions, so sums equal those of one product. 2·T·R·(D + N) flops a
 * matrix forward, twice that backward, on T·(D + N) elements: compute bound from ranks of about 32
 * on, bound by y's and dy's memory below. */
#include "../runtime/transpose.h"
#include "gemm_tiled.h"
#include "gemm.h"

enum {
    COLUMNS = DEPTH,     /* of the group at once: 3 matrices of rank 128 */
    ROWS = 16 * TALL,    /* of x in one job, at most */
    GRADIENT_PANELS = 8, /* of x in one job, at most */
    SHARED_COLUMNS = 4,  /* factor on the width of a block of dy shared by threads */
    DY_PANELS = 2,       /* of it in one job */
};

typedef struct LoraGroup {
    const Device *dev;
    const Lora *list;
    int count;
    const float *x;
    float *dx;
    int T, D, R;
    int rows, columns; /* of x in one job */
} LoraGroup;

/* The next of the group's columns in [from, to) that belong to one matrix. */
typedef struct LoraPart {
    const Lora *m;
    int r, n; /* its columns [r, r + n) */
} LoraPart;

static LoraPart part_of(const LoraGroup *g, int from, int to)
{
    int r = from % g->R, n = g->R - r;
    return (LoraPart){g->list + from / g->R, r, n < to - from ? n : to - from};
}

static int block_of(int64_t job, int size, int all)
{
    int from = (int)job * size;
    return all - from < size ? all - from : size;
}

/* ---- products of whole matrices ---- */

static void multiply(Device *dev, float *c, int64_t c_row, const float *a, int64_t a_row,
                     const float *b, int64_t ldb, Order order, int m, int n, int k, float scale,
                     int accumulate)
{
    Product p = product_of(c, a, a_row, b, ldb, order, m, n, k);
    p.ldc = c_row;
    p.scale = scale;
    if (accumulate) p.plus = p.c;
    CPU(product_run)(dev, &p);
}

/* ---- between x and the group's columns ---- */

typedef struct LoraRows {
    float packed[ROWS * DEPTH + PACKED_SLACK];
    _Alignas(64) float b[DEPTH * PANEL], wide[ROWS * COLUMNS];
} LoraRows;

_Static_assert((int)COLUMNS == (int)DEPTH && sizeof(LoraRows) <= POOL_SCRATCH, "a job's scratch");

/* s of all matrices for a block of rows. */
static void narrow_job(void *context, int64_t job)
{
    const LoraGroup *g = context;
    LoraRows *own = cpu_scratch(g->dev);
    float *packed = own->packed, *b = own->b, *sums = own->wide;
    int t0 = (int)job * g->rows, m = block_of(job, g->rows, g->T), all = g->count * g->R;
    memset(b, 0, sizeof own->b); /* missing columns */
    for (int c0 = 0; c0 < all; c0 += COLUMNS) {
        int c1 = all - c0 < COLUMNS ? all : c0 + COLUMNS;
        for (int k0 = 0; k0 == 0 || k0 < g->D; k0 += DEPTH) {
            int depth = g->D - k0 < DEPTH ? g->D - k0 : DEPTH;
            CPU(block_pack)(packed, g->x + (int64_t)t0 * g->D + k0, g->D, 1, m, depth, 0);
            for (int n0 = c0; n0 < c1; n0 += PANEL) {
                int width = c1 - n0 < PANEL ? c1 - n0 : PANEL;
                for (int c = n0; c < n0 + width;) {
                    LoraPart p = part_of(g, c, n0 + width);
                    panel_copy(b + c - n0, p.m->a + (int64_t)k0 * g->R + p.r, g->R, depth, p.n);
                    c += p.n;
                }
                CPU(block_multiply)(out_to(sums + n0 - c0, COLUMNS, 1.0f, k0 > 0),
                                    tiles_packed(packed, depth, 0), b, m, width, depth);
            }
        }
        for (int c = c0; c < c1;) {
            LoraPart p = part_of(g, c, c1);
            for (int t = 0; t < m; t++)
                memcpy(f32(p.m->s) + (int64_t)(t0 + t) * g->R + p.r, sums + t * COLUMNS + c - c0,
                       (size_t)p.n * sizeof(float));
            c += p.n;
        }
    }
}

/* dx += Σ ds_i·a_iᵀ for a block of rows. */
static void widen_job(void *context, int64_t job)
{
    const LoraGroup *g = context;
    LoraRows *own = cpu_scratch(g->dev);
    float *packed = own->packed, *b = own->b, *side_by_side = own->wide;
    int t0 = (int)job * g->rows, m = block_of(job, g->rows, g->T), all = g->count * g->R;
    memset(b, 0, sizeof own->b); /* missing columns */
    for (int c0 = 0; c0 < all; c0 += COLUMNS) {
        int c1 = all - c0 < COLUMNS ? all : c0 + COLUMNS, k = c1 - c0;
        for (int c = c0; c < c1;) {
            LoraPart p = part_of(g, c, c1);
            for (int t = 0; t < m; t++)
                memcpy(side_by_side + t * k + c - c0, f32(p.m->ds) + (int64_t)(t0 + t) * g->R + p.r,
                       (size_t)p.n * sizeof(float));
            c += p.n;
        }
        CPU(block_pack)(packed, side_by_side, k, 1, m, k, 0);
        for (int n0 = 0; n0 < g->D; n0 += PANEL) {
            int width = g->D - n0 < PANEL ? g->D - n0 : PANEL;
            for (int c = c0; c < c1;) {
                LoraPart p = part_of(g, c, c1);
                CPU(transpose)(b + (c - c0) * PANEL, PANEL, p.m->a + (int64_t)n0 * g->R + p.r, g->R,
                               width, p.n);
                c += p.n;
            }
            CPU(block_multiply)(out_to(g->dx + (int64_t)t0 * g->D + n0, g->D, 1.0f, 1),
                                tiles_packed(packed, k, 0), b, m, width, k);
        }
    }
}

/* ---- sums over rows ---- */

typedef struct Sums {
    _Alignas(64) float b[DEPTH * PANEL], sums[COLUMNS * PANEL], turned[PANEL * COLUMNS];
} Sums;

_Static_assert(sizeof(Sums) <= POOL_SCRATCH, "a job's scratch");

/* da_i += xᵀ·ds_i for some columns of x: computed as dsᵀ·x, R rows at a time, and transposed. */
static void da_job(void *context, int64_t job)
{
    const LoraGroup *g = context;
    Sums *own = cpu_scratch(g->dev);
    float *b = own->b, *sums = own->sums, *turned = own->turned;
    int first = (int)job * g->columns, R = g->R;
    int last = first + block_of(job, g->columns, g->D);
    memset(b, 0, sizeof own->b); /* missing columns */
    for (int k0 = 0; k0 < g->T; k0 += DEPTH) {
        int depth = g->T - k0 < DEPTH ? g->T - k0 : DEPTH;
        for (int n0 = first; n0 < last; n0 += PANEL) {
            int width = last - n0 < PANEL ? last - n0 : PANEL;
            panel_copy(b, g->x + (int64_t)k0 * g->D + n0, g->D, depth, width);
            for (int c = 0; c < g->count * R;) {
                LoraPart p = part_of(g, c, g->count * R);
                p.n = p.n < COLUMNS ? p.n : COLUMNS;
                Tiles ds = tiles_turned(f32(p.m->ds) + (int64_t)k0 * R + p.r, R);
                CPU(block_multiply)(out_to(sums, PANEL, 1.0f, 0), ds, b, p.n, width, depth);
                CPU(transpose)(turned, p.n, sums, PANEL, p.n, width);
                for (int j = 0; j < width; j++) {
                    float *da = p.m->da + (int64_t)(n0 + j) * R + p.r;
                    for (int r = 0; r < p.n; r++) da[r] += turned[j * p.n + r];
                }
                c += p.n;
            }
        }
    }
}

/* A block of dy, T rows by `columns`, and its part of db. */
typedef struct Db {
    const Device *dev;
    float *db;
    const float *s, *dy;
    int T, columns, N, step, R; /* step: dy's row stride */
    float scale;
} Db;

/* db += scale·sᵀ·dy for some of its columns. */
static void db_job(void *context, int64_t job)
{
    const Db *g = context;
    int first = (int)job * DY_PANELS * PANEL;
    int last = first + block_of(job, DY_PANELS * PANEL, g->columns);
    float *b = ((Sums *)cpu_scratch(g->dev))->b;
    if ((last - first) % PANEL) memset(b, 0, DEPTH * PANEL * sizeof *b); /* missing columns */
    for (int k0 = 0; k0 < g->T; k0 += DEPTH) {
        int depth = g->T - k0 < DEPTH ? g->T - k0 : DEPTH;
        for (int n0 = first; n0 < last; n0 += PANEL) {
            int width = last - n0 < PANEL ? last - n0 : PANEL;
            panel_copy(b, g->dy + (int64_t)k0 * g->step + n0, g->step, depth, width);
            CPU(block_multiply)(out_to(g->db + n0, g->N, g->scale, 1),
                                tiles_turned(g->s + (int64_t)k0 * g->R, g->R), b, g->R, width,
                                depth);
        }
    }
}

static int64_t jobs_of(int all, int size)
{
    return ((int64_t)all + size - 1) / size;
}

/* ds and db of one matrix, block by block of dy: DEPTH by DEPTH, 590 KB. With several threads a
 * block has DEPTH rows per thread, and is wide enough to be worth sharing. */
static void ds_db(Device *dev, const Lora *m, int T, int R, float scale)
{
    int threads = pool_threads(((CpuDevice *)dev)->pool), N = m->N, rows = DEPTH * threads;
    int width = threads > 1 ? SHARED_COLUMNS * DEPTH : DEPTH;
    for (int t0 = 0; t0 < T; t0 += rows)
        for (int n0 = 0; n0 < N; n0 += width) {
            const float *dy = f32c(m->y) + (int64_t)t0 * m->step + n0;
            int count = T - t0 < rows ? T - t0 : rows;
            int columns = N - n0 < width ? N - n0 : width;
            Db db = {.dev = dev,
                     .db = m->db + n0,
                     .s = f32c(m->s) + (int64_t)t0 * R,
                     .dy = dy,
                     .T = count,
                     .columns = columns,
                     .N = N,
                     .step = m->step,
                     .R = R,
                     .scale = scale};
            multiply(dev, f32(m->ds) + (int64_t)t0 * R, R, dy, m->step, m->b + n0, N, BY_COLUMN,
                     count, R, columns, scale, n0 > 0);
            cpu_run(dev, jobs_of(columns, DY_PANELS * PANEL), db_job, &db);
        }
}

/* ---- the ops ---- */

void CPU(lora)(Device *dev, const Lora *group, int count, const real *x, int T, int D, int R,
               float scale)
{
    LoraGroup g = {.dev = dev, .list = group, .count = count, .x = f32c(x), .T = T, .D = D, .R = R};
    g.rows = cpu_size_of_piece(dev, T, ROWS, TALL);
    if (count == 1) /* nothing to share: x in place is best for one panel */
        multiply(dev, f32(group->s), R, g.x, D, group->a, R, BY_ROW, T, R, D, 1.0f, 0);
    else
        cpu_run(dev, jobs_of(T, g.rows), narrow_job, &g);
    for (const Lora *m = group; m < group + count; m++)
        multiply(dev, f32(m->y), m->step, f32(m->s), R, m->b, m->N, BY_ROW, T, m->N, R, scale, 1);
}

void CPU(lora_backward)(Device *dev, real *dx, const Lora *group, int count, const real *x, int T,
                        int D, int R, float scale)
{
    LoraGroup g = {.dev = dev,
                   .list = group,
                   .count = count,
                   .x = f32c(x),
                   .dx = dx ? f32(dx) : NULL,
                   .T = T,
                   .D = D,
                   .R = R,
                   .rows = cpu_size_of_piece(dev, T, ROWS, TALL),
                   .columns = cpu_size_of_piece(dev, D, GRADIENT_PANELS * PANEL, PANEL)};
    for (const Lora *m = group; m < group + count; m++) ds_db(dev, m, T, R, scale);
    cpu_run(dev, jobs_of(D, g.columns), da_job, &g);
    if (dx) cpu_run(dev, jobs_of(T, g.rows), widen_job, &g);
}

void CPU(head_lora)(Device *dev, float *logits, real *s, const real *x, const float *a,
                    const float *b, int T, int V, int D, int R, float scale)
{
    CPU(lora)(dev, &(Lora){.y = (real *)logits, .s = s, .a = a, .b = b, .N = V, .step = V}, 1, x, T,
              D, R, scale);
}
