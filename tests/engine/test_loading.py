"""A base model is read while the engine goes on with others: who needs it waits, no one else."""

import contextlib
import itertools
import mmap
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from conftest import Wire
from support.small_run import PROMPT, make_client, sample, train
from support.tiny_models import DEVICE, folder, loaded, tokens_of
from support.waiting import until
from test_worker import long_batch
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.jobs import SnapshotJob
from tinsmith.engine.loading import AHEAD_BYTES, Loading
from tinsmith.engine.teachers import Teacher
from tinsmith.engine.training import Batch, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.formats import safetensors_io
from tinsmith.models.registry import inspect_model
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

REQUEST = SampleRequest(np.asarray([5, 6, 7], np.int32), max_tokens=20, seed=3)
DRAW = {"max_tokens": 12, "seed": 5, "stop": []}


class Disk:
    """Stops before a tensor of the model `other` is read, until `go` is set."""

    def __init__(self, before: int):
        self.before, self.seen = before, 0
        self.stopped, self.go = threading.Event(), threading.Event()

    def fetch(self, entry: safetensors_io.Entry, bits: mmap.mmap) -> None:
        if entry.file.parent.name == "other":
            if self.seen == self.before:
                self.stopped.set()
                assert self.go.wait(60)
            self.seen += 1
        _fetch(entry, bits)


_fetch = safetensors_io.fetch


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(before=7)
    monkeypatch.setattr(safetensors_io, "fetch", made.fetch)
    yield made
    made.go.set()


