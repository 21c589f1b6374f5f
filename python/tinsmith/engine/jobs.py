"""The worker's jobs, except those of a training step, which are in training.py.

A job's fields are its arguments. A run's jobs are executed in the order of runs.py; RefusedJob
takes a refused request's turn. A SampleJob has no turn: it waits for no other request.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Meta
from tinsmith.engine.bases import NotLoaded
from tinsmith.engine.call_log import Call, CallListener
from tinsmith.engine.decoding import SampleRequest, SampleResult, TokenListener
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import explain
from tinsmith.engine.runs import Run, ShortJob
from tinsmith.models.registry import LoadedModel


@dataclass(frozen=True)
class StateSpec:
    """An adapter that starts from a checkpoint's folder."""

    folder: Path
    optimizer: bool
    created: str | None = None  # when the checkpoint was saved; a newer one in its place is refused
    kind: str | None = None  # its optimizer from here on; None: the checkpoint's

    def load(self, base: LoadedModel) -> peft.Loaded:
        """Loads it onto its base model."""
        return peft.load(
            self.folder, base, optimizer=self.optimizer, created=self.created, kind=self.kind
        )


@dataclass(eq=False)
class CreateJob(ShortJob[None]):
    """Makes a run's adapter; the run's first request."""

    spec: LoraSpec | StateSpec

    def called(self) -> Call:
        return Call("create", request=self.spec)

    def run(self, run: Run, engine: Engine) -> None:
        try:
            run.adapter = self._adapter(run, engine)
        except NotLoaded:
            raise
        except BaseException as error:
            run.failure = explain(error)
            raise

    def _adapter(self, run: Run, engine: Engine) -> _core.Adapter:
        base, spec = engine.bases.use(run.base), self.spec
        rank = peft.load_meta(spec.folder).rank if isinstance(spec, StateSpec) else spec.rank

        def make() -> _core.Adapter:
            if isinstance(spec, StateSpec):
                found = spec.load(base)
                run.average = found.average
                return found.adapter
            return spec.adapter(base.core)

        vectors = base.core.plan(rank)["adapter"]
        return engine.bases.make_run(base, rank, vectors, f"a run of rank {rank}", make)


@dataclass(eq=False)
class RefusedJob(ShortJob[None]):
    """A request that was refused: the requests after it don't wait for it."""

    error: BaseException

    def called(self) -> Call:
        return Call("reject")

    def run(self, run: Run, engine: Engine) -> None:
        raise self.error


@dataclass(eq=False)
class SaveJob(ShortJob[None]):
    """Writes a checkpoint. `describe` turns the number of steps taken into its Meta."""

    folder: Path
    describe: Callable[[int], Meta]
    optimizer: bool
    overwrite: bool = False

    def called(self) -> Call:
        return Call("save", request=self.folder)

    def run(self, run: Run, engine: Engine) -> None:
        adapter = engine.adapter(run)
        checkpoint.save(
            self.folder,
            run.base.family,
            adapter,
            self.describe(adapter.step),
            optimizer=self.optimizer,
            average=run.average,
            overwrite=self.overwrite,
            going=engine.going,
            reserve=engine.reserve,
        )


@dataclass(eq=False)
class LoadJob(ShortJob[None]):
    """Replaces a run's weights and, with optimizer, the whole state of the next step."""

    folder: Path
    optimizer: bool

    def called(self) -> Call:
        return Call("load", request=self.folder)

    def run(self, run: Run, engine: Engine) -> None:
        adapter, family = engine.adapter(run), run.base.family
        run.average = peft.load_into(self.folder, family, adapter, optimizer=self.optimizer)


@dataclass(eq=False)
class SnapshotJob(ShortJob[int]):
    """Makes a sampling session with the run's weights at its turn; returns the run's number of
    steps. An inflight one also brings these weights to the earlier inflight sessions."""

    sampler: str
    inflight: bool = False

    def called(self) -> Call:
        return Call("snapshot", sampler=self.sampler)

    def run(self, run: Run, engine: Engine) -> int:
        adapter, snapshots = engine.adapter(run), engine.snapshots
        if self.inflight:
            weights = snapshots.add_inflight(self.sampler, run.name, run.base, adapter)
            engine.decoder.set_weights(run.name, weights)
        else:
            snapshots.add_run(self.sampler, run.name, run.base, adapter)
        return adapter.step


@dataclass(eq=False)
class ForgetJob(ShortJob[None]):
    """Frees a run's adapter."""

    def called(self) -> Call:
        return Call("forget")

    def run(self, run: Run, engine: Engine) -> None:
        engine.forget(run)


class SampleJob:
    """A request to a sampling session; it decodes together with all others. Clients share each step
    equally, however many requests each has. The listener is called for each token."""

    def __init__(
        self,
        sampler: str,
        request: SampleRequest,
        client: int,
        listener: TokenListener | None,
        on_end: CallListener,
    ):
        self.request, self.client, self.listener = request, client, listener
        self.future: Future[SampleResult] = Future()
        self.call = Call("sample", sampler=sampler, request=request, tokens=len(request.prompt))
        self.call.follow(self.future, on_end)

    def run(self, engine: Engine) -> None:
        """Starts it; the decoder finishes it."""
        call, snapshot = self.call, engine.snapshots.use(self.call.sampler)
        call.run, call.base = snapshot.run, engine.bases.name(snapshot.base.path)
        base = engine.bases.use(snapshot.base)
        engine.open_cache(base)
        follows = (snapshot.run if snapshot.number else None, snapshot.number)
        call.turn(call.base, snapshot.step)
        engine.decoder.add(
            base,
            snapshot.adapter,
            self.request,
            self.future,
            self.client,
            follows,
            self.listener,
            call,
        )
