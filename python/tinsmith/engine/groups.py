"""A request for many samples in parts, which are drawn side by side in several places.

What a sample draws depends on its request's seed and on its own number, so a part is a request
whose numbers begin later. Parts of few samples would not be faster: a step that decodes a few rows
reads the same weights as a step that decodes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from tinsmith.engine.call_log import Call
from tinsmith.engine.decoding import SampleDelta, SampleRequest, SampleResult, TokenListener

LEAST = 8  # samples of a part


def split(request: SampleRequest, places: int) -> list[SampleRequest]:
    """A request's parts for that many places. Only the first scores the prompt. One with images is
    not divided: only the owner has their pixels."""
    if request.images:
        return [request]
    count = max(1, min(places, request.num_samples // LEAST))
    ends = [request.num_samples * n // count for n in range(count + 1)]
    unscored = replace(
        request,
        prompt_logprobs=False,
        topk_prompt=0,
        last_n=None,
        prompt_draws=0,
        targets=None,
    )
    return [
        replace(
            unscored if first else request,
            num_samples=end - first,
            first_sample=request.first_sample + first,
        )
        for first, end in pairwise(ends)
    ]


def bounded(
    request: SampleRequest, context: int, cache_tokens: Callable[[], int]
) -> SampleRequest | None:
    """A request as a replica gets it, whose cache may hold another number of tokens than the
    owner's: one without max_tokens is for the whole context. None if only the owner has its images,
    or can tell where it ends, as its own cache holds less."""
    if request.images:
        return None
    if request.max_tokens > 0:
        return request
    if cache_tokens() < context:
        return None
    return replace(request, max_tokens=max(context - len(request.prompt), 1))


def merge(results: Sequence[SampleResult]) -> SampleResult:
    """The result of a request, from its parts'."""
    samples = [sample for result in results for sample in result.samples]
    return replace(results[0], samples=tuple(samples))


def count_all(whole: Call, parts: Sequence[Call]) -> None:
    """A request's tokens and times, from its parts'."""
    whole.drawn = sum(part.drawn for part in parts)
    whole.cached = parts[0].cached
    whole.first = min((part.first for part in parts if part.first), default=0.0)


def shifted(listener: TokenListener, first: int) -> TokenListener:
    """A listener for a part whose first sample is number `first` of the request."""

    def hear(parts: Sequence[SampleDelta]) -> None:
        listener([replace(part, number=first + part.number) for part in parts])

    return hear
