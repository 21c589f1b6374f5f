"""Faults that end no replica: too little memory for what it is asked, and a full disk at the owner.
Replies have the bits of one process all the same."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.replica_crew import Replicated, replicated
from support.waiting import until
from test_replica_parts import batch_of, open_run, train
from test_replica_sampling import ask, told
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.errors import RequestError
from tinsmith.engine.training import TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models.registry import load_model
from tinsmith.replicas import identity

CONTEXT = 1024
LONG = np.asarray([9, 900, 70, 5, 12, 30, 1, 44, 8, 21, 700, 2, 60, 33], np.int32)
STEP = "a training step of [79]00 tokens needs at least .* MiB"
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


def test_a_part_for_which_a_replica_has_no_memory_is_computed_elsewhere(short, alone) -> None:
    """It stays in use for what fits it."""
    first, asked = short.crew.all[0], list[Future[Any]]()
    part = first.part

    def recorded(*arguments: Any) -> Future[Any]:
        asked.append(part(*arguments))
        return asked[-1]

    first.part = recorded
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
    before, large, small = (
        short.worker.repeated[0],
        ask(5, 6, **SAMPLES[name]),
        ask(7, max_tokens=9),
    )
    assert drawn(short.worker, large) == drawn(alone, large)
    assert short.worker.repeated[0] > before
    tokens = short.crew.all[0].drawn[0]
    assert drawn(short.worker, small) == drawn(alone, small)
    until(lambda: short.crew.all[0].drawn[0] != tokens)
    del short.crew.choose


def drawn(worker: Worker, request: SampleRequest) -> list[Any]:
    return told(worker.sample("tiny", request).result())


def fill(worker: Worker) -> None:
    """Makes runs until there is no memory for another, nor for a cache."""
    for number in itertools.count():
        if worker.create(f"other{number}", "tiny", LoraSpec(rank=4, seed=1)).exception():
            return


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
