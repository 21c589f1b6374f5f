"""Other processes that compute for this one: what they can do, and which one gets a request.

This process is the owner: it has all runs, and computes too. A replica computes pure functions of
weights and requests, and gives the owner's bits. So nothing is lost with it: a request whose
replica is lost goes to another one. How they are reached is not known here (tinsmith.replicas).

A request goes where its weights and the first page of its prompt have been before, because the
cache of keys and values has that page there: each place is hashed with both, and the highest hash
wins (rendezvous hashing). A place that has more than LOAD times the mean passes it on to the next
(consistent hashing with bounded loads, arXiv:1608.01350). No result depends on it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.engine.errors import RequestError
from tinsmith.engine.shared_call import Helper, Helpers, PartRequest, PartResult, Sum

if TYPE_CHECKING:
    from tinsmith.engine.call_log import Call
    from tinsmith.engine.decoding import SampleRequest, SampleResult, TokenListener
    from tinsmith.engine.engine import Engine

PAGE = 64  # tokens
LOAD = 1.25


class ReplicaLost(RequestError):
    """A replica's process has ended, or hangs. Its requests can be repeated elsewhere."""


class NoWeights(RequestError):
    """Weights that were sent to a replica are no longer there."""

    def __init__(self, message: str):
        super().__init__(message, "server")


@dataclass(frozen=True, eq=False)
class Weights:
    """What a replica samples from, or trains: a base model, or an adapter on it."""

    base: str
    adapter: _core.Adapter | None

    @cached_property
    def id(self) -> str:
        """Names the adapter's numbers as they are now; "" for a base model."""
        return "" if self.adapter is None else str(self.adapter.stamp)

    @cached_property
    def vector(self) -> NDArray[np.float32]:
        """The adapter's numbers, read once for all replicas; in the engine's thread."""
        assert self.adapter is not None
        return self.adapter.read("weights")


@dataclass(frozen=True)
class ReplicaRow:
    """A replica's figures, for people. `state` is "owner", "starting", "same bits", "other bits" or
    "lost"; `memory` is None where Memory tells."""

    name: str
    place: str
    state: str
    samples: int  # under way
    drawn: int  # tokens, so far
    weights_bytes: int  # of adapters that were sent to it, so far
    parts: int  # of training calls, so far
    gradient_bytes: int  # of sums that it has sent, so far
    memory: int | None


