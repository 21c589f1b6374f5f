"""The weights that sampling sessions sample from: the base model's, or an adapter's.

An adapter has a run's weights at some step, shared with the run until its next step, or was read
from a checkpoint. A checkpoint is read once, however many sessions use it. The inflight sessions of
a run share one adapter: a new one brings the run's current weights to all of them. Training loops
make a session in each step and never close it. So when snapshots take too many bytes, the least
recently used are evicted first; those of checkpoints are read again at their next use. Under memory
pressure, snapshots that were not used while their run made two newer ones are evicted before
anything else. Only the worker's thread may use this.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from tinsmith import _core
from tinsmith.checkpoints import peft
from tinsmith.engine.bases import Bases, Hold
from tinsmith.engine.errors import RequestError
from tinsmith.models.registry import BaseModel

BYTES_MAX = 4 << 30
OLD = 2  # newer snapshots of the run since a snapshot's last use


@dataclass(frozen=True)
class Snapshot:
    """The weights of one sampling session."""

    base: BaseModel
    adapter: _core.Adapter | None = None
    failure: RequestError | None = None
    origin: tuple[Path, str] | None = None  # the checkpoint's folder and creation time
    run: str = ""  # the run whose weights it has, after `step` optimizer steps
    step: int = 0
    number: int = 0  # of an inflight session, from 1: it follows its run, and shares no cache
    used: int = 0  # how many snapshots the run had made at its last use

    @property
    def bytes(self) -> int:
        """The adapter's bytes."""
        return 0 if self.adapter is None else 4 * self.adapter.size


