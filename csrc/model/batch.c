/* model/batch.c - puts a packed batch on the device: T rows of S sequences, and the pages they
 * attend to.
 */
#include "batch.h"

void batch_place_on(Batch *batch, Arena *arena, int T, int S, int lists, int page_count, int axes)
{
    size_t slots = (size_t)lists * (size_t)T, spans = (size_t)lists * (size_t)S;
    batch->T = T;
    batch->S = S;
    batch->lists = lists;
    batch->read = NULL;
    batch->image = NULL;
    batch->images = 0;
    batch->tokens = arena_take(arena, (size_t)T * sizeof(int32_t));
    batch->pos = arena_take(arena, (size_t)T * (size_t)axes * sizeof(int32_t));
    batch->slot = arena_take(arena, slots * sizeof(int32_t));
    batch->spans = arena_take(arena, spans * sizeof(Span));
    batch->pages = arena_take(arena, (size_t)page_count * sizeof(int32_t));
}

void batch_place(Batch *batch, Arenas *arenas, const Model *model, int T, int S, int lists,
                 int page_count)
{
    for (int k = 0; k < model->stages; k++)
        batch_place_on(&batch[k], &arenas->of[k], T, S, lists, page_count, model->shape.axes);
}

static void upload_to(const Batch *batch, Device *dev, const BatchHost *host, int axes)
{
    size_t slots = (size_t)host->lists * (size_t)host->T,
           spans = (size_t)host->lists * (size_t)host->S;
    dev->upload(dev, batch->tokens, host->tokens, (size_t)host->T * sizeof(int32_t));
    dev->upload(dev, batch->pos, host->pos, (size_t)host->T * (size_t)axes * sizeof(int32_t));
    dev->upload(dev, batch->slot, host->slot, slots * sizeof(int32_t));
    dev->upload(dev, batch->pages, host->pages, (size_t)host->page_count * sizeof(int32_t));
    dev->upload(dev, batch->spans, host->spans, spans * sizeof(Span));
}

void batch_upload(Batch *batch, const Model *model, const BatchHost *host)
{
    for (int k = 0; k < model->stages; k++)
        upload_to(&batch[k], model->stage[k].dev, host, model->shape.axes);
}

void batch_add(BatchHost *host, const ImageRun *runs, int images, int length, int axes)
{
    host->spans[host->S++] = (Span){host->T, length, 0, host->page_count, -1};
    for (int t = 0; t < length; t++, host->T++) {
        image_position(host->pos + (size_t)host->T * (size_t)axes, runs, images, t, axes);
        host->slot[host->T] = host->page_count * KV_PAGE + t;
    }
    for (int t = 0; t < length; t += KV_PAGE, host->page_count++)
        host->pages[host->page_count] = host->page_count;
}

int batch_stopped(const Batch *batch)
{
    return batch->stop && *batch->stop;
}

void batch_whole(Batch *batch, const Model *model, const Adapter *adapter, int rows,
                 const atomic_int *stop)
{
    for (int k = 0; k < model->stages; k++) {
        batch[k].whole = (Segment){adapter, 0, rows};
        batch[k].segment = &batch[k].whole;
        batch[k].segments = 1;
        batch[k].stop = stop;
    }
}

void batch_images(Batch *batch, const Model *model, const ImageRows *image, int images)
{
    for (int k = 0; k < model->stages; k++) {
        batch[k].image = image;
        batch[k].images = images;
    }
}
