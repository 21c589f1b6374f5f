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
from tinsmith.models.registry import BaseModel, LoadedModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class PromptTargets:
    """Ids to score in a prompt: ids[starts[p] : starts[p + 1]] at position p + 1. The rest is the
    layout of the tensor they came in, of so many values, those at `cells` being the ids."""

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
    max_tokens: int = -1  # -1: to the end of the context, or of the cache
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
    record: bool = False  # whether the server remembers its samples, for losses that need that


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
    """What a sample has drawn in a step; the stop reason is there when it has ended."""

    number: int  # of the sample in its request
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stop_reason: str | None
    topk_ids: NDArray[np.int32] | None
    topk_logprobs: NDArray[np.float32] | None


# Is called in the worker's thread with what a request's samples drew in a step. It must be quick.
Listener = Callable[[Sequence[SampleDelta]], None]


@dataclass(frozen=True)
class SampleResult:
    """A request's result; prompt rows that were not scored are NaN, or id 0 at -99999."""

    samples: tuple[Sample, ...]
    prompt_logprobs: NDArray[np.float32] | None = None
    topk_ids: NDArray[np.int32] | None = None
    topk_logprobs: NDArray[np.float32] | None = None
    targets: PromptTargets | None = None
    target_logprobs: NDArray[np.float32] | None = None  # like targets.ids
    drawn_ids: NDArray[np.int32] | None = None  # (prompt - 1, draws)
    drawn_logprobs: NDArray[np.float32] | None = None
    prompt_reused: int = 0  # of the prompt's tokens, those that were found in the cache


@dataclass
class _Pending:
    request: SampleRequest
    future: "Future[SampleResult]"
    tokenizer: "Tokenizer | None"
    run: str | None  # whose newest weights it follows
    listener: Listener | None
    call: Call
    readings: dict[int, Reading] = field(default_factory=dict)  # of samples with stop strings
    told: dict[int, int] = field(default_factory=dict)  # tokens of each sample, to the listener


@dataclass
class _Lane:
    """The requests that decode together on one base model."""

    core: _core.Model
    sampler: _core.Sampler
    cache_bytes: int
    pending: dict[int, _Pending] = field(default_factory=dict)


class Decoder:
    """Every sampling request that is under way."""

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()  # how many steps drew so many tokens
        self.seconds = 0.0  # that they took
        self._lanes: dict[Path, _Lane] = {}
        self._numbers = itertools.count()
        self._places: dict[Future[SampleResult], tuple[_Lane, int]] = {}  # of what is not done

    @property
    def active(self) -> bool:
        """Whether a step would do anything."""
        return any(lane.pending for lane in self._lanes.values())

    def is_open(self, base: BaseModel) -> bool:
        """Whether requests for a base model can be added."""
        return base.path in self._lanes

    def open(self, base: LoadedModel, cache_tokens: int = 0) -> None:
        """Makes what requests for a base model need, with a cache for so many tokens (0: the
        engine's default)."""
        sampler = _core.Sampler(base.core, tokens=cache_tokens)
        self._lanes[base.path] = _Lane(base.core, sampler, base.core.cache_bytes(cache_tokens))

    def shut(self, path: Path) -> bool:
        """Drops an idle lane with its cache; returns whether there was one."""
        lane = self._lanes.get(path)
        if lane is None or lane.pending:
            return False
        del self._lanes[path]
        return True

    @property
    def under_way(self) -> dict[Path, int]:
        """The requests of each open lane. Any thread may ask."""
        return {path: len(lane.pending) for path, lane in list(self._lanes.items())}

    def caches(self) -> list[tuple[Path, int, bool]]:
        """Of each open lane: its base model's path, its cache's bytes, and whether it is active."""
        return [(path, lane.cache_bytes, bool(lane.pending)) for path, lane in self._lanes.items()]

    @property
    def cache_used(self) -> int:
        """The bytes of the caches that running sequences hold. The rest is free, or remembered for
        prompts that begin alike."""
        used = 0
        for lane in self._lanes.values():
            kept = lane.sampler.cache
            frames = kept["held"] * kept["full"] + kept["windows"] * kept["windowed"]
            used += lane.cache_bytes * frames // max(1, kept["frames"])
        return used

    def add(
        self,
        base: LoadedModel,
        adapter: _core.Adapter | None,
        request: SampleRequest,
        future: "Future[SampleResult]",
        client: int = 0,
        follows: tuple[str | None, int] = (None, 0),
        listener: Listener | None = None,
        call: Call | None = None,
    ) -> None:
        """Queues a request on an open lane; each client has a fair part of the lane. One of an
        inflight session `follows` a run, and has the session's number. The listener hears of each
        token before the future is done, and the call is told of it. Raises the engine's error if it
        refuses the request."""
        lane = self._lanes[base.path]
        left = max(base.context - len(request.prompt), 1)  # a full context still gives one token
        tokenizer = load_tokenizer(base.tokenizer_dir) if request.stop_texts else None
        number = next(self._numbers)
        lane.sampler.add(
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
        )
        call = call or Call("sample")
        lane.pending[number] = _Pending(request, future, tokenizer, follows[0], listener, call)
        self._places[future] = lane, number
        future.add_done_callback(self._places.pop)

    def follow(self, run: str, weights: _core.Adapter) -> None:
        """The requests that follow a run go on with these weights from their next token."""
        for lane in self._lanes.values():
            for number, item in lane.pending.items():
                if item.run == run:
                    lane.sampler.follow(number, weights)

    def step(self) -> None:
        """One forward of every base model that has requests."""
        for path, lane in list(self._lanes.items()):
            if not lane.pending:
                continue
            began = time.monotonic()
            try:
                self.steps[_step(lane)] += 1
            except Exception as error:
                # The lane's state is unknown now: its requests fail, the other lanes go on.
                del self._lanes[path]
                for item in lane.pending.values():
                    _fail(item, error)
            self.seconds += time.monotonic() - began

    def interrupt(self) -> None:
        """Call it from another thread: the current step ends with KeyboardInterrupt and draws
        nothing."""
        for lane in list(self._lanes.values()):
            lane.sampler.interrupt()

    def cancel(self, future: "Future[SampleResult]") -> None:
        """Forgets the request of a future, which fails; nothing where it is done."""
        lane, number = self._places.get(future, (None, 0))
        if lane is None or number not in lane.pending:
            return
        lane.sampler.cancel(number)
        del lane.pending[number]
        future.set_exception(RequestError("the request was cancelled"))

    def fail_all(self, error: RequestError) -> None:
        """Ends everything that is under way."""
        for lane in self._lanes.values():
            for item in lane.pending.values():
                item.future.set_exception(error)
        self._lanes.clear()


