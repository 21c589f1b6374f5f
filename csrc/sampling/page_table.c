/* sampling/page_table.c - the pages of a step's sequences as the device sees them: for each list of
 * layers (core.h) a table of frames, a span for each sequence and a slot for each row.
 *
 * In a windowed list a sequence has the frames that it holds alone: none before them is read. */
#include "page_table.h"

static int begin_of(const Kv *kv, const Sequence *s, int list)
{
    return list < kv->lists.full ? 0 : s->seen;
}

int table_size(const Kv *kv, const Sequence *s)
{
    return kv->lists.full * s->page_count + kv->lists.windowed * (s->page_count - s->seen);
}

static int32_t frame_of(const Kv *kv, int32_t page, int list)
{
    return kv->frame[page * (kv->lists.full + kv->lists.windowed) + list];
}

int32_t table_slot(const Kv *kv, const Sequence *s, int list, int position)
{
    return frame_of(kv, s->pages[position / KV_PAGE], list) * KV_PAGE + position % KV_PAGE;
}

int table_add(const Kv *kv, const Sequence *s, int list, int32_t *table, int at, int32_t *first)
{
    int begin = begin_of(kv, s, list);
    *first = at - begin;
    for (int i = begin; i < s->page_count; i++) table[at++] = frame_of(kv, s->pages[i], list);
    return at;
}
