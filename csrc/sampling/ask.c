/* sampling/ask.c - the results that a request wants from one row of its prompt, and whether it has
 * them. */
#include "prompt_scores.h"

int row_targets(const RequestSpec *spec, int position)
{
    return spec->targets ? spec->starts[position + 1] - spec->starts[position] : 0;
}

int row_asked(const Request *r, int position)
{
    const RequestSpec *spec = &r->spec;
    if (position + 1 >= spec->prompt_length || position + 1 <= r->scored) return 0;
    return spec->prompt_logprobs || spec->topk_prompt || spec->draws || row_targets(spec, position);
}
