"""What a server's --memory counts, beside what the system says that is resident: an embedding in a
mapped copy, and a datum that needs more than a step's share."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import tiny_models
from tinsmith import _core
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.errors import RequestError
from tinsmith.engine.loading import bytes_of
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker
from tinsmith.models import weight_cache
from tinsmith.models.registry import inspect_model, load_model, measure_model

VOCAB, WIDTH, LONG = 8192, 64, 1500


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model most of whose bytes are the embedding's and the head's."""
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "max_position_embeddings": 4096}
    spec = replace(
        tiny_models.SPECS["qwen3"], config={**tiny_models.SPECS["qwen3"].config, **sizes}
    )
    return tiny_models.make(spec, tmp_path_factory.mktemp("wide") / "model")


@pytest.fixture(autouse=True)
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "LEAST_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def resident() -> int:
    """Bytes of mapped copies that this process has in memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(rf"{weight_cache.SUFFIX}\n(?:\w+: .*\n)*?Rss: +([0-9]+) kB", text)
    assert found
    return 1024 * sum(map(int, found))


def test_an_embedding_in_a_copy_is_not_counted_and_what_was_read_of_it_not_kept(
    place: Path,
) -> None:
    embed = VOCAB * WIDTH * 34 // 32
    before = inspect_model(place, weights="int4")
    assert bytes_of(before) == before.copy.size  # they are quantised in memory first
    held = load_model(place, weights="int4", threads=1)
    assert bytes_of(before) == before.weight_bytes == held.weight_bytes == held.core.held_bytes
    assert embed <= held.core.weight_bytes - held.weight_bytes <= embed + 4096
    planned = measure_model(place, device="cpu", weights="int4")[0]
    assert planned.plan(4) | {"free": 0} == held.core.plan(4) | {"free": 0}
    assert held.core.plan(4)["held"] == held.weight_bytes
    alone = load_model(place, weights="int4", weights_copy=False, threads=1)
    assert alone.weight_bytes == alone.core.weight_bytes == before.copy.size
    ids = np.random.default_rng(0).permutation(VOCAB - tiny_models.PADDING).astype(np.int32)
    found = []
    for model in (held, alone):
        adapter, one = _core.Adapter(model.core, rank=2), np.ones(1, np.int32)
        rows = [ids[at : at + 2048] for at in (0, 2048, 4096)]
        found.append([adapter.forward(r, len(r) * one, r, one)[0] for r in rows])
        assert resident() < held.weight_bytes + embed // 2
    np.testing.assert_array_equal(found[0], found[1])


@pytest.fixture
def worker(place: Path) -> Iterator[Worker]:
    """A server of little memory: a long datum needs more than the half that is left."""
    known = inspect_models({"m": place}, weights="int4")
    core = measure_model(place, device="cpu", weights="int4")[0]
    plan = core.plan(4, LONG, 1)
    run = plan["adapter"] + plan["sums"] // 4 + plan["step"] + plan["scratch"]
    memory = core.held_bytes + run + (1 << 16)
    load_model(place, weights="int4")  # leaves the copy
    made = Worker(known, threads=1, memory=memory)
    yield made
    made.close()


def batch(tokens: int) -> Batch:
    ids = np.arange(tokens, dtype=np.int32)
    counts = np.array([tokens], np.int32), np.ones(1, np.int32)
    return Batch(ids, counts[0], ids, counts[1], "cross_entropy", {}, {}, ((tokens,),))


def test_a_long_datum_may_take_all_that_is_free_and_gives_it_back(worker: Worker) -> None:
    worker.create("run", "m", LoraSpec(rank=4, seed=1)).result(60)
    worker.submit("run", 1, TrainJob(batch(LONG))).result(60)
    lane = worker._engine.runs["run"]
    assert lane.adapter.step_bytes < lane.adapter.model.training_bytes
    assert worker._engine.bases._used() <= worker._engine.bases.memory
    worker.submit("run", 2, OptimJob(AdamParams())).result(60)
    more = LoraSpec(rank=6, seed=1)  # for which there is no room beside that step
    worker.create("more", "m", more).result(60)
    assert not lane.adapter.model.training_bytes
    with pytest.raises(RequestError, match=r"needs at least .* may take") as refused:
        worker.submit("run", 3, TrainJob(batch(LONG + 200))).result(60)
    assert f"may take {lane.adapter.datum_bytes / 2**20:.2f} MiB" in str(refused.value)
    assert worker.memory().result(60).weights == worker._engine.models["m"].weight_bytes
