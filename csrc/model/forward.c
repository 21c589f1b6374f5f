/* model/forward.c - the transformer, once for all devices, for training and for decoding.
 *
 *   x = embed(tokens);  each layer:  x += mixer(norm(x)),  x += feed(norm(x));  hidden = norm(x)
 *
 * layers.inc lists the kinds of mixers and feed-forward parts; each kind has its own file. */
#include "layer.h"

static KindForward *const kind_forward[KINDS] = {
#define LAYER_KIND(kind, part, has, token, window, sequence) [KIND_##kind] = kind##_forward,
#include "layers.inc"
};

/* out = x + kind(norm(x)). Where `out` is NULL, recomputes the rows that backward needs. */
static void part_forward(const Pass *p, LayerKind kind, real *out, float *rstd, const real *x,
                         const float *norm)
{
    Device *d = p->model->dev;
    int T = p->batch->T, D = p->model->shape.width;
    d->rmsnorm(d, p->acts->xn, rstd, x, norm, T, D, p->model->shape.norm_eps);
    kind_forward[kind](p, out, x);
}

void layer_forward(const Pass *p, real *next)
{
    const LayerKind *kind = p->model->shape.layer[p->l].kind;
    const LayerWeights *w = &p->model->layer[p->l];
    const LayerActs *a = &p->acts->layer[p->l];
    real *mid = next || p->l < p->acts->again[DEAR] ? a->mid : NULL;
    part_forward(p, kind[MIXER], mid, a->attn_rstd, a->x, w->attn_norm);
    part_forward(p, kind[FEED], next, a->mlp_rstd, a->mid, w->mlp_norm);
}

enum { LOOKED_UP = 256 }; /* rows */

/* Rows of an embedding that is mapped lie among others in its pages, which are given back: or else
 * they would be all of it in the end. */
static void look_up(const Model *m, real *x, const int32_t *tokens, int T)
{
    Device *d = m->dev;
    int D = m->shape.width, V = m->shape.vocab;
    for (int row = 0, rows = T; row < T; row += rows) {
        if (m->looked_up && rows > LOOKED_UP) rows = LOOKED_UP;
        if (rows > T - row) rows = T - row;
        d->embed(d, real_at(d, x, (size_t)row * (size_t)D), tokens + row, m->embed, rows, V, D);
        if (m->looked_up) d->rarely(d, m->embed, m->looked_up);
    }
}

void forward(const Model *m, const Batch *batch, const Acts *acts, const Cache *cache)
{
    Device *d = m->dev;
    const Shape *s = &m->shape;
    int T = batch->T, L = s->layers;
    Pass p = {.model = m, .batch = batch, .acts = acts, .cache = cache};
    d->rope_table(d, acts->cosine, acts->sine, batch->pos, m->inv_freq, T, s->rotary,
                  s->rope_scale);
    look_up(m, acts->layer[0].x, batch->tokens, T);
    for (p.l = 0; p.l < L && !batch_stopped(batch); p.l++)
        layer_forward(&p, p.l + 1 < L ? acts->layer[p.l + 1].x : acts->out);
    d->rmsnorm(d, acts->hidden, acts->final_rstd, acts->out, m->final_norm, T, s->width,
               s->norm_eps);
}
