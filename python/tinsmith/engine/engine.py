"""What the engine's thread owns: base models, runs, sampling sessions, and their decoder.

All of these take memory. Before Bases evicts a model, this file drops what can be restored. A job
gets the engine when its turn comes. Only the worker's thread may use this.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.engine.bases import Bases, Hold
from tinsmith.engine.call_log import Memory
from tinsmith.engine.decoding import Decoder
from tinsmith.engine.runs import IDLE_SECONDS, Run, Runs
from tinsmith.engine.shared_call import Helper
from tinsmith.engine.snapshots import BYTES_MAX, Snapshots
from tinsmith.models.registry import BaseModel, LoadedModel
from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

GAP_SECONDS = 60.0  # to wait for an earlier request; the SDK's chunks of one call take a few


class Engine:
    """See the file's header. `going` is called by a save between two files, and may raise. `wake`
    is called in another thread when a model's loading can continue."""

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
        reserve: checkpoint.Reserve = checkpoint.anywhere,  # for checkpoints
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
        self.reserve, self.going = reserve, going
        self.trained: set[_core.Adapter] = set()  # the adapters of the training calls in flight

    @contextlib.contextmanager
    def training(self, run: Run, adapter: _core.Adapter) -> Iterator[None]:
        """Marks a run's training call, so that another thread may interrupt it."""
        self.trained.add(adapter)
        run.training = True
        try:
            yield
        finally:
            self.trained.discard(adapter)
            run.teacher, run.training = None, False

    def others_wait(self) -> bool:
        """Whether other runs than the one in turn have something to do."""
        return self.runs.busy

    def helpers(
        self,
        run: Run,
        adapter: _core.Adapter,
        teacher: _core.Adapter | _core.Model | None = None,
    ) -> Callable[[], Iterable[Helper]] | None:
        """The replicas that can compute parts of a run's call; None: there are none."""
        return None

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
        """Limits the memory of a run's next step; `longest` is the length of its longest datum."""
        step = run.bytes - run.vectors  # reserved, or taken by an earlier step
        path = run.base.path
        adapter.limit(*self.bases.step_limits(path, adapter, run.vectors, step, longest))

    def release(self, path: Path) -> bool:
        """Drops what can be restored on a base model; returns whether there was anything."""
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
