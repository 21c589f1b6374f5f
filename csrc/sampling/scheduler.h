/* sampling/scheduler.h - the requests that are here, and which of their rows a step runs. */
#ifndef TINSMITH_SAMPLING_SCHEDULER_H
#define TINSMITH_SAMPLING_SCHEDULER_H

#include "sequence.h"

/* A client, while it has a request here. */
typedef struct Client {
    int64_t id;
    int requests;
    int queued; /* the client's sequences, in the step that is planned */
    int wanted; /* rows that its prompts still need */
    int rows;   /* rows that it may still run in the step */
} Client;

typedef struct Scheduler {
    Request **request; /* in the order in which they came */
    int requests, request_capacity;
    Sequence **queue; /* [waiting] those that could run, in the order in which they are served */
    int *rank;        /* [waiting + 1] where the n-th sequences of their clients begin */
    int waiting, queue_capacity, rank_capacity;
    int sequences;          /* of all requests */
    int decoding;           /* sequences that decode */
    int mixed;              /* these can't be replayed together */
    const Adapter *adapter; /* of the first of them */
    int64_t prompt_rows;    /* that prompts lack */
    Client **client;        /* the one with the oldest request first */
    int clients, client_capacity;
    int graphs;       /* whether decode steps may be recorded */
    int gathered;     /* steps that prompts have waited for more of them */
    int prompts_left; /* the newest step did not run all prompts that it could have */
} Scheduler;

Status scheduler_add(Scheduler *scheduler, Request *request);
void scheduler_remove(Scheduler *scheduler, const Request *request);
void scheduler_close(Scheduler *scheduler);
/* Picks the sequences that run and allocates their pages; returns how many. */
int schedule(Scheduler *scheduler, PagePool *pool, ScheduledRows *runs);

#endif
