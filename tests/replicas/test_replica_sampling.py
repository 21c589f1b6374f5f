"""Sampling on replicas: the bits of one process, whatever happens to a replica."""

import errno
import itertools
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import pytest
from support.replica_crew import Replicated, replicated
from support.waiting import until
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest, SampleResult
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import SnapshotJob
from tinsmith.engine.replica import Weights
from tinsmith.engine.worker import Worker
from tinsmith.replicas import crew, identity

runs = itertools.count()


@pytest.fixture(scope="module")
def three(tiny_model_dir) -> Iterator[Replicated]:
    """An owner and two replicas; no test of this fixture ends one."""
    with replicated(3, {"tiny": tiny_model_dir}) as found:
        yield found


@pytest.fixture
def two(tiny_model_dir) -> Iterator[Replicated]:
    """An owner and a replica, which gets every request while it lives."""
    with replicated(2, {"tiny": tiny_model_dir}) as found:
        found.send_all_to(0)
        yield found


@pytest.fixture(scope="module")
def alone(tiny_model_dir) -> Iterator[Worker]:
    with replicated(1, {"tiny": tiny_model_dir}) as found:
        yield found.worker


def weigh(worker: Worker, run: str, seed: int) -> None:
    """Random weights for a run."""

    def write(engine: Engine) -> None:
        adapter = engine.runs[run].trained()
        numbers = np.random.default_rng(seed).uniform(-0.3, 0.3, adapter.size)
        adapter.write("weights", numbers.astype(np.float32))

    worker.call(write).result()


def open_run(worker: Worker, seed: int = 1) -> str:
    run = f"run{next(runs)}"
    worker.create(run, "tiny", LoraSpec(rank=4, seed=1)).result()
    weigh(worker, run, seed)
    return run


def stamp(worker: Worker, sampler: str) -> str:
    """The name of a sampling session's weights."""
    return worker.call(
        lambda engine: Weights("tiny", engine.snapshots.use(sampler).adapter).id
    ).result()


def ask(*prompt: int, **settings: Any) -> SampleRequest:
    return SampleRequest(np.asarray(prompt, np.int32), **({"seed": 7} | settings))


def told(result: SampleResult) -> list[Any]:
    """All that a result says, but how much of its prompt was cached."""

    def plain(value: Any) -> Any:
        return value.tobytes() if isinstance(value, np.ndarray) else value

    samples = [[plain(value) for value in vars(sample).values()] for sample in result.samples]
    rest = {name: plain(value) for name, value in vars(result).items()}
    return [samples, {**rest, "samples": None, "prompt_reused": None}]


def requests() -> list[SampleRequest]:
    rows = [ask(n, 5, max_tokens=30, num_samples=2, seed=n) for n in range(3, 15)]
    rows.append(ask(*range(90), max_tokens=20, prompt_logprobs=True, topk_prompt=3, topk_sample=2))
    rows.append(ask(*range(90), max_tokens=2, topk_prompt=3, last_n=4, prompt_draws=2))
    rows.append(ask(4, 5, 6, temperature=0.0))
    rows.append(ask(4, 5, max_tokens=5, num_samples=50, prompt_logprobs=True))  # in parts
    return rows


def sampled(worker: Worker) -> list[Any]:
    """What requests to a base model and to a run's weights give."""
    run = open_run(worker)
    worker.submit(run, 1, SnapshotJob(f"{run} shot")).result()
    futures = [worker.sample(s, row) for row in requests() for s in ("tiny", f"{run} shot")]
    return [told(future.result()) for future in futures]


def test_replicas_give_the_bits_of_one_process(three: Replicated, alone: Worker) -> None:
    expected = sampled(alone)
    assert sampled(three.worker) == expected
    assert all(one.weights_bytes for one in three.crew.all), "each has drawn from the adapter"
    until(lambda: all(sum(one.drawn[0].values()) for one in three.crew.all))
    steps, _ = three.worker.drawn
    assert sum(steps.values()) > sum(map(sum, (one.drawn[0].values() for one in three.crew.all)))


def test_tokens_come_as_they_are_drawn(three: Replicated) -> None:
    three.send_all_to(0)
    heard: list[Any] = []
    request = ask(5, 6, max_tokens=100, num_samples=20)
    result = three.worker.sample("tiny", request, listener=heard.extend).result()
    del three.crew.choose
    for number, sample in enumerate(result.samples):
        parts = [part for part in heard if part.number == number]
        assert np.concatenate([part.tokens for part in parts]).tolist() == sample.tokens.tolist()
        assert [part.stop_reason for part in parts if part.stop_reason] == [sample.stop_reason]


def test_a_group_is_drawn_in_parts_and_streams_as_one(three: Replicated, alone: Worker) -> None:
    request, heard = ask(5, 6, max_tokens=9, num_samples=40), list[Any]()
    before = {place: three.crew.all[place].drawn for place in (0, 1)}
    result = three.worker.sample("tiny", request, listener=heard.extend).result()
    assert told(result) == told(alone.sample("tiny", request).result())
    for number, sample in enumerate(result.samples):
        parts = [part.tokens for part in heard if part.number == number]
        assert np.concatenate(parts).tolist() == sample.tokens.tolist()
    until(lambda: all(three.crew.all[place].drawn != before[place] for place in (0, 1)))