@pytest.fixture(scope="module")
def models(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`other` and `third` are copies of `tiny`, and so draw the same."""
    found = {"tiny": tiny_model_dir}
    for name in ("other", "third"):
        found[name] = tmp_path_factory.mktemp("copies") / name
        shutil.copytree(tiny_model_dir, found[name])
    return found


@contextlib.contextmanager
def working(models: dict[str, Path], **options: Any) -> Iterator[Worker]:
    worker = Worker(inspect_models(models), threads=1, **options)
    for name in models:
        worker.open_base(name, name)
    try:
        yield worker
    finally:
        worker.close()


def batch() -> Batch:
    ids = np.arange(5, 45, dtype=np.int32)
    lengths, one = np.asarray([40], np.int32), np.ones(1, np.int32)
    return Batch(ids, lengths, ids, one, "cross_entropy", {}, {}, ((40,),))


def drawn(result: Any) -> list[int]:
    return result.result(timeout=60).samples[0].tokens.tolist()


def message(future: Any) -> str:
    return str(future.exception(timeout=60))


def test_others_sample_and_train_while_a_model_is_read(models, disk) -> None:
    with working(models) as worker:
        waiting = worker.sample("other", REQUEST)
        assert disk.stopped.wait(60)
        expected = drawn(worker.sample("tiny", REQUEST))
        worker.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        losses = [worker.submit("run", seq, TrainJob(batch())) for seq in range(1, 4)]
        assert len({future.result(timeout=60).loss for future in losses}) == 1
        worker.submit("run", 4, SnapshotJob("snapshot")).result(timeout=60)
        assert len(drawn(worker.sample("snapshot", REQUEST))) == 20
        assert not waiting.done()
        assert worker.waits_for(waiting).startswith("the base model other is being read: ")
        assert worker.waits_for(losses[0]) is None and waiting in worker.now.paused
        disk.go.set()
        assert drawn(waiting) == expected and worker.waits_for(waiting) is None


def taught(worker: Worker, seq: int, copies: int = 1) -> Any:
    """A loss of the run `taught` whose teacher is the model `other`."""
    one, length = batch(), np.full(copies, 40, np.int32)
    ids, weights = np.tile(one.tokens, copies), np.tile(np.eye(40)[39], copies)
    read = np.tile(np.append(one.tokens[5:], one.tokens[-1]), copies)
    teacher = Teacher(read, length - 4, "other", 0.0)
    ones, inputs = np.ones(copies, np.int32), {"weights": weights.astype(np.float32)}
    shapes = ((40,),) * copies
    wanted = Batch(ids, length, ids, ones, "generalized_jsd", inputs, {}, shapes, teacher)
    return worker.submit("taught", seq, TrainJob(wanted))


def test_a_model_is_read_during_a_long_batch(models, disk) -> None:
    """A sample that waited for it is drawn, and another run, whose teacher it is, trains."""
    with working(models) as worker:
        for name in ("long", "taught"):
            worker.create(name, "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        waiting = taught(worker, 1)
        assert disk.stopped.wait(60)
        long = worker.submit("long", 1, TrainJob(long_batch()))
        sample = worker.sample("other", REQUEST)
        expected = drawn(worker.sample("tiny", REQUEST))
        assert not sample.done()
        disk.go.set()
        assert drawn(sample) == expected and waiting.result(timeout=60).loss > 0
        assert not long.done()
    assert "the server is shutting down" in message(long)


def test_a_sample_does_not_wait_for_a_long_batch_that_waited_for_the_same_model(
    models, disk
) -> None:
    with working(models) as worker:
        worker.create("taught", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        long, then = taught(worker, 1, copies=50_000), taught(worker, 2)
        assert disk.stopped.wait(60)  # for the loss
        sample = worker.sample("other", REQUEST)
        expected = drawn(worker.sample("tiny", REQUEST))
        disk.go.set()
        assert drawn(sample) == expected and not long.done()
    assert all("the server is shutting down" in message(future) for future in (long, then))


def test_a_loss_that_waited_for_its_teachers_model_is_what_it_is_without_waiting(models) -> None:
    losses = []
    for preloaded in ([], ["tiny", "other"]):
        with working(models) as worker:
            worker.preload(preloaded).result(timeout=60)
            worker.create("taught", "tiny", LoraSpec(rank=4, seed=1))
            found = [taught(worker, seq, copies=2) for seq in (1, 2)]
            losses.append([future.result(timeout=60).loss for future in found])
    assert losses[0] == losses[1] and losses[0][0] > 0


def test_a_teachers_model_is_not_evicted_between_two_micro_batches(models, monkeypatch) -> None:
    seen: list[set[str]] = []

    go_on = Worker._continue

    def watch(worker: Worker, *step: Any) -> None:
        go_on(worker, *step)
        seen.append({hold.base.name for hold in worker._engine.passing() if hold.pins})

    monkeypatch.setattr(Worker, "_continue", watch)
    with working(models) as worker:
        worker.create("taught", "third", LoraSpec(rank=4, seed=1)).result(timeout=60)
        assert taught(worker, 1, copies=100).result(timeout=60).loss > 0
        assert len(seen) > 1 and all(names == {"third", "other"} for names in seen)
        seen.clear()
        worker.submit("taught", 2, TrainJob(long_batch(4000))).result(timeout=60)
        assert len(seen) > 1 and all(names == {"third"} for names in seen)


def test_what_waits_for_a_model_is_done_in_order(models, disk) -> None:
    """A run, what it trains, and a sampler of it, all asked for before their model is there."""
    with working(models) as worker:
        ended: list[str] = []
        futures = {
            "create": worker.create("run", "other", LoraSpec(rank=4, seed=1)),
            "train": worker.submit("run", 1, TrainJob(batch())),
            "snapshot": worker.submit("run", 2, SnapshotJob("snapshot")),
        }
        early = worker.sample("other", REQUEST)
        for name, future in futures.items():
            future.add_done_callback(lambda _, name=name: ended.append(name))
        assert disk.stopped.wait(60)
        third = drawn(worker.sample("third", REQUEST))  # does not wait for `other`
        assert not ended and not early.done()
        disk.go.set()
        assert drawn(early) == third
        futures["snapshot"].result(timeout=60)
        assert ended == ["create", "train", "snapshot"]
        assert len(drawn(worker.sample("snapshot", REQUEST))) == 20


def test_a_failed_load_is_told_to_those_that_wait_and_the_next_one_tries_again(
    models, disk, tmp_path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(models["other"], folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    with working(models | {"other": folder}) as worker:
        file.write_bytes(whole[:-8])
        disk.go.set()
        waiting = [
            worker.sample("other", REQUEST),
            worker.create("run", "other", LoraSpec(rank=4, seed=1)),
            worker.preload(["other"]),
        ]
        trained = worker.submit("run", 1, TrainJob(batch()))
        for future in waiting:
            assert "model.safetensors: the tensors need" in message(future)
        assert "run can't be used: " in message(trained)
        expected = drawn(worker.sample("tiny", REQUEST))
        file.write_bytes(whole)
        assert drawn(worker.sample("other", REQUEST)) == expected


def test_memory_that_lacks_while_files_are_read_drops_no_model(models, monkeypatch) -> None:
    def fails(entry: safetensors_io.Entry, bits: mmap.mmap) -> None:
        raise MemoryError("12.0 GiB")

    with working(models) as worker:
        expected = drawn(worker.sample("tiny", REQUEST))
        monkeypatch.setattr(safetensors_io, "fetch", fails)
        assert "no memory to read" in message(worker.sample("other", REQUEST))
        assert [path.name for path in worker._engine.bases._loaded] == ["tiny"]
        assert drawn(worker.sample("tiny", REQUEST)) == expected


def test_the_limit_holds_while_a_model_is_read(models, disk) -> None:
    """Its memory is counted from the start, and others are dropped before, not after."""
    size = inspect_models(models)["tiny"].weight_bytes
    with working(models, memory=int(2.4 * size)) as worker:
        bases = worker._engine.bases
        expected = drawn(worker.sample("tiny", REQUEST))
        waiting = worker.sample("other", REQUEST)
        assert disk.stopped.wait(60)
        until(lambda: bases._loading)
        held = len(bases._loaded) + len(bases._loading)
        assert held * size <= bases._used() <= bases.memory
        refused = worker.create("run", "tiny", LoraSpec(rank=4, seed=1))
        assert f"the base model other ({size / 2**10:.2f} KiB), which is being read" in message(
            refused
        )
        assert bases._used() <= bases.memory and not waiting.done()
        disk.go.set()
        assert drawn(waiting) == expected
        assert drawn(worker.sample("third", REQUEST)) == expected
        assert drawn(worker.sample("tiny", REQUEST)) == expected
        assert drawn(worker.sample("other", REQUEST)) == expected
        assert bases._used() <= bases.memory


def test_a_model_that_has_no_room_beside_another_one_is_read_after_it(models, disk) -> None:
    size = inspect_models(models)["tiny"].weight_bytes
    with working(models, memory=int(1.9 * size)) as worker:
        other = worker.preload(["other"])
        assert disk.stopped.wait(60)
        third = worker.preload(["third"])
        until(lambda: worker.waits_for(third) is not None)
        assert worker.waits_for(third) == "the base model third is read after another one"
        disk.go.set()
        assert other.result(timeout=60) is None and third.result(timeout=60) is None
        assert [path.name for path in worker._engine.bases._loaded] == ["third"]


def test_a_cancelled_request_does_not_run_when_its_model_is_there(models, disk) -> None:
    with working(models) as worker:
        cancelled, other = worker.sample("other", REQUEST), worker.sample("other", REQUEST)
        assert disk.stopped.wait(60)
        worker.cancel(cancelled)
        assert "was cancelled" in message(cancelled)
        disk.go.set()
        assert len(drawn(other)) == 20


def test_a_session_that_ends_meanwhile_leaves_nothing(models, disk) -> None:
    with working(models) as worker:
        made = worker.create("run", "other", LoraSpec(rank=4, seed=1))
        trained = worker.submit("run", 1, TrainJob(batch()))
        waiting = worker.sample("other", REQUEST)
        assert disk.stopped.wait(60)
        worker.forget(["run"], ["other"])
        disk.go.set()
        assert made.exception(timeout=60) is None and trained.result(timeout=60).loss > 0
        assert "its session has ended" in message(worker.submit("run", 2, TrainJob(batch())))
        assert "has no weights" in message(waiting)
        assert not worker._engine.runs


def test_closing_fails_what_waits(models, disk) -> None:
    with working(models) as worker:
        waiting = [
            worker.sample("other", REQUEST),
            worker.create("run", "other", LoraSpec(rank=4, seed=1)),
            worker.submit("run", 1, TrainJob(batch())),
            worker.preload(["third", "other"]),
        ]
        assert disk.stopped.wait(60)
        worker.close()
        for future in waiting:
            assert "the server is shutting down" in message(future)


def test_a_load_gets_on_under_endless_training_and_sampling(models) -> None:
    """Whatever ends is asked for again: the engine is never without work."""
    with working(models) as worker:
        expected = drawn(worker.sample("tiny", REQUEST))
        worker.create("run", "tiny", LoraSpec(rank=4, seed=1)).result(timeout=60)
        turns, stop, ended = itertools.count(1), threading.Event(), Counter()

        def again(start: Callable[[], Any], what: str) -> Callable[[object], None]:
            def go(future: Any = None) -> None:
                if future and not future.exception():
                    ended[what] += 1
                if not stop.is_set():
                    start().add_done_callback(go)

            return go

        try:
            for _ in range(3):
                again(lambda: worker.submit("run", next(turns), TrainJob(batch())), "train")()
                again(lambda: worker.sample("tiny", REQUEST), "sample")()
            assert drawn(worker.sample("other", REQUEST)) == expected
            meanwhile = Counter(ended)
        finally:
            stop.set()
    assert meanwhile["train"] > 0 and meanwhile["sample"] > 0


def test_a_checkpoints_sampler_is_read_when_its_model_is(models, disk, tmp_path) -> None:
    options = {"checkpoints": tmp_path, "device": "cpu", "threads": 1, "seed": 1}
    with (
        Backend(ServerConfig({"other": models["tiny"]}, **options)) as backend,
        backend.service_client() as own,
    ):
        client = own.create_lora_training_client("other", rank=4, seed=1).result()
        train(client, 1)
        path = client.save_weights_for_sampler("s").result().path
        tuned = own.create_sampling_client(model_path=path).result()
        expected = sample(tuned, 1, **DRAW)
    with Backend(ServerConfig(models, **options)) as backend, backend.service_client() as own:
        tuned = own.create_sampling_client(model_path=path).result()
        assert disk.stopped.wait(60)
        reply = tuned.sample(PROMPT, 1, tinker.SamplingParams(**DRAW))
        first, second = train(make_client(own), 2)  # on another model
        assert second < first
        disk.go.set()
        assert [list(s.tokens) for s in reply.result().sequences] == expected


def test_a_poll_says_what_a_request_waits_for(models, disk, tmp_path) -> None:
    with Backend(
        ServerConfig(models, checkpoints=tmp_path, device="cpu", threads=1, poll_seconds=0.1)
    ) as backend:
        wire = Wire(backend.url)
        session = wire.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
        opened = {"sampling_session_seq_id": 0, "base_model": "other"}
        sampler = wire.post("/create_sampling_session", **session, **opened)
        promise = wire.post(
            "/asample",
            sampling_session_id=sampler["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
            sampling_params={"max_tokens": 4},
        )
        assert disk.stopped.wait(60)
        reply = wire.poll(promise)
        assert reply.status_code == 408
        told = reply.json()
        assert (told["type"], told["queue_state"]) == ("try_again", "paused_capacity")
        assert told["queue_state_reason"].startswith("the base model other is being read: ")
        disk.go.set()
        while (reply := wire.poll(promise)).status_code == 408:
            pass
        assert reply.status_code == 200


# ---- the engine's side ----


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize("name", ("qwen3", "llama"))
def test_a_load_between_steps_changes_no_bit_of_either(name: str) -> None:
    """On every device: tensors are taken in between the decoding steps of another model."""

    def draw(core: _core.Model, between: Callable[[], None]) -> list[Any]:
        sampler = _core.Sampler(core, tokens=2048)
        for seed in range(3):
            sampler.add(seed, tokens_of(name, 9 + seed, seed), max_tokens=25, seed=seed)
        while sampler.active:
            between()
            sampler.step()
        samples = [sampler.take(seed)["samples"][0] for seed in range(3)]
        return [(one["tokens"].tolist(), one["logprobs"].tobytes()) for one in samples]

    expected = draw(loaded(name).core, lambda: None)
    model = inspect_model(folder(name), device=DEVICE.get())
    loading, made = Loading(model, threads=0, wake=lambda: None), []

    def take() -> None:
        if not made and loading.ready:
            made.extend(one for one in [loading.take()] if one is not None)

    assert draw(loaded(name).core, take) == expected
    while not made:
        take()
    assert loading.share == 1
    assert draw(made[0].core, lambda: None) == expected


def test_the_reader_stays_near(models, monkeypatch) -> None:
    """It stops when so many bytes were read that nobody took, and ends when it is closed."""
    monkeypatch.setattr("tinsmith.engine.loading.AHEAD_BYTES", 1000)
    woken = threading.Event()
    loading = Loading(inspect_models(models)["tiny"], threads=1, wake=woken.set)
    assert woken.wait(60)
    time.sleep(0.2)
    sizes = [piece.array.nbytes for piece in loading._read]
    assert sum(sizes[:-1]) < 1000 < AHEAD_BYTES
    until(lambda: loading.take() is not None)
    other = Loading(inspect_models(models)["tiny"], threads=1, wake=woken.set)
    other.close()
    until(lambda: all(one.name != "tinsmith-loading" for one in threading.enumerate()))
