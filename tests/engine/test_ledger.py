"""The ledger's running sums against a walk over what it has, after random changes; and the requests
that must not walk the runs or snapshots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.waiting import until
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine import engine as engine_file
from tinsmith.engine.bases import inspect_models
from tinsmith.engine.decoding import SampleRequest
from tinsmith.engine.jobs import SnapshotJob
from tinsmith.engine.ledger import Hold, Ledger
from tinsmith.engine.runs import Runs
from tinsmith.engine.training import Batch, OptimJob, TrainJob
from tinsmith.engine.worker import Worker

BASES = [Path("a"), Path("b"), Path("c")]
IDS = np.arange(5, 45, dtype=np.int32)
ONE = np.ones(1, np.int32)
BATCH = Batch(IDS, 40 * ONE, IDS, ONE, "cross_entropy", {}, {}, ((40,),))
REQUEST = SampleRequest(IDS[:2], max_tokens=2, seed=1)


def test_the_sums_are_those_of_a_walk() -> None:
    rng, ledger, expected = np.random.default_rng(0), Ledger(), {}
    for _ in range(3000):
        key, base = int(rng.integers(12)), BASES[rng.integers(3)]
        if rng.random() < 0.4:
            ledger.drop(key)
            expected.pop(key, None)
        else:
            pins, yields, moves, trains = (bool(flag) for flag in rng.random(4) < 0.5)
            hold = Hold(
                base, int(rng.integers(100)), f"{key}", pins, yields=yields, moves=moves,
                trains=trains,
            )  # fmt: skip
            ledger.set(key, hold)
            expected[key] = hold
        holds = list(expected.values())
        firm = [hold for hold in holds if hold.pins and not hold.yields and not hold.moves]
        assert sorted(ledger.all(), key=str) == sorted(holds, key=str)
        assert ledger.bytes == sum(hold.bytes for hold in holds)
        assert ledger.staying == sum(hold.bytes for hold in firm)
        for base in BASES:
            assert ledger.pinned(base) == any(hold.pins for hold in holds if hold.base == base)
            assert ledger.pinned_for_good(base) == any(hold.base == base for hold in firm)
            training = [hold for hold in holds if hold.trains and hold.base == base]
            assert ledger.trains(base) == bool(training)
            assert ledger.trains_for_good(base) == any(not hold.moves for hold in training)
    most = ledger.largest(3)
    assert [hold.bytes for hold in most] == sorted((h.bytes for h in holds), reverse=True)[:3]


class NeverWalked(dict[str, Any]):
    """A dict that is not walked over, once `closed` is set. Its first item may be looked at."""

    closed = False

    def _check(self) -> None:
        assert not self.closed, "a request has walked all of them"

    def __iter__(self) -> Iterator[str]:
        self._check()
        return super().__iter__()

    def values(self) -> Any:
        """As a dict's."""
        self._check()
        return super().values()

    def items(self) -> Any:
        """As a dict's."""
        self._check()
        return super().items()


class NeverWalkedRuns(NeverWalked, Runs):
    """Runs that are not walked over."""


def test_no_request_walks_the_runs_or_the_snapshots(tiny_model_dir, monkeypatch) -> None:
    """An idle run cost every training call of the others 7 microseconds."""
    monkeypatch.setattr(engine_file, "Runs", NeverWalkedRuns)
    worker = Worker(inspect_models({"tiny": tiny_model_dir}), threads=1, gap_seconds=600)
    try:
        engine = worker._engine
        engine.snapshots._items = NeverWalked()
        engine.ledger._holds = NeverWalked()
        worker.open_base("base", "tiny")
        for number in range(4):
            worker.create(f"run{number}", "tiny", LoraSpec(rank=2, seed=1))
            last = worker.submit(f"run{number}", 1, SnapshotJob(f"s{number}"))
        last.result(60)
        monkeypatch.setattr(NeverWalked, "closed", True)
        worker.sample("base", REQUEST).result(60)
        worker.submit("run0", 2, TrainJob(BATCH)).result(60)
        worker.submit("run0", 3, OptimJob(AdamParams())).result(60)
        worker.submit("run0", 4, SnapshotJob("s")).result(60)
        worker.sample("s", REQUEST).result(60)
        worker.sample("s0", REQUEST).result(60)
        waiting = worker.submit("run1", 9, TrainJob(BATCH))
        worker.forget(["run3"], ["s3"])
        until(lambda: "run3" not in engine.runs)
        worker.create("more", "tiny", LoraSpec(rank=2, seed=1)).result(60)
        engine.runs._gap_seconds = 0.0
        worker.sample("base", REQUEST).result(60)
        assert "which never came" in str(waiting.exception(60))
    finally:
        monkeypatch.setattr(NeverWalked, "closed", False)
        worker.close()
