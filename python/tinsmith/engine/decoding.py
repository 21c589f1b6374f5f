"""Continuous batching of sampling requests: one engine Sampler for each base model.

A request joins the others at the next step and leaves when its samples are done. This module looks
for stop strings, in the text decoded after each token, because the engine knows ids only. The stop
string stays in the sample's tokens. Only the worker's thread may use a Decoder.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.chat.text import Reading, load_tokenizer
from tinsmith.engine.call_log import Call
from tinsmith.engine.devices import say_notes
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.teachers import NO_LOGPROB
from tinsmith.models.registry import BaseModel, LoadedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class PromptTargets:
    """Ids to score in a prompt: ids[starts[p] : starts[p + 1]] at position p + 1. The rest is the
    layout of the tensor they came in: shape, number of `values`, and the `cells` that are ids."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    shape: tuple[int, ...]
    cells: NDArray[np.int64]
    values: int
    crow: NDArray[np.int64] | None = None  # compressed sparse rows; None: dense
    cols: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """A checked request: ids are in the vocabulary and the prompt fits into the context."""

    prompt: NDArray[np.int32]
    num_samples: int = 1
    first_sample: int = 0  # the number of the first, if these are a part of more with one seed
    max_tokens: int = -1  # -1: until the context, or the cache, is full
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    last_n: int | None = None  # score the prompt's last n tokens only
    prompt_draws: int = 0  # tokens to draw at each prompt position after the first
    targets: PromptTargets | None = None
    record: bool = False  # whether the server records its samples, for losses that need them
    images: tuple[HeldImage, ...] = ()  # whose ids are in the prompt


