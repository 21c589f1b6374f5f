/* sampler.h - requests, and the sequences that a sampler decodes for them.
 *
 * A sequence is its tokens so far and how many of them have their keys and values in the cache. One
 * step runs, for each sequence, the tokens that are missing there (a prompt, a preempted sequence's
 * past, or just the newest token), and draws the next one when none is missing. There is no other
 * state, so joining, preempting and resuming are all the same thing, and none can change a result.
 */
#ifndef TINSMITH_SAMPLER_H
#define TINSMITH_SAMPLER_H

#include "core.h"

typedef enum Ending { RUNNING, STOPPED, FULL } Ending; /* FULL: max_tokens or the context */

typedef struct Sequence {
    Ending ending;
    int ready;  /* 0: waits for the request's first sequence to share the prompt's pages */
    int cached; /* tokens whose keys and values are in the cache */
    int length; /* tokens: prompt and drawn */
    int drawn;
    int32_t *tokens;  /* [room] */
    float *logprobs;  /* [drawn] */
    int32_t *top_ids; /* [drawn · topk_sample] */
    float *top_logprobs;
    int32_t *pages;
    int page_count, room;
    int kept;        /* full pages that prefix.c knows */
    uint64_t behind; /* its number of the last of them */
    int waited;      /* for the beginning of a page that another one computed */
} Sequence;

typedef struct RequestSpec {
    int64_t id;
    int64_t client;         /* who asks: clients share each step */
    const Adapter *adapter; /* kept alive by the caller until the request is gone */
    const int32_t *prompt, *stop_ids;
    int prompt_length, stop_count;
    int samples, max_tokens; /* max_tokens -1: to the end of the context */
    float temperature, top_p;
    int top_k;
    uint64_t seed;
    int topk_sample, prompt_logprobs, topk_prompt;
    int draws;        /* tokens to draw at each prompt position after the first */
    int first_scored; /* prompt positions before this one are not scored */
    /* Ids to score there: those at position p + 1 are targets[starts[p]] up to starts[p + 1]. NULL:
     * none. */
    const int32_t *targets, *starts;
    int64_t target_count, start_count; /* lengths, as they came */
} RequestSpec;

/* Who asks, while a request of theirs is here. */
typedef struct Client {
    int64_t id;
    int requests;
    int in_line; /* sequences of theirs, in the step that is picked */
    int wanted;  /* rows that their prompts lack */
    int rows;    /* and may yet run */
} Client;

typedef struct Request {
    RequestSpec spec; /* its arrays are copies */
    Client *client;
    int limit;  /* tokens at which a sequence is full */
    int scored; /* prompt positions whose log-probabilities are known */
    float *prompt_logprobs;
    int32_t *top_ids;
    float *top_logprobs;
    float *target_logprobs; /* [target_count] */
    int32_t *drawn_ids;     /* [(prompt_length − 1) · draws] */
    float *drawn_logprobs;
    int done;
    Sequence *sequence;
} Request;

/* schedule.c's: the sequences that could run, who is to go on first before the others. */
typedef struct Waiter {
    Request *request;
    int sample;
} Waiter;

typedef struct Line {
    Waiter *waiter; /* [room] */
    int *rank;      /* [room + 1]: where the sequences that are so many-th of their clients begin */
    int count, room;
    int sequences;   /* of all requests */
    Client **client; /* who has the oldest request first */
    int clients, client_room;
} Line;

typedef struct Drawn {
    int64_t request;
    int sample;
    int32_t token;
} Drawn;

/* A decoding step as the device has recorded it, and all that it depends on. */
typedef struct Recording {
    int rows;
    uint64_t adapter; /* its number; 0: none */
    const void *base; /* of the step's arena */
    Graph *graph;     /* NULL: it ran once, and is recorded when it comes again */
    int64_t used;     /* the step in which it ran last; 0: an empty place */
} Recording;

enum { RECORDINGS = 32 }; /* 9 sizes of three adapters, and some */

