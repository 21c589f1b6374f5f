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

/* All checks that need no look into the request's arrays, which are not copied yet. */
Status request_check(const Kv *kv, const RequestSpec *spec);
/* A checked request. */
Status request_open(Request **request, const Kv *kv, const RequestSpec *spec);
void request_close(Kv *kv, Request *request);
/* Ends a marked request: what is wrong with one of its samples is wrong with its weights. */
void request_overflow(Kv *kv, Request *request);

#endif
