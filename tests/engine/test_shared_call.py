"""A call that is shared with replicas has the bits of one process, whoever computes what, and
whatever happens to a replica meanwhile. The replicas here are snapshots in this process."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.tiny_models import tokens_of
from support.training_cases import ADAM, adapter_of
from tinsmith import _core
from tinsmith.engine import shared_call
from tinsmith.engine.shared_call import (
    Helper,
    PartRequest,
    PartResult,
    SharedCall,
    Sum,
    compute_part,
    next_call,
    nodes_of,
    share,
)
from tinsmith.engine.training import Batch
from tinsmith.system.steps import finish

NAME = "qwen3_moe"
LENGTHS = np.array([9, 3, 70, 5, 12, 30, 1, 44, 8, 21, 17, 2, 60, 33], np.int32)


def batch_of(lengths: np.ndarray = LENGTHS) -> Batch:
    total = int(lengths.sum())
    rng = np.random.default_rng(0)
    return Batch(
        tokens_of(NAME, total),
        lengths,
        tokens_of(NAME, total, 1),
        np.ones(len(lengths), np.int32),
        "cross_entropy",
        {"weights": rng.normal(size=total).astype(np.float32)},
        {},
        tuple((int(length),) for length in lengths),
    )


@dataclass(eq=False)
class Replica(Helper):
    """A replica whose answers come when the test lets them: `work()` answers one request. It obeys
    one command after another, as one does behind a socket."""

    adapter: _core.Adapter
    lost: bool = False
    asked: list[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=list)
    call: int = 0
    drops: int = 0

    def _ask(self, work: Callable[[], Any]) -> Future[Any]:
        future = Future[Any]()
        if self.lost:
            future.set_exception(ConnectionError("lost"))
        else:
            self.asked.append((future, work))
        return future

    def part(self, request: PartRequest) -> Future[PartResult]:
        def work() -> PartResult:
            if self.call != request.call:
                self.adapter.drop_parts()
            self.call = request.call
            return finish(compute_part(self.adapter, request))

        return self._ask(work)

    def take(self, call: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        return self._ask(lambda: [self.adapter.take_part(node) for node in nodes])

    def drop(self, call: int) -> None:
        self.drops += 1
        self.asked.append((Future(), self.adapter.drop_parts))

    def work(self) -> None:
        if self.asked:
            future, work = self.asked.pop(0)
            future.set_result(work())

    def lose(self) -> None:
        self.lost = True
        for future, _ in self.asked:
            if not future.done():
                future.set_exception(ConnectionError("lost"))
        self.asked.clear()


def run(
    adapter: _core.Adapter,
    helpers: list[Replica],
    happen: Callable[[int], None] = lambda step: None,
    *,
    backward: bool = True,
    batch: Batch | None = None,
    others_wait: bool = False,
) -> PartResult:
    """A call; before each of its steps something happens, and a random helper works."""
    batch = batch or batch_of()
    whole = batch.request(adapter, backward)
    parts = batch.parts(adapter, whole)
    order, step = random.Random(len(helpers)), 0
    alive = lambda: [one for one in helpers if not one.lost]  # noqa: E731
    steps = share(adapter, whole, parts, alive, lambda: others_wait)
    try:
        while True:
            news = next(steps)
            happen(step)
            step += 1
            for one in order.sample(helpers, len(helpers)):
                if order.random() < 0.5:
                    one.work()
            while isinstance(news, Future) and not news.done():
                for one in helpers:
                    one.work()
    except StopIteration as end:
        result: PartResult = end.value
        return result


def replicas(adapter: _core.Adapter, count: int) -> list[Replica]:
    return [Replica(adapter.snapshot()) for _ in range(count)]


def same(found: PartResult, wanted: PartResult) -> None:
    assert found.logprobs.tobytes() == wanted.logprobs.tobytes() and found.loss == wanted.loss
    assert found.routed is not None and wanted.routed is not None
    assert (found.routed == wanted.routed).all()


def state(adapter: _core.Adapter) -> Any:
    return adapter.read("gradients").tobytes(), adapter.pending


@pytest.fixture
def alone() -> tuple[_core.Adapter, PartResult]:
    """What one process gives."""
    adapter = adapter_of(NAME, step_tokens=8)
    return adapter, run(adapter, [])


@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_replicas_gives_the_bits_of_one(
    count: int, alone: tuple[_core.Adapter, PartResult]
) -> None:
    wanted, result = alone
    adapter = adapter_of(NAME, step_tokens=8)
    helpers = replicas(adapter, count)
    same(run(adapter, helpers), result)
    assert state(adapter) == state(wanted)
    assert sum(one.drops for one in helpers) == min(count, 7)
    same(run(adapter, helpers, backward=False), run(wanted, [], backward=False))
    run(adapter, helpers)  # with gradients before it
    run(wanted, [])
    assert state(adapter) == state(wanted)
    for one in (adapter, wanted):
        one.optim_step(**ADAM)
    assert adapter.read("weights").tobytes() == wanted.read("weights").tobytes()


@pytest.mark.parametrize("at", range(0, 14, 2))
@pytest.mark.parametrize("count", (1, 3, 7))
def test_a_replica_that_is_lost_changes_no_bit(
    count: int, at: int, alone: tuple[_core.Adapter, PartResult]
) -> None:
    """At any step: while it computes, between two parts, or with sums that nobody else has."""
    wanted, result = alone
    adapter = adapter_of(NAME, step_tokens=8)
    helpers = replicas(adapter, count)
    found = run(adapter, helpers, lambda step: helpers[0].lose() if step == at else None)
    same(found, result)
    assert state(adapter) == state(wanted)
    run(adapter, helpers[1:])
    run(wanted, [])
    assert state(adapter) == state(wanted)


def test_a_replica_that_joins_and_one_that_leaves_change_no_bit(
    alone: tuple[_core.Adapter, PartResult],
) -> None:
    wanted, result = alone
    adapter = adapter_of(NAME, step_tokens=8)
    helpers = replicas(adapter, 1)

    def happen(step: int) -> None:
        if step == 3:
            helpers.append(Replica(adapter.snapshot()))
        if step == 6:
            helpers[0].lose()

    same(run(adapter, helpers, happen), result)
    assert state(adapter) == state(wanted)


def test_a_replica_that_is_slow_is_given_up(
    monkeypatch: pytest.MonkeyPatch, alone: tuple[_core.Adapter, PartResult]
) -> None:
    wanted, result = alone
    monkeypatch.setattr(shared_call, "SLOW", 1e-6)
    monkeypatch.setattr(shared_call, "LATE_SECONDS", 1e-6)
    adapter = adapter_of(NAME, step_tokens=8)

    class Slow(Replica):
        def work(self) -> None:
            pass

    slow = Slow(adapter.snapshot())
    helpers = [slow, *replicas(adapter, 1)]
    same(run(adapter, helpers), result)
    assert state(adapter) == state(wanted) and slow.drops == 1
    monkeypatch.undo()
    for _ in range(len(slow.asked)):
        Replica.work(slow)
    slow.__class__ = Replica  # it is well again, and used again
    run(adapter, helpers)
    run(wanted, [])
    assert state(adapter) == state(wanted)


def test_a_failure_here_leaves_no_trace_anywhere() -> None:
    adapter = adapter_of(NAME, step_tokens=8)
    run(adapter, [])
    before, helpers = state(adapter), replicas(adapter, 2)
    bad = batch_of()
    bad.inputs["weights"][-1] = 3e38
    bad.inputs["weights"][-2] = 3e38
    with pytest.raises(FloatingPointError):
        run(adapter, helpers, batch=bad)
    assert state(adapter) == before
    assert all(one.drops == 1 for one in helpers)
    run(adapter, helpers)
    wanted = adapter_of(NAME, step_tokens=8)
    run(wanted, [])
    run(wanted, [])
    assert state(adapter) == state(wanted)


def test_a_call_that_is_closed_leaves_no_trace() -> None:
    adapter, wanted = (adapter_of(NAME, step_tokens=8) for _ in range(2))
    batch, helpers = batch_of(), replicas(adapter, 2)
    before = state(adapter)
    whole = batch.request(adapter, True)
    for count in (1, 2, 5):
        parts = batch.parts(adapter, whole)
        steps = share(adapter, whole, parts, lambda: helpers, lambda: False)
        for _ in range(count):
            next(steps)
        steps.close()
        assert state(adapter) == before
    for one in helpers:
        while one.asked:
            one.work()
    run(adapter, helpers)
    run(wanted, [])
    assert state(adapter) == state(wanted)


def test_the_last_part_travels_only_if_others_wait() -> None:
    adapter = adapter_of(NAME, step_tokens=1000)
    helpers = replicas(adapter, 3)
    run(adapter, helpers)
    assert not any(one.drops for one in helpers)
    wanted = state(adapter)
    adapter.clear_gradients()
    run(adapter, helpers, others_wait=True)
    assert sum(one.drops for one in helpers) == 1 and state(adapter) == wanted


def test_nodes_of_parts() -> None:
    assert nodes_of(range(8)) == [1]
    assert nodes_of([0]) == [8]
    assert nodes_of([0, 1, 2]) == [4, 10]
    assert nodes_of([1, 2, 3, 4, 5, 6, 7]) == [3, 5, 9]
    assert nodes_of([]) == []


def test_siblings_go_to_one_process() -> None:
    adapter = adapter_of(NAME, step_tokens=1)
    batch = batch_of(np.full(16, 3, np.int32))
    whole = batch.request(adapter, True)
    (helper,) = replicas(adapter, 1)
    call = SharedCall(adapter, batch.parts(adapter, whole), lambda: [helper])
    steps = call.steps(lambda one: compute_part(adapter, one))
    taken: list[int] = []
    original = helper.take

    def take(number: int, nodes: Sequence[int]) -> Future[list[Sum]]:
        taken.extend(nodes)
        return original(number, nodes)

    helper.take = take  # type: ignore[method-assign]
    with pytest.raises(StopIteration):
        while True:
            news = next(steps)
            helper.work()
            while isinstance(news, Future) and not news.done():
                helper.work()
    assert len(taken) <= 3 and next_call() > whole.call
