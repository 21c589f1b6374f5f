/* sampling/decode_graph.h - steps in which every sequence runs one row and draws one token. */
#ifndef TINSMITH_SAMPLING_DECODE_GRAPH_H
#define TINSMITH_SAMPLING_DECODE_GRAPH_H

#include "model_runner.h"

/* A recorded decode step, and all that it depends on. */
typedef struct Recording {
    int rows;
    uint64_t adapter; /* its number; 0: none */
    const void *base; /* of the step's arena */
    Graph *graph;     /* NULL: it ran once, and is recorded the next time */
    int64_t used;     /* the last step that ran it; 0: free */
} Recording;

enum { RECORDINGS = 32 }; /* 9 sizes for three adapters, and some spare */

typedef struct DecodeGraphs {
    Recording recording[RECORDINGS];
    int64_t steps, replays; /* decoding steps, and those that were replayed */
    char *inputs;           /* host: the bytes that a decode step uploads */
    size_t inputs_size;
} DecodeGraphs;

/* Whether a request can share a recorded step with an adapter's requests. */
int decode_shares(const RequestSpec *spec, const Adapter *adapter);
/* Whether a device that records can record such a step. */
int decode_records(const ScheduledRows *runs, int count);
Status decode_step(DecodeGraphs *graphs, ModelRunner *runner, const ScheduledRows *runs, int count,
                   StepResult *result);
/* Frees all recordings. */
void decode_close(DecodeGraphs *graphs, Device *dev);

#endif
