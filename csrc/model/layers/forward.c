/* model/layers/forward.c - the transformer, for all devices, for training and decoding.
 *
 *   x = embed(tokens);  each layer:  x += mixer(norm(x)),  x += feed(norm(x));  hidden = norm(x)
 *
 * Often one row of a prompt is read; the last layer's feed-forward part then runs for it alone.
 * layers.inc lists the kinds of mixers and feed-forward parts; each kind has its own file. */
#include "forward.h"

#include "../stages.h"
#include "layer.h"

static KindForward *const kind_forward[KINDS] = {
#define LAYER_KIND(kind, part, has, token, window, sequence) [KIND_##kind] = kind##_forward,
#include "../layers.inc"
};

/* out = x + kind(norm(x)). With `out` NULL it recomputes the rows that backward needs. */
static void part_forward(const LayerPass *p, LayerKind kind, real *out, float *rstd, const real *x,
                         const float *norm)
{
    Device *d = p->stage->dev;
    int T = p->batch->T, D = p->model->shape.width;
    d->rmsnorm(d, p->acts->xn, rstd, x, norm, T, D, p->model->shape.norm_eps);
    kind_forward[kind](p, out, x);
}

static void mixer_forward(const LayerPass *p, real *mid)
{
    const LayerActs *a = &p->acts->layer[p->l];
    LayerKind kind = p->model->shape.layer[p->l].kind[MIXER];
    part_forward(p, kind, mid, a->attn_rstd, a->x, p->model->layer[p->l].attn_norm);
}

static void feed_forward(const LayerPass *p, real *next, const real *mid)
{
    const LayerActs *a = &p->acts->layer[p->l];
    LayerKind kind = p->model->shape.layer[p->l].kind[FEED];
    part_forward(p, kind, next, a->mlp_rstd, mid, p->model->layer[p->l].mlp_norm);
}

void layer_forward(const LayerPass *p, real *next)
{
    const LayerActs *a = &p->acts->layer[p->l];
    mixer_forward(p, next || p->l < p->acts->again[DEAR] ? a->mid : NULL);
    feed_forward(p, next, a->mid);
}

/* The last layer; its feed-forward part runs only for the rows that are read. */
static void last_forward(const LayerPass *p)
{
    const Batch *read = p->batch->read;
    const Acts *acts = p->acts;
    const LayerActs *a = &acts->layer[p->l];
    Device *d = p->stage->dev;
    mixer_forward(p, a->mid);
    if (!read->T) return;
    d->gather(d, acts->hidden, a->mid, read->rows, read->T, p->model->shape.width);
    LayerPass few = *p;
    few.batch = read;
    feed_forward(&few, acts->out, acts->hidden);
}

enum { LOOKED_UP = 256 }; /* rows */

/* A row of a mapped embedding brings in whole pages of the file. They are dropped after each
 * lookup; otherwise the whole embedding would become resident in time. */
static void look_up(const Model *m, real *x, const int32_t *tokens, int T)
{
    const Stage *stage = &m->stage[0];
    Device *d = stage->dev;
    int D = m->shape.width, V = m->shape.vocab;
    for (int row = 0, rows = T; row < T; row += rows) {
        if (m->looked_up && rows > LOOKED_UP) rows = LOOKED_UP;
        if (rows > T - row) rows = T - row;
        d->embed(d, real_at(d, x, (size_t)row * (size_t)D), tokens + row, stage->embed, rows, V, D);
        if (m->looked_up) d->rarely(d, stage->embed, m->looked_up);
    }
}

/* An image's rows of features stand in place of the embedding. */
static void images_place(const Model *m, real *x, const Batch *batch)
{
    Device *d = m->stage[0].dev;
    size_t D = (size_t)m->shape.width;
    for (int i = 0; i < batch->images; i++) {
        const ImageRows *one = &batch->image[i];
        d->copy(d, real_at(d, x, (size_t)one->row * D),
                real_at(d, one->features->level[0], (size_t)one->from * D),
                (size_t)one->rows * D * d->real_bytes);
    }
}

/* Deepstack: after each of the first layers, more features are added to an image's rows. */
static void images_add(const LayerPass *p, real *next)
{
    const Model *m = p->model;
    Device *d = p->stage->dev;
    size_t D = (size_t)m->shape.width;
    int level = p->l + 1;
    if (!p->batch->images || level > m->tower->shape.deeps) return;
    for (int i = 0; i < p->batch->images; i++) {
        const ImageRows *one = &p->batch->image[i];
        d->add(d, real_at(d, next, (size_t)one->row * D),
               real_at(d, one->features->level[level], (size_t)one->from * D),
               (int64_t)one->rows * (int64_t)D);
    }
}

/* The layers of the pass's stage, whose last one writes acts->out. */
static void stage_forward(LayerPass *p)
{
    const Shape *s = &p->model->shape;
    const Acts *acts = p->acts;
    const Batch *batch = p->batch;
    Device *d = p->stage->dev;
    if (acts->cosine) /* NULL if no layer of the stage has rope */
        d->rope_table(d, acts->cosine, acts->sine, batch->pos, p->stage->axis, p->stage->inv_freq,
                      batch->T, s->rotary, s->axes, s->rope_scale);
    for (p->l = p->stage->first; p->l < p->stage->end && !batch_stopped(batch); p->l++) {
        real *next = p->l + 1 < p->stage->end ? acts->layer[p->l + 1].x : acts->out;
        if (next == acts->out && batch->read)
            last_forward(p);
        else
            layer_forward(p, next);
        images_add(p, next);
    }
}

void forward(const Model *m, const Batch *batch, const Acts *acts, const Cache *cache)
{
    const Shape *s = &m->shape;
    int T = batch->T, last = m->stages - 1;
    size_t bytes = (size_t)T * (size_t)s->width * m->dev->real_bytes;
    look_up(m, acts->layer[0].x, batch->tokens, T);
    images_place(m, acts->layer[0].x, batch);
    for (int k = 0; k <= last; k++) {
        const Stage *stage = &m->stage[k];
        LayerPass p = {m, stage, &batch[k], &acts[k], &cache[k], NULL, NULL, 0};
        if (k > 0)
            stage_copy(stage, acts->layer[stage->first].x, stage - 1, acts[k - 1].out, bytes);
        stage_forward(&p);
    }
    if (batch[last].read) T = batch[last].read->T;
    m->dev->rmsnorm(m->dev, acts[last].hidden, acts[last].final_rstd, acts[last].out,
                    stage_last(m)->final_norm, T, s->width, s->norm_eps);
}