def test_all_parts_of_a_cancelled_group_end(three: Replicated) -> None:
    future = three.worker.sample("tiny", ask(5, 6, num_samples=5_000, max_tokens=100))
    three.worker.cancel(future)
    assert "cancelled" in str(future.exception())
    until(lambda: not any(three.crew.load(place) for place in (None, *three.crew.all)))
    assert not three.worker.now.sampling["tiny"]


def test_a_listeners_failure_ends_its_request(three: Replicated) -> None:
    def fail(parts: Any) -> None:
        raise ValueError("nobody listens")

    three.send_all_to(1)
    request = ask(5, 6, max_tokens=100, num_samples=1000)
    failed = three.worker.sample("tiny", request, listener=fail)
    assert "nobody listens" in str(failed.exception())
    del three.crew.choose


def test_weights_that_a_replica_has_dropped_are_sent_again(three, alone) -> None:
    run, request = open_run(three.worker), ask(5, 6, max_tokens=20)
    other = open_run(alone)
    three.worker.submit(run, 1, SnapshotJob("dropped")).result()
    alone.submit(other, 1, SnapshotJob("kept")).result()
    three.send_all_to(0)
    first = three.crew.all[0]
    weights = stamp(three.worker, "dropped")
    first._there.add(weights)  # it was told so, and dropped them
    before = first.weights_bytes
    found = three.worker.sample("dropped", request).result()
    assert told(found) == told(alone.sample("kept", request).result())
    assert first.weights_bytes > before
    del three.crew.choose


def test_a_cancelled_request_ends_at_its_replica(three: Replicated) -> None:
    three.send_all_to(0)
    heard: list[Any] = []
    endless = ask(5, 6, num_samples=5_000, max_tokens=100)
    future = three.worker.sample("tiny", endless, listener=heard.extend)
    until(lambda: heard)
    assert three.worker.now.sampling["tiny"] > 0
    three.worker.cancel(future)
    assert "cancelled" in str(future.exception())
    until(lambda: not three.crew.all[0]._asked)
    assert three.crew.load(three.crew.all[0]) == 0
    assert three.worker.sample("tiny", ask(5, 6, max_tokens=2)).result()
    del three.crew.choose


def test_a_killed_replicas_requests_are_repeated(two: Replicated, alone: Worker) -> None:
    """To the same bits, and nothing that was streamed comes again."""
    request, heard, killed = ask(5, 6, num_samples=60, max_tokens=100), list[Any](), Future[None]()

    def hear(parts: Any) -> None:
        heard.extend(parts)
        if not killed.done():
            os.kill(two.processes[0].pid, signal.SIGKILL)
            killed.set_result(None)

    quiet = two.worker.sample("tiny", replace(request, seed=8))
    streamed = two.worker.sample("tiny", request, listener=hear)
    killed.result()
    expected = alone.sample("tiny", replace(request, seed=8))
    assert told(quiet.result()) == told(expected.result())
    assert told(streamed.result()) == told(alone.sample("tiny", request).result())
    for number, sample in enumerate(streamed.result().samples):
        parts = [part.tokens for part in heard if part.number == number]
        assert np.concatenate(parts).tolist() == sample.tokens.tolist()
    assert two.worker.repeated[0] > 0


@pytest.mark.parametrize("often", (False, True))
def test_a_lost_replica_is_started_again(two, alone: Worker, monkeypatch, often: bool) -> None:
    """At once if it was there for long, however often it was lost before."""
    monkeypatch.setattr(crew, "AGAIN_SECONDS", 0.0)
    place = two.crew._places[0]
    place.wait_seconds, place.since = (1e6, -1e6) if often else (0.0, place.since)
    request, lost = ask(5, 6, max_tokens=9), two.crew.all[0]
    os.kill(two.processes[0].pid, signal.SIGKILL)
    until(lambda: "tiny" in two.crew.all[0].bases and two.crew.all[0] is not lost)
    assert (lost.state, two.crew.all[0].state) == ("lost", "same bits")
    assert told(two.worker.sample("tiny", request).result()) == told(
        alone.sample("tiny", request).result()
    )
    until(lambda: sum(two.crew.all[0].drawn[0].values()) == 9)
    assert len(two.processes) == 2


def test_a_replica_that_can_not_be_started_is_tried_again(two, monkeypatch, caplog) -> None:
    monkeypatch.setattr(crew, "AGAIN_SECONDS", 0.0)
    place, starts = two.crew._places[0], list[Any]()
    place.wait_seconds, start = 0.0, place.starter

    def starter() -> Any:
        starts.append(None)
        if len(starts) < 4:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return start()

    place.starter = starter
    os.kill(two.processes[0].pid, signal.SIGKILL)
    until(lambda: len(starts) == 4 and "tiny" in two.crew.all[0].bases)
    assert caplog.text.count("was not started again: Resource temporarily unavailable") == 3
    assert two.worker.sample("tiny", ask(5, 6, max_tokens=9)).result()


