/* sampling/sampler.h - requests, and the sequences that a sampler decodes for them.
 *
 * A sequence is its tokens so far and how many of them have their keys and values in the cache. One
 * step runs, for each sequence, the tokens that are missing there: a prompt, a preempted sequence's
 * past, or just the newest token. It draws the next token when none is missing. There is no other
 * state, so joining, preempting and resuming are the same operation, and none can change a
 * result. */
#ifndef TINSMITH_SAMPLING_SAMPLER_H
#define TINSMITH_SAMPLING_SAMPLER_H

#include "../model/core.h"

/* ---- prefix_cache.c: the prefix cache, full pages found by their content ---- */

typedef struct Memory Memory; /* private to prefix_cache.c: the known content of a page */

/* The scores of the tokens after the last `rows` rows of a page. 0: nothing is known. */
typedef struct PageScores {
    int rows, top;       /* of each row the log-probability of its next token, and the `top` best */
    int32_t after;       /* the next token of the page's last row */
    float *logprobs;     /* [KV_PAGE] */
    float *top_logprobs; /* [KV_PAGE · top] */
    int32_t *top_ids;
} PageScores;

typedef struct Prefix {
    int pages;
    Memory *memory;     /* [pages] */
    PageScores *scores; /* [pages] prompt_scores.c's */
    size_t scores_bytes, scores_most;
    int32_t *bucket; /* [buckets] the first page of each, or -1 */
    int buckets;
    int32_t oldest, newest; /* remembered pages that no sequence holds */
    uint64_t numbers;       /* given so far */
    int64_t reused;         /* tokens that were found here instead of computed */
} Prefix;

/* For a cache of `pages` pages that takes `bytes` bytes in all. */
Status prefix_open(Prefix *prefix, int pages, size_t bytes);
void prefix_close(Prefix *prefix);
/* No sequence holds this page any more. It is kept if its content is known, else 0. */
int prefix_lay(Prefix *prefix, int32_t page);
/* A sequence holds a page again that prefix_lay kept. */
void prefix_lift(Prefix *prefix, int32_t page);
/* Evicts the least recently used page, and returns it; -1 if there is none. */
int32_t prefix_evict(Prefix *prefix);
/* The page with these KV_PAGE tokens behind the page of number `before` (0: none), under the
 * weights of that stamp; -1 if there is none. */
int32_t prefix_find(const Prefix *prefix, uint64_t stamp, uint64_t before, const int32_t *tokens);
/* Remembers a page's content; its number is new. */
void prefix_add(Prefix *prefix, int32_t page, uint64_t stamp, uint64_t before,
                const int32_t *tokens);
uint64_t prefix_number(const Prefix *prefix, int32_t page);
/* What is known of a page, its number too, is known of another from now on, which a sequence holds
 * and whose content is the same. */
void prefix_move(Prefix *prefix, int32_t from, int32_t to);

/* ---- state_pool.c: what sequences keep beside their pages ---- */

/* Of a slot that is kept. */
typedef struct StateSlot {
    int32_t page;         /* behind whose last token it is the state */
    int32_t older, newer; /* used before it and after it; -1: the end */
} StateSlot;

typedef struct States {
    int count; /* slots; 0: the model's layers keep nothing beside the pages */
    int free_count, kept;
    int32_t *free_list;
    StateSlot *slot;        /* [count] */
    int32_t *of_page;       /* [pages] the slot that is kept for a page, or -1 */
    int32_t oldest, newest; /* kept ones */
} States;

/* Even a failed one is closed. */
Status states_open(States *states, int count, int pages);
void states_close(States *states);
/* A slot for a sequence: a free one, or the kept one that was not used for longest; -1: none. */
int32_t states_take(States *states);
void states_give(States *states, int32_t slot);
/* The slot that is kept for a page, or -1. */
int32_t states_find(const States *states, int32_t page);
/* A kept slot is used now. */
void states_use(States *states, int32_t slot);
/* Keeps a slot that was taken for a page that has none. */
void states_keep(States *states, int32_t slot, int32_t page);
/* The page is forgotten, so is the slot that was kept for it. */
void states_forget(States *states, int32_t page);

/* ---- window.c: frames in the windowed lists that no sequence reads any more ---- */

typedef struct Windows {
    struct WindowPage *page; /* [pages] private to window.c */
    int32_t oldest, newest;  /* those laid aside */
} Windows;

Status windows_open(Windows *windows, int pages);
void windows_close(Windows *windows);
/* A sequence holds the frames of a page; it does not any more: returns whether it was the last. */
void windows_hold(Windows *windows, int32_t page);
int windows_leave(Windows *windows, int32_t page);
/* Lays the frames of a page aside that nobody holds. Those that are not wanted are the first to be
 * given up. */
