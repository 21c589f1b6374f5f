"""tinsmith.Sampler: sequences drawn from a base model or an adapter, many at once."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, SupportsFloat, SupportsIndex, TypeAlias, overload

from tinsmith.api import datums
from tinsmith.api.adapter import Adapter, core_of
from tinsmith.api.images import images_of, is_batch
from tinsmith.api.kinds import Ids, Prompt, SomePrompt
from tinsmith.api.model_thread import ModelThread
from tinsmith.api.progress import Progress, reporting
from tinsmith.api.results import Ending, Public, SampledSequence
from tinsmith.engine.decoding import Sample, SampleRequest
from tinsmith.ops import tensors

SEED_BITS = 63

Stop: TypeAlias = str | SupportsIndex | Sequence[str] | Ids | None


class Sampler(Public):
    """Draws sequences; see `sample`. Made by Model.sampler.

    Examples
    --------
    >>> model.sampler()
    <tinsmith.Sampler of Qwen3-0.6B>
    """

    def __init__(self, engine: ModelThread):
        self.engine = engine

    def __repr__(self) -> str:
        return f"<tinsmith.Sampler of {self.engine.title}>"

    @overload
    def sample(
        self,
        prompts: Prompt,
        *,
        adapter: Adapter | None = None,
        num_samples: SupportsIndex = 1,
        max_tokens: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        top_p: SupportsFloat = 1.0,
        seed: SupportsIndex | Sequence[int] | None = None,
        stop: Stop = None,
        topk_logprobs: SupportsIndex = 0,
        progress: Progress = False,
    ) -> list[SampledSequence]: ...
    @overload
    def sample(
        self,
        prompts: list[SomePrompt] | tuple[SomePrompt, ...],
        *,
        adapter: Adapter | None = None,
        num_samples: SupportsIndex = 1,
        max_tokens: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        top_p: SupportsFloat = 1.0,
        seed: SupportsIndex | Sequence[int] | None = None,
        stop: Stop = None,
        topk_logprobs: SupportsIndex = 0,
        progress: Progress = False,
    ) -> list[list[SampledSequence]]: ...
    def sample(
        self,
        prompts: Any,
        *,
        adapter: Adapter | None = None,
        num_samples: SupportsIndex = 1,
        max_tokens: SupportsIndex | None = None,
        temperature: SupportsFloat = 1.0,
        top_k: SupportsIndex = -1,
        top_p: SupportsFloat = 1.0,
        seed: SupportsIndex | Sequence[int] | None = None,
        stop: Stop = None,
        topk_logprobs: SupportsIndex = 0,
        progress: Progress = False,
    ) -> list[SampledSequence] | list[list[SampledSequence]]:
        """Draws continuations of a prompt, or of each in a list.

        All prompts decode together. A prompt's result does not depend on the others.

        Parameters
        ----------
        prompts : ids (N,), a text, or a list of them
            A prompt with images is a list of `Model.image`s, texts and ids.
        adapter : Adapter, optional
            None: the base model.
        num_samples : int
            Continuations of each prompt.
        max_tokens : int, optional
            None: until the context is full.
        temperature : float
            0 is greedy.
        top_k : int
            How many of the likeliest ids may be drawn; -1: all.
        top_p : float
            Only the likeliest ids with this much probability together may be drawn; 1: all.
        seed : int or list of int, optional
            The same seed gives the same tokens. With an integer, prompt i gets seed + i; a list has
            one for each prompt. None: random seeds.
        stop : str, int, or a list of them, optional
            What ends a sequence. None: the model's end-of-sequence ids; []: nothing. Strings need
            the package tokenizers.
        topk_logprobs : int
            How many of the likeliest ids to return at each token. It does not change what is drawn.
        progress : bool or function
            True draws a bar with tqdm. A function is called with (prompts done, all).

        Returns
        -------
        list of SampledSequence
            For a list of prompts, a list of these lists.

        Raises
        ------
        TypeError, ValueError, IndexError
            The message says what was expected, and what came.

        Examples
        --------
        >>> sampler = model.sampler()
        >>> [answer] = sampler.sample("What time is it?", max_tokens=5, stop=[])
        >>> answer
        SampledSequence(tokens=int32[5], logprobs=float32[5], stop_reason='length')
        >>> pairs = sampler.sample([[55, 73], [327]], num_samples=2, seed=1, topk_logprobs=3)
        >>> [len(samples) for samples in pairs], pairs[1][0].topk_ids.shape[1]
        ([2, 2], 3)
        """
        batch = is_batch(prompts)
        given = list(prompts) if batch else [prompts]
        ending = ending_of(self.engine, stop)
        settings = {
            "num_samples": tensors.to_integer(num_samples, "num_samples"),
            "topk_sample": tensors.to_integer(topk_logprobs, "topk_logprobs"),
            **drawing(ending, max_tokens, temperature, top_k, top_p),
        }
        rows = [
            datums.sequence(self.engine.ids(item), f"prompts[{n}]" if batch else "prompt")
            for n, item in enumerate(given)
        ]
        requests = [
            SampleRequest(row, seed=drawn, images=images_of([item]), **settings)
            for item, row, drawn in zip(given, rows, seeds(seed, len(rows)), strict=True)
        ]
        with reporting(progress, "sampling", unit=" prompts") as report:
            results = self.engine.decode(requests, core_of(adapter), report if progress else None)
        found = [
            [SampledSequence(*values(sample, one), ending.behind(row)) for sample in result.samples]
            for one, row, result in zip(given, rows, results, strict=True)
        ]
        return found if batch else found[0]


def ending_of(engine: ModelThread, stop: Any, ends: tuple[int, ...] | None = None) -> Ending:
    """Ids and texts that end a sequence. With texts, as without `stop`, the model's end of sequence
    always ends it. `ends` are its ids; None: the model's own."""
    loaded = engine.loaded
    ends = loaded.eos_ids if ends is None else ends
    if stop is None:
        return Ending(loaded.path, ends, ())
    items = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop]
    texts = tuple(item for item in items if isinstance(item, str))
    if "" in texts:
        raise ValueError("stop must be strings or token ids; an empty string came")
    ids = tuple(tensors.to_integer(item, "stop") for item in items if not isinstance(item, str))
    for item in ids:
        if not 0 <= item < loaded.vocab:
            raise IndexError(f"stop has id {item}; the model's ids are 0 to {loaded.vocab - 1}")
    return Ending(loaded.path, ids + ends if texts else ids, texts)


