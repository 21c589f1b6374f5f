"""Idle runs that make room for others: moved to disk or to the host's memory, and back on their
next use, to the same bits."""

import contextlib
import errno
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import until
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Meta
from tinsmith.checkpoints.optimizers import AdamParams, DimuonParams
from tinsmith.checkpoints.store import Store
from tinsmith.engine import engine, offload
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import LoadJob, SaveJob, SnapshotJob
from tinsmith.engine.teachers import EMA, Teacher
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model

VECTORS = ("weights", "m", "v", "gradients")
RANK, STEP = 4, AdamParams(learning_rate=0.05)
PROMPT = SampleRequest(np.arange(5, 9, dtype=np.int32), max_tokens=4, seed=1)


def batch(seed: int) -> Batch:
    ids = np.random.default_rng(seed).integers(5, 200, 25).astype(np.int32)
    one = np.ones(1, np.int32)
    return Batch(ids[:-1], 24 * one, ids[1:], one, "cross_entropy", {}, {}, ((24,),))


def taught(seed: int) -> Batch:
    """For a loss whose teacher is a moving average of the student."""
    plain = batch(seed)
    weights = {"weights": np.r_[np.zeros(11), np.ones(13)].astype(np.float32)}
    tokens = np.r_[plain.tokens, plain.targets[-1:]]
    teacher = Teacher(tokens, plain.lengths + 1, EMA, 0.5)
    return Batch(
        *plain.arrays, "generalized_jsd", weights, {"beta": 0.5}, plain.shapes, teacher=teacher
    )  # fmt: skip


def room(model: Path, runs: int) -> int:
    """The memory of a server in which so many runs fit beside their model, a step and a cache."""
    core = load_model(model, threads=1).core
    plan = core.plan(RANK)
    least = core.plan(RANK, plan["step_tokens"], 1)
    step = least["step"] * 9 // 8 + plan["sums"] // 4 + plan["scratch"]
    return core.held_bytes + step + runs * plan["adapter"]