@dataclass(frozen=True)
class Sample:
    """One sampled sequence; the stop token is its last."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: str  # "stop" or "length"
    topk_ids: NDArray[np.int32] | None = None
    topk_logprobs: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class SampleDelta:
    """The tokens that a sample drew in a step; the stop reason is set when it has ended."""

    number: int  # of the sample in its request
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: str | None
    topk_ids: NDArray[np.int32] | None
    topk_logprobs: NDArray[np.float32] | None

    def after(self, count: int) -> "SampleDelta":
        """It without its first tokens."""
        ids, topk = self.topk_ids, self.topk_logprobs
        return SampleDelta(
            self.number,
            self.tokens[count:],
            self.logprobs[count:],
            self.stop_reason,
            None if ids is None else ids[count:],
            None if topk is None else topk[count:],
        )


# Called in the worker's thread with what a request's samples drew in a step. It must be quick.
TokenListener = Callable[[Sequence[SampleDelta]], None]


@dataclass(frozen=True)
class SampleResult:
    """A request's result. Prompt rows that were not scored are NaN, or id 0 at -99999. So are an
    image's, but for their log-probability, which is 0: they are given, and the sum is the text's.
    The cookbook multiplies these numbers by weights of 0, which a NaN would survive."""

    samples: tuple[Sample, ...]
    prompt_logprobs: NDArray[np.float32] | None = None
    topk_ids: NDArray[np.int32] | None = None
    topk_logprobs: NDArray[np.float32] | None = None
    targets: PromptTargets | None = None
    target_logprobs: NDArray[np.float32] | None = None  # like targets.ids
    drawn_ids: NDArray[np.int32] | None = None  # (prompt - 1, draws)
    drawn_logprobs: NDArray[np.float32] | None = None
    prompt_reused: int = 0  # prompt tokens that were found in the prefix cache


@dataclass
class _Pending:
    request: SampleRequest
    future: "Future[SampleResult]"
    tokenizer: "Tokenizer | None"
    run: str | None  # the run whose newest weights it uses
    listener: TokenListener | None
    call: Call
    readings: dict[int, Reading] = field(default_factory=dict)  # of samples with stop strings
    told: dict[int, int] = field(default_factory=dict)  # tokens of each sample given to `listener`


@dataclass
class _Batcher:
    """The requests that decode together on one base model."""

    core: _core.Model
    sampler: _core.Sampler
    cache_tokens: int
    cache_bytes: int
    pending: dict[int, _Pending] = field(default_factory=dict)


class Decoder:
    """All sampling requests in flight."""

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()  # tokens drawn in a step: number of such steps
        self.seconds = 0.0  # of all these steps
        self._batchers: dict[Path, _Batcher] = {}
        self._numbers = itertools.count()
        self._places: dict[Future[SampleResult], tuple[_Batcher, int]] = {}  # of requests in flight

    @property
    def active(self) -> bool:
        """Whether a step would do anything."""
        return any(batcher.pending for batcher in self._batchers.values())

    def is_open(self, base: BaseModel) -> bool:
        """Whether requests for a base model can be added."""
        return base.path in self._batchers

    def open(self, base: LoadedModel, cache_tokens: int = 0) -> None:
        """Creates a base model's batcher, with a cache for `cache_tokens` tokens (0: the engine's
        default)."""
        tokens = cache_tokens or base.core.cache_tokens()
        sampler = _core.Sampler(base.core, tokens=tokens)
        self._batchers[base.path] = _Batcher(
            base.core, sampler, tokens, base.core.cache_bytes(tokens)
        )

    def cache_tokens(self, base: BaseModel) -> int:
        """How many tokens an open batcher's cache holds."""
        return self._batchers[base.path].cache_tokens

    def shut(self, path: Path) -> bool:
        """Drops an idle batcher with its cache; returns whether there was one."""
        batcher = self._batchers.get(path)
        if batcher is None or batcher.pending:
            return False
        del self._batchers[path]
        return True

    @property
    def under_way(self) -> dict[Path, int]:
        """The number of requests of each open batcher. Any thread may ask."""
        return {path: len(batcher.pending) for path, batcher in list(self._batchers.items())}

    def caches(self) -> list[tuple[Path, int, bool]]:
        """(base's path, cache's bytes, whether it is active) of each open batcher."""
        return [
            (path, batcher.cache_bytes, bool(batcher.pending))
            for path, batcher in self._batchers.items()
        ]

    @property
    def cache_used(self) -> int:
        """The bytes of the caches that running sequences hold. The rest is free, or cached for
        prompts with the same beginning."""
        used = 0
        for batcher in self._batchers.values():
            kept = batcher.sampler.cache
            frames = kept["held"] * kept["full"] + kept["windows"] * kept["windowed"]
            used += batcher.cache_bytes * frames // max(1, kept["frames"])
        return used

    def add(
        self,
        base: LoadedModel,
        adapter: _core.Adapter | None,
        request: SampleRequest,
        future: "Future[SampleResult]",
        client: int = 0,
        follows: tuple[str | None, int] = (None, 0),
        listener: TokenListener | None = None,
        call: Call | None = None,
    ) -> None:
        """Queues a request on an open batcher; clients share a batcher fairly. `follows` is (run,
        session number) for a request of an inflight session. The listener is called for each token
        before the future is done, and `call` is updated. Raises the engine's error if it refuses
        the request."""
        batcher = self._batchers[base.path]
        left = max(base.context - len(request.prompt), 1)  # a full context still gives one token
        tokenizer = load_tokenizer(base.tokenizer_dir) if request.stop_texts else None
        number = next(self._numbers)
        batcher.sampler.add(
            number,
            request.prompt,
            adapter,
            num_samples=request.num_samples,
            max_tokens=min(request.max_tokens, left),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=request.seed,
            stop_ids=np.asarray(request.stop_ids, np.int32),
            topk_sample=request.topk_sample,
            prompt_logprobs=request.prompt_logprobs,
            topk_prompt=request.topk_prompt,
            prompt_draws=request.prompt_draws,
            targets=None if request.targets is None else request.targets.ids,
            target_starts=None if request.targets is None else request.targets.starts,
            prompt_from=_scored_from(request),
            client=client,
            session=follows[1],
            first_sample=request.first_sample,
        )
        call = call or Call("sample")
        batcher.pending[number] = _Pending(request, future, tokenizer, follows[0], listener, call)
        self._places[future] = batcher, number
        future.add_done_callback(self._places.pop)

    def set_weights(self, run: str, weights: _core.Adapter) -> None:
        """Requests of a run's inflight sessions use these weights from their next token."""
        for batcher in self._batchers.values():
            for number, item in batcher.pending.items():
                if item.run == run:
                    batcher.sampler.set_adapter(number, weights)

    def step(self) -> None:
        """One forward of every base model that has requests."""
        for path, batcher in list(self._batchers.items()):
            if not batcher.pending:
                continue
            began = time.monotonic()
            try:
                self.steps[_step(batcher)] += 1
            except Exception as error:
                # The batcher's state is unknown now: its requests fail, the other batchers go on.
                del self._batchers[path]
                for item in batcher.pending.values():
                    _fail(item, error)
            self.seconds += time.monotonic() - began

    def interrupt(self) -> None:
        """Call it from another thread: the current step ends with KeyboardInterrupt and draws
        nothing."""
        for batcher in list(self._batchers.values()):
            batcher.sampler.interrupt()

    def cancel(self, future: "Future[SampleResult]") -> None:
        """Cancels the request of a future, which fails. Does nothing if it is done."""
        batcher, number = self._places.get(future, (None, 0))
        if batcher is None or number not in batcher.pending:
            return
        batcher.sampler.cancel(number)
        del batcher.pending[number]
        future.set_exception(RequestError("the request was cancelled"))

    def fail_all(self, error: RequestError) -> None:
        """Fails all requests in flight."""
        for batcher in self._batchers.values():
            for item in batcher.pending.values():
                item.future.set_exception(error)
        self._batchers.clear()