class Snapshots:
    """See the file's header."""

    def __init__(self, bases: Bases, bytes_max: int = BYTES_MAX):
        self._bases = bases
        self._bytes_max = bytes_max
        self._items: dict[str, Snapshot] = {}  # the least recently used first
        self._inflight = 0  # inflight sessions so far
        self._made: dict[str, int] = {}  # how many snapshots each run has made
        self._left: Counter[str] = Counter()  # of these, those that are not forgotten yet
        self._ended: set[str] = set()

    def add_base(self, sampler: str, base: BaseModel) -> None:
        """A session of a base model."""
        self._items[sampler] = Snapshot(base)

    def add_run(self, sampler: str, run: str, base: BaseModel, adapter: _core.Adapter) -> None:
        """A session of a run's weights as they are now."""
        copy, made = self._copy(base, adapter), self._made.get(run, 0) + 1
        self._keep(sampler, Snapshot(base, copy, run=run, step=adapter.step, used=made))
        self._made[run] = made
        self._left[run] += 1

    def add_inflight(
        self, sampler: str, run: str, base: BaseModel, adapter: _core.Adapter
    ) -> _core.Adapter:
        """Adds an inflight session of a run; returns its weights, which earlier ones get too."""
        copy, step = self._copy(base, adapter), adapter.step
        for name, item in self._items.items():
            if item.run == run and item.number:
                self._items[name] = replace(item, adapter=copy, step=step, failure=None)
        self._inflight += 1
        self._keep(sampler, Snapshot(base, copy, run=run, step=step, number=self._inflight))
        return copy

    def add_checkpoint(self, sampler: str, base: BaseModel, folder: Path, created: str) -> None:
        """Adds a session of a saved checkpoint, which is read on its next use. An existing one
        stays."""
        known, origin = self._items.get(sampler), (folder, created)
        if known is None or known.origin != origin:
            self._items[sampler] = Snapshot(base, origin=origin)

    def use(self, sampler: str) -> Snapshot:
        """A session's snapshot, which becomes the most recently used one. If reading a checkpoint
        fails, only this call raises the error: memory may be free at the next use."""
        snapshot = self._items.pop(sampler, None)
        if snapshot is None:
            raise RequestError(
                f"sampling session {sampler} has no weights: saving them failed, or its session "
                "has ended; create a new sampling client"
            )
        snapshot = replace(snapshot, used=self._made.get(snapshot.run, 0))
        self._items[sampler] = snapshot
        if snapshot.failure is not None:
            raise snapshot.failure
        if snapshot.origin is not None and snapshot.adapter is None:
            snapshot = self._load(sampler, snapshot)
        return snapshot

    def forget(self, sampler: str) -> None:
        """Drops a session."""
        item = self._items.pop(sampler, None)
        if item is not None and item.run in self._made and not item.number:
            self._left[item.run] -= 1
            self._drop_count(item.run)

    def end(self, run: str) -> None:
        """A run makes no more snapshots. Its snapshots stay until they are forgotten, and yield as
        before."""
        self._ended.add(run)
        self._drop_count(run)

    def _drop_count(self, run: str) -> None:
        if run in self._ended and not self._left[run]:
            self._made.pop(run, None)
            del self._left[run]
            self._ended.discard(run)

    def holds(self) -> list[Hold]:
        """The memory of the adapters; an adapter that is not on disk pins its base model."""
        owners = {id(item.adapter): name for name, item in self._items.items() if item.adapter}
        items = [(name, self._items[name]) for name in owners.values()]
        return [
            Hold(
                item.base.path,
                item.bytes,
                f"the sampling session {name}",
                pins=item.origin is None,
                yields=self._is_old(item),
            )
            for name, item in items
        ]

    @property
    def bytes(self) -> int:
        """Of all adapters, each counted once."""
        return sum({id(item.adapter): item.bytes for item in self._items.values()}.values())

    def release(self, path: Path) -> bool:
        """Drops the adapters on a base model that can be read again; returns whether there were
        any."""
        found = [
            name
            for name, item in self._items.items()
            if item.base.path == path and item.origin is not None and item.adapter is not None
        ]
        for name in found:
            self._items[name] = replace(self._items[name], adapter=None)
        return bool(found)

    def drop(self) -> bool:
        """Drops the least recently used old snapshot; returns whether there was any."""
        for name, item in self._items.items():
            if self._is_old(item):
                self._items[name] = _dropped(name, item)
                return True
        return False

    def _is_old(self, item: Snapshot) -> bool:
        made = self._made.get(item.run, 0)
        return item.adapter is not None and not item.number and made - item.used >= OLD

    def _copy(self, base: BaseModel, adapter: _core.Adapter) -> _core.Adapter:
        need = 4 * adapter.size
        return self._bases.make(need, "a snapshot", adapter.snapshot, keep=base.path)

    def _load(self, sampler: str, wanted: Snapshot) -> Snapshot:
        """Adds a checkpoint's adapter to its snapshot; shares it if another session has it."""
        assert wanted.origin is not None
        folder, created = wanted.origin
        same = (item.adapter for item in self._items.values() if item.origin == wanted.origin)
        adapter = next((item for item in same if item is not None), None)
        if adapter is None:
            meta = peft.load_meta(folder)
            base = self._bases.use(wanted.base)
            adapter = self._bases.make(
                base.core.plan(meta.rank, 1)[
                    "adapter"
                ],  # while it is read; the snapshot takes less
                f"the checkpoint {folder}",
                lambda: peft.load(
                    folder, base, optimizer=False, created=created
                ).adapter.snapshot(),
                keep=base.path,
            )
        return self._keep(sampler, replace(wanted, adapter=adapter))

    def _keep(self, sampler: str, snapshot: Snapshot) -> Snapshot:
        """Adds a snapshot; evicts the least recently used while all take too many bytes."""
        self._items[sampler] = snapshot
        adapters = {id(item.adapter): item.bytes for item in self._items.values()}
        total = sum(adapters.values())
        for name, item in list(self._items.items()):
            if total <= self._bytes_max:
                break
            if item.adapter is None or item.adapter is snapshot.adapter:
                continue
            total -= adapters.pop(id(item.adapter), 0)
            self._items[name] = _dropped(name, item)
        return snapshot


def _dropped(name: str, item: Snapshot) -> Snapshot:
    """A session without its adapter: a checkpoint's is read again, a run's is lost."""
    lost = RequestError(
        f"the weights of sampling session {name} were dropped to make room; "
        "save_weights_for_sampler(name) keeps weights that are needed for long"
    )
    return replace(item, adapter=None, failure=None if item.origin else lost)
