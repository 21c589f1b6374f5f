"""What the engine's thread owns: base models, runs, sampling sessions, and their decoder.

All of these take memory. Before Bases evicts a model, this file drops what can be restored. A job
gets the engine when its turn comes. Only the worker's thread may use this.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import _core
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.lora import Average
from tinsmith.engine.bases import Bases, gradient_sums
from tinsmith.engine.call_log import Memory
from tinsmith.engine.decoding import Decoder
from tinsmith.engine.devices import GPUS, kind_of
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.ledger import Hold, Ledger
from tinsmith.engine.offload import Offload
from tinsmith.engine.replica import Crew, Weights
from tinsmith.engine.runs import IDLE_SECONDS, Run, Runs
from tinsmith.engine.shared_call import Helpers
from tinsmith.engine.snapshots import BYTES_MAX, Snapshots
from tinsmith.models.registry import BaseModel, LoadedModel
from tinsmith.system.format import readable

log = logging.getLogger("tinsmith")

GAP_SECONDS = 60.0  # to wait for an earlier request; the SDK's chunks of one call take a few


class Engine:
    """See the file's header. `going` is called by a save between two files, and may raise. `wake`
    is called in another thread when a model's loading can continue. `start` is the worker's, for
    any thread. `crew` are the replicas that compute too."""

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
        offload: Path | None = None,  # a folder for idle runs; None: they stay in memory
        going: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
        start: Callable[[Future[Any], Callable[[Engine], None]], object] = lambda *_: None,
        crew: Crew | None = None,
    ):
        self.crew, self.start = crew or Crew(), start
        self.models = dict(models)
        self.ledger = Ledger()
        self.runs = Runs(
            gap_seconds,
            idle_seconds,
            self.ledger,
            lambda path: self.bases.trim(path),
            moves=offload is not None,
        )
        self.decoder = Decoder()
        host = kind_of(device) in GPUS
        self.offload = Offload(offload, reserve, host=host) if offload else None
        self.bases = Bases(
            models,
            device=device,
            threads=threads,
            memory=memory,
            ledger=self.ledger,
            passing=self.passing,
            release=self.release,
            drop=lambda: self.snapshots.drop(),  # an old one; see snapshots.py
            move=self.move,
            wake=wake,
        )
        self.snapshots = Snapshots(self.bases, snapshot_bytes_max, self.ledger)
        self.keep_forwards = keep_forwards
        self.reserve, self.going = reserve, going
        # The training calls in flight: their runs, and the adapters that they compute with.
        self.calls: dict[str, tuple[Run, _core.Adapter]] = {}

    @contextlib.contextmanager
    def training(self, run: Run, adapter: _core.Adapter) -> Iterator[None]:
        """Marks a run's training call, so that another thread may interrupt it."""
        self.calls[run.name] = run, adapter
        try:
            yield
        finally:
            run.teacher = None
            del self.calls[run.name]

    def others_wait(self) -> bool:
        """Whether other runs than the one in turn have something to do."""
        return self.runs.busy

    def helpers(
        self,
        run: Run,
        adapter: _core.Adapter,
        teacher: _core.Adapter | _core.Model | None = None,
    ) -> Helpers | None:
        """The replicas that can compute parts of a run's call; None: there are none."""
        base = self.bases.name(run.base.path)
        self.crew.meet(self, base)
        taught = None
        if teacher is not None:
            other = self.bases.name(run.teacher) if run.teacher else base
            taught = Weights(other, teacher if isinstance(teacher, _core.Adapter) else None)
        return self.crew.helpers(run.name, Weights(base, adapter), taught)

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

    def adapter(self, run: Run) -> _core.Adapter:
        """A run's adapter, which is moved back into memory if it was offloaded. RequestError if
        there is none, or it can't be moved back now: then the run's next request tries again."""
        item, offload = run.offloaded, self.offload
        if item is None or offload is None:
            return run.trained()
        base = self.bases.use(run.base)
        rank, what = item.spec.rank, f"the run {run.name}, which had made room while it was idle,"

        def restore() -> tuple[_core.Adapter, Average | None]:
            return offload.restore(item, base.core)

        try:
            size = item.engine_bytes
            run.adapter, run.average = self.bases.make_run(base, rank, size, what, restore)
        except (OSError, ValueError) as error:
            raise RequestError(
                f"{run.name} had made room while it was idle, and can't be read back now: "
                f"{explain(error)}; its next request tries again",
                "server",
            ) from error
        run.offloaded = None
        offload.forget(item)
        self.runs.count(run)
        return run.trained()

    def move(self) -> bool:
        """Moves the run that was idle for longest out of memory; returns whether it could."""
        while self.offload is not None and self.runs.idle:
            run = next(iter(self.runs.idle.values()))
            try:
                run.offloaded = self.offload.put(run.trained(), run.average)
            except ValueError as error:  # not finite: it can't be written as it is
                log.info("%s stays in memory: %s", run.name, error)
                self.runs.keep(run)
                continue
            except OSError as error:
                self.bases.stuck = f"idle runs stay in memory: {explain(error)}"
                return False
            run.adapter = run.average = run.kept = None
            self.runs.count(run)
            if not self.ledger.trains(run.base.path):
                self.bases.trim(run.base.path)
            return True
        return False

    def forget(self, run: Run) -> None:
        """Frees a run's memory, wherever it is."""
        self.runs.remove(run)
        self.snapshots.end(run.name)
        if run.offloaded is not None and self.offload is not None:
            self.offload.forget(run.offloaded)
            run.offloaded = None

    def close(self) -> None:
        """Removes the files of idle runs."""
        if self.offload is not None:
            self.offload.close()

    def passing(self) -> list[Hold]:
        """The uses of memory that change with each call, a few of each base model: caches, training
        calls in flight, and their teachers."""
        found = [
            Hold(path, size, f"the cache of {path.name}", pins=active)
            for path, size, active in self.decoder.caches()
        ]
        for run, _ in self.calls.values():
            what = f"the gradients of a call of {run.name}"
            found.append(Hold(run.base.path, run.sums, what, pins=True, trains=True))
            if run.teacher is not None:
                found.append(Hold(run.teacher, 0, f"the teacher of {run.name}", pins=True))
        return found

    def limit(self, run: Run, adapter: _core.Adapter, lengths: NDArray[np.int32]) -> None:
        """Limits the memory of a run's next call, with datums of these lengths."""
        run.sums, longest = gradient_sums(adapter, lengths), int(lengths.max(initial=1))
        adapter.limit(*self.bases.step_limits(run.base.path, adapter, longest, run.sums))

    def release(self, path: Path) -> bool:
        """Drops what can be restored on a base model; returns whether there was anything."""
        shut = self.decoder.shut(path)  # an active one keeps the adapters that it uses
        trimmed = self.bases.trim_surplus(path)
        dropped = self.bases.drop_features(path)
        return self.snapshots.release(path) or shut or trimmed or dropped

    def memory(self) -> Memory:
        """The bytes of each kind of use."""
        return Memory(
            limit=self.bases.memory,
            weights=self.bases.weight_bytes,
            adapters=sum(run.bytes for run in self.runs.values()),
            arenas=self.bases.step_bytes,
            snapshots=self.snapshots.bytes,
            cache=sum(size for _, size, _ in self.decoder.caches()),
            cache_used=self.decoder.cache_used,
            offloaded=sum(run.offloaded.bytes for run in self.runs.values() if run.offloaded),
            evictions=self.bases.evictions,
        )