def _step(batcher: _Batcher) -> int:
    """A step of a batcher; returns how many tokens it drew."""
    drawn, done = batcher.sampler.step()
    heard: dict[int, list[SampleDelta]] = {}
    now = time.monotonic()
    for number, sample, token in drawn:
        item = batcher.pending[number]
        item.call.drawn += 1
        item.call.first = item.call.first or now
        if item.tokenizer is not None:
            reading = item.readings.get(sample) or _begin(item, sample, item.tokenizer)
            reading.add(token)
            if reading.found is not None:
                batcher.sampler.stop(number, sample)
        if item.listener is not None:
            heard.setdefault(number, []).append(_look(batcher, number, sample))
    for number, parts in heard.items():
        _tell(batcher, number, parts)
    for number in done:
        if number not in batcher.pending:  # the listener's failure has ended it
            continue
        say_notes(batcher.core)
        item = batcher.pending[number]
        try:
            result = batcher.sampler.take(number)
        except FloatingPointError as error:  # fails this request only; other errors fail the step
            _fail(batcher.pending.pop(number), error)
            continue
        del batcher.pending[number]
        item.call.cached = result["prompt_reused"]
        item.future.set_result(_result(item, result))
    return len(drawn)


def _begin(item: _Pending, sample: int, tokenizer: "Tokenizer") -> Reading:
    """Starts to decode a sample's text, at its first token."""
    request = item.request
    made = item.readings[sample] = Reading(tokenizer, request.prompt, request.stop_texts)
    return made


def _fail(item: _Pending, error: Exception) -> None:
    failure = explain(error)
    failure.__cause__ = error
    item.future.set_exception(failure)


def _look(batcher: _Batcher, number: int, sample: int) -> SampleDelta:
    """The tokens of a sample that its listener does not have yet."""
    told = batcher.pending[number].told
    part = SampleDelta(sample, **batcher.sampler.look(number, sample, told.get(sample, 0)))
    told[sample] = told.get(sample, 0) + len(part.tokens)
    return part


def _tell(batcher: _Batcher, number: int, parts: Sequence[SampleDelta]) -> None:
    """Calls a request's listener. If it raises, the request ends at once."""
    item = batcher.pending[number]
    assert item.listener is not None
    try:
        item.listener(parts)
    except Exception as error:
        batcher.sampler.cancel(number)
        del batcher.pending[number]
        _fail(item, error)


def _result(item: _Pending, raw: dict[str, Any]) -> SampleResult:
    samples = [
        Sample(
            sample["tokens"],
            sample["logprobs"],
            sample["stop_reason"],
            sample["topk_ids"],
            sample["topk_logprobs"],
        )
        for sample in raw["samples"]
    ]
    logprobs, ids, topk = raw["prompt_logprobs"], raw["topk_ids"], raw["topk_logprobs"]
    is_image = item.request.prompt < 0
    skipped = np.zeros_like(is_image)
    if item.request.last_n is not None:
        skipped[: len(skipped) - item.request.last_n] = True
    if logprobs is not None:
        logprobs[1:][is_image[1:]] = 0.0
        logprobs[skipped] = np.nan
    if ids is not None and topk is not None:
        ids[is_image | skipped], topk[is_image | skipped] = 0, NO_LOGPROB
    return SampleResult(
        tuple(samples),
        logprobs,
        ids,
        topk,
        item.request.targets,
        raw["target_logprobs"],
        raw["drawn_ids"],
        raw["drawn_logprobs"],
        raw["prompt_reused"],
    )


def _scored_from(request: SampleRequest) -> int:
    """The first prompt position that needs log-probabilities, where the engine can skip others."""
    if request.last_n is None or request.prompt_draws or request.targets is not None:
        return 0
    return len(request.prompt) - request.last_n
