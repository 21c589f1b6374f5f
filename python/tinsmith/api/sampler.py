"""tinsmith.Sampler: sequences drawn from a base model or an adapter, many at once."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from tinsmith import tensors
from tinsmith.api import datums
from tinsmith.api.adapter import Adapter, core_of
from tinsmith.api.model_thread import ModelThread
from tinsmith.api.progress import Progress, reporting
from tinsmith.api.results import Public, SampledSequence
from tinsmith.engine.decoding import Sample, SampleRequest

SEED_BITS = 63


class Sampler(Public):
    """Draws sequences; see `sample`. Made by Model.sampler."""

    def __init__(self, engine: ModelThread):
        self.engine = engine

    def __repr__(self) -> str:
        return f"<tinsmith.Sampler of {self.engine.title}>"

    def sample(
        self,
        prompts: Any,
        *,
        adapter: Adapter | None = None,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
        seed: int | Sequence[int] | None = None,
        stop: str | Sequence[str] | Sequence[int] | None = None,
        topk: int = 0,
        progress: Progress = False,
    ) -> list[SampledSequence] | list[list[SampledSequence]]:
        """Draws num_samples continuations of a prompt, ids (N,); for a list of prompts, of each.

        All prompts decode together; a prompt's result does not depend on the others.

        adapter: None is the base model. max_tokens: None is to the end of the context. temperature:
        0 is greedy. top_k -1 and top_p 1 cut nothing. seed: the same seed gives the same tokens
        each time. An integer seed is added to a prompt's place in the list; or pass one seed for
        each prompt. None draws afresh. stop: ids or strings that end a sequence (strings need the
        tokenizers package). None is the model's end of sequence; [] is nothing. topk: also returns
        the topk most likely ids at each token. progress: True draws a bar with tqdm; or pass a
        function, called with (prompts done, prompts).

            [answer] = model.sampler().sample(prompt, max_tokens=100)

        Raises TypeError, ValueError or IndexError; each says what was expected and what came.
        """
        batch = tensors.is_batch(prompts)
        given = list(prompts) if batch else [prompts]
        stop_ids, stop_texts = self._stops(stop)
        requests = [
            SampleRequest(
                datums.sequence(prompt, f"prompts[{index}]" if batch else "prompt"),
                num_samples=tensors.to_integer(num_samples, "num_samples"),
                max_tokens=-1 if max_tokens is None else _positive(max_tokens, "max_tokens"),
                temperature=tensors.to_number(temperature, "temperature"),
                top_k=tensors.to_integer(top_k, "top_k"),
                top_p=tensors.to_number(top_p, "top_p"),
                seed=drawn,
                stop_ids=stop_ids,
                stop_texts=stop_texts,
                topk_sample=tensors.to_integer(topk, "topk"),
            )
            for index, (prompt, drawn) in enumerate(
                zip(given, _seeds(seed, len(given)), strict=True)
            )
        ]
        with reporting(progress, "sampling", unit=" prompts") as report:
            results = self.engine.decode(requests, core_of(adapter), report if progress else None)
        found = [
            [_sequence(sample, prompt) for sample in result.samples]
            for prompt, result in zip(given, results, strict=True)
        ]
        return found if batch else found[0]

    def _stops(self, stop: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ids and texts that end a sequence. With texts, the model's end of sequence always ends it
        too, as it does without `stop`.
        """
        eos, vocab = self.engine.loaded.eos_ids, self.engine.loaded.vocab
        if stop is None:
            return eos, ()
        items = list(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else [stop]
        texts = tuple(item for item in items if isinstance(item, str))
        ids = tuple(item for item in items if not isinstance(item, str))
        if "" in texts:
            raise ValueError("stop must be strings or token ids; an empty string came")
        found = tuple(tensors.to_integer(item, "stop") for item in ids)
        for item in found:
            if not 0 <= item < vocab:
                raise IndexError(f"stop has id {item}; the model's ids are 0 to {vocab - 1}")
        return (found + eos if texts else found), texts


def _positive(value: Any, name: str) -> int:
    number = tensors.to_integer(value, name)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, or None, {value} came")
    return number


def _seeds(seed: Any, count: int) -> list[int]:
    if seed is None:
        return [secrets.randbits(SEED_BITS) for _ in range(count)]
    if isinstance(seed, Sequence):
        if len(seed) != count:
            raise ValueError(f"seed has {len(seed)} numbers for {count} prompts")
        seeds = [tensors.to_integer(item, "seed") for item in seed]
    else:
        seeds = [tensors.to_integer(seed, "seed") + index for index in range(count)]
    return [item % (1 << SEED_BITS) for item in seeds]


def _sequence(sample: Sample, prompt: Any) -> SampledSequence:
    def like(array: Any) -> Any:
        return None if array is None else tensors.like(prompt, array)

    return SampledSequence(
        like(sample.tokens),
        like(sample.logprobs),
        sample.stop_reason,
        like(sample.topk_ids),
        like(sample.topk_logprobs),
    )
