"""The weights that sampling sessions sample from: the base model's, or an adapter's.

An adapter has a run's weights at some step, shared with the run until its next step, or was read
from a checkpoint. A checkpoint is read once, however many sessions use it. The inflight sessions of
a run share one adapter: a new one brings the run's current weights to all of them. Training loops
make a session in each step and never close it. So when snapshots take too many bytes, the least
recently used are evicted first; those of checkpoints are read again at their next use. Under memory
pressure, snapshots that were not used while their run made two newer ones are evicted before
anything else. Every change of a session goes through `_set`, which keeps the indices, so no request
walks the sessions. Only the worker's thread may use this.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from tinsmith import _core
from tinsmith.checkpoints import peft
from tinsmith.engine.bases import Bases
from tinsmith.engine.errors import RequestError
from tinsmith.engine.ledger import Hold, Ledger
from tinsmith.models.registry import BaseModel

K = TypeVar("K")
_Index: TypeAlias = dict[K, dict[str, None]]

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
    tick: int = 0  # when that was, among all uses

    @property
    def bytes(self) -> int:
        """The adapter's bytes."""
        return 0 if self.adapter is None else 4 * self.adapter.size

    @property
    def ages(self) -> bool:
        """Whether it yields to newer ones of its run."""
        return self.adapter is not None and self.origin is None and not self.number