def _step(lane: _Lane) -> int:
    """A step of a lane; returns how many tokens it drew."""
    drawn, done = lane.sampler.step()
    heard: dict[int, list[SampleDelta]] = {}
    now = time.monotonic()
    for number, sample, token in drawn:
        item = lane.pending[number]
        item.call.drawn += 1
        item.call.first = item.call.first or now
        if item.tokenizer is not None:
            reading = item.readings.get(sample) or _begin(item, sample, item.tokenizer)
            reading.add(token)
            if reading.found is not None:
                lane.sampler.stop(number, sample)
        if item.listener is not None:
            heard.setdefault(number, []).append(_look(lane, number, sample))
    for number, parts in heard.items():
        _tell(lane, number, parts)
    for number in done:
        if number not in lane.pending:  # the listener's failure has ended it
            continue
        say_notes(lane.core)
        item = lane.pending[number]
        try:
            result = lane.sampler.take(number)
        except FloatingPointError as error:  # of this request alone; others fail the step
            _fail(lane.pending.pop(number), error)
            continue
        del lane.pending[number]
        item.call.cached = result["prompt_reused"]
        item.future.set_result(_result(item, result))
    return len(drawn)


def _begin(item: _Pending, sample: int, tokenizer: "Tokenizer") -> Reading:
    """The text of a sample, whose first token has come."""
    request = item.request
    made = item.readings[sample] = Reading(tokenizer, request.prompt, request.stop_texts)
    return made


def _fail(item: _Pending, error: Exception) -> None:
    failure = explain(error)
    failure.__cause__ = error
    item.future.set_exception(failure)


def _look(lane: _Lane, number: int, sample: int) -> SampleDelta:
    """What a sample has drawn that its listener has not heard of."""
    told = lane.pending[number].told
    part = SampleDelta(sample, **lane.sampler.look(number, sample, told.get(sample, 0)))
    told[sample] = told.get(sample, 0) + len(part.tokens)
    return part


def _tell(lane: _Lane, number: int, parts: Sequence[SampleDelta]) -> None:
    """Calls a request's listener. Where that fails, the request ends at once."""
    item = lane.pending[number]
    assert item.listener is not None
    try:
        item.listener(parts)
    except Exception as error:
        lane.sampler.cancel(number)
        del lane.pending[number]
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
    if item.request.last_n is not None:
        skipped = slice(0, len(item.request.prompt) - item.request.last_n)
        if logprobs is not None:
            logprobs[skipped] = np.nan
        if ids is not None and topk is not None:
            ids[skipped], topk[skipped] = 0, -99999.0
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
    """The first prompt position that needs log-probabilities, so far as the engine can skip."""
    if request.last_n is None or request.prompt_draws or request.targets is not None:
        return 0
    return len(request.prompt) - request.last_n
