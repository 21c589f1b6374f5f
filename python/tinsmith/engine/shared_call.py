"""A training call whose parts several processes compute, with the bits of one process.

A call's datums form eight parts, a function of their lengths and of step_tokens alone
(_core.Adapter.parts). A part is a pure function of weights and datums. So parts are handed out one
by one, the largest first, to whoever is free: this process takes one in its turn, replicas have up
to DEPTH. The sums of gradients stay where they were computed until all parts are done; siblings in
the tree are summed there. Then this process collects them. If a replica is lost, or slow by SLOW
times, all its parts of the call are computed again by others, to the same bits. So how many
replicas there are, and what happens to them, changes the time alone.

The last part stays here, unless other runs wait for this process, or it has no memory for a part: a
call of one part travels only then.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.engine.errors import sentence
from tinsmith.system.steps import Steps

log = logging.getLogger("tinsmith")

WHOLE_CALL = -1  # instead of a part's number
DEPTH = 2  # parts that a replica has at once, so that it need not wait for the next
SLOW = 3.0  # times the expected time, after which a replica is given up for a call,
LATE_SECONDS = 1.0  # and at least so long: its first part of a call waits for weights

# A node's gradients, loss, tokens and sequences, as _core.Adapter.take_part returns them.
Sum: TypeAlias = tuple[NDArray[np.float32] | None, float, float, float]
Ids: TypeAlias = NDArray[np.int32]

_numbers = count(1)


@dataclass(frozen=True)
class PartRequest:
    """The datums of one part of a call, with what the engine needs for them."""

    call: int  # a process drops the sums of earlier calls with the same weights
    part: int  # or WHOLE_CALL
    arrays: tuple[Ids, Ids, Ids, Ids]  # of _core.Adapter.forward_backward
    loss: str
    inputs: dict[str, NDArray[np.float32]]
    config: dict[str, float]
    backward: bool
    step_tokens: int
    taught: tuple[Ids, Ids] | None = None  # a teacher's tokens and lengths

    @property
    def rows(self) -> int:
        """Its tokens."""
        return len(self.arrays[0])


@dataclass(frozen=True)
class PartResult:
    """What a part gives besides the sum of its gradients. Arrays are flat, in the datums' order."""

    logprobs: NDArray[np.float32]
    loss: float
    divergences: NDArray[np.float32] | None = None
    routed: NDArray[np.int32] | None = None  # rows of each expert


