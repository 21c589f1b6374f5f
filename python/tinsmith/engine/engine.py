"""What the engine's thread owns: base models, runs, sampling sessions, and what decodes from them.

All of these take memory. Before Bases makes room, it has this file drop what can be made again. A
job gets the engine when its turn comes. Only the worker's thread may use this.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.engine.bases import Bases, Hold
from tinsmith.engine.call_log import Memory
from tinsmith.engine.decoding import Decoder
from tinsmith.engine.runs import IDLE_SECONDS, Run, Runs
from tinsmith.engine.snapshots import BYTES_MAX, Snapshots
from tinsmith.models.registry import BaseModel, LoadedModel
from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

GAP_SECONDS = 60.0  # for an earlier request; the SDK's chunks of one call take a few


class Engine:
    """See the file's header. `between` is called between two micro-batches, with the number of
    those done and of all; `going` by a save between two files. Either may raise. `wake` is called
    in another thread when a model can be read on."""

    def __init__(
        self,
        models: Mapping[str, BaseModel],
        *,
        device: str = "cpu",
        threads: int = 0,
        memory: int | None = None,  # bytes; None: most of the machine's or the card's
        gap_seconds: float = GAP_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
        snapshot_bytes_max: int = BYTES_MAX,
        keep_forwards: bool = True,
        room: checkpoint.Room = checkpoint.anywhere,  # for what is saved
        between: Callable[[int, int], None] = lambda done, count: None,
        going: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ):
        self.models = dict(models)
        self.runs = Runs(gap_seconds, idle_seconds)
        self.decoder = Decoder()
        self.bases = Bases(
            models,
            device=device,
            threads=threads,
            memory=memory,
            holds=self.holds,
            release=self.release,
            drop=lambda: self.snapshots.drop(),  # an old one; see snapshots.py
            wake=wake,
        )
        self.snapshots = Snapshots(self.bases, snapshot_bytes_max)
        self.keep_forwards = keep_forwards
        self.room, self.between, self.going = room, between, going
        self.trained: _core.Adapter | None = None  # it is in a training call

    @contextlib.contextmanager
    def training(self, run: Run, adapter: _core.Adapter) -> Iterator[None]:
        """Around a training call of a run: another thread may interrupt it."""
        self.trained, run.training = adapter, True
        try:
            yield
        finally:
            self.trained, run.teacher, run.training = None, None, False

    def open_cache(self, base: LoadedModel) -> None:
        """Makes sure that a base model can be sampled from."""
        if self.decoder.is_open(base):
            return
        tokens = self.bases.cache_tokens(base)
        size = base.core.cache_bytes(tokens)
        log.info(
            "%s: sampling fills a cache of keys and values of up to %s (%d tokens), and keeps it "
            "for prompts that begin alike; it is part of --memory, and makes room for others",
            base.path,
            readable(size),
            tokens,
        )
        self.bases.make(
            size,
            "a cache of keys and values",
            lambda: self.decoder.open(base, tokens),
            keep=base.path,
        )

    def holds(self) -> list[Hold]:
        """The uses of memory beside the base models' weights."""
        found = [
            Hold(run.base.path, run.bytes, f"the run {run.name}", pins=True, spare=run.spare)
            for run in self.runs.values()
            if run.failure is None
        ]
        for run in self.runs.values():
            if run.teacher is not None:
                found.append(Hold(run.teacher, 0, f"the teacher of {run.name}", pins=True))
        found += self.snapshots.holds()
        for path, size, active in self.decoder.caches():
            found.append(Hold(path, size, f"the cache of {path.name}", pins=active))
        return found

    def limit(self, run: Run, adapter: _core.Adapter, longest: int) -> None:
        """Tells a run's adapter what its next step, of so long a datum at most, may take."""
        step = run.bytes - run.vectors  # what is reserved, or was taken before
        path = run.base.path
        adapter.limit(*self.bases.step_limits(path, adapter, run.vectors, step, longest))

    def release(self, path: Path) -> bool:
        """Drops what can be made again on a base model; returns whether there was any."""
        shut = self.decoder.shut(path)  # an active one keeps the adapters that it uses
        runs = [run for run in self.runs.values() if run.base.path == path and not run.training]
        trimmed = [run.trim() for run in runs]
        return self.snapshots.release(path) or shut or any(trimmed)

    def memory(self) -> Memory:
        """The bytes of each kind of use."""
        runs = self.runs.values()
        return Memory(
            limit=self.bases.memory,
            weights=self.bases.weight_bytes,
            adapters=sum(run.vectors for run in runs),
            arenas=sum(run.bytes - run.vectors for run in runs),
            snapshots=self.snapshots.bytes,
            cache=sum(size for _, size, _ in self.decoder.caches()),
            cache_used=self.decoder.cache_used,
            evictions=self.bases.evictions,
        )
