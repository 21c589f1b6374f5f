"""The worker without HTTP: requests decode together, and neither training nor sampling starves."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.waiting import until
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Meta, load_meta
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine import runs
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import Decoder, SampleRequest
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import RefusedJob, SaveJob, SnapshotJob
from tinsmith.engine.runs import Run, Runs
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.formats import safetensors_io


@pytest.fixture(scope="module")
def worker(tiny_model_dir):
    made = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    made.open_base("base", "tiny")
    yield made
    made.close()


def small_batch() -> Batch:
    ids = np.arange(5, 45, dtype=np.int32)
    length = np.asarray([40], np.int32)
    one = np.ones(1, np.int32)
    return Batch(ids, length, ids, one, "cross_entropy", {}, {}, ((40,),))


def test_a_request_that_arrives_later_joins_and_may_end_sooner(worker, monkeypatch):
    prompt, order = np.asarray([5, 6], np.int32), []
    begun, go, step = threading.Event(), threading.Event(), Decoder.step

    def hold(decoder: Decoder) -> None:
        step(decoder)
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(Decoder, "step", hold)
    long = worker.sample("base", SampleRequest(prompt, num_samples=100, max_tokens=120))
    assert begun.wait(60)
    short = worker.sample("base", SampleRequest(prompt, max_tokens=2))
    go.set()
    long.add_done_callback(lambda _: order.append("long"))
    short.add_done_callback(lambda _: order.append("short"))
    assert len(long.result(timeout=60).samples) == 100
    assert order == ["short", "long"]


def test_sampling_goes_on_under_endless_training(worker):
    """Each training request that ends submits another one: there is always one that waits. The
    sample is what it is without."""
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=50, seed=3)
    expected = worker.sample("base", request).result(timeout=60).samples[0].tokens
    worker.create("endless", "tiny", LoraSpec(rank=4, seed=1)).result()
    turns, stop = itertools.count(1), threading.Event()
    losses: list[float] = []

    def train_again(ended: Future | None = None) -> None:
        losses.extend([ended.result().loss] if ended else [])
        if not stop.is_set():
            future = worker.submit("endless", next(turns), TrainJob(small_batch()))
            future.add_done_callback(train_again)

    for _ in range(3):
        train_again()
    try:
        found = worker.sample("base", request).result(timeout=60).samples[0].tokens
        trained = len(losses)
    finally:
        stop.set()
    np.testing.assert_array_equal(found, expected)
    assert len(found) == 50 and trained > 0 and len(set(losses)) == 1


def test_training_goes_on_under_endless_sampling(worker):
    """Each sample that ends submits another one: the decoder is never without work."""
    request, stop = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=20), threading.Event()

    def sample_again(_: object = None) -> None:
        if not stop.is_set():
            worker.sample("base", request).add_done_callback(sample_again)

    for _ in range(3):
        sample_again()
    try:
        worker.create("under", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        futures = [worker.submit("under", seq, TrainJob(small_batch())) for seq in range(1, 6)]
        assert len({future.result(timeout=60).loss for future in futures}) == 1
    finally:
        stop.set()


def long_batch(tokens: int = 4_000_000) -> Batch:
    """Many seconds' work."""
    lengths = np.full(tokens // 100, 100, np.int32)
    ids, ones = np.resize(np.arange(5, 45, dtype=np.int32), tokens), np.ones(len(lengths), np.int32)
    return Batch(ids, lengths, ids, ones, "cross_entropy", {}, {}, ((100,),) * len(lengths))


@pytest.mark.parametrize("backward", (True, False))
def test_sampling_does_not_wait_for_a_long_batch_and_closing_ends_it(tiny_model_dir, backward):
    """The run that is trained is sampled from: its snapshot gives what it gave before."""
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    try:
        request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=4, seed=3)
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1))
        probe.submit("run", 1, TrainJob(small_batch()))
        probe.submit("run", 2, OptimJob(AdamParams(learning_rate=0.1)))
        probe.submit("run", 3, SnapshotJob("shot")).result(timeout=60)
        before = probe.sample("shot", request).result(timeout=60).samples[0]
        long = probe.submit("run", 4, TrainJob(long_batch(), backward=backward))
        step = probe.submit("run", 5, OptimJob(AdamParams()))
        late = probe.submit("run", 7, TrainJob(small_batch()))  # request 6 never came
        for _ in range(3):
            found = probe.sample("shot", request).result(timeout=60).samples[0]
            assert found.tokens.tolist() == before.tokens.tolist()
            assert found.logprobs.tolist() == before.logprobs.tolist()
        sampling = probe.sample("shot", replace(request, num_samples=100_000, max_tokens=100))
        assert not long.done()
    finally:
        probe.close()
    for future in (long, step, late, sampling):
        assert "the server is shutting down" in str(future.exception(timeout=0))