class Helper(ABC):
    """A replica with a call's weights and teacher. Its futures fail if it is lost, or can't do what
    it is asked; then others do it."""

    @property
    def name(self) -> str:
        """The replica's."""
        return "a replica"

    @property
    def waiting(self) -> int:
        """How many requests it has, of all calls."""
        return 1

    @abstractmethod
    def part(self, request: PartRequest) -> Future[PartResult]:
        """Computes a part; the sum of its gradients stays there."""

    @abstractmethod
    def take(self, call: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        """Takes the sums of a call's nodes."""

    @abstractmethod
    def drop(self, call: int) -> None:
        """Ends what it does for a call, and drops its sums."""


# Those of a call that are alive now, each as the same object every time.
Helpers: TypeAlias = Callable[[], Iterable[Helper]]


@dataclass
class _Part:
    """A part that a helper computes."""

    number: int
    future: Future[PartResult]
    since: float


@dataclass
class _Share:
    """What a helper has of a call."""

    helper: Helper
    under_way: list[_Part] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # parts whose sums are there


class SharedCall:
    """The parts of a call: which are to be done, who does them, and their results. `others_wait`
    says whether other runs wait for this process."""

    def __init__(
        self,
        adapter: _core.Adapter,
        requests: Sequence[PartRequest],
        helpers: Helpers,
        others_wait: Callable[[], bool] = lambda: False,
    ):
        self._adapter = adapter
        self._requests = {one.part: one for one in requests}
        self._helpers, self._others_wait = helpers, others_wait
        self._call = requests[0].call
        self._todo = sorted(self._requests, key=self._size)
        self._shares: dict[Helper, _Share] = {}
        self._given_up: set[Helper] = set()
        self._own: set[int] = set()  # parts whose sums are in the adapter
        self._refusal: MemoryError | None = None  # why this process computes no more parts
        self._pace: list[float] = []  # seconds a row of the parts that are done
        self.results: dict[int, PartResult] = {}
        self.repeated = 0  # parts that were computed again

    def steps(self, compute: Callable[[PartRequest], Steps[PartResult]]) -> Steps[float]:
        """Computes all parts, here with `compute`; returns the loss. Gradients are added to the
        adapter's at the end. Whatever ends it before then leaves no trace."""
        backward = next(iter(self._requests.values())).backward
        try:
            while True:
                yield from self._compute_all(compute)
                if not backward:
                    return self._loss()
                if (yield from self._collect()):
                    break
            self._add_empty()
            return self._adapter.end_parts()
        finally:
            for helper in self._shares:
                helper.drop(self._call)
            self._adapter.drop_parts()

    # ---- parts ----

    def _compute_all(self, compute: Callable[[PartRequest], Steps[PartResult]]) -> Steps[None]:
        while len(self.results) < len(self._requests):
            self._look()
            self._hand_out()
            if self._todo and self._refusal is None:
                yield from self._compute_one(compute)
            elif any(share.under_way for share in self._shares.values()):
                yield self._news()
            elif len(self.results) < len(self._requests):
                raise self._refusal or AssertionError("nobody has a part that is to be done")

    def _compute_one(self, compute: Callable[[PartRequest], Steps[PartResult]]) -> Steps[None]:
        part, began = self._choose(self._own), time.monotonic()
        request = self._requests[part]
        work = compute(request)
        try:
            while True:
                news = next(work)
                if isinstance(news, tuple):
                    news = self._progress(request.rows * news[0] // news[1])
                yield news
                self._look()
                self._hand_out()
        except StopIteration as end:
            self._own.add(part)
            self._finish(part, end.value, began)
        except MemoryError as error:  # a replica may have more
            self._refusal = error
            self._todo = sorted([*self._todo, part], key=self._size)
        finally:
            work.close()
        yield self._progress(0)

    def _progress(self, rows: int) -> tuple[int, int]:
        """(Micro-batches done, all), given the rows of a part in progress here."""
        step = next(iter(self._requests.values())).step_tokens
        total = sum(one.rows for one in self._requests.values())
        done = rows + sum(self._requests[part].rows for part in self.results)
        return done // step, max(1, -(-total // step))

    def _size(self, part: int) -> tuple[int, int]:
        return -self._requests[part].rows, part

    def _choose(self, has: set[int]) -> int:
        """The next part for a process that has some: near those and far from others' in the tree,
        so that few sums travel; then the largest."""
        others = set(self._requests) - has - set(self._todo)

        def near(part: int) -> tuple[int, ...]:
            pair, four = {part ^ 1}, set(range(part & ~3, (part & ~3) + 4))
            return tuple(len(has & some) - len(others & some) for some in (pair, four))

        part = max(self._todo, key=near)  # of equal ones, the first: the largest
        self._todo.remove(part)
        return part

    def _hand_out(self) -> None:
        """Gives parts to helpers: first one to each."""
        left = 0 if self._refusal is not None or self._others_wait() else 1
        alive = [one for one in self._helpers() if one not in self._given_up]
        shares = [self._shares.get(one) or _Share(one) for one in alive]
        for depth in range(DEPTH):
            for share in shares:
                if len(self._todo) <= left + depth:
                    return
                if len(share.under_way) <= depth:
                    self._shares[share.helper] = share
                    has = share.done | {part.number for part in share.under_way}
                    part = self._choose(has)
                    future = share.helper.part(self._requests[part])
                    share.under_way.append(_Part(part, future, time.monotonic()))

    def _look(self) -> None:
        """Takes the results that have come. A helper that is lost, or too slow, is given up."""
        for share in list(self._shares.values()):
            while share.under_way and (first := share.under_way[0]).future.done():
                if (error := first.future.exception()) is not None:
                    self._give_up(share, sentence(error))
                    break
                share.under_way.pop(0)
                share.done.add(first.number)
                self._finish(first.number, first.future.result(), first.since)
                for part in share.under_way[:1]:
                    part.since = time.monotonic()
            if share.under_way and not self._todo and time.monotonic() >= self._late(share):
                self._give_up(share, f"a part takes more than {SLOW:g} times as long as others")

    def _finish(self, part: int, result: PartResult, began: float) -> None:
        self.results[part] = result
        self._pace.append((time.monotonic() - began) / max(self._requests[part].rows, 1))

    def _late(self, share: _Share) -> float:
        """When a helper's first part is late; infinity while no part is done."""
        if not share.under_way or not self._pace:
            return float("inf")
        first = share.under_way[0]
        expected = max(self._pace) * self._requests[first.number].rows
        return first.since + max(LATE_SECONDS, SLOW * expected * max(1, share.helper.waiting))

    def _give_up(self, share: _Share, reason: str) -> None:
        """What a helper has, done or not, is to be done by others."""
        log.info("%s leaves its parts of a call to others: %s", share.helper.name, reason)
        del self._shares[share.helper]
        self._given_up.add(share.helper)
        share.helper.drop(self._call)
        for part in share.done:
            del self.results[part]
        lost = share.done | {part.number for part in share.under_way}
        self._todo = sorted([*self._todo, *lost], key=self._size)
        self.repeated += len(lost)

    def _news(self) -> Future[None]:
        """Is done when a helper has answered, or one is late."""
        working = [share for share in self._shares.values() if share.under_way]
        late = min(map(self._late, working), default=float("inf"))
        futures = [share.under_way[0].future for share in working]
        return _when_any(futures, late - time.monotonic())

    # ---- sums ----

    def _collect(self) -> Steps[bool]:
        """Takes the helpers' sums; returns whether all came. Otherwise parts are to do again."""
        shares = [share for share in self._shares.values() if share.done]
        asked = [(share, nodes_of(share.done)) for share in shares]
        taken = [(share, n, share.helper.take(self._call, n)) for share, n in asked]
        for share, nodes, future in taken:
            if not future.done():
                yield _when_any([future])
            if (error := future.exception()) is not None:
                self._give_up(share, sentence(error))
                continue
            for node, found in zip(nodes, future.result(), strict=True):
                self._adapter.put_part(node, *found)
            self._own |= share.done
            share.done.clear()
        return not self._todo

    def _add_empty(self) -> None:
        for part in range(_core.PARTS):
            if part not in self._requests:
                self._adapter.put_part(_core.PARTS + part, None, 0.0, 0.0, 0.0)

    def _loss(self) -> float:
        """The sum of the parts' losses, in the order of the tree."""
        sums = [self.results[p].loss if p in self.results else 0.0 for p in range(_core.PARTS)]
        while len(sums) > 1:
            sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
        return sums[0]


def compute_part(
    adapter: _core.Adapter,
    request: PartRequest,
    teacher: _core.Adapter | _core.Model | None = None,
) -> Steps[PartResult]:
    """Computes a part; the sum of its gradients stays in the adapter."""
    adapter.step_tokens = request.step_tokens
    given = (*request.arrays, request.loss, request.inputs, request.config)
    if request.taught is None:
        logprobs, loss = yield from adapter.forward_backward(
            *given, backward=request.backward, part=request.part, stepwise=True
        )
        return PartResult(logprobs, loss, None, adapter.routed)
    logprobs, divergences, loss = yield from adapter.distill(
        *given,
        *request.taught,
        teacher=teacher,
        backward=request.backward,
        part=request.part,
        stepwise=True,
    )
    return PartResult(logprobs, loss, divergences, adapter.routed)


def kept_forward(adapter: _core.Adapter, request: PartRequest) -> Steps[PartResult]:
    """A whole forward of which the adapter keeps the activations, so that backward may follow."""
    logprobs, loss = yield from adapter.forward_backward(
        *request.arrays,
        request.loss,
        request.inputs,
        request.config,
        backward=False,
        keep=True,
        stepwise=True,
    )
    return PartResult(logprobs, loss, None, adapter.routed)


def share(
    adapter: _core.Adapter,
    whole: PartRequest,
    parts: Sequence[PartRequest],
    helpers: Helpers,
    others_wait: Callable[[], bool],
    teacher: _core.Adapter | _core.Model | None = None,
    repeated: Callable[[int], object] = lambda parts: None,
) -> Steps[PartResult]:
    """Computes a call with helpers, or alone if it has one part and nobody waits. `repeated` is
    called with the number of parts that were computed again."""
    if len(parts) == 1 and not others_wait():
        try:
            return (yield from compute_part(adapter, whole, teacher))
        except MemoryError:
            others_wait = lambda: True  # noqa: E731 - a replica may have more
    call = SharedCall(adapter, parts, helpers, others_wait)
    try:
        loss = yield from call.steps(lambda one: compute_part(adapter, one, teacher))
    except (ValueError, IndexError):  # the whole call's error names the datum by its own number
        return (yield from compute_part(adapter, whole, teacher))
    finally:
        repeated(call.repeated)
    found = [call.results[part] for part in sorted(call.results)]
    divergences = [one.divergences for one in found if one.divergences is not None]
    routed = [one.routed for one in found if one.routed is not None]
    return PartResult(
        np.concatenate([one.logprobs for one in found]),
        loss,
        np.concatenate(divergences) if divergences else None,
        np.sum(routed, axis=0, dtype=np.int32) if routed else None,
    )


def next_call() -> int:
    """A number for a call."""
    return next(_numbers)


def nodes_of(parts: Iterable[int]) -> list[int]:
    """The nodes of the tree that a process has which has computed these parts."""
    nodes = {_core.PARTS + part for part in parts}
    for node in range(2 * _core.PARTS - 1, 1, -2):
        if {node, node - 1} <= nodes:
            nodes -= {node, node - 1}
            nodes.add(node // 2)
    return sorted(nodes)


def _when_any(futures: Iterable[Future[Any]], seconds: float = float("inf")) -> Future[None]:
    """Is done when one of several futures is, or after some time."""
    told, lock = Future[None](), threading.Lock()

    def tell(_: object = None) -> None:
        with lock:
            if not told.done():
                told.set_result(None)

    if seconds < float("inf"):
        timer = threading.Timer(max(0.0, seconds), tell)
        timer.daemon = True
        timer.start()
        told.add_done_callback(lambda _: timer.cancel())
    for future in futures:
        future.add_done_callback(tell)
    return told
