/* sampling/request.h - checks, copies, ends and frees a request. */
#ifndef TINSMITH_SAMPLING_REQUEST_H
#define TINSMITH_SAMPLING_REQUEST_H

#include "page_pool.h"

/* The stamp under which a request's pages are cached: its weights' stamp, which counts up from 0,
 * or ~session, which counts down, if its weights may change in flight. So pages of mixed weights
 * are found only in their session. */
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
/* Ends a marked request with all its samples, because they share the weights. */
void request_overflow(PagePool *pool, Request *request);

#endif