void windows_lay(Windows *windows, int32_t page, int wanted);
/* They are laid aside no more, if they were. */
void windows_lift(Windows *windows, int32_t page);
/* The page whose frames are to be given up next; -1: there is none, or, unless `wanted`, none that
 * is not wanted. */
int32_t windows_oldest(const Windows *windows, int wanted);
int windows_users(const Windows *windows, int32_t page);

/* ---- page_pool.c: pages of the cache, their frames, and states beside them ---- */

typedef struct Kv {
    Model *model;
    Arena arena;
    Cache cache;
    Lists lists;
    int pages, free_count; /* numbers of pages */
    int longest;           /* pages that one sequence can have */
    int32_t *free_list;
    int32_t *users;          /* of each page: how many sequences hold it */
    int frames, free_frames; /* frame number `frames` is for padding rows */
    int32_t *frame_list;     /* the free ones */
    int32_t *frame;          /* [pages · lists] of each page, -1: none; the windowed ones last */
    Windows windows;
    Prefix prefix;
    States states;
} Kv;

/* Pages and frames, by what they are for. */
typedef struct KvCount {
    int frames, free;  /* in all, and free */
    int held, windows; /* pages that sequences hold, and those of them whose windowed
                          frames they hold */
    int known, kept;   /* pages that no sequence holds, and pages whose windowed frames
                          none holds */
} KvCount;

Status kv_open(Kv *kv, Model *model, int64_t tokens);
void kv_close(Kv *kv);
/* A page for new content, with a frame in each list, or -1. */
int32_t kv_take(Kv *kv);
/* A sequence holds a page, or holds it no more: with its frames in the windowed lists, or without.
 */
void kv_share(Kv *kv, int32_t page, int windowed);
void kv_drop(Kv *kv, int32_t page, int windowed);
/* A sequence that holds a page holds its windowed frames no more. They are kept if the page is
 * known; where they are wanted they are the last to be given up. */
void kv_leave(Kv *kv, int32_t page, int wanted);
/* Whether a page has a frame in every list. */
int kv_whole(const Kv *kv, int32_t page);
/* A known page is replaced by one with the same content, which a sequence holds. */
void kv_replace(Kv *kv, int32_t page, int32_t by);
KvCount kv_count(const Kv *kv);
/* For tests: fills the memory of all free frames with NaN. */
void kv_spoil(Kv *kv);
/* Empties the prefix cache: the pages that no sequence holds. */
void kv_forget(Kv *kv);
/* Copy-on-write: a page with the first `count` keys of `page`, for a sequence that diverges from
 * it; -1 if there is none. */
int32_t kv_fork(Kv *kv, int32_t page, int count);
/* Copies the state in a slot to another. `rewinds`: the copy is taken back to the beginning of the
 * page of its newest row. */
void kv_state_copy(Kv *kv, int32_t from, int32_t to, int rewinds);

/* ---- requests and sequences ---- */

/* FULL: max_tokens or the context; OVERFLOWED: with its request, whose numbers are none */
typedef enum Ending { RUNNING, STOPPED, FULL, OVERFLOWED } Ending;

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
    int seen;        /* pages before this one are held without their windowed frames */
    int kept;        /* full pages that prefix_cache.c knows */
    uint64_t behind; /* its number of the last of them */
    int waited;      /* for a page that another sequence was computing */
    int32_t state;   /* the slot of its state; -1: none */
    int low;         /* the state is good for rows from here on, up to those that are cached */
    int shared_end;  /* tokens of whole pages that it had in common with an earlier one, behind
                        which no state was kept, or no window; 0: none */
} Sequence;