typedef struct Sampler {
    Model *model;
    Kv kv;
    Arena arena; /* of a step */
    int graphs;  /* whether decoding steps may be recorded */
    Recording recording[RECORDINGS];
    int64_t steps, replays; /* decoding steps, and those that were replayed */
    char *inputs;           /* host: what a decoding step uploads */
    size_t inputs_room;
    LayerActs *layers;
    int limit_ids; /* ids from here on are never drawn */
    Request **request;
    int count, room;
    Line line;
    Drawn *drawn; /* of the newest step */
    int drawn_count, drawn_room;
    volatile int interrupted; /* set from outside: the step under way stops */
} Sampler;

Status sampler_open(Sampler **sampler, Model *model, int64_t tokens, int limit_ids);
void sampler_close(Sampler *sampler);
Status sampler_add(Sampler *sampler, const RequestSpec *spec);
/* One forward. sampler->drawn then holds what was drawn; an interrupted step drew nothing. */
Status sampler_step(Sampler *sampler);
/* Ends a sample after its newest token: its stop string was seen. */
Status sampler_stop(Sampler *sampler, int64_t id, int sample);
Request *sampler_find(Sampler *sampler, int64_t id);
/* Forgets a request, done or not. */
void sampler_forget(Sampler *sampler, int64_t id);

/* A drawn token joins its sequence, and may end it. */
struct Turn;
void sampler_take_token(Sampler *sampler, const struct Turn *turn, int32_t token, float logp);
/* How the token behind a turn's last row is drawn. */
Draw sampler_draw(const Sampler *sampler, const struct Turn *turn);

/* Ids from the request's own lists that are scored in the row of a prompt's position. */
int row_targets(const RequestSpec *spec, int position);
/* Whether anything is asked of that row that was not told yet. */
int row_asked(const Request *request, int position);

/* schedule.c: which rows a step runs. */

enum { STEP_ROWS = 512, STEP_SEQUENCES = 256 };

typedef struct Turn {
    Request *request;
    int sample, from, rows; /* tokens [from, from + rows) */
    int draws;              /* its last row is followed by a draw */
} Turn;

/* Picks the sequences that run and gives them pages; returns how many. */
int schedule(Sampler *sampler, Turn *turns);
/* A request comes: 0 if there is no memory. It goes, whether it could join or not. */
int line_join(Line *line, Request *request);
void line_leave(Line *line, const Request *request);
void line_close(Line *line);
/* The rows of these turns have their keys and values in the cache. */
void turns_cached(Sampler *sampler, const Turn *turns, int count);
/* Gives back the pages of a sequence. */
void sequence_drop(Kv *kv, Sequence *sequence);

/* prefix.c: remembers the full pages of a sequence, and what their rows told; and lets one whose
 * pages are all remembered go on with those that follow, as far as they are known. */
void prefix_keep(Kv *kv, const Request *request, Sequence *s);
void prefix_begin(Kv *kv, Request *request, Sequence *s);
/* The tokens of its next page, from the first on, that another one has there too. */
int prefix_common(const Request *request, const Sequence *s, const Request *other,
                  const Sequence *theirs);

/* share.c: sequences that begin alike. */

/* A request's first sequence has its prompt in the cache: the others begin from its pages, all but
 * the prompt's last token, which each runs for itself. */
void share_prompt(Sampler *sampler, Request *request);
/* Gives a sequence what is there of the tokens that it lacks; whether it then waits for what one of
 * this step's turns computes. */
int share_begin(Sampler *sampler, const Turn *turns, int count, Request *request, Sequence *s);

/* scores.c: the log-probabilities that a page's rows gave. */

/* What a request knows of its prompt's page number `page` once its rows have been run. */
PageScores scores_of(const Request *request, int page);
/* Whether that is all that a request asks of its own page of that number; and takes it from there.
 */
int scores_suffice(const PageScores *known, const Request *request, int page);
void scores_take(const PageScores *known, Request *request, int page);
/* Remembers it with a page of the cache; forgets it. */
void scores_keep(Prefix *prefix, int32_t at, const Request *request, int page);
void scores_drop(Prefix *prefix, int32_t at);

/* decode.c: steps in which every sequence runs one row and draws one token. */

/* Whether the device records such a step. */
int decode_fits(const Sampler *sampler, const Turn *turns, int count);
Status decode_step(Sampler *sampler, const Turn *turns, int count);
/* Forgets what was recorded. */
void decode_close(Sampler *sampler);

#endif
