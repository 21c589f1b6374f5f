/* sampling/request.h - a request: checked, copied, overflowed, freed. */
#ifndef TINSMITH_SAMPLING_REQUEST_H
#define TINSMITH_SAMPLING_REQUEST_H

#include "page_pool.h"

/* The stamp of a request's weights, under which its pages are found: they count up, or, where they
 * may change under way, its session, which counts down. So pages of several weights are found in
 * their session alone. */
static inline uint64_t request_stamp(const Request *request)
{
    if (request->spec.session) return ~request->spec.session;
    return request->spec.adapter ? request->spec.adapter->stamp : 0;
}

/* The checks that do not read the request's arrays, which are not copied yet. */
Status request_check(const PagePool *pool, const RequestSpec *spec);
/* A checked request. */
Status request_open(Request **request, const PagePool *pool, const RequestSpec *spec);
void request_close(PagePool *pool, Request *request);
/* Ends a marked request: what is wrong with one of its samples is wrong with its weights. */
void request_overflow(PagePool *pool, Request *request);

#endif