def test_a_replica_that_comes_again_with_other_bits_ends_and_is_tried_again(
    two, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(crew, "AGAIN_SECONDS", 0.0)
    place, differences = two.crew._places[0], identity.differences
    refusals = iter([["its code is new, and the owner's is old"]])
    place.wait_seconds, other = (
        0.0,
        lambda *given, **how: next(refusals, differences(*given, **how)),
    )
    monkeypatch.setattr(identity, "differences", other)
    os.kill(two.processes[0].pid, signal.SIGKILL)
    until(lambda: len(two.processes) == 3 and "tiny" in two.crew.all[0].bases)
    assert two.processes[1].poll() is not None and two.crew.all[0].state == "same bits"
    assert "would give other bits: its code is new" in caplog.text


def test_a_replica_with_another_owner_has_the_models_alone(two) -> None:
    """A second Start is another owner's, whose weights may have the same names."""
    run, request = open_run(two.worker), ask(5, 6, max_tokens=20)
    two.worker.submit(run, 1, SnapshotJob("shot")).result()
    place, remote = two.crew._places[0], two.crew.all[0]
    expected = told(two.worker.sample("shot", request).result())
    sent = remote.weights_bytes
    assert remote.begin(place.start).result() == place.facts.result()
    assert told(two.worker.sample("shot", request).result()) == expected
    assert remote.weights_bytes == 2 * sent
    with pytest.raises(RequestError, match="other settings"):
        remote.begin(replace(place.start, memory=1 << 30)).result()


@pytest.mark.parametrize("field", ("code", "probe"))
def test_what_an_earlier_server_left_is_started_anew_if_it_is_refused(
    tiny_model_dir, monkeypatch, caplog, field: str
) -> None:
    models, differences, refused = {"tiny": tiny_model_dir}, identity.differences, list[Any]()

    def differ(own: Any, found: Any, **how: Any) -> list[str]:
        if field in found and not refused:
            refused.append(found)
            return [f"its {field} is old, and the owner's is new"]
        return list(differences(own, found, **how))

    monkeypatch.setattr(identity, "differences", differ)
    with replicated(2, models, wait=False) as found:
        found.crew._places[0].kept = True
        asked = partial(found.crew.ask_for, base="tiny")
        found.crew.wait(inspect_models(models), "cpu", [lambda: found.worker.call(asked).result()])
        assert "left is started anew: replica 2 (cpu, 1 thread) is refused" in caplog.text
        assert " is lost: " not in caplog.text and not found.crew._places[0].kept
        assert [one.state for one in found.crew.replicas] == ["same bits"]
        assert "tiny" in found.crew.all[0].bases
        until(lambda: found.processes[0].poll() is not None)
        assert [one.poll() is None for one in found.processes] == [False, True]


def test_a_replica_that_hangs_does_not_keep_its_owner(two: Replicated) -> None:
    os.kill(two.processes[0].pid, signal.SIGSTOP)
    asked = two.worker.sample("tiny", ask(5, 6, max_tokens=5))
    two.worker.close()
    two.crew.close()
    assert "the server is shutting down" in str(asked.exception())
    assert two.processes[0].poll() == -signal.SIGKILL


def test_a_replica_ends_with_its_owner(two: Replicated) -> None:
    """Though it is in the middle of its work."""
    heard: list[Any] = []
    two.worker.sample("tiny", ask(5, 6, num_samples=5_000), listener=heard.extend)
    until(lambda: heard)
    two.crew._closed.set()  # the owner is gone: it sees to nothing
    two.crew.all[0]._link.close()
    assert two.processes[0].wait() == 0


def test_a_runs_new_weights_come_to_its_inflight_requests(two: Replicated) -> None:
    """In the middle of a request: its first tokens are drawn from the old ones, its last tokens
    from the new ones. A request that ends before they come is tried again."""
    run, request = open_run(two.worker), ask(5, 6, num_samples=15, max_tokens=120)
    two.worker.submit(run, 1, SnapshotJob("inflight", inflight=True)).result()
    turns = itertools.count(2)

    def changed_in_the_middle() -> bool:
        old, begun, turn = two.worker.sample("inflight", request).result(), Event(), next(turns)
        future = two.worker.sample("inflight", request, listener=lambda parts: begun.set())
        begun.wait()
        weigh(two.worker, run, turn)
        two.worker.submit(run, turn, SnapshotJob(f"shot{turn}", inflight=True)).result()
        pairs = zip(old.samples, future.result().samples, strict=True)
        both = [(one.tokens, other.tokens) for one, other in pairs]
        firsts, lasts = ([one[at] == other[at] for one, other in both] for at in (0, -1))
        return all(firsts) and not all(lasts)

    until(changed_in_the_middle)


def test_a_request_that_is_refused_there_is_refused_with_its_sentence(three: Replicated) -> None:
    three.send_all_to(0)
    with pytest.raises(RequestError, match="top_p"):
        three.worker.sample("tiny", ask(5, 6, top_p=-1.0)).result()
    del three.crew.choose