typedef struct RequestSpec {
    int64_t id;
    int64_t client;         /* the client: clients share each step */
    const Adapter *adapter; /* kept alive by the caller until the request is gone */
    uint64_t session;       /* not 0: its weights may change under way (sampler_follow), and pages
                               are shared by the session's requests alone */
    const int32_t *prompt, *stop_ids;
    int prompt_length;
    int64_t stop_count;
    int samples, max_tokens; /* max_tokens -1: as many as context and cache hold */
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

/* A client, while it has a request here. */
typedef struct Client {
    int64_t id;
    int requests;
    int in_line; /* the client's sequences, in the step that is planned */
    int wanted;  /* rows that its prompts still need */
    int rows;    /* rows that it may still run in the step */
} Client;

typedef struct Request {
    RequestSpec spec; /* its arrays are copies */
    Client *client;
    int limit;           /* tokens at which a sequence is full */
    int scored;          /* prompt positions whose log-probabilities are known */
    int reached, reused; /* the first sample's tokens that were ever in the cache; of the prompt's,
                            those that were found there */
    float *prompt_logprobs;
    int32_t *top_ids;
    float *top_logprobs;
    float *target_logprobs; /* [target_count] */
    int32_t *drawn_ids;     /* [(prompt_length − 1) · draws] */
    float *drawn_logprobs;
    int overflowed; /* one of its log-probabilities is not a number: it ends with this step */
    int done;
    Sequence *sequence;
} Request;

/* Private to scheduler.c: the sequences that could run, in the order in which they are served. */
typedef struct Waiter {
    Request *request;
    int sample;
} Waiter;

/* Its sequence. */
static inline Sequence *waiter_sequence(const Waiter *waiter)
{
    return &waiter->request->sequence[waiter->sample];
}

typedef struct Line {
    Waiter *waiter; /* [room] */
    int *rank;      /* [room + 1]: where the sequences begin that are the n-th of their clients */
    int count, room;
    int sequences;          /* of all requests */
    int decoding;           /* sequences that decode */
    int mixed;              /* these can't be replayed together */
    const Adapter *adapter; /* of the first of them */
    int64_t prompt_rows;    /* that prompts lack */
    Client **client;        /* the one with the oldest request first */
    int clients, client_room;
} Line;

typedef struct Drawn {
    int64_t request;
    int sample;
    int32_t token;
} Drawn;

/* A recorded decode step, and all that it depends on. */
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
    Arena arena;      /* of a step */
    int graphs;       /* whether decode steps may be recorded */
    int gathered;     /* steps that prompts have waited for more of them */
    int prompts_left; /* the newest step did not run all prompts that it could have */
    Recording recording[RECORDINGS];
    int64_t steps, replays; /* decoding steps, and those that were replayed */
    char *inputs;           /* host: the bytes that a decode step uploads */
    size_t inputs_room;
    LayerActs *layers;
    Request **request;
    int count, room;
    Line line;
    Drawn *drawn; /* of the newest step */
    int drawn_count, drawn_room;
    atomic_int interrupted; /* set from outside: the step under way stops */
} Sampler;

Status sampler_open(Sampler **sampler, Model *model, int64_t tokens);
void sampler_close(Sampler *sampler);
Status sampler_add(Sampler *sampler, const RequestSpec *spec);
/* One forward. sampler->drawn then holds what was drawn. A step that fails, or is interrupted, drew
 * nothing and can be repeated. */
Status sampler_step(Sampler *sampler);
/* A request of a session goes on with these weights from its next token. What it has in the cache
 * stays. */
Status sampler_follow(Sampler *sampler, int64_t id, const Adapter *adapter);
/* Ends a sample after its newest token, because its stop string was seen. */
Status sampler_stop(Sampler *sampler, int64_t id, int sample);
Request *sampler_find(Sampler *sampler, int64_t id);
/* Forgets a request, done or not. */
void sampler_forget(Sampler *sampler, int64_t id);

/* request.c: forgets a request's arrays and pages. */
void request_close(Sampler *sampler, Request *request);
/* Ends a marked request: what is wrong with one of its samples is wrong with its weights. */
void request_overflow(Sampler *sampler, Request *request);

/* ask.c: the results that are wanted from a prompt's row. */

/* Ids from the request's own lists that are scored in the row of a prompt's position. */
int row_targets(const RequestSpec *spec, int position);
/* Whether a result of that row is still missing. */
int row_asked(const Request *request, int position);

/* scheduler.c: which rows a step runs. */

typedef struct Turn {
    Request *request;
    int sample, from, rows; /* tokens [from, from + rows) */
    int draws;              /* its last row is followed by a draw */
} Turn;

static inline Sequence *turn_sequence(const Turn *turn)
{
    return &turn->request->sequence[turn->sample];
}

/* Picks the sequences that run and gives them pages; returns how many. */
int schedule(Sampler *sampler, Turn *turns);
/* line_join adds a request to the line; 0 if there is no memory. line_leave takes it away, whether
 * or not it was added. */
int line_join(Line *line, Request *request);
void line_leave(Line *line, const Request *request);
void line_close(Line *line);

/* preempt.c: the sequence in a place of the line gets what it needs to run, if need be by
 * preemption; 0: it has to wait. */

/* A slot for its state, where the model's layers keep one. */
int room_state(Sampler *sampler, int place);
/* Pages for `length` tokens. */
int room_pages(Sampler *sampler, int place, int length);

/* state_checkpoint.c: which states are kept. */

/* Of the next `rows` rows of a sequence those that its turn runs: it ends where a state is to be
 * kept. */
