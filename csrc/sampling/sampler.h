/* sampling/sampler.h - the sampler's interface: add requests, run steps, read results. */
#ifndef TINSMITH_SAMPLING_SAMPLER_H
#define TINSMITH_SAMPLING_SAMPLER_H

#include "../model/head.h"
#include "../model/layers/forward.h"
#include "../model/memory_share.h"

typedef struct Sampler Sampler;

typedef struct RequestSpec {
    int64_t id;
    int64_t client;         /* the client: clients share each step */
    const Adapter *adapter; /* the caller's, must outlive the request */
    uint64_t session; /* not 0: its weights may change in flight (sampler_set_adapter), and only the
                         session's requests share its pages */
    const int32_t *prompt, *stop_ids;
    int prompt_length;
    int64_t stop_count;
    int samples, max_tokens; /* max_tokens -1: as many as context and cache hold */
    int first_sample;        /* the first one's number: what is drawn depends on seed and number */
    float temperature, top_p;
    int top_k;
    uint64_t seed;
    int topk_sample, prompt_logprobs, topk_prompt;
    int draws;        /* tokens to draw at each prompt position after the first */
    int first_scored; /* prompt positions before this one are not scored */
    /* Ids to score in the prompt: those at position p + 1 are targets[starts[p]] up to starts[p +
     * 1]. NULL: none. */
    const int32_t *targets, *starts;
    int64_t target_count, start_count; /* lengths, as passed */
} RequestSpec;

/* LENGTH: max_tokens or the context. OVERFLOWED: the weights give numbers that are not finite. */
typedef enum Finish { RUNNING, STOPPED, LENGTH, OVERFLOWED } Finish;

/* The tokens of one of a request's samples: its prompt, then the drawn ones. */
typedef struct Tokens {
    Finish finish;
    int length, drawn;
    int32_t *ids;     /* [length] */
    float *logprobs;  /* [drawn] */
    int32_t *top_ids; /* [drawn · topk_sample] */
    float *top_logprobs;
} Tokens;

typedef struct Request {
    RequestSpec spec; /* its arrays are copies */
    int done;
    int overflowed; /* one of its log-probabilities is not a number: it ends with this step */
    int reused;     /* tokens of the first sample's prompt found in the cache */
    /* By prompt position. */
    int scored; /* positions whose log-probabilities are done */
    float *prompt_logprobs;
    int32_t *top_ids;
    float *top_logprobs;
    float *target_logprobs; /* [target_count] */
    int32_t *drawn_ids;     /* [(prompt_length − 1) · draws] */
    float *drawn_logprobs;
    /* Private. */
    struct Client *client;
    struct Sequence *sequence; /* [samples] */
    int limit;                 /* the most tokens of a sequence */
    int reached;               /* the most tokens of the first sample that were ever cached */
    ImageRun *runs;            /* the prompt's images */
    int images;
} Request;

typedef struct Drawn {
    int64_t request;
    int sample;
    int32_t token;
} Drawn;

typedef struct StepResult {
    int count;
    Drawn drawn[STEP_SEQUENCES];
} StepResult;

/* `graphs`: decode steps may be recorded, if the device can. */
Status sampler_open(Sampler **sampler, Model *model, int64_t tokens, int graphs);
void sampler_close(Sampler *sampler);
Status sampler_add(Sampler *sampler, const RequestSpec *spec);
/* One forward. A failed or interrupted step has drawn nothing and can be retried. */
Status sampler_step(Sampler *sampler, StepResult *result);
/* Stops the step in flight, from another thread. */
void sampler_interrupt(Sampler *sampler);
/* A session's request continues with these weights from its next token. Its cache stays. */
Status sampler_set_adapter(Sampler *sampler, int64_t id, const Adapter *adapter);
/* Ends a sample after its newest token, because its stop string was seen. */
Status sampler_stop(Sampler *sampler, int64_t id, int sample);
/* Frees a request, done or not. */
void sampler_remove(Sampler *sampler, int64_t id);

/* The request of that id; NULL: there is none. */
const Request *sampler_find(const Sampler *sampler, int64_t id);
/* The requests in order of arrival; NULL past the last. */
const Request *sampler_request(const Sampler *sampler, int index);
const Tokens *request_tokens(const Request *request, int sample);

/* These numbers can be read at any time. */
typedef struct SamplerStats {
    int64_t reused;            /* tokens found in the cache instead of computed */
    int64_t steps, replays;    /* decode steps on a device that records them, and replayed ones */
    int states, cached_states; /* slots for states, and the cached ones */
} SamplerStats;

SamplerStats sampler_stats(const Sampler *sampler);

/* The cache's frames, and its pages by use. */
typedef struct CacheCounts {
    int full, windowed; /* lists of layers */
    int frames, free;
    int used, used_windows;     /* referenced pages; those with referenced windowed frames */
    int cached, cached_windows; /* unreferenced pages; those with unreferenced windowed frames */
} CacheCounts;

CacheCounts sampler_cache(const Sampler *sampler);
/* For tests: fills the memory of all free frames with NaN. */
void sampler_spoil(Sampler *sampler);

#endif
