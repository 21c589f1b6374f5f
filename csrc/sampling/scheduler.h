/* sampling/scheduler.h - the requests that are here, and which of their rows a step runs. */
#ifndef TINSMITH_SAMPLING_SCHEDULER_H
#define TINSMITH_SAMPLING_SCHEDULER_H

#include "sequence.h"

/* A client, while it has a request here. */
typedef struct Client {
    int64_t id;
    int requests;
    int in_line; /* the client's sequences, in the step that is planned */
    int wanted;  /* rows that its prompts still need */
    int rows;    /* rows that it may still run in the step */
} Client;

/* A sequence that could run. */
typedef struct Waiter {
    Request *request;
    int sample;
} Waiter;

static inline Sequence *waiter_sequence(const Waiter *waiter)
{
    return &waiter->request->sequence[waiter->sample];
}

typedef struct Scheduler {
    Request **request; /* in the order in which they came */
    int requests, request_room;
    Waiter *waiter; /* [room] those that could run, in the order in which they are served */
    int *rank;      /* [room + 1]: where the sequences begin that are the n-th of their clients */
    int count, room;
    int sequences;          /* of all requests */
    int decoding;           /* sequences that decode */
    int mixed;              /* these can't be replayed together */
    const Adapter *adapter; /* of the first of them */
    int64_t prompt_rows;    /* that prompts lack */
    Client **client;        /* the one with the oldest request first */
    int clients, client_room;
    int graphs;       /* whether decode steps may be recorded */
    int gathered;     /* steps that prompts have waited for more of them */
    int prompts_left; /* the newest step did not run all prompts that it could have */
} Scheduler;

/* scheduler_join adds a request. scheduler_leave takes it away. */
Status scheduler_join(Scheduler *scheduler, Request *request);
void scheduler_leave(Scheduler *scheduler, const Request *request);
void scheduler_close(Scheduler *scheduler);
/* Picks the sequences that run and gives them pages; returns how many. */
int schedule(Scheduler *scheduler, Kv *kv, Turn *turns);

#endif
