/* cuda/attention/kv.cu - the pages of the key-value cache: writing rows to their slots, copying a
 * page.
 *
 *   k_pages[slot[t]] = k[t],  v_pages[slot[t]] = v[t]
 *
 * One layer's pages are [page][G][KV_PAGE][E], for keys and values. A head's part of a page is
 * KV_PAGE·E contiguous elements, which attention reads in place. Roofline: reads 4·T·G·E bytes and
 * writes as many; memory bound, and negligible beside attention. */
#include "../runtime/kernel.cuh"

enum { THREADS = 256 };

/* One thread moves W elements: 8 (16 bytes) if rows allow it, else one. */
template <int W>
static __global__ void kv_write_kernel(real *k_pages, real *v_pages, const real *k, const real *v,
                                       const int32_t *slot, int T, int G, int E, int64_t v_step)
{
    int pieces = E / W;
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)T * G * pieces) return;
    int piece = (int)(i % pieces), g = (int)(i / pieces % G);
    int64_t t = i / pieces / G;
    int page = slot[t] / KV_PAGE, offset = slot[t] % KV_PAGE;
    int64_t to = (((int64_t)page * G + g) * KV_PAGE + offset) * E + piece * W, from = i * W;
    float keys[W], values[W];
    load<W>(keys, k + from);
    load<W>(values, v + t * v_step + g * E + piece * W);
    store<W>(k_pages + to, keys);
    store<W>(v_pages + to, values);
}

template <int W>
static __global__ void kv_copy_kernel(real *k_pages, real *v_pages, int from, int to, int count,
                                      int G, int E)
{
    int pieces = count * E / W, i = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (i >= G * pieces) return;
    int64_t page = (int64_t)G * KV_PAGE * E;
    int64_t at = (int64_t)(i / pieces) * KV_PAGE * E + (int64_t)(i % pieces) * W;
    float keys[W], values[W];
    load<W>(keys, k_pages + from * page + at);
    load<W>(values, v_pages + from * page + at);
    store<W>(k_pages + to * page + at, keys);
    store<W>(v_pages + to * page + at, values);
}

void cuda_kv_write(Device *dev, cached *k_pages, cached *v_pages, const real *k, const real *v,
                   const int32_t *slot, int T, int G, int E, int v_step)
{
    int64_t n = (int64_t)T * G * E;
    if (E % 8 == 0 && v_step % 8 == 0)
        LAUNCH(cuda_of(dev), kv_write_kernel<8>, cuda_blocks(n / 8, THREADS), THREADS, 0, k_pages,
               v_pages, k, v, slot, T, G, E, (int64_t)v_step);
    else
        LAUNCH(cuda_of(dev), kv_write_kernel<1>, cuda_blocks(n, THREADS), THREADS, 0, k_pages,
               v_pages, k, v, slot, T, G, E, (int64_t)v_step);
}

void cuda_kv_copy(Device *dev, cached *k_pages, cached *v_pages, int from, int to, int count, int G,
                  int E)
{
    int64_t n = (int64_t)count * G * E;
    if (E % 8 == 0)
        LAUNCH(cuda_of(dev), kv_copy_kernel<8>, cuda_blocks(n / 8, THREADS), THREADS, 0, k_pages,
               v_pages, from, to, count, G, E);
    else
        LAUNCH(cuda_of(dev), kv_copy_kernel<1>, cuda_blocks(n, THREADS), THREADS, 0, k_pages,
               v_pages, from, to, count, G, E);
}
