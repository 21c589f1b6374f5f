"""What uses memory beside the base models: runs, sampling sessions, and caches of keys and values.

Bases asks it before it makes room, and has it drop what can be made again. Only the worker's thread
may use this.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tinsmith import _core
from tinsmith.engine.bases import Bases, Hold
from tinsmith.engine.call_log import Memory
from tinsmith.engine.decoding import Decoder
from tinsmith.engine.runs import Run, Runs
from tinsmith.engine.snapshots import Snapshots
from tinsmith.models.registry import LoadedModel
from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")


class Uses:
    """See the file's header. `open` comes first."""

    def __init__(self, runs: Runs, decoder: Decoder, snapshot_bytes_max: int):
        self._runs = runs
        self._decoder = decoder
        self._snapshot_bytes_max = snapshot_bytes_max
        self._bases: Bases
        self._snapshots: Snapshots

    def open(self, bases: Bases) -> Snapshots:
        """The sampling sessions on the base models."""
        self._bases = bases
        self._snapshots = Snapshots(bases, self._snapshot_bytes_max)
        return self._snapshots

    def open_cache(self, base: LoadedModel) -> None:
        """Makes sure that a base model can be sampled from."""
        if self._decoder.is_open(base):
            return
        tokens = self._bases.cache_tokens(base)
        size = base.core.cache_bytes(tokens)
        log.info(
            "%s: sampling fills a cache of keys and values of up to %s (%d tokens), and keeps it "
            "for prompts that begin alike; it is part of --memory, and makes room for others",
            base.path,
            readable(size),
            tokens,
        )
        self._bases.make(
            size,
            "a cache of keys and values",
            lambda: self._decoder.open(base, tokens),
            keep=base.path,
        )

    def holds(self) -> list[Hold]:
        """The uses of memory beside the base models' weights."""
        found = [
            Hold(run.base.path, run.bytes, f"the run {run.name}", pins=True, spare=run.spare)
            for run in self._runs.values()
            if run.failure is None
        ]
        for run in self._runs.values():
            if run.teacher is not None:
                found.append(Hold(run.teacher, 0, f"the teacher of {run.name}", pins=True))
        found += self._snapshots.holds()
        for path, size, active in self._decoder.caches():
            found.append(Hold(path, size, f"the cache of {path.name}", pins=active))
        return found

    def limit(self, run: Run, adapter: _core.Adapter, longest: int) -> None:
        """Tells a run's adapter what its next step, of so long a datum at most, may take."""
        step = run.bytes - run.vectors  # what is reserved, or was taken before
        path = run.base.path
        adapter.limit(*self._bases.step_limits(path, adapter, run.vectors, step, longest))

    def release(self, path: Path) -> bool:
        """Drops what can be made again on a base model; returns whether there was any."""
        shut = self._decoder.shut(path)  # an active one keeps the adapters that it uses
        runs = [run for run in self._runs.values() if run.base.path == path and not run.training]
        trimmed = [run.trim() for run in runs]
        return self._snapshots.release(path) or shut or any(trimmed)

    def drop(self) -> bool:
        """Gives up a snapshot that is old (snapshots.py); returns whether there was one."""
        return self._snapshots.drop()

    def memory(self) -> Memory:
        """The bytes of each kind of use."""
        runs = self._runs.values()
        return Memory(
            limit=self._bases.memory,
            weights=self._bases.weight_bytes,
            adapters=sum(run.vectors for run in runs),
            arenas=sum(run.bytes - run.vectors for run in runs),
            snapshots=self._snapshots.bytes,
            cache=sum(size for _, size, _ in self._decoder.caches()),
            cache_used=self._decoder.cache_used,
            evictions=self._bases.evictions,
        )
