"""Which snapshots yield to others, and which checkpoints are read again."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_models import folder, loaded
from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.engine.errors import RequestError
from tinsmith.engine.snapshots import OLD, Snapshots
from tinsmith.models.registry import LoadedModel


class Roomy:
    """Bases of a machine that has memory for everything."""

    def make(self, need: int, what: str, make: Callable[[], Any], keep: Path) -> Any:
        return make()

    def use(self, base: LoadedModel) -> LoadedModel:
        return base


@pytest.fixture
def snapshots() -> Snapshots:
    return Snapshots(Roomy())  # type: ignore[arg-type]


@pytest.fixture
def adapter() -> Iterator[_core.Adapter]:
    yield _core.Adapter(loaded("qwen3").core, rank=2)


def take(snapshots: Snapshots, run: str, adapter: _core.Adapter, count: int) -> None:
    for number in range(count):
        adapter.step += 1
        snapshots.add_run(f"{run}{number}", run, loaded("qwen3"), adapter)


def yielding(snapshots: Snapshots) -> int:
    return sum(hold.yields for hold in snapshots._ledger.all())


def test_a_run_that_has_ended_leaves_snapshots_that_yield_as_before(snapshots, adapter) -> None:
    take(snapshots, "run", adapter, 5)
    before = yielding(snapshots)
    assert before == 5 - OLD
    snapshots.end("run")
    assert yielding(snapshots) == before
    assert [snapshots.drop() for _ in range(before + 1)] == [True] * before + [False]
    for number in range(5):
        snapshots.forget(f"run{number}")
    assert not snapshots._ledger.all() and not snapshots._made and not snapshots._ended


def test_counts_of_runs_go_with_the_last_snapshot(snapshots, adapter) -> None:
    for run in ("one", "other"):
        take(snapshots, run, adapter, 3)
    for number in range(3):
        snapshots.forget(f"one{number}")
        snapshots.forget(f"one{number}")  # again, which does nothing
    assert snapshots._made == {"one": 3, "other": 3}  # it may make more
    snapshots.end("one")
    assert snapshots._made == {"other": 3} and yielding(snapshots) == 3 - OLD
    snapshots.end("nobody")
    assert not snapshots._ended


def test_a_checkpoint_that_is_opened_again_is_not_read_again(
    snapshots, adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = checkpoint.Meta(
        str(folder("qwen3")), 2, 32.0, 0, True, True, True, "weights", 0, {},
        "2026-11-21T12:00:00+00:00", None,
    )  # fmt: skip
    base, place = loaded("qwen3"), tmp_path / "a"
    checkpoint.save(place, base.family, adapter, meta, optimizer=False)
    reads, load = [], peft.load

    def counted(*arguments: Any, **options: Any) -> peft.Loaded:
        reads.append(arguments)
        return load(*arguments, **options)

    monkeypatch.setattr(peft, "load", counted)
    for _ in range(3):
        snapshots.add_checkpoint("teacher", base, place, meta.created)
        assert snapshots.use("teacher").adapter is not None
    assert len(reads) == 1
    snapshots.add_checkpoint("teacher", base, place, "2026-11-22T12:00:00+00:00")
    with pytest.raises(ValueError, match="another checkpoint than the one that was asked for"):
        snapshots.use("teacher")


@pytest.mark.parametrize("most", [1000, 6])
def test_the_indices_are_those_of_a_walk_over_the_sessions(adapter, most: int) -> None:
    bytes_max, rng = most * 4 * adapter.size, np.random.default_rng(0)
    snapshots = Snapshots(Roomy(), bytes_max)  # type: ignore[arg-type]
    base, names = loaded("qwen3"), [f"s{number}" for number in range(12)]
    dropped = 0
    for _ in range(600):
        name, run, what = rng.choice(names), rng.choice(["one", "other"]), rng.integers(6)
        adapter.step += 1
        if what == 0:
            snapshots.add_run(name, run, base, adapter)
        elif what == 1:
            snapshots.add_inflight(name, run, base, adapter)
        elif what == 2:
            snapshots.forget(name)
        elif what == 3:
            dropped += snapshots.drop()
        elif name in snapshots._items:
            with contextlib.suppress(RequestError):  # it was dropped
                assert snapshots.use(name).adapter is not None
        items = snapshots._items
        held = {id(item.adapter): item for item in items.values() if item.adapter}
        old = [name for name, item in items.items() if snapshots._is_old(item)]
        assert snapshots.bytes == sum(item.bytes for item in held.values()) <= bytes_max
        assert {key for _, key in snapshots._ledger._holds} == set(held)
        assert sum(hold.yields for hold in snapshots._ledger.all()) == len(old)
        assert set(snapshots._held) == {name for name, item in items.items() if item.adapter}
        young = {name for names in snapshots._recent.values() for name in names}
        assert young == {name for name, item in items.items() if item.ages} - set(old)
        following = {name for names in snapshots._followers.values() for name in names}
        assert following == {name for name, item in items.items() if item.number}
        valid = sorted(entry for entry in snapshots._old if snapshots._is_next(*entry))
        assert sorted({name for _, name in valid}) == sorted(old)
    assert dropped > 5