def drawing(
    ending: Ending, max_tokens: Any, temperature: Any, top_k: Any, top_p: Any
) -> dict[str, Any]:
    """The fields of a SampleRequest that say how tokens are drawn."""
    limit = -1 if max_tokens is None else tensors.to_integer(max_tokens, "max_tokens")
    if max_tokens is not None and limit < 1:
        raise ValueError(f"max_tokens must be at least 1, or None, {limit} came")
    return {
        "max_tokens": limit,
        "temperature": tensors.to_number(temperature, "temperature"),
        "top_k": tensors.to_integer(top_k, "top_k"),
        "top_p": tensors.to_number(top_p, "top_p"),
        "stop_ids": ending.ids,
        "stop_texts": ending.texts,
    }


def seeds(seed: Any, count: int) -> list[int]:
    """The seeds of `count` prompts."""
    if seed is None:
        return [secrets.randbits(SEED_BITS) for _ in range(count)]
    if isinstance(seed, Sequence):
        if len(seed) != count:
            raise ValueError(f"seed has {len(seed)} numbers for {count} prompts")
        found = [tensors.to_integer(item, "seed") for item in seed]
    else:
        found = [tensors.to_integer(seed, "seed") + index for index in range(count)]
    return [item % (1 << SEED_BITS) for item in found]


def values(sample: Sample, prompt: Any) -> tuple[Any, Any, str, Any, Any]:
    """A sample's values, with arrays of the prompt's kind."""

    def like(array: Any) -> Any:
        return None if array is None else tensors.like(prompt, array)

    return (
        like(sample.tokens),
        like(sample.logprobs),
        sample.stop_reason,
        like(sample.topk_ids),
        like(sample.topk_logprobs),
    )