int keep_rows(const Sequence *s, int rows);
/* The rows of a sequence's turn have run. */
void keep_ran(Kv *kv, const Request *request, Sequence *s);
/* Keeps a copy of a sequence's state as it was at the beginning of the page of its newest row,
 * unless there is one or no slot can be had. */
void keep_copy(Kv *kv, const Request *request, const Sequence *s);
/* A sequence gives its state up: it is kept at the end of its last full page, unless there is one
 * or the page is not known. */
void keep_own(Kv *kv, const Request *request, Sequence *s);

/* leave.c: which pages a sequence leaves behind in the windowed lists. */

/* The first page that rows read there from this one on. */
int leave_first(const Kv *kv, int row);
/* A sequence leaves its pages before this one. */
void leave_pages(Kv *kv, const Request *request, Sequence *s, int first);
/* The rows of a sequence's turn have run. */
void leave_ran(Kv *kv, const Request *request, Sequence *s);

/* page_table.c: a step's pages, as the device sees them. */

/* Frames of a sequence in all lists. */
int table_size(const Kv *kv, const Sequence *s);
/* Where a sequence's token is put in a list. */
int32_t table_slot(const Kv *kv, const Sequence *s, int list, int position);
/* Writes a sequence's frames in a list behind the `at` that are in the table, and returns how many
 * are in it then. *first is where the sequence's pages begin (Span). */
int table_add(const Kv *kv, const Sequence *s, int list, int32_t *table, int at, int32_t *first);

/* sequence.c: a sequence after its rows have run. */

/* The rows of these turns have their keys and values in the cache. */
void turns_cached(Sampler *sampler, const Turn *turns, int count);
/* The draw of the token behind a turn's last row. */
Draw sequence_draw(const Turn *turn);
/* A drawn token joins its sequence, and may end it. One whose log-probability is not a number was
 * drawn from nothing: it does not join, and the request is marked. */
void sequence_take_token(Sampler *sampler, const Turn *turn, int32_t token, float logp);
/* Gives back what a sequence holds. Its state may be kept for others (state_checkpoint.c). */
void sequence_drop(Kv *kv, const Request *request, Sequence *sequence);
/* The same, of a sequence whose content is not known. */
void sequence_forget(Kv *kv, Sequence *sequence);

/* reuse.c: sequences with a common prefix. */

/* Remembers the full pages of a sequence, and the scores of their rows. */
void share_keep(Kv *kv, const Request *request, Sequence *s);
/* A request's first sequence has its prompt in the cache. The others begin with its pages, up to
 * the prompt's last token, which each runs for itself. (Where there are states, resume_begin sees
 * to that.) */
void share_prompt(Sampler *sampler, Request *request);
/* Gives a sequence the pages of its missing tokens that the cache already has. Returns whether it
 * then waits for a page that one of this step's turns computes. */
int share_begin(Sampler *sampler, const Turn *turns, int count, Request *request, Sequence *s);
/* The stamp of a request's weights. */
uint64_t share_stamp(const Request *request);
/* Whether a turn's sequence still runs in the next step, unless a stop token ends it. */
int share_goes_on(const Turn *turn);

/* resume.c: the same where the model's layers keep a state. */

/* As share_begin, for the sequence in a place of the line, which also gets a slot. If there is none
 * it waits, and those behind it that have none will too: `full` is set. */
int resume_begin(Sampler *sampler, const Turn *turns, int count, int place, int *full);

/* prompt_scores.c: the log-probabilities that a page's rows gave. */

/* New log-probabilities of a request, which is marked where one of them is not a number. */
void scores_look(Request *request, const float *logprobs, size_t count);
/* The scores that a request has for page number `page` of its prompt, once its rows have been
 * run. */
PageScores scores_of(const Request *request, int page);
/* Whether those scores are all that a request wants from its own page of that number; if so, copies
 * them into the request. */
int scores_suffice(const PageScores *known, const Request *request, int page);
void scores_take(const PageScores *known, Request *request, int page);
/* Remembers it with a page of the cache; forgets it. */
void scores_keep(Prefix *prefix, int32_t at, const Request *request, int page);
void scores_drop(Prefix *prefix, int32_t at);

/* decode_graph.c: steps in which every sequence runs one row and draws one token. */

/* Whether a request can share a step with those of an adapter. */
int decode_joins(const RequestSpec *spec, const Adapter *adapter);
/* Whether the device records such a step. */
int decode_fits(const Sampler *sampler, const Turn *turns, int count);
Status decode_step(Sampler *sampler, const Turn *turns, int count);
/* Forgets what was recorded. */
void decode_close(Sampler *sampler);

#endif