def test_closing_ends_a_micro_batch_that_is_under_way(tiny_model_dir, monkeypatch):
    """As a long one would be: between two of these nothing is asked."""
    begun = threading.Event()

    def go_on(worker, run, *_):
        begun.set()
        while True:
            next(run.steps)

    monkeypatch.setattr(Worker, "_continue", go_on)
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        long = probe.submit("run", 1, TrainJob(long_batch(300_000)))
        assert begun.wait(60) and not long.done()
    finally:
        probe.close()
    assert "the server is shutting down" in str(long.exception(timeout=0))


def saving(worker: Worker, seq: int, folder: Path, created: str) -> Future[None]:
    """A save of the weights of `run`, a run of rank 4."""

    def describe(step: int) -> Meta:
        fields = dict.fromkeys(("attn", "mlp", "unembed"), True)
        fields |= {"base_model": "tiny", "rank": 4, "alpha": 32.0, "seed": 1, "step": step}
        fields |= {"kind": "weights", "user_metadata": {}, "ttl_seconds": None}
        return Meta(**fields, created=created)

    return worker.submit("run", seq, SaveJob(folder, describe, optimizer=False, overwrite=True))


def save(worker: Worker, seq: int, folder: Path, created: str) -> None:
    saving(worker, seq, folder, created).result(timeout=60)


@pytest.mark.parametrize("seconds", (0.0, 600.0))
def test_closing_leaves_a_save_some_time(tiny_model_dir, tmp_path, monkeypatch, seconds):
    """A save that takes longer leaves what was there; else it is whole."""
    monkeypatch.setattr("tinsmith.engine.worker.SAVE_SECONDS", seconds)
    begun, go, write = threading.Event(), threading.Event(), safetensors_io.write
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    closing = threading.Thread(target=probe.close)

    def slow(*arguments: Any) -> None:
        begun.set()
        assert go.wait(60)
        write(*arguments)

    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        save(probe, 1, tmp_path / "a", "2026-11-21T00:00:00+00:00")
        monkeypatch.setattr(safetensors_io, "write", slow)
        late = saving(probe, 2, tmp_path / "a", "2026-11-22T00:00:00+00:00")
        assert begun.wait(60)
        closing.start()
        until(lambda: probe._closed)
    finally:
        go.set()
        probe.close()
    closing.join()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    day, told = load_meta(tmp_path / "a").created[8:10], str(late.exception(timeout=0))
    assert (day, told.partition(":")[0]) == (
        ("22", "None") if seconds else ("21", "the server is shutting down")
    )


def test_snapshots_that_nobody_used_for_long_make_room(tiny_model_dir):
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1, snapshot_bytes_max=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result()
        request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=2, seed=1)
        probe.submit("run", 1, SnapshotJob("old")).result()
        probe.open_base("base", "tiny")
        first = probe.sample("old", request).result(timeout=60)
        probe.submit("run", 2, SnapshotJob("new")).result()
        dropped = probe.sample("old", request).exception(timeout=60)
        assert "were dropped to make room" in str(dropped)
        kept = [probe.sample(name, request).result(timeout=60) for name in ("new", "base")]
        assert all(len(item.samples[0].tokens) == 2 for item in (first, *kept))
    finally:
        probe.close()


def test_the_snapshot_that_was_used_last_stays(tiny_model_dir):
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=2, seed=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        for seq, name in enumerate(("first", "second"), 1):
            probe.submit("run", seq, SnapshotJob(name)).result(timeout=60)
        assert probe.sample("first", request).exception(timeout=60) is None
        probe._engine.snapshots._bytes_max = 2 * probe._engine.snapshots._items["first"].bytes
        probe.submit("run", 3, SnapshotJob("third")).result(timeout=60)
        assert probe.sample("first", request).exception(timeout=60) is None
        assert "dropped to make room" in str(probe.sample("second", request).exception(timeout=60))
    finally:
        probe.close()


