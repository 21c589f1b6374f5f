"""Faults that end no replica: too little memory for what it is asked, and a full disk at the owner.
Replies have the bits of one process all the same."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.replica_crew import Replicated, replicated
from support.waiting import until
from test_offload import gone, meta, room
from test_replica_parts import batch_of, open_run, train
from test_replica_sampling import ask, told
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError
from tinsmith.engine.jobs import LoadJob, SaveJob
from tinsmith.engine.runs import Job
from tinsmith.engine.training import OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model
from tinsmith.replicas import identity

CONTEXT = 1024
LONG = np.asarray([9, 900, 70, 5, 12, 30, 1, 44, 8, 21, 700, 2, 60, 33], np.int32)
STEP = "a training step of [79]00 tokens needs at least .* MiB"
FULL, STUCK = "the disk is full", "idle runs stay in memory: the disk is full"
ADAM = AdamParams(learning_rate=0.01)
ROOM = 3_400_000  # bytes for a run, and for its step


@pytest.fixture(scope="module")
def model(tiny_model_dir, tmp_path_factory) -> Path:
    """With a longer context."""
    folder = tmp_path_factory.mktemp("models") / "long"
    shutil.copytree(tiny_model_dir, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": CONTEXT}
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def little(model: Path) -> int:
    """Memory for the model, and for calls and samples of short datums."""
    loaded = load_model(model, threads=1)
    return loaded.weight_bytes + identity.probe_bytes(loaded)


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Worker]:
    with replicated(1, {"tiny": model}) as found:
        yield found.worker


@pytest.fixture(scope="module")
def short(model: Path, little: int) -> Iterator[Replicated]:
    """An owner and two replicas, of which the first has little memory."""
    with replicated(3, {"tiny": model}, short=little) as found:
        yield found


# ---- too little memory ----


def test_a_part_for_which_a_replica_has_no_memory_is_computed_elsewhere(
    short, alone, monkeypatch
) -> None:
    """It stays in use for what fits it."""
    first, asked = short.crew.all[0], list[Future[Any]]()
    part = first.part

    def recorded(*arguments: Any) -> Future[Any]:
        asked.append(part(*arguments))
        return asked[-1]

    monkeypatch.setattr(first, "part", recorded)
    assert train(short.worker, batch_of(1, LONG)) == train(alone, batch_of(1, LONG))
    with pytest.raises(RequestError, match=STEP):
        asked[0].result()
    before = first.parts
    assert train(short.worker, batch_of(2)) == train(alone, batch_of(2))
    assert first.parts > before and first.state == "same bits"


SAMPLES = {
    "more than its cache": {"max_tokens": 900},
    "a whole context": {},
    "parts": {"max_tokens": 900, "num_samples": 24},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_for_which_a_replica_has_no_memory_is_drawn_elsewhere(short, alone, name) -> None:
    """It stays in use for what fits it."""
    short.send_all_to(0)
    worker, first = short.worker, short.crew.all[0]
    large, small, before = ask(5, 6, **SAMPLES[name]), ask(7, max_tokens=9), worker.repeated[0]
    assert drawn(worker, large) == drawn(alone, large)
    assert worker.repeated[0] > before
    tokens = first.drawn[0]
    assert drawn(worker, small) == drawn(alone, small)
    until(lambda: first.drawn[0] != tokens)
    del short.crew.choose


def drawn(worker: Worker, request: SampleRequest) -> list[Any]:
    return told(worker.sample("tiny", request).result())


def fill(worker: Worker) -> BaseException:
    """Makes runs until there is no memory for another, nor for a cache; returns the refusal."""
    for number in itertools.count():
        asked = worker.create(f"other{number}", "tiny", LoraSpec(rank=4, seed=1))
        if (error := asked.exception()) is not None:
            return error
    raise AssertionError


def test_what_nobody_has_memory_for_is_refused_with_a_sentence(model, little, alone) -> None:
    with replicated(2, {"tiny": model}, short=little, memory=little + ROOM) as found:
        run = open_run(found.worker)
        with pytest.raises(RequestError, match=STEP):
            found.worker.submit(run, 1, TrainJob(batch_of(1, LONG))).result()
        assert train(found.worker, batch_of(2)) == train(alone, batch_of(2))
        fill(found.worker)
        with pytest.raises(RequestError, match=r"a cache of keys and values needs 5.* are free"):
            drawn(found.worker, ask(5, 6, max_tokens=900))
        assert drawn(found.worker, ask(5, 6, max_tokens=9)) == drawn(alone, ask(5, 6, max_tokens=9))


def test_what_only_a_replica_has_memory_for_is_done_there(model, little, alone) -> None:
    """A call of one part too."""
    with replicated(2, {"tiny": model}, memory=little + ROOM) as found:
        for lengths in (LONG, LONG[1:2]):
            batch = batch_of(1, lengths)
            assert train(found.worker, batch) == train(alone, batch)
        fill(found.worker)
        for settings in SAMPLES.values():
            assert drawn(found.worker, ask(5, **settings)) == drawn(alone, ask(5, **settings))


# ---- a full disk ----


class Twin:
    """Two runs in training on one worker, and what they gave. `refused` are requests that failed
    while a call was in flight, each with its sentence."""

    def __init__(self, worker: Worker):
        self._worker, self.refused, self.found = worker, list[str](), list[Any]()
        self.runs = {open_run(worker): itertools.count(1) for _ in range(2)}

    def ask(self, number: int, job: Job[Any]) -> Future[Any]:
        """Submits run `number`'s next request."""
        name, turns = list(self.runs.items())[number]
        return self._worker.submit(name, next(turns), job)

    def create(self) -> Future[None]:
        """Makes a third run."""
        return self._worker.create(f"third of {id(self)}", "tiny", LoraSpec(rank=4, seed=1))

    def train(self, seed: int, fails: Callable[[], Future[Any]] | None = None) -> None:
        """A step of both. What `fails` asks for comes while the first one's call is in flight."""
        asked = list[Future[Any]]()

        def told(failed: Future[Any]) -> None:
            self.refused.append(str(failed.exception()) if not asked[0].done() else "too late")

        def begin(engine: Engine) -> None:  # between two micro-batches
            asked.append(self.ask(0, TrainJob(batch_of(seed))))
            if fails is not None:
                fails().add_done_callback(told)

        self._worker.call(begin).result()
        rows = [asked[0].result(), self.ask(1, TrainJob(batch_of(seed + 1))).result()]
        self.found += [(one.loss, [row.tobytes() for row in one.logprobs]) for one in rows]
        self.found += [self.ask(number, OptimJob(ADAM)).result() for number in range(2)]


