/* sampling/scheduler.h - the sampler's requests, and which of their rows a step runs. */
#ifndef TINSMITH_SAMPLING_SCHEDULER_H
#define TINSMITH_SAMPLING_SCHEDULER_H

#include "sequence.h"

/* A client with at least one request. */
typedef struct Client {
    int64_t id;
    int requests;
    int queued; /* its sequences in the queue */
    int wanted; /* rows that its prompts still need */
    int rows;   /* rows that it may still run in the step */
} Client;

typedef struct Scheduler {
    Request **request; /* in order of arrival */
    int requests, request_capacity;
    Sequence **queue; /* [waiting] sequences that could run, in serving order */
    int *rank;        /* [waiting + 1] start of the clients' n-th sequences */
    int waiting, queue_capacity, rank_capacity;
    int sequences;          /* of all requests */
    int decoding;           /* sequences that decode */
    int mixed;              /* they can't share a recorded step */
    const Adapter *adapter; /* the first one's */
    int64_t prompt_rows;    /* missing rows of prompts */
    Client **client;        /* in the order of their oldest requests */
    int clients, client_capacity;
    int graphs;       /* whether decode steps may be recorded */
    int gathered;     /* steps that prompts have waited for more prompts */
    int prompts_left; /* the newest step did not complete all prompts */
} Scheduler;

Status scheduler_add(Scheduler *scheduler, Request *request);
void scheduler_remove(Scheduler *scheduler, const Request *request);
void scheduler_close(Scheduler *scheduler);
/* Picks the sequences that run and allocates their pages; returns how many. */
int schedule(Scheduler *scheduler, PagePool *pool, ScheduledRows *runs);

#endif
