"""The worker's jobs, except those of a training step, which are in training.py.

A job's fields are its arguments. A run's jobs are executed in the order of runs.py; RefusedJob
takes a refused request's turn. A SampleJob has no turn: it waits for no other request.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tinsmith import _core
from tinsmith.checkpoints import checkpoint, peft
from tinsmith.checkpoints.lora import LoraSpec
from tinsmith.checkpoints.meta import Meta
from tinsmith.engine import groups
from tinsmith.engine.bases import NotLoaded
from tinsmith.engine.call_log import Call, CallListener
from tinsmith.engine.decoding import SampleRequest, SampleResult, TokenListener
from tinsmith.engine.engine import Engine
from tinsmith.engine.errors import RequestError, explain
from tinsmith.engine.replica import NoWeights, Replica, ReplicaLost, Weights, settle, untold
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
            engine.crew.push(run.name, Weights(engine.bases.name(run.base.path), weights))
        else:
            snapshots.add_run(self.sampler, run.name, run.base, adapter)
        return adapter.step


@dataclass(eq=False)
class ForgetJob(ShortJob[None]):
    """Frees a run's adapter."""

    def called(self) -> Call:
        return Call("forget")

    def run(self, run: Run, engine: Engine) -> None:
        engine.crew.end(run.name)
        engine.forget(run)


class SampleJob:
    """A request to a sampling session; it decodes together with all others, here or at a replica.
    Clients share each step equally, however many requests each has. The listener is called for each
    token. `follows` is for a replica, which knows no inflight sessions; see Decoder.add."""

    def __init__(
        self,
        sampler: str,
        request: SampleRequest,
        client: int,
        listener: TokenListener | None,
        on_end: CallListener,
        follows: tuple[str | None, int] | None = None,
    ):
        self.request, self.client, self.listener = request, client, listener
        self._follows, self._told = follows, dict[int, int]()
        self._splits = True  # whether it may be drawn in parts
        self._refused = set[Replica | None]()  # those that could not do it; None: the owner
        self.future: Future[SampleResult] = Future()
        self.call = Call("sample", sampler=sampler, request=request, tokens=len(request.prompt))
        self.call.follow(self.future, on_end)

    def run(self, engine: Engine) -> None:
        """Starts it; the decoder, or a replica's, finishes it, or several of them a part each. It
        is called again if its replica is lost."""
        call, snapshot = self.call, engine.snapshots.use(self.call.sampler)
        call.run, call.base = snapshot.run, engine.bases.name(snapshot.base.path)
        base = engine.bases.use(snapshot.base, tower=bool(self.request.images))
        follows = self._follows or (snapshot.run if snapshot.number else None, snapshot.number)
        listener = self.listener and untold(self.listener, self._told)
        rest = (self.client, follows, listener)
        crew, weights = engine.crew, Weights(call.base, snapshot.adapter)
        crew.meet(engine, call.base)
        call.turn(call.base, snapshot.step)
        parts = groups.split(self.request, crew.places(call.base)) if self._splits else []
        if len(parts) > 1:
            self._share(parts, engine)
            return
        away = groups.bounded(self.request, base.context, lambda: engine.bases.cache_tokens(base))
        replica = crew.choose(weights, away, self._refused) if away else None
        if replica is None or away is None:
            try:
                engine.open_cache(base)
                engine.decoder.add(base, snapshot.adapter, self.request, self.future, *rest, call)
            except MemoryError:
                self._refused.add(None)
                if away is None or crew.choose(weights, away, self._refused) is None:
                    raise
                self.run(engine)
            else:
                crew.count(None, self.future, self.request.num_samples)
            return
        inner = replica.sample(weights, away, call, *rest)
        crew.count(replica, inner, self.request.num_samples)
        crew.send(replica, self.future, inner, call.base, follows[0])
        inner.add_done_callback(partial(self._answered, engine, replica))

    def _share(self, parts: list[SampleRequest], engine: Engine) -> None:
        """Starts it as parts."""
        jobs = []
        for part in parts:
            first = part.first_sample - self.request.first_sample
            listener = self.listener and groups.shifted(self.listener, first)
            job = SampleJob(
                self.call.sampler, part, self.client, listener, lambda call: None, self._follows
            )
            job._splits = False
            jobs.append(job)
        engine.crew.share(self.future, [job.future for job in jobs])

        def gather(_: object) -> None:
            if not all(job.future.done() for job in jobs):
                return
            groups.count_all(self.call, [job.call for job in jobs])
            failures = [error for job in jobs if (error := job.future.exception())]
            results = [] if failures else [job.future.result() for job in jobs]
            settle(self.future, failures[0] if failures else groups.merge(results))

        for job in jobs:
            job.future.add_done_callback(gather)
            try:
                job.run(engine)
            except Exception as error:
                settle(job.future, explain(error))

    def _answered(self, engine: Engine, replica: Replica, inner: Future[SampleResult]) -> None:
        """A replica has answered, or is lost; in its thread."""
        error = inner.exception()
        if isinstance(error, RequestError) and error.category == "server":
            if not isinstance(error, ReplicaLost | NoWeights):
                self._refused.add(replica)
            engine.crew.repeated += not isinstance(error, NoWeights)
            engine.start(self.future, self.run)
        else:
            settle(self.future, inner.result() if error is None else error)