def history(worker: Worker, folder: Path, full: list[OSError] | None = None) -> list[Any]:
    """What two runs give. In the middle the disk is full, if there is `full`."""
    twin = Twin(worker)
    twin.train(1)
    twin.ask(0, SaveJob(folder / "kept", meta, optimizer=True)).result()
    if full is not None:
        full.append(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert STUCK in str(fill(worker))
        twin.train(3, twin.create)
        twin.train(5, lambda: twin.ask(1, SaveJob(folder / "more", meta, optimizer=True)))
        assert [STUCK in twin.refused[0], FULL in twin.refused[1]] == [True, True], twin.refused
        assert not gone(worker) and not [*folder.rglob("more*"), *folder.rglob("idle/*")]
        full.clear()
        twin.create().result()
        assert gone(worker)
    else:
        twin.train(3)
        twin.train(5)
    twin.ask(1, SaveJob(folder / "more", meta, optimizer=True)).result()
    twin.train(7)
    twin.ask(0, LoadJob(folder / "kept", optimizer=True)).result()
    twin.ask(1, LoadJob(folder / "more", optimizer=True)).result()
    twin.train(9)
    return twin.found


def test_a_full_disk_refuses_what_is_written_and_ends_no_call(
    model, alone, tmp_path, monkeypatch
) -> None:
    full, sync = list[OSError](), os.fsync

    def fsync(file: int) -> None:
        for error in full:
            raise error
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    options = {"memory": room(model, 3), "offload": tmp_path / "idle"}
    with replicated(3, {"tiny": model}, **options) as found:
        assert history(found.worker, tmp_path, full) == history(alone, tmp_path / "alone")
        assert all(one.parts for one in found.crew.all)