def test_what_is_forgotten_is_gone_after_what_was_asked_before(worker):
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=2)
    worker.create("short", "tiny", LoraSpec(rank=4, seed=1))
    trained = worker.submit("short", 1, TrainJob(small_batch()))
    worker.submit("short", 2, SnapshotJob("shot"))
    waiting = worker.submit("short", 4, TrainJob(small_batch()))
    worker.forget(["short"], [])
    late = worker.submit("short", 3, TrainJob(small_batch()))
    assert trained.result(timeout=60).loss > 0
    for future in (waiting, late):
        assert "its session has ended" in str(future.exception(timeout=60))
    assert worker.sample("shot", request).exception(timeout=60) is None
    worker.forget([], ["shot"])
    assert "has no weights" in str(worker.sample("shot", request).exception(timeout=60))


def test_a_cancelled_sample_fails_and_the_rest_goes_on(worker):
    prompt = np.asarray([5, 6], np.int32)
    worker.preload(["tiny"]).result(timeout=60)  # so that both begin
    cancelled = worker.sample("base", SampleRequest(prompt, num_samples=100, max_tokens=120))
    other = worker.sample("base", SampleRequest(prompt, max_tokens=120))
    worker.cancel(cancelled)
    assert "cancelled" in str(cancelled.exception(timeout=60))
    assert len(other.result(timeout=60).samples[0].tokens) == 120


def test_sessions_of_a_checkpoint_share_its_weights(tiny_model_dir, tmp_path):
    probe, created = (
        Worker(inspect_models({"tiny": tiny_model_dir}), threads=1),
        "2026-11-21T00:00:00+00:00",
    )
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=4, seed=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        save(probe, 1, tmp_path / "a", created)
        for name in ("one", "other"):
            probe.open_checkpoint(name, "tiny", tmp_path / "a", created)
            assert probe.sample(name, request).exception(timeout=60) is None
        one, other = probe._engine.snapshots._items.values()
        assert one.adapter is other.adapter is not None
        [hold] = [hold for hold in probe._engine.ledger.all() if "session" in hold.what]
        assert hold.bytes == 4 * one.adapter.size
    finally:
        probe.close()


def test_a_snapshot_that_is_on_no_disk_keeps_its_model(tiny_model_dir):
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=20, seed=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        probe.submit("run", 1, SnapshotJob("shot")).result(timeout=60)
        probe.forget(["run"], [])
        first = probe.sample("shot", request).result(timeout=60).samples[0].tokens
        while probe._engine.bases._evict(None):  # all that may go
            pass
        assert [path.name for path in probe._engine.bases._loaded] == [tiny_model_dir.name]
        again = probe.sample("shot", request).result(timeout=60).samples[0].tokens
        np.testing.assert_array_equal(first, again)
    finally:
        probe.close()


def test_a_sampler_of_a_checkpoint_that_was_replaced_is_refused(tiny_model_dir, tmp_path):
    """Its weights were dropped to make room, and what is read again must be what was there."""
    request = SampleRequest(np.asarray([5, 6], np.int32), max_tokens=4, seed=1)
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1, snapshot_bytes_max=1)
    try:
        probe.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        save(probe, 1, tmp_path / "a", "2026-11-21T12:00:00+00:00")
        probe.open_checkpoint("s", "tiny", tmp_path / "a", "2026-11-21T12:00:00+00:00")
        first = probe.sample("s", request).result(timeout=60).samples[0].tokens
        probe.submit("run", 2, SnapshotJob("new")).result(timeout=60)  # there is room for one
        again = probe.sample("s", request).result(timeout=60).samples[0].tokens
        np.testing.assert_array_equal(first, again)
        save(probe, 3, tmp_path / "a", "2026-11-21T13:00:00+00:00")
        probe.submit("run", 4, SnapshotJob("newer")).result(timeout=60)
        refused = probe.sample("s", request).exception(timeout=60)
        assert "is another checkpoint than the one that was asked for" in str(refused)
    finally:
        probe.close()


def test_the_end_fails_the_samples_that_are_under_way(tiny_model_dir):
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    probe.open_base("base", "tiny")
    probe.preload(["tiny"]).result(timeout=60)
    request = SampleRequest(np.asarray([5, 6], np.int32), num_samples=1000, max_tokens=120)
    sampled = probe.sample("base", request)
    probe.close()
    assert "the server is shutting down" in str(sampled.exception(timeout=60))


# ---- the order of requests ----


def submitted(made: Runs, seq: int) -> Future:
    job = RefusedJob(RequestError("of a test"))
    job.submitted("run", seq, lambda call: None)
    made.submit("run", job)
    return job.future


