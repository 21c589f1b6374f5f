"""Parts of training calls on replicas: the owner's bits, whoever computes which part."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.replica_crew import Replicated, replicated
from support.waiting import until
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import SnapshotJob
from tinsmith.engine.replica import NoWeights, Replica, Weights
from tinsmith.engine.shared_call import PartRequest, PartResult, compute_part, nodes_of
from tinsmith.engine.teachers import Teacher
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.system.steps import finish

STEP_TOKENS = 24
LENGTHS = np.asarray([9, 3, 70, 5, 12, 30, 1, 44, 8, 21, 17, 2, 60, 33], np.int32)
names = (f"run{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def three(tiny_model_dir) -> Iterator[Replicated]:
    with replicated(3, {"tiny": tiny_model_dir}) as found:
        yield found


@pytest.fixture(scope="module")
def alone(tiny_model_dir) -> Iterator[Worker]:
    with replicated(1, {"tiny": tiny_model_dir}) as found:
        yield found.worker


def batch_of(seed: int, lengths: NDArray[np.int32] = LENGTHS, *, taught: bool = False) -> Batch:
    """Random datums."""
    rng, rows = np.random.default_rng(seed), int(lengths.sum())
    tokens = rng.integers(3, 200, rows).astype(np.int32)
    targets = np.roll(tokens, -1)
    lessons = [np.concatenate([[5], row]) for row in np.split(targets, np.cumsum(lengths)[:-1])]
    lesson = np.concatenate(lessons).astype(np.int32)
    return Batch(
        tokens,
        lengths,
        targets,
        np.ones(len(lengths), np.int32),
        "generalized_jsd" if taught else "cross_entropy",
        {"weights": rng.uniform(0.1, 1, rows).astype(np.float32)},
        {},
        tuple((int(length),) for length in lengths),
        Teacher(lesson, lengths + 1, "current", 0.0) if taught else None,
    )


class Called:
    """A call of random datums on random weights, and how one process computes it."""

    def __init__(self, worker: Worker, seed: int, *, taught: bool = False, rank: int = 4):
        self.worker, self.batch = worker, batch_of(seed, taught=taught)
        numbers = np.random.default_rng(seed).uniform(-0.2, 0.2, 1 << 20).astype(np.float32)

        def make(engine: Engine) -> _core.Adapter:
            core = engine.bases.use(engine.models["tiny"]).core
            adapter = LoraSpec(rank, 1).adapter(core, STEP_TOKENS)
            adapter.write("weights", numbers[: adapter.size])
            return adapter

        self.adapter = worker.call(make).result()
        self.weights = Weights("tiny", self.adapter)
        self.teacher = Weights("tiny", None) if taught else None
        self.request = self.batch.request(self.adapter, True)
        self.parts = self.batch.parts(self.adapter, self.request)

    def whole(self) -> list[Any]:
        """What one process gets."""

        def compute(engine: Engine) -> list[Any]:
            found = finish(compute_part(self.adapter, self.request))
            return self._told(found.logprobs, found.divergences, found.loss)

        return self.worker.call(compute).result()

    def ask(self, replica: Replica, part: int) -> Future[PartResult]:
        return replica.part(self.parts[part], self.weights, self.teacher)

    def gathered(self, results: list[PartResult], at: dict[Replica, list[int]]) -> list[Any]:
        """What the owner makes of the parts, and of the sums at replicas."""
        for replica, parts in at.items():
            nodes = nodes_of(parts)
            sums = replica.take(self.weights, self.request.call, nodes).result()
            for node, total in zip(nodes, sums, strict=True):
                self.adapter.put_part(node, *total)
        loss = self.adapter.end_parts()
        divergences = [one.divergences for one in results if one.divergences is not None]
        return self._told(
            np.concatenate([one.logprobs for one in results]),
            np.concatenate(divergences) if divergences else None,
            loss,
        )

    def _told(self, logprobs: Any, divergences: Any, loss: float) -> list[Any]:
        arrays = logprobs, divergences, self.adapter.read("gradients")
        return [loss, *(None if array is None else array.tobytes() for array in arrays)]


@pytest.mark.parametrize("taught", (False, True))
def test_parts_on_any_replicas_have_the_bits_of_one_process(three, alone, taught) -> None:
    order = random.Random(0)
    for seed in range(3):
        options = {"taught": taught, "rank": 4 + 4 * (seed % 2)}
        called, asked = Called(three.worker, seed, **options), dict[int, Future[PartResult]]()
        at: dict[Replica, list[int]] = {replica: [] for replica in three.crew.all}
        for part in order.sample(range(_core.PARTS), _core.PARTS):
            replica = order.choice(three.crew.all)
            asked[part] = called.ask(replica, part)
            at[replica].append(part)
        results = [asked[part].result() for part in range(_core.PARTS)]
        assert called.gathered(results, at) == Called(alone, seed, **options).whole()
    assert sum(one.parts for one in three.crew.all) >= 24
    assert all(one.gradient_bytes for one in three.crew.all)


def test_calls_of_several_runs_do_not_mix(three: Replicated, alone: Worker) -> None:
    """Their parts come to one replica in turns."""
    calls, replica = [Called(three.worker, seed) for seed in (7, 8, 9)], three.crew.all[0]
    asked = [[called.ask(replica, part) for called in calls] for part in range(_core.PARTS)]
    for number, called in enumerate(calls):
        results = [row[number].result() for row in asked]
        expected = Called(alone, 7 + number).whole()
        assert called.gathered(results, {replica: list(range(_core.PARTS))}) == expected


def test_a_call_with_the_same_weights_does_not_see_the_one_before(three, alone) -> None:
    """Which was dropped, or ended without a word."""
    called, replica = Called(three.worker, 2), three.crew.all[0]
    for drops in (True, False):
        called.ask(replica, 3).result()
        if drops:
            replica.drop(called.weights, called.request.call)
        called.request = called.batch.request(called.adapter, True)
        called.parts = called.batch.parts(called.adapter, called.request)
    results = [called.ask(replica, part).result() for part in range(_core.PARTS)]
    expected = Called(alone, 2).whole()
    assert called.gathered(results, {replica: list(range(_core.PARTS))}) == expected


def endless(called: Called) -> PartRequest:
    """A part of many micro-batches."""
    tokens, lengths = np.resize(called.batch.tokens, 4_000_000), np.full(40_000, 100, np.int32)
    arrays = tokens, lengths, tokens, np.ones(len(lengths), np.int32)
    return replace(called.request, part=0, arrays=arrays, inputs={})


@pytest.mark.parametrize("how", ("cancel", "drop"))
def test_a_part_is_interrupted_while_it_computes(three: Replicated, alone: Worker, how) -> None:
    """The replica then computes others."""
    called, replica = Called(three.worker, 4), three.crew.all[1]
    future = replica.part(endless(called), called.weights, None)
    Called(three.worker, 5).ask(replica, 0).result()  # it has taken its turn in between
    assert not future.done()
    if how == "cancel":
        replica.cancel(future)
    else:
        replica.drop(called.weights, called.request.call)
    with pytest.raises(RequestError, match="the part was stopped"):
        future.result()
    results = [called.ask(replica, part).result() for part in range(_core.PARTS)]
    expected = Called(alone, 4).whole()
    assert called.gathered(results, {replica: list(range(_core.PARTS))}) == expected


def test_sums_that_were_dropped_are_gone(three: Replicated) -> None:
    called, replica = Called(three.worker, 5), three.crew.all[0]
    called.ask(replica, 0).result()
    replica.drop(called.weights, called.request.call)
    with pytest.raises(RequestError, match="no such sums"):
        replica.take(called.weights, called.request.call, [8]).result()


def test_weights_that_were_forgotten_are_sent_again(three: Replicated) -> None:
    called, replica = Called(three.worker, 6), three.crew.all[0]
    called.ask(replica, 0).result()
    before = replica.weights_bytes
    called.ask(replica, 1).result()
    assert replica.weights_bytes == before
    replica.forget(called.weights.id)
    called.ask(replica, 2).result()
    assert replica.weights_bytes > before


def test_weights_that_a_replica_has_dropped_are_missed(three: Replicated) -> None:
    """By one part; they are sent with the next."""
    called, replica = Called(three.worker, 6), three.crew.all[0]
    replica._there.add(called.weights.id)  # it was told so
    assert isinstance(called.ask(replica, 0).exception(), NoWeights)
    called.ask(replica, 0).result()


def test_a_bad_part_is_refused_with_its_sentence(three: Replicated) -> None:
    called, replica = Called(three.worker, 6), three.crew.all[0]
    called.parts[0].arrays[0][0] = 10_000
    with pytest.raises(RequestError, match="the token at position 0 is 10000"):
        called.ask(replica, 0).result()


# ---- whole calls, as the owner makes them ----


def open_run(worker: Worker) -> str:
    """A run with small micro-batches, and random weights."""
    run = next(names)
    worker.create(run, "tiny", LoraSpec(rank=4, seed=1)).result()

    def change(engine: Engine) -> None:
        adapter = engine.runs[run].trained()
        adapter.step_tokens = STEP_TOKENS
        numbers = np.random.default_rng(3).uniform(-0.2, 0.2, adapter.size)
        adapter.write("weights", numbers.astype(np.float32))

    worker.call(change).result()
    return run


def train(worker: Worker, batch: Batch) -> list[Any]:
    """Two steps of a run on a batch, with a snapshot sampled from."""
    run, found = open_run(worker), list[Any]()
    for turn in range(2):
        trained = worker.submit(run, 3 * turn + 1, TrainJob(batch)).result()
        logprobs = [row.tobytes() for row in trained.logprobs]
        step = worker.submit(run, 3 * turn + 2, OptimJob(AdamParams(learning_rate=0.01))).result()
        worker.submit(run, 3 * turn + 3, SnapshotJob(f"{run} {turn}")).result()
        request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=9, seed=turn)
        [sample] = worker.sample(f"{run} {turn}", request).result().samples
        found.append((logprobs, trained.loss, trained.metrics, step, sample.tokens.tolist()))
    worker.forget([run], [])
    return found


@pytest.mark.parametrize("taught", (False, True))
def test_training_has_the_bits_of_one_process(three: Replicated, alone: Worker, taught) -> None:
    batch = Called(alone, 1, taught=taught).batch
    before = sum(one.parts for one in three.crew.all)
    assert train(three.worker, batch) == train(alone, batch)
    assert sum(one.parts for one in three.crew.all) > before
    until(lambda: not three.crew._trained)  # the run has ended


def test_a_bad_datum_of_a_shared_call_is_named_by_its_number(three: Replicated) -> None:
    """In the call, not in its part."""
    batch, run = Called(three.worker, 1).batch, open_run(three.worker)
    batch.tokens[-1] = 10_000
    with pytest.raises(RequestError, match="datum 13: the token at position 32 is 10000"):
        three.worker.submit(run, 1, TrainJob(batch)).result()


def test_training_goes_on_when_a_replica_is_killed(tiny_model_dir, alone) -> None:
    """In a call: its parts are computed by others."""
    batch = Called(alone, 1).batch
    with replicated(3, {"tiny": tiny_model_dir}) as found:
        first = found.crew.all[0]
        ask = first.part

        def part(*arguments: Any) -> Future[PartResult]:
            first.part = ask  # type: ignore[method-assign]
            os.kill(found.processes[0].pid, signal.SIGKILL)
            return ask(*arguments)

        first.part = part  # type: ignore[method-assign]
        assert train(found.worker, batch) == train(alone, batch)
        assert first.state == "lost"