@contextlib.contextmanager
def serving(model: Path, **options: Any) -> Iterator[Worker]:
    made = Worker(inspect_models({"tiny": model}), threads=1, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def small(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Worker]:
    """A server in which two runs fit."""
    memory = room(tiny_model_dir, 2)
    with serving(tiny_model_dir, memory=memory, offload=tmp_path / "idle") as made:
        yield made


def create(worker: Worker, name: str, **options: Any) -> None:
    worker.create(name, "tiny", LoraSpec(RANK, 1, **options)).result(60)


def gone(worker: Worker) -> list[str]:
    """The runs that are not in memory."""
    return [run.name for run in worker._engine.runs.values() if run.offloaded is not None]


def push_out(worker: Worker, name: str) -> None:
    """Makes runs until this one is gone."""
    number = 0
    while name not in gone(worker):
        number += 1
        create(worker, f"{name}, {number} others")


def bits(worker: Worker, name: str) -> dict[str, Any]:
    """All of a run in memory."""
    run = worker._engine.runs[name]
    adapter = run.trained()
    vectors = [what for what in VECTORS if what != "v" or adapter.optimizer == "adamw"]
    found: dict[str, Any] = {what: adapter.read(what).tobytes() for what in vectors}
    if run.average is not None:
        found["average"] = run.average.adapter.read("weights").tobytes()
        found["decay"] = run.average.decay, run.average.adapter.growth
    facts = adapter.step, adapter.pending, adapter.growth, adapter.has_gradients
    return found | {"facts": facts, "rows": adapter.step_tokens, "layout": adapter.layout}


# ---- the same bits ----


def meta(step: int) -> Meta:
    switches = dict.fromkeys(("attn", "mlp", "unembed"), True)
    return Meta("tiny", RANK, 32.0, 1, **switches, kind="weights", step=step, user_metadata={},
                created="2026-11-21T12:00:00+00:00", ttl_seconds=None)  # fmt: skip


def random_work(worker: Worker, folder: Path, runs: int, rounds: int) -> list[Any]:
    """What requests of many runs give, in a random order."""
    rng, seqs, found = np.random.default_rng(7), [0] * runs, []
    for number in range(runs):
        create(worker, f"run{number}", optimizer=["adamw", "dimuon"][number % 5 == 0])
    for turn in range(rounds):
        number, what = int(rng.integers(runs)), rng.random()
        name, sampler, place = f"run{number}", f"s{turn}", folder / f"{turn}"
        seqs[number] += 1

        def ask(job: Any, name: str = name, seq: int = seqs[number]) -> Any:
            return worker.submit(name, seq, job).result(60)

        if what < 0.45:
            result = ask(TrainJob(taught(turn) if turn % 3 == 0 else batch(turn)))
            found.append((result.loss, result.logprobs[0].tobytes()))
        elif what < 0.7:
            dimuon = number % 5 == 0
            found.append(ask(OptimJob(DimuonParams(1e-3) if dimuon else STEP)))
        elif what < 0.8:
            ask(SaveJob(place, meta, optimizer=True))
            files = sorted(place.glob("*.safetensors"))
            found.append([file.read_bytes() for file in files])
        else:
            found.append(ask(SnapshotJob(sampler)))
            sample = worker.sample(sampler, PROMPT).result(60).samples[0]
            found.append((sample.tokens.tolist(), sample.logprobs.tobytes()))
            worker.forget([], [sampler])
    return found


def test_many_runs_where_three_fit_are_those_of_a_server_with_room(tiny_model_dir, tmp_path):
    results = []
    for memory in (None, room(tiny_model_dir, 3)):
        folder = tmp_path / str(memory)
        with serving(tiny_model_dir, memory=memory, offload=folder / "idle") as worker:
            results.append(random_work(worker, folder, runs=40, rounds=160))
            assert len(gone(worker)) >= 30 if memory else not gone(worker)
    assert results[0] == results[1]


@pytest.mark.parametrize("step_before", [False, True])
@pytest.mark.parametrize("options", [{}, {"optimizer": "dimuon"}, {"mlp": False, "alpha": 5.0}])
def test_a_run_comes_back_with_its_gradients(small, options, step_before):
    create(small, "run", **options)
    if step_before:
        small.submit("run", 1, TrainJob(batch(1))).result(60)
        dimuon = options.get("optimizer") == "dimuon"
        params = DimuonParams(1e-3) if dimuon else AdamParams(learning_rate=1e6)
        small.submit("run", 2, OptimJob(params)).result(60)  # adamw: the norm grows too much
    small.submit("run", 3 if step_before else 1, TrainJob(batch(2))).result(60)
    until(lambda: "run" in small._engine.runs.idle)
    before = bits(small, "run")
    assert before["facts"][3] and before["facts"][1][1] == 24
    assert bool(before["facts"][2][0]) == (step_before and "optimizer" not in options)
    push_out(small, "run")
    assert small._engine.runs["run"].step == before["facts"][0]
    held, size = small.memory().result(60), small._engine.runs["run"].offloaded.size
    assert held.offloaded >= 4 * size * sum(name in before for name in VECTORS)
    small.submit("run", 4 if step_before else 2, SnapshotJob("s")).result(60)
    assert bits(small, "run") == before


def test_a_run_comes_back_with_its_average(small):
    create(small, "run")
    for seq in (1, 4):
        small.submit("run", seq, TrainJob(batch(seq))).result(60)
        small.submit("run", seq + 1, TrainJob(taught(seq))).result(60)
        small.submit("run", seq + 2, OptimJob(STEP)).result(60)
    until(lambda: "run" in small._engine.runs.idle)
    before = bits(small, "run")
    assert before["average"] != before["weights"] and not before["facts"][3]
    push_out(small, "run")
    small.submit("run", 7, SnapshotJob("s")).result(60)
    assert bits(small, "run") == before


def test_a_snapshot_of_a_run_that_is_gone_stays_valid(small):
    create(small, "run")
    small.submit("run", 1, TrainJob(batch(1))).result(60)
    small.submit("run", 2, OptimJob(STEP)).result(60)
    small.submit("run", 3, SnapshotJob("s")).result(60)
    before = small.sample("s", PROMPT).result(60).samples[0]
    push_out(small, "run")
    after = small.sample("s", PROMPT).result(60).samples[0]
    assert "run" in gone(small)
    assert before.tokens.tolist() == after.tokens.tolist()
    assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_a_checkpoint_may_be_loaded_into_a_run_that_is_gone(small, tmp_path):
    create(small, "run")
    small.submit("run", 1, TrainJob(batch(1))).result(60)
    small.submit("run", 2, OptimJob(STEP)).result(60)
    small.submit("run", 3, SaveJob(tmp_path / "a", meta, optimizer=True)).result(60)
    expected = bits(small, "run")
    small.submit("run", 4, TrainJob(batch(2))).result(60)
    push_out(small, "run")
    small.submit("run", 5, LoadJob(tmp_path / "a", optimizer=True)).result(60)
    assert bits(small, "run")["weights"] == expected["weights"]


def test_the_only_run_of_a_model_leaves_room_for_another_model(tiny_model_dir, tmp_path):
    """Neither the idle run, nor its step, nor its model stays."""
    bases = inspect_models({"tiny": tiny_model_dir})
    other = tmp_path / "other"
    other.symlink_to(tiny_model_dir)
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in tiny_model_dir.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    bases |= inspect_models({"copied": copied})
    with contextlib.closing(
        Worker(bases, threads=1, memory=room(tiny_model_dir, 1), offload=tmp_path / "idle")
    ) as worker:
        create(worker, "run")
        worker.create("second", "copied", LoraSpec(RANK, 1)).result(60)
        assert gone(worker) == ["run"] and len(worker._engine.bases._loaded) == 1
        worker.submit("run", 1, TrainJob(batch(1))).result(60)
        assert gone(worker) == ["second"]


# ---- what may go wrong ----


def message(future: Future[Any]) -> str:
    error = future.exception(60)
    assert isinstance(error, RequestError)
    return str(error)


def test_a_full_disk_is_told_and_the_runs_stay(tiny_model_dir, tmp_path):
    full: list[int] = []

    @contextlib.contextmanager
    def reserve(size: int, place: Path) -> Iterator[None]:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        yield

    with serving(
        tiny_model_dir, memory=room(tiny_model_dir, 2), offload=tmp_path / "idle", reserve=reserve
    ) as worker:
        for name in ("one", "other"):
            create(worker, name)
        full.append(1)
        told = message(worker.create("more", "tiny", LoraSpec(RANK, 1)))
        assert "a run of rank 4 needs" in told and "69.50 KiB are free" in told
        assert "idle runs stay in memory: the disk is full: an idle run was not written" in told
        assert not gone(worker) and not list(tmp_path.rglob("*.safetensors"))
        assert worker.submit("one", 1, TrainJob(batch(1))).result(60).loss > 0
        full.clear()
        create(worker, "again")
        assert gone(worker) == ["other"]


def test_the_limit_of_checkpoints_counts_idle_runs(tiny_model_dir, tmp_path):
    store = Store(tmp_path, bytes_max=100_000)
    with serving(
        tiny_model_dir, memory=room(tiny_model_dir, 2), offload=store.idle_runs,
        reserve=store.quota.reserve,
    ) as worker:  # fmt: skip
        for number in range(3):
            told = worker.create(f"{number}", "tiny", LoraSpec(RANK, 1)).exception(60)
        assert "may take 97.66 KiB (--checkpoints-max)" in str(told) and not gone(worker)
        store.quota.most = 1 << 30
        create(worker, "more")
        assert store.runs() == [] and store.unfinished() == [store.idle_runs]
        assert store.quota._kept(tmp_path / "x") > 100_000
    assert not store.unfinished()


def test_what_a_killed_server_left_is_removed(tmp_path):
    left = Store(tmp_path).idle_runs
    left.mkdir()
    (left / "1.safetensors").write_bytes(b"x")
    store = Store(tmp_path)
    store.claim()
    assert not left.exists()
    store.close()


def test_a_damaged_file_is_told_and_the_run_is_not_lost(small):
    create(small, "run")
    push_out(small, "run")
    file = small._engine.runs["run"].offloaded.file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    told = message(small.submit("run", 1, TrainJob(batch(1))))
    assert "run had made room while it was idle, and can't be read back now" in told
    assert "does not give back what was written to it; its next request tries again" in told
    file.unlink()
    assert "No such file" in message(small.submit("run", 2, TrainJob(batch(1))))
    file.write_bytes(whole)
    assert small.submit("run", 3, TrainJob(batch(1))).result(60).loss > 0
    assert not file.exists()


def test_a_run_with_numbers_that_are_not_finite_stays(small):
    create(small, "run")
    small.submit("run", 1, TrainJob(batch(1))).result(60)
    create(small, "other")
    item = small._engine.runs["run"]

    class Adapter:
        """The run's, with a loss that is not finite."""

        pending = (float("inf"), 1.0, 1.0)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real, item.adapter = item.adapter, Adapter()
    create(small, "more")
    assert gone(small) == ["other"] and item.stays


def test_a_run_that_is_forgotten_while_it_is_gone_leaves_no_file(small, tmp_path):
    create(small, "run")
    push_out(small, "run")
    file = small._engine.runs["run"].offloaded.file
    assert file.exists()
    small.forget(["run"], [])
    until(lambda: not file.exists())
    assert "there is no run" in message(small.submit("run", 1, TrainJob(batch(1))))


def test_a_server_that_ends_leaves_nothing_of_its_idle_runs(tiny_model_dir, tmp_path):
    memory = room(tiny_model_dir, 2)
    with serving(tiny_model_dir, memory=memory, offload=tmp_path / "idle") as worker:
        create(worker, "run")
        push_out(worker, "run")
        assert list((tmp_path / "idle").iterdir())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("growth", "kind", "sentence"),
    [([1, 2.0, 3.0], TypeError, "must be a tuple"), ((1, 2.0), TypeError, "3 arguments"),
     ((-1, 2.0, 3.0), ValueError, "step 0 or more"), ((1, np.nan, 3.0), ValueError, "finite")],
)  # fmt: skip
def test_a_growth_that_cannot_be_is_refused(tiny_model_dir, growth, kind, sentence):
    adapter = _core.Adapter(load_model(tiny_model_dir, threads=1).core, rank=2)
    with pytest.raises(kind, match=sentence):
        adapter.growth = growth
    assert adapter.growth == (0, 0.0, 0.0) and not adapter.has_gradients