def test_a_gaps_time_begins_anew_when_a_part_of_it_is_filled(tiny_model_dir, monkeypatch):
    now = 0.0
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: now))
    made = Runs(gap_seconds=10.0)
    made["run"] = Run("run", inspect_models({"tiny": tiny_model_dir})["tiny"])
    last = submitted(made, 2)
    now = 8.0
    submitted(made, 0)
    now = 15.0
    assert made.timeout() == 3.0
    made.give_up_gaps()
    assert not last.done()
    now = 18.0
    made.give_up_gaps()
    assert "waited 10 s for request 1, which never came" in str(last.exception(timeout=0))


def test_the_end_fails_requests_before_their_turn_too(tiny_model_dir):
    made = Runs(gap_seconds=10.0)
    made["run"] = Run("run", inspect_models({"tiny": tiny_model_dir})["tiny"])
    ready, waiting = submitted(made, 0), submitted(made, 2)
    made.close(RequestError("the end"))
    for future in (ready, waiting):
        assert str(future.exception(timeout=0)) == "the end"


# ---- failures of nobody's request ----


def test_a_command_that_fails_fails_its_future(worker, caplog: pytest.LogCaptureFixture):
    """It was logged, and whoever waited for it waited for ever, on a server that did nothing."""
    future: Future[None] = Future()

    def command() -> None:
        raise ZeroDivisionError("planted")

    worker._put(command, future)
    with pytest.raises(RequestError, match="planted"):
        future.result(timeout=60)
    assert "a command of the worker failed" in caplog.text
    assert worker.sample("base", SampleRequest(np.asarray([5], np.int32), max_tokens=1)).result(60)


def test_all_that_waits_is_told_when_the_engines_thread_fails(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The thread ended without a word, and every client waited for ever."""
    broken = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    broken.create("run", "tiny", LoraSpec(rank=2, seed=1)).result(60)
    waits = broken.submit(
        "run", 2, OptimJob(AdamParams(1e-3))
    )  # for request 1, which does not come

    def trim() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(broken._engine.runs, "trim", trim)
    later = [broken.submit("run", 4, OptimJob(AdamParams(1e-3)))]
    broken._thread.join(60)
    later.append(broken.submit("run", 1, OptimJob(AdamParams(1e-3))))
    for future in (waits, *later):
        with pytest.raises(
            RequestError, match=r"failed \(ZeroDivisionError.*start the server again"
        ):
            future.result(timeout=60)
    assert "the engine's thread has failed" in caplog.text
    broken.close()


# ---- turns of micro-batches ----


def watched(monkeypatch, seen: Callable[[str], None]) -> None:
    """Calls a function with a run's name after each of its micro-batches but a call's last."""
    go_on = Worker._continue

    def watch(worker: Worker, run: Run, *step: Any) -> None:
        go_on(worker, run, *step)
        seen(run.name)

    monkeypatch.setattr(Worker, "_continue", watch)


def test_a_long_call_holds_another_run_for_one_micro_batch(tiny_model_dir, monkeypatch) -> None:
    order: list[str] = []
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)

    def seen(name: str) -> None:
        order.append(name)
        if len(order) == 3:  # the short call comes while the long one is under way
            future = probe.submit("short", 1, TrainJob(small_batch()))
            future.add_done_callback(lambda _: order.append("short"))

    watched(monkeypatch, seen)
    try:
        for name in ("long", "short"):
            probe.create(name, "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        long = probe.submit("long", 1, TrainJob(long_batch(8000)))
        assert long.result(timeout=60).loss > 0
    finally:
        probe.close()
    assert "short" in order[3:5] and len(order) > 10


def test_runs_of_a_heavier_client_get_more_rows(tiny_model_dir, monkeypatch) -> None:
    order: list[str] = []
    watched(monkeypatch, order.append)
    probe = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1)
    clients = {"a": ("one", 1.0), "b": ("one", 1.0), "c": ("other", 2.0)}
    try:
        for name, client in clients.items():
            probe.create(name, "tiny", LoraSpec(rank=4, seed=1), *client).result(timeout=60)
        futures = [probe.submit(name, 1, TrainJob(long_batch(20_000))) for name in clients]
        until(lambda: len(order) > 60 or any(future.done() for future in futures))
    finally:
        probe.close()
    every = next(at for at in range(60) if len(set(order[:at])) == 3)
    counts = Counter(order[every : every + 36])
    assert counts["c"] == pytest.approx(24, abs=2)
    assert counts["a"] == pytest.approx(6, abs=1) and counts["b"] == pytest.approx(6, abs=1)