class Snapshots:
    """See the file's header."""

    def __init__(
        self, bases: Bases, bytes_max: int = BYTES_MAX, ledger: Ledger | None = None
    ) -> None:
        self._bases = bases
        self._bytes_max = bytes_max
        self._ledger = Ledger() if ledger is None else ledger
        self.bytes = 0  # of all adapters, each counted once
        self._items: dict[str, Snapshot] = {}
        self._inflight = 0  # inflight sessions so far
        self._made: dict[str, int] = {}  # how many snapshots each run has made
        self._left: Counter[str] = Counter()  # of these, those that are not forgotten yet
        self._ended: set[str] = set()
        self._tick = 0
        # Indices of the items, by name; in a dict, the least recently used is first.
        self._held: dict[str, None] = {}  # those with an adapter
        self._owners: _Index[int] = defaultdict(dict)  # by the id of the adapter that they share
        self._followers: _Index[str] = defaultdict(dict)  # inflight sessions, by run
        self._recent: _Index[str] = defaultdict(dict)  # those that will be old, by run
        self._old: list[tuple[int, str]] = []  # a heap of (tick, name), some no longer valid
        self._on_disk: _Index[tuple[Path, str]] = defaultdict(dict)  # adapters by their origin
        self._readable: _Index[Path] = defaultdict(dict)  # the same, by their base model

    def add_base(self, sampler: str, base: BaseModel) -> None:
        """A session of a base model."""
        self._set(sampler, Snapshot(base))

    def add_run(self, sampler: str, run: str, base: BaseModel, adapter: _core.Adapter) -> None:
        """A session of a run's weights as they are now."""
        copy, made = self._copy(base, adapter), self._made.get(run, 0) + 1
        self._made[run] = made
        self._left[run] += 1
        self._keep(sampler, Snapshot(base, copy, run=run, step=adapter.step, used=made))
        while recent := self._recent.get(run):
            name = next(iter(recent))
            if made - self._items[name].used < OLD:
                break
            self._set(name, self._items[name])

    def add_inflight(
        self, sampler: str, run: str, base: BaseModel, adapter: _core.Adapter
    ) -> _core.Adapter:
        """Adds an inflight session of a run; returns its weights, which earlier ones get too."""
        copy, step = self._copy(base, adapter), adapter.step
        for name in list(self._followers.get(run, ())):
            self._set(name, replace(self._items[name], adapter=copy, step=step, failure=None))
        self._inflight += 1
        self._keep(sampler, Snapshot(base, copy, run=run, step=step, number=self._inflight))
        return copy

    def add_checkpoint(self, sampler: str, base: BaseModel, folder: Path, created: str) -> None:
        """Adds a session of a saved checkpoint, which is read on its next use. An existing one
        stays."""
        known, origin = self._items.get(sampler), (folder, created)
        if known is None or known.origin != origin:
            self._set(sampler, Snapshot(base, origin=origin))

    def use(self, sampler: str) -> Snapshot:
        """A session's snapshot, which becomes the most recently used one. If reading a checkpoint
        fails, only this call raises the error: memory may be free at the next use."""
        snapshot = self._items.get(sampler)
        if snapshot is None:
            raise RequestError(
                f"sampling session {sampler} has no weights: saving them failed, or its session "
                "has ended; create a new sampling client"
            )
        if snapshot.adapter is not None:
            self._tick += 1
            used = self._made.get(snapshot.run, 0)
            snapshot = replace(snapshot, used=used, tick=self._tick)
            self._set(sampler, snapshot)
        if snapshot.failure is not None:
            raise snapshot.failure
        if snapshot.origin is not None and snapshot.adapter is None:
            snapshot = self._load(sampler, snapshot)
        return snapshot

    def forget(self, sampler: str) -> None:
        """Drops a session."""
        item = self._items.get(sampler)
        self._set(sampler, None)
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

    def release(self, path: Path) -> bool:
        """Drops the adapters on a base model that can be read again; returns whether there were
        any."""
        found = list(self._readable.get(path, ()))
        for name in found:
            self._set(name, replace(self._items[name], adapter=None))
        return bool(found)

    def drop(self) -> bool:
        """Drops the least recently used old snapshot; returns whether there was any."""
        while self._old:
            tick, name = heapq.heappop(self._old)
            if self._is_next(tick, name):
                self._set(name, _dropped(name, self._items[name]))
                return True
        return False

    def _is_old(self, item: Snapshot) -> bool:
        return item.ages and self._made.get(item.run, 0) - item.used >= OLD

    def _set(self, name: str, item: Snapshot | None) -> None:
        """Replaces a session; it becomes the most recently used one. None: it is forgotten."""
        before = self._items.pop(name, None)
        if before is not None:
            for index, key in self._indices(before):
                _remove(index, key, name)
            self._uncount(name, before)
        if item is None:
            return
        self._items[name] = item
        for index, key in self._indices(item):
            index[key][name] = None
        if item.adapter is not None:
            self._count(name, item)

    def _indices(self, item: Snapshot) -> Iterator[tuple[_Index[Any], Any]]:
        """The indices that have a session, and its key in each."""
        if item.number:
            yield self._followers, item.run
        if item.adapter is not None:
            yield self._owners, id(item.adapter)
        if item.adapter is not None and item.origin is not None:
            yield self._on_disk, item.origin
            yield self._readable, item.base.path
        if item.ages:
            yield self._recent, item.run

    def _count(self, name: str, item: Snapshot) -> None:
        """Counts the memory of a session's adapter."""
        self._held[name] = None
        if len(self._owners[id(item.adapter)]) == 1:
            self.bytes += item.bytes
        self._tell(item)
        if self._is_old(item):
            _remove(self._recent, item.run, name)
            heapq.heappush(self._old, (item.tick, name))
            if len(self._old) > 2 * len(self._held):
                self._old = [entry for entry in self._old if self._is_next(*entry)]
                heapq.heapify(self._old)

    def _uncount(self, name: str, item: Snapshot) -> None:
        self._held.pop(name, None)
        if item.adapter is None:
            return
        if id(item.adapter) in self._owners:
            self._tell(item)
            return
        self.bytes -= item.bytes
        self._ledger.drop(("snapshot", id(item.adapter)))

    def _tell(self, item: Snapshot) -> None:
        """Tells the ledger of an adapter, under the name of the first session that has it."""
        key = id(item.adapter)
        what, pins = f"the sampling session {next(iter(self._owners[key]))}", item.origin is None
        hold = Hold(item.base.path, item.bytes, what, pins=pins, yields=self._is_old(item))
        self._ledger.set(("snapshot", key), hold)

    def _is_next(self, tick: int, name: str) -> bool:
        """Whether an entry of the heap of old snapshots is valid."""
        item = self._items.get(name)
        return item is not None and item.tick == tick and self._is_old(item)

    def _copy(self, base: BaseModel, adapter: _core.Adapter) -> _core.Adapter:
        need = 4 * adapter.size
        return self._bases.make(need, "a snapshot", adapter.snapshot, keep=base.path)

    def _load(self, sampler: str, wanted: Snapshot) -> Snapshot:
        """Adds a checkpoint's adapter to its snapshot; shares it if another session has it."""
        assert wanted.origin is not None
        folder, created = wanted.origin
        same = next(iter(self._on_disk.get(wanted.origin, ())), None)
        adapter = None if same is None else self._items[same].adapter
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
        self._tick += 1
        snapshot = replace(snapshot, tick=self._tick)
        self._set(sampler, snapshot)
        while self.bytes > self._bytes_max:
            others = (n for n in self._held if self._items[n].adapter is not snapshot.adapter)
            name = next(others, None)
            if name is None:
                break
            self._set(name, _dropped(name, self._items[name]))
        return snapshot


def _remove(index: _Index[Any], key: Any, name: str) -> None:
    """Removes a name from an index, if it is there."""
    names = index.get(key)
    if names is not None:
        names.pop(name, None)
        if not names:
            del index[key]


def _dropped(name: str, item: Snapshot) -> Snapshot:
    """A session without its adapter: a checkpoint's is read again, a run's is lost."""
    lost = RequestError(
        f"the weights of sampling session {name} were dropped to make room; "
        "save_weights_for_sampler(name) keeps weights that are needed for long"
    )
    return replace(item, adapter=None, failure=None if item.origin else lost)