# ---- a GPU's runs ----


def test_a_gpus_runs_go_to_the_hosts_memory_first(tiny_model_dir, tmp_path, monkeypatch):
    free = [10**9]
    monkeypatch.setattr(engine, "GPUS", ("cpu",))
    monkeypatch.setattr(offload, "_fits_host", lambda size: size <= free[0])
    with serving(tiny_model_dir, offload=tmp_path / "idle") as worker:
        held = worker._engine
        for name in ("one", "two", "three"):
            create(worker, name)
        worker.submit("one", 1, TrainJob(batch(1))).result(60)
        until(lambda: "one" in held.runs.idle)
        expected = {name: bits(worker, name) for name in ("one", "two")}
        asked: list[bool] = []
        for _ in range(2):
            worker._put(lambda: asked.append(held.move()))
        until(lambda: len(asked) == 2)
        assert gone(worker) == ["two", "three"] and not list(tmp_path.iterdir())
        free[0] = 0
        worker._put(lambda: asked.append(held.move()))
        until(lambda: len(asked) == 3)
        items = [held.runs[name].offloaded for name in ("one", "two", "three")]
        assert all(item.file.exists() and item.vectors is None for item in items)
        for seq, name in enumerate(expected, 2):
            worker.submit(name, seq if name == "one" else 1, SnapshotJob(name)).result(60)
            assert bits(worker, name) == expected[name]