class Replica(ABC):
    """One replica. Its futures fail with ReplicaLost if it is lost."""

    def __init__(self, name: str):
        self.name = name
        self.bases: set[str] = set()  # the base models on which it was found to give equal bits

    @abstractmethod
    def sample(
        self,
        weights: Weights,
        request: SampleRequest,
        call: Call,
        client: int,
        follows: tuple[str | None, int],
        listener: TokenListener | None,
    ) -> Future[SampleResult]:
        """Decoder.add elsewhere. The listener is called in another thread. The future fails with
        NoWeights if the weights, which had been sent, were dropped there."""

    @abstractmethod
    def part(
        self, request: PartRequest, weights: Weights, teacher: Weights | None
    ) -> Future[PartResult]:
        """Helper.part, on these weights. It may fail with NoWeights too."""

    @abstractmethod
    def take(self, weights: Weights, call: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        """Helper.take."""

    @abstractmethod
    def drop(self, weights: Weights, call: int) -> None:
        """Helper.drop."""

    @abstractmethod
    def cancel(self, future: Future[Any]) -> None:
        """Stops the work of a sample or a part, which fails."""

    @abstractmethod
    def forget(self, weights: str) -> None:
        """Weights, by their id, that are not needed any more."""

    @abstractmethod
    def push(self, run: str, weights: Weights) -> None:
        """Its requests of a run's inflight sessions use these weights from their next token."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many of its requests are not answered yet."""

    @property
    @abstractmethod
    def drawn(self) -> tuple[Mapping[int, int], float]:
        """Worker.drawn of that process, as it was a moment ago."""


@dataclass(frozen=True, eq=False)
class _CallHelper(Helper):
    """A replica with the weights and the teacher of a call."""

    replica: Replica
    weights: Weights
    teacher: Weights | None

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def waiting(self) -> int:
        return self.replica.waiting

    def part(self, request: PartRequest) -> Future[PartResult]:
        return self.replica.part(request, self.weights, self.teacher)

    def take(self, call: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        return self.replica.take(self.weights, call, nodes)

    def drop(self, call: int) -> None:
        self.replica.drop(self.weights, call)


@dataclass(eq=False)
class _Away:
    """A request at a replica."""

    replica: Replica
    base: str
    run: str | None  # that it follows
    inner: Future[SampleResult]


class Crew:
    """The replicas of an owner. This one has none; what starts them fills `replicas`."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []  # those that are alive
        self.repeated = 0  # requests that were repeated because their replica was lost
        self.parts_repeated = 0  # the same of parts of training calls, or as it was too slow
        self._away: dict[Future[SampleResult], _Away] = {}
        self._trained: dict[str, str] = {}  # the ids of the weights of runs' newest calls
        self._parts: dict[Future[SampleResult], list[Future[SampleResult]]] = {}
        self._lock = threading.Lock()  # guards the next one
        self._loads: Counter[Replica | None] = Counter()  # samples under way; None: the owner's

    def meet(self, engine: Engine, base: str) -> None:
        """Begins to find out whether the replicas have the owner's bits on a base model, which is
        loaded. Called before each use; it must be quick when all is known."""

    def places(self, base: str) -> int:
        """How many processes compute on a base model: the owner, and replicas."""
        return 1 + sum(base in one.bases for one in list(self.replicas))

    def choose(
        self, weights: Weights, request: SampleRequest, refused: Set[Replica | None] = frozenset()
    ) -> Replica | None:
        """The replica that should get a sampling request; None: the owner. Those that have
        `refused` it don't, unless all have: then the owner says why."""
        fit = [one for one in list(self.replicas) if weights.base in one.bases]
        places: list[Replica | None] = [one for one in (None, *fit) if one not in refused]
        if len(places) < 2:
            return places[0] if places else None
        key = blake2b(weights.id.encode() + b"\0" + request.prompt[:PAGE].tobytes()).digest()

        def height(place: Replica | None) -> bytes:
            return blake2b((place.name if place else "owner").encode(), key=key).digest()

        total = sum(self._loads[place] for place in places) + request.num_samples
        most = max(math.ceil(LOAD * total / len(places)), request.num_samples)
        places.sort(key=height, reverse=True)
        free = (p for p in places if self._loads[p] + request.num_samples <= most)
        return next(free, min(places, key=lambda place: self._loads[place]))

    def count(self, place: Replica | None, future: Future[Any], samples: int) -> None:
        """Counts a request's samples at their place until its future is done."""

        def add(samples: int) -> None:
            with self._lock:
                self._loads[place] += samples

        add(samples)
        future.add_done_callback(lambda _: add(-samples))

    def load(self, place: Replica | None) -> int:
        """The samples under way at a place; None: the owner's own."""
        return self._loads[place]

    def send(
        self,
        replica: Replica,
        future: Future[SampleResult],
        inner: Future[SampleResult],
        base: str,
        run: str | None,
    ) -> None:
        """Notes that a request is at a replica: `inner` is its future there."""
        self._away[future] = _Away(replica, base, run, inner)
        inner.add_done_callback(lambda _: self._away.pop(future, None))

    def share(self, future: Future[SampleResult], parts: list[Future[SampleResult]]) -> None:
        """Notes that a request is drawn in parts."""
        self._parts[future] = parts
        future.add_done_callback(lambda _: self._parts.pop(future, None))

    def parts(self, future: Future[SampleResult]) -> list[Future[SampleResult]]:
        """The parts of a request; itself, if there are none."""
        return self._parts.get(future, [future])

    def repeated_parts(self, count: int) -> None:
        """Counts parts that were computed again."""
        self.parts_repeated += count

    def cancel(self, future: Future[SampleResult]) -> None:
        """Cancels a request that is at a replica, if it is."""
        if (item := self._away.get(future)) is not None:
            item.replica.cancel(item.inner)

    def push(self, run: str, weights: Weights) -> None:
        """Brings a run's new weights to its inflight sessions' requests."""
        for replica in {item.replica for item in list(self._away.values()) if item.run == run}:
            replica.push(run, weights)

    def helpers(self, run: str, weights: Weights, teacher: Weights | None) -> Helpers | None:
        """Engine.helpers, given a run's weights and its teacher's: those with the fewest requests
        first. The weights of the run's earlier calls are forgotten."""
        bases = {weights.base, teacher.base} if teacher else {weights.base}
        if not any(bases <= one.bases for one in list(self.replicas)):
            return None
        before, self._trained[run] = self._trained.get(run, weights.id), weights.id
        if before != weights.id:
            self._forget(before)
        known: dict[Replica, Helper] = {}

        def alive() -> list[Helper]:
            fit = [one for one in list(self.replicas) if bases <= one.bases]
            fit.sort(key=lambda one: one.waiting)
            for one in fit:
                known.setdefault(one, _CallHelper(one, weights, teacher))
            return [known[one] for one in fit]

        return alive

    def end(self, run: str) -> None:
        """A run has ended: its weights are forgotten."""
        if (weights := self._trained.pop(run, None)) is not None:
            self._forget(weights)

    def _forget(self, weights: str) -> None:
        for replica in list(self.replicas):
            replica.forget(weights)

    def fail_all(self, error: RequestError) -> None:
        """Fails all requests that are at replicas."""
        for future in list(self._away):
            settle(future, error)

    def rows(self, steps: Mapping[int, int]) -> list[ReplicaRow]:
        """The figures of all, the owner's first, given its decoder's steps; empty without
        replicas."""
        return []

    @property
    def under_way(self) -> Counter[str]:
        """The number of requests at replicas, by their base models' names."""
        return Counter(item.base for item in list(self._away.values()))

    def drawn(self, steps: Mapping[int, int], seconds: float) -> tuple[dict[int, int], float]:
        """Worker.drawn of all, given the owner's."""
        counts = Counter(steps)
        for replica in self.replicas:
            more, spent = replica.drawn
            counts.update(more)
            seconds += spent
        return dict(counts), seconds


def settle(future: Future[Any], outcome: Any) -> None:
    """Sets a future's result or exception, unless another thread was first."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def untold(listener: TokenListener, told: dict[int, int]) -> TokenListener:
    """A listener for a request's repetition, which gives the same tokens again: it passes on only
    those that are new. `told` counts the tokens of each sample that have been passed on."""
    seen: Counter[int] = Counter()

    def hear(parts: Sequence[Any]) -> None:
        fresh = []
        for part in parts:
            skip = min(max(told.get(part.number, 0) - seen[part.number], 0), len(part.tokens))
            seen[part.number] += len(part.tokens)
            told[part.number] = max(told.get(part.number, 0), seen[part.number])
            if skip < len(part.tokens) or part.stop_reason is not None:
                fresh.append(part.after(skip) if skip else part)
        if fresh:
            listener(fresh)

    return hear
